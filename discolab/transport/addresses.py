"""Where a process is: the identity of its machine, addresses of hosts, and endpoints."""

from __future__ import annotations

import socket
import time
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError

NO_SESSION = "what listens there is no session of discolab"


def machine_id() -> str:
    """What is equal for processes of one machine (or container), and for no others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another one; nothing is sent.

    Raises
    ------
    OSError
        If there is no such host, or no way to it.
    """
    for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as sock:
            try:
                sock.connect(where)
            except OSError:
                continue
            return str(sock.getsockname()[0])
    raise OSError(f"there is no way to {host}")


def look_for_session(host: str, port: int, timeout: float) -> str:
    """Whether a session may listen there: "" or in a few words what there is instead.

    Any program that uses zmq begins as it does; whether it is the right one, its keys tell.
    """
    deadline = time.monotonic() + timeout
    why = "nobody answers"
    try:
        with socket.create_connection((host, port), timeout) as sock:
            greeting, why = b"", "somebody listens there, and says nothing"
            while len(greeting) < 10:
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                more = sock.recv(10 - len(greeting))
                if not more:
                    return "it closes the connection at once"
                greeting += more
    except TimeoutError:
        return why
    except OSError as exc:
        return exc.strerror or str(exc)
    return "" if greeting[0] == 0xFF and greeting[9] == 0x7F else NO_SESSION


def split_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port`` or ``host:port``.

    Raises
    ------
    ValueError
        If it is neither.
    """
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 <= int(port) < 65_536:
        raise ValueError(f"an address is tcp://HOST:PORT, got {text!r}")
    return host, int(port)


def endpoint_of(host: str, port: int) -> str:
    """For zmq to bind or to connect to: the address of a host.

    Raises
    ------
    OSError
        If there is no such host.
    """
    addresses = socket.getaddrinfo(host, port or None, type=socket.SOCK_STREAM)
    addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
    address = str(addresses[0][4][0])
    name = f"[{address}]" if ":" in address else address
    return f"tcp://{name}:{port or '*'}"


def checked_endpoint(host: Any, port: Any) -> str:
    """As `endpoint_of`, of what a user gave.

    Raises
    ------
    ArgumentError, DiscoError
        If they are no host and port; if there is no such host.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65_536:
        raise ArgumentError(f"port is a number from 0 to 65535, got {port!r}")
    if not isinstance(host, str) or not host:
        raise ArgumentError(f"host is a name or an address of this machine, got {host!r}")
    try:
        return endpoint_of(host, port)
    except OSError as exc:
        raise DiscoError(f"there is no host {host!r}: {exc.strerror or exc}") from None

"""The Ray cluster of this process: joined with its first session, left with its last one.

A process is in one cluster at a time. One that was there before, or that the program itself has
joined with `ray.init`, stays as it was. Ray is started and left on a thread of its own, the keeper:
it may take long, nothing can cut it short half-way, and Linux ends what was started with the thread
that has started it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ..runtime.errors import ArgumentError, DiscoError
from ..transport.addresses import address_towards, split_endpoint
from .connections.controller_side import report_no_deaths

_SLOTS = 64  # CPUs of a cluster of our own: its workers share what there is, as processes do
_STORE = 80 << 20  # bytes for Ray's objects there, of which we have none
_TICK = 0.1  # seconds
_LEAVE_WITHIN = 10.0  # seconds
_MOST_WORDS = 400  # characters of what Ray says
_OF_OUR_OWN = {  # as little as possible is started
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
}
_MUTE = {"RAY_DEDUP_LOGS_SKIP_REGEX": "^(A worker died|Raylet is terminated)"}  # for its import
# else Ray ends this process, the notebook's, a minute after its cluster's head has died
_STAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**8)}

Say = Callable[[str], None]

_lock = threading.Lock()  # guards the next two
_joined: Cluster | None = None
_keeper: _Keeper | None = None


class Cluster:
    """One that sessions of this process use; from `join`, to be given to `leave` as often.

    Attributes
    ----------
    local
        Whether it is our own, on this machine.
    address
        What was asked for; "" if it was there already.
    """

    def __init__(self, ray: Any, address: str, keeper: _Keeper | None) -> None:
        self.ray, self.address, self._keeper = ray, address, keeper
        self.local = address == "local"
        self.users = 0
        self._job = _job(ray)

    @property
    def alive(self) -> bool:
        """Whether this process is still in it."""
        return bool(self.ray.is_initialized()) and _job(self.ray) == self._job

    def is_at(self, address: str | None) -> bool:
        """Whether that is its address, as far as is known."""
        if address in (None, "auto", self.address):
            return True
        return address == getattr(self.ray.get_runtime_context(), "gcs_address", "")

    def host(self) -> str:
        """This machine's address as actors reach it."""
        if self.local:
            return "127.0.0.1"
        if self._is_client():
            place = self.address.removeprefix("ray://").partition("/")[0]
            try:
                host, port = split_endpoint(place)
            except ValueError:
                host, port = str(self.ray.nodes()[0]["NodeManagerAddress"]), 6379
            return address_towards(host, port)
        return str(self.ray.util.get_node_ip_address())

    def node_here(self) -> str:
        """Its node that this process is on, "" if on none: the id."""
        if self._is_client():
            return ""
        return str(self.ray.get_runtime_context().get_node_id())

    def _is_client(self) -> bool:
        return bool(self.ray.util.client.ray.is_connected())


def join(address: Any, slots: int, timeout: float, say: Say) -> Cluster:
    """Be in the cluster at `address` with one session more.

    Parameters
    ----------
    address
        None: the one that this process is in; else the one at $RAY_ADDRESS; else one of our own.
    slots
        How many CPUs one of our own has at least.
    timeout
        Seconds that it may take.
    say
        Called with lines of text meanwhile.

    Raises
    ------
    ArgumentError
        If Ray is not installed, or the address is none.
    DiscoError
        If there is no cluster, or this process is in another one.
    """
    global _joined
    ray = import_ray()
    if address is not None and (not isinstance(address, str) or not address):
        raise ArgumentError(
            "address is that of a Ray cluster: 'auto', 'host:port' or 'ray://host:port', got "
            f"{address!r}"
        )
    with _lock:
        if _joined is None or not _joined.alive:
            _joined = _enter(ray, address, slots, timeout, say)
        elif not _joined.is_at(address):
            raise DiscoError(
                f"this process is in another Ray cluster than {address}, and can be in one only: "
                "end the sessions there first, or leave it with ray.shutdown()"
            )
        _joined.users += 1
        return _joined


def leave(cluster: Cluster, wait: bool = True) -> None:
    """End a session's use of it; the last one leaves what we joined, and ends what we started.

    Without `wait` that goes on when this returns.
    """
    global _joined
    with _lock:
        cluster.users -= 1
        if cluster.users > 0 or cluster._keeper is None:
            return
        if _joined is cluster:
            _joined = None
        cluster._keeper.end.set()
        if wait:
            _await(cluster._keeper, _LEAVE_WITHIN)


def import_ray() -> Any:
    """Import the package.

    Raises
    ------
    ArgumentError
        If it is not there.
    """
    # a notebook without ipywidgets is no reason for a warning here
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    # we report dead actors; where the program has imported Ray before, Ray does too
    mute = _MUTE.keys() - os.environ.keys()
    os.environ.update({name: _MUTE[name] for name in mute})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")
            import ray
            import ray.util.client
            import ray.util.placement_group
            import ray.util.scheduling_strategies
    except ImportError as exc:
        raise ArgumentError(
            f"the engine 'ray' needs the package ray: pip install 'discolab[ray]' ({exc})"
        ) from None
    finally:
        for name in mute:
            del os.environ[name]
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # before Ray's own, which is registered when it is imported
    return ray


def in_short(exc: BaseException) -> str:
    """Shorten what Ray says to a line or two: the reason comes after the facts."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    reasons = [line for line in lines if "because" in line or "exit" in line.lower()]
    text = " ".join((reasons or lines or [type(exc).__name__])[-1].split())
    for guesses in (" Some common causes", " There are some potential"):
        text = text.partition(guesses)[0]
    return text if len(text) <= _MOST_WORDS else text[: _MOST_WORDS - 1] + "…"


# -- joining ---------------------------------------------------------------------------------------


def _enter(ray: Any, address: str | None, slots: int, timeout: float, say: Say) -> Cluster:
    global _keeper
    deadline = time.monotonic() + timeout
    if _keeper is not None and not _await(_keeper, timeout):
        raise DiscoError("Ray is still busy with what was begun before; try again later")
    if ray.is_initialized():
        return Cluster(ray, "", None)
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"address": where, "log_to_driver": False}
    options |= {"configure_logging": False, "logging_level": logging.ERROR}
    if where == "local":
        cpus = max(_SLOTS, os.cpu_count() or 1, slots)
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _STORE}
    _check_answers(where, deadline)
    doing = "starting Ray" if where == "local" else f"connecting to the Ray cluster at {where}"
    while True:
        _keeper = keeper = _Keeper(ray, options)
        keeper.start()
        try:
            _watch(keeper, doing, timeout, deadline, say)
        except BaseException:
            keeper.end.set()
            raise
        if keeper.error is None:
            return Cluster(ray, where, keeper)
        left = deadline - time.monotonic()
        if where == "local" and "timed out" in str(keeper.error) and _await(keeper, left):
            continue  # Ray gives its processes half a minute: too little on a busy machine
        if where == "local":
            raise DiscoError(f"Ray can't be started here: {in_short(keeper.error)}")
        raise DiscoError(f"there is no Ray cluster at {where}: {in_short(keeper.error)}")


def _check_answers(where: str, deadline: float) -> None:
    """Check that a server answers there: Ray itself would try for minutes, and log each attempt."""
    try:
        host, port = split_endpoint(where.removeprefix("ray://").partition("/")[0])
        socket.create_connection((host, port), max(_TICK, deadline - time.monotonic())).close()
    except ValueError:  # "auto", "local"
        return
    except OSError as exc:
        why = "nobody answers in time" if isinstance(exc, TimeoutError) else exc.strerror or exc
        raise DiscoError(f"there is no Ray cluster at {where}: {why}") from None


def _watch(keeper: _Keeper, doing: str, timeout: float, deadline: float, say: Say) -> None:
    began, said = time.monotonic(), 0
    while not keeper.started.wait(_TICK):
        seconds = int(time.monotonic() - began)
        if time.monotonic() > deadline:
            raise DiscoError(f"{doing} takes more than {timeout:g} s (start_timeout=)")
        if seconds > said:
            said = seconds
            say(f"{doing} ({seconds} s)")


class _Keeper(threading.Thread):
    """Joins a cluster, and leaves it again when `end` is set."""

    def __init__(self, ray: Any, options: dict[str, Any]) -> None:
        super().__init__(name="discolab-ray", daemon=True)
        self.started, self.end = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._ray, self._options = ray, options

    def run(self) -> None:
        """See the class."""
        local = self._options["address"] == "local"
        folder = None
        try:
            with _quietly(_STAY | (_OF_OUR_OWN if local else {})):
                context = self._ray.init(**self._options)
            if local:
                folder = context.address_info.get("session_dir")
        except BaseException as exc:
            self.error = exc
            if local:
                _end_what_is_left()
        self.started.set()
        if self.error is None:
            self.end.wait()
            with contextlib.suppress(Exception):
                self._ray.shutdown()
            if folder:  # its logs
                shutil.rmtree(folder, ignore_errors=True)


def _end_what_is_left() -> None:
    """End the processes of a Ray that this one could not start, and remove its logs.

    Ray's agents outlive a raylet that has given up waiting for them. Ray names the folder of each
    start after the process; what has a file of it open is of that start.
    """
    of_ours = re.compile(rf"(/.*/session_[0-9_-]+_{os.getpid()})/")
    me, folders = os.getpid(), set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == me:
            continue
        found = set()
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for entry in os.scandir(f"/proc/{name}/fd"):
                with contextlib.suppress(OSError):  # it was closed
                    if match := of_ours.match(os.readlink(entry)):
                        found.add(match[1])
            if found:
                folders |= found
                os.kill(int(name), signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _quietly(settings: dict[str, str]) -> Iterator[None]:
    """Within it Ray says nothing, and finds `settings`; what it sets for itself is taken back."""
    logger = logging.getLogger("ray")
    level, before = logger.level, dict(os.environ)
    logger.setLevel(logging.ERROR)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name in {*before, *os.environ}:
            if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
                if name in before:
                    os.environ[name] = before[name]
                else:
                    os.environ.pop(name, None)


def _await(keeper: _Keeper, timeout: float) -> bool:
    """Wait until it has ended; Ctrl-C is seen, because no join is longer than a tick."""
    deadline = time.monotonic() + timeout
    while keeper.is_alive() and time.monotonic() < deadline:
        keeper.join(_TICK)
    return not keeper.is_alive()


def _job(ray: Any) -> str:
    """What names this process's connection."""
    return str(ray.get_runtime_context().get_job_id())


def _at_exit() -> None:
    """Stop reporting what ends: this process ends, and its workers with it."""
    report_no_deaths()
    if _keeper is not None:
        _keeper.end.set()
        _await(_keeper, _LEAVE_WITHIN)


def _forked() -> None:
    global _lock, _joined, _keeper
    _lock, _joined, _keeper = threading.Lock(), None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

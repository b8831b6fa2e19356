"""The fork server: a process that has imported torch and discolab, and forks workers from itself.

It is a zygote: it has one thread and never touches a GPU, so forking it is safe; a worker is there
in milliseconds, and shares the memory of the imported libraries. The controller starts it with its
first session (`python -m discolab.engines`), and keeps it: it ends by itself when
it has had no worker for a minute, and at once, with its workers, when the controller's process
ends, however that happens; that the connection breaks is not enough to see it, as what the
controller has forked may hold it open. A node forks its server from itself.

Requests and answers are JSON, one answer a request, each with the request's number:

    {"fork": true} with descriptors       {"pid": 123} or {"error": "..."}
    {"status": pid}                       {"status": null | exit code, negative: a signal}
    {"ended": [pid, …]}                   {"ended": {pid: exit code}}   those that have ended
    {"kill": pid}                         {"killed": true}     its process group, by SIGKILL

The first descriptor of a worker is memory with its settings, in JSON. For a status the server waits
a moment, as a process may be about to end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..runtime.errors import DiscoError
from ..runtime.services import PRELOAD
from ..transport.frame import SharedBuffer
from ..transport.unix_sockets import LocalSocket, local_socket, socket_pair

LINGER = 60.0  # seconds without a worker after which it ends
_ANSWER = 60.0  # seconds that an answer may take; the first one waits for the imports
_PR_SET_PDEATHSIG = 1


def like_here() -> dict[str, Any]:
    """Settings for `worker_main.prepare_process`: what makes a forked process like this one."""
    return {
        "environ": dict(os.environ),
        "path": sys.path,
        "argv": sys.argv,
        "folder": os.getcwd(),
    }


class ForkServer:
    """The controller's end, or a node's. `_lock` guards the socket: one request at a time.

    Parameters
    ----------
    sock
        Leads to it.
    process
        The process, a child of this one.
    ready
        Whether it has imported everything.
    """

    def __init__(
        self, sock: LocalSocket, process: subprocess.Popen[bytes] | _Child, ready: bool = False
    ) -> None:
        self._socket, self.process, self._ready = sock, process, ready
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    @classmethod
    def start(cls) -> ForkServer:
        """Start one in a fresh interpreter."""
        ours, theirs = socket_pair()
        with contextlib.closing(theirs.sock):
            # a session of its own: Ctrl-C in a terminal is for the controller to deal with
            process = subprocess.Popen(
                # -P: modules come from where this process has them, not from the folder it works in
                [sys.executable, "-P", "-m", "discolab.engines", str(theirs.fileno()), *PRELOAD],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths())},
            )
        return cls(ours, process)

    @classmethod
    def forked(cls) -> ForkServer:
        """Fork one from this process, which has imported everything and uses no threads yet."""
        ours, theirs = socket_pair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _be_forked_server(theirs)
        theirs.close()
        return cls(ours, _Child(pid), ready=True)

    @property
    def usable(self) -> bool:
        """Whether it can be asked: it lives, is this process's own, and is not about to end."""
        if self._pid != os.getpid() or self.process.poll() is not None:
            return False
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), 0)
        except ValueError:  # closed
            return False
        return not poll.poll(0)  # it closes its end first, and takes a while to end then

    def ready(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until it has imported everything.

        Raises
        ------
        DiscoError
            If it has ended instead.
        """
        with self._lock:
            if self._ready:
                return True
            self._socket.sock.settimeout(timeout)
            try:
                self._ready = bool(self._receive())
            except TimeoutError:
                return False
            return True

    def fork(self, settings: dict[str, Any], fds: Sequence[int], timeout: float = _ANSWER) -> int:
        """Fork a worker; its process id."""
        memory = SharedBuffer([json.dumps(settings).encode()])
        return int(self._ask({"fork": True}, [memory.fd, *fds], timeout)["pid"])

    def status(self, pid: int) -> int | None:
        """How a worker has ended: exit code, or minus a signal's number; None: it lives."""
        code: int | None = self._ask({"status": pid})["status"]
        return code

    def ended(self, pids: Sequence[int]) -> dict[int, int]:
        """Those of some workers that have ended, and how; never waits for one to end."""
        return {int(pid): code for pid, code in self._ask({"ended": pids})["ended"].items()}

    def kill(self, pid: int) -> None:
        """End a worker and what it has started, now."""
        self._ask({"kill": pid})

    def close(self) -> None:
        """End it now, with all its workers."""
        with self._lock:
            self._socket.close()
        if self._pid == os.getpid():
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _ask(
        self, request: dict[str, Any], fds: Sequence[int] = (), timeout: float = _ANSWER
    ) -> dict[str, Any]:
        # a Ctrl-C may have left an answer unread: each says to what it is one
        number = next(self._numbers)
        with self._lock:
            try:
                self._socket.sock.settimeout(timeout)
                self._socket.send(json.dumps({**request, "number": number}).encode(), fds)
                answer = self._receive()
                while answer.get("number") != number:
                    answer = self._receive()
            except TimeoutError:
                raise DiscoError(
                    f"the process that starts workers (pid {self.process.pid}) has not answered "
                    f"for {timeout:g} s; is it stopped?"
                ) from None
            except OSError as exc:
                raise DiscoError(f"the process that starts workers does not answer: {exc}") from exc
        if "error" in answer:
            raise DiscoError(f"a worker's process can't be started: {answer['error']}")
        return answer

    def _receive(self) -> dict[str, Any]:
        received = self._socket.recv()
        if received is None:
            code = self.process.wait(10)
            raise DiscoError(
                f"the process that starts workers has ended (exit code {code}); what it wrote is "
                f"above. Try it by hand: {sys.executable} -c 'import discolab'"
            )
        answer: dict[str, Any] = json.loads(received[0])
        return answer


class _Child:
    """As much of `subprocess.Popen` as a `ForkServer` needs, for a process that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


_server: ForkServer | None = None
_start_lock = threading.Lock()


def the_fork_server() -> ForkServer:
    """The fork server of this process, started if there is none."""
    global _server
    with _start_lock:
        if _server is None or not _server.usable:
            if _server is not None and _server._pid == os.getpid():
                _server.close()
            _server = ForkServer.start()
        return _server


def end_fork_server() -> None:
    """End it now rather than after its minute."""
    global _server
    with _start_lock:
        if _server is not None:
            _server.close()
            _server = None


atexit.register(end_fork_server)


def _forked() -> None:
    global _server, _start_lock
    _server, _start_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _paths() -> list[str]:
    """Where this process finds modules: discolab may be run from a folder."""
    return [path if path else os.getcwd() for path in sys.path]


# -- in the server ---------------------------------------------------------------------------


class _Server:
    """The server's own state; it has one thread."""

    def __init__(self, sock: LocalSocket, linger: float) -> None:
        self.socket, self.linger = sock, linger
        self.alive: set[int] = set()
        self.ended: dict[int, int] = {}
        self.since = time.monotonic()  # since when there is no worker

    def serve(self) -> None:
        """Answer until the controller is gone, or nothing was asked for too long."""
        poll = select.poll()
        poll.register(self.socket.fileno(), select.POLLIN)
        parent = _watch_parent()
        if parent >= 0:
            poll.register(parent, select.POLLIN)
        while True:
            self._reap()
            ready = poll.poll(200)
            if any(fd == parent for fd, _ in ready):
                return
            if not ready:
                if not self.alive and time.monotonic() - self.since > self.linger:
                    self.socket.close()  # a session that asks now starts another server
                    return
                continue
            received = self.socket.recv()
            if received is None:
                return
            fds = received[1]
            self.since = time.monotonic()
            request = json.loads(received[0])
            try:
                answer = self._answer(request, fds)
            except Exception as exc:
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            finally:
                for fd in fds:
                    os.close(fd)
            answer["number"] = request.get("number")
            self.socket.send(json.dumps(answer).encode())

    def _answer(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        if "fork" in request:
            pid = os.fork()
            if pid == 0:
                _become_worker(fds, self.socket)
            self.alive.add(pid)
            self.ended.pop(pid, None)  # another process had the number before
            return {"pid": pid}
        if "ended" in request:
            self._reap()
            return {
                "ended": {pid: self.ended[pid] for pid in request["ended"] if pid in self.ended}
            }
        if "status" in request:
            for _ in range(60):  # its connection may break a moment before it has ended
                self._reap()
                if request["status"] not in self.alive:
                    break
                time.sleep(0.005)
            return {"status": self.ended.get(request["status"])}
        pid = request["kill"]
        if pid in self.alive:  # not reaped yet: the number is still its own
            _kill(pid)
        return {"killed": True}

    def _reap(self) -> None:
        for pid in tuple(self.alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.alive.remove(pid)
                self.ended[pid] = os.waitstatus_to_exitcode(status)
                _kill(pid)  # what it has left behind
                self.since = time.monotonic()


def _watch_parent() -> int:
    """A descriptor that is readable once this process's parent has ended; -1 if there is none."""
    try:
        return os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # macOS, an old kernel
        return -1


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def main(fd: int, preload: Sequence[str] = ()) -> None:
    """Be the fork server; `fd` is its end of the socket."""
    sock = local_socket(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    package = __name__.partition(".")[0]  # what takes time is done here, once
    import_all((package, f"{__package__}.worker_main", *preload))
    sock.send(b'{"ready": true}')
    _serve(sock, LINGER)
    os._exit(0)  # to take torch apart takes most of a second


def _be_forked_server(sock: LocalSocket) -> NoReturn:
    """In a process that a node has forked."""
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        _serve(sock, math.inf)  # it ends with the node
        code = 0
    finally:
        os._exit(code)


def import_all(names: Sequence[str]) -> None:
    """Import what workers will want."""
    for name in names:
        with contextlib.suppress(Exception):  # the worker that needs it raises when it imports it
            importlib.import_module(name)


def _serve(sock: LocalSocket, linger: float) -> None:
    """Fork as requests say, until none come any more; `sock` is our end of the socket."""
    server = _Server(sock, linger)
    try:
        server.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for pid in server.alive:
            _kill(pid)


def _become_worker(fds: Sequence[int], sock: LocalSocket) -> NoReturn:
    """In the forked process: be a worker, and end."""
    code = 1
    try:
        die_with_parent()
        os.setpgid(0, 0)
        sock.close()
        memory, *own = fds
        with open(memory, encoding="utf-8") as file:
            file.seek(0)
            settings: dict[str, Any] = json.load(file)
        if own and not settings.get("own_text"):  # else it keeps our descriptors 1 and 2
            text = own.pop()
            for fd in (1, 2):
                os.dup2(text, fd)
            os.close(text)
        code = _body(settings)(settings, *own)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _body(settings: dict[str, Any]) -> Callable[..., int]:
    """What is to run in a forked process: a worker, or what `settings` names as ``module:name``."""
    own = "run_connected" if "connect" in settings else "run_forked"
    module, _, name = settings.get("run", f"{__package__}.worker_main:{own}").partition(":")
    body: Callable[..., int] = getattr(importlib.import_module(module), name)
    return body


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

"""Engines: where the workers of a session live.

An engine makes the channels, starts the workers, notices when one dies, and stops them;
everything else is the session's.

- `threads`: workers are threads of this process; `worker_threads` is their start and end, `hooks`
  what the process gets meanwhile, `placement` how many there are and on which devices.
- `processes`, `sockets`, `ray`: workers have processes; `remote_session` is what these engines
  have in common, `worker_main` what runs in such a process, `connections` what leads to it,
  `output` what it prints.
- `child_processes` starts worker processes of this machine, has the fork server (`forkserver`) fork
  them, and knows what became of them. `node_agent` does that on another machine (`discolab node`);
  `membership` knows which nodes have joined, and `keys` are what they prove it with. `ray_cluster`,
  `ray_actors` and `ray_worker` are for a Ray cluster.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..runtime.errors import ArgumentError
from ..runtime.session import Session
from .processes import ProcessSession
from .threads import ThreadedSession

if TYPE_CHECKING:
    from .ray import RaySession
    from .sockets import SocketSession


class _Later:
    """Makes sessions of an engine that is imported when it is used."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _found(self) -> Any:
        return getattr(import_module(self._module, __package__), self._name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._found()(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._found())


ENGINES: dict[str, Any] = {
    "threads": ThreadedSession,
    "processes": ProcessSession,
    "sockets": _Later(".sockets", "make_socket_session"),
    "ray": _Later(".ray", "RaySession"),
}
_ELSEWHERE = {"RaySession": ".ray", "SocketSession": ".sockets"}


def __getattr__(name: str) -> Any:
    """Sessions of engines that are imported when they are used."""
    if name in _ELSEWHERE:
        return getattr(import_module(_ELSEWHERE[name], __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_session(num_workers: int, engine: str = "threads", **options: Any) -> Session:
    """Start a session on the engine of that name, one of `ENGINES`.

    Raises
    ------
    ArgumentError
        If there is no such engine, or its options do not fit.
    """
    kind = ENGINES.get(engine)
    if kind is None:
        raise ArgumentError(
            f"there is no engine {engine!r} in this version; there is: {', '.join(ENGINES)}"
        )
    session: Session = kind(num_workers, **options)
    return session


__all__ = [
    "ENGINES",
    "ProcessSession",
    "RaySession",
    "SocketSession",
    "ThreadedSession",
    "make_session",
]

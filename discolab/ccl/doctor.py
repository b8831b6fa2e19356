"""The doctor: what this process knows of a session's collectives at one moment.

`doctor` reads the ledger, the boards and the workers' own attributes on the caller's thread. It
sends no command and waits for no worker, for they may be stuck; so it works during a hang, after
one, and on a closed session. It changes nothing. What it finds are frozen records: the session
and its workers go on while they are read.

Where workers have processes of their own, the ledger and the board are the coordinator's, in this
process; what the workers do they are asked on their links, which answer while they compute, and it
waits 0.3 s for that at most. How a `Diagnosis` is drawn is not decided here, see
`runtime.display`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ..runtime.display import Pictured
from ..runtime.errors import ArgumentError
from ..runtime.failures import Failure, name_ranks
from ..runtime.interpreter_lock import copied
from ..runtime.ranks import parse_ranks
from ..runtime.session import Session
from ..runtime.status import WorkerStatus
from ..runtime.worker import Worker
from .backends.local import LocalBackend
from .board.diagnosis import cycle_of, stuck
from .board.ledger import Ledger, ledger_of
from .board.peers import Peer
from .board.rendezvous import RUNNING, Board, PendingCollective, Reception, Wait
from .board.rounds import Round, align, failed_in_collective, in_words
from .call import Call, kind, shown_tag
from .groups import Group

_PATIENCE = 1.0  # seconds for a lock that is never held for long; then look without it
_ANSWER = 0.3  # seconds that workers in other processes are given to say what they do


@dataclass(frozen=True)
class Edge:
    """A worker that waits for others.

    `whom` are those each of which must do something; with `any_of`, one of them. If all have come,
    it is nobody, and `doing` says what goes on. `seconds` is how long it has waited.
    """

    rank: int
    whom: tuple[int, ...]
    any_of: bool
    what: str
    site: str
    seconds: float
    doing: str = ""


@dataclass(frozen=True)
class Parcel:
    """A message that was sent and is not yet received."""

    sender: int
    receiver: int
    what: str
    tag: str
    site: str


@dataclass(frozen=True, repr=False)
class Diagnosis(Pictured):
    """What `doctor` found. It shows itself as text and, in a notebook, as HTML.

    Attributes
    ----------
    title
        Which session.
    workers
        What each worker does now.
    waits
        Who waits for whom in a collective or for a message.
    deadlocks
        Sets of workers that wait for each other and can't go on.
    messages
        On their way, by sender and receiver.
    rounds
        The last collectives, the oldest first; each with what its members did.
    failure
        What the last of `rounds` that failed has told, "" if none did: one that was stopped by
        an interrupt has not failed, even for workers that noticed that others had left it.
    unseen
        Workers in other processes, whose collectives are not known here.
    """

    title: str
    workers: tuple[WorkerStatus, ...]
    waits: tuple[Edge, ...]
    deadlocks: tuple[tuple[int, ...], ...]
    messages: tuple[Parcel, ...]
    rounds: tuple[Round, ...]
    failure: str
    unseen: tuple[int, ...]


def doctor(session: Session, n: int = 8, ranks: Any = None, group: Any = None) -> Diagnosis:
    """Examine a session: its last collectives, who waits for whom, and what went wrong last.

    Works at any moment, above all while a program hangs: nothing is asked of the workers.

    Parameters
    ----------
    n
        How many collectives of each worker to show, 1 or more; the ledger keeps 256.
    ranks
        The workers to look at, a rank set (see `runtime.ranks`); None: all.
    group
        Show the collectives of one group only: ``"world"``, a `Group`, its ranks, or an axis of
        the session's mesh, which means each group along it. None: all.

    Returns
    -------
    Diagnosis

    Raises
    ------
    ArgumentError
        If an argument can't be read.

    Examples
    --------
    >>> discolab.doctor(sess, n=3)  # doctest: +SKIP
    """
    if not isinstance(session, Session):
        raise ArgumentError(f"doctor examines a session, got {session!r:.60}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ArgumentError(f"n is how many collectives to show, 1 or more; got {n!r}")
    chosen = parse_ranks(ranks, session.num_workers, session.current_mesh)
    wanted = _wanted_groups(group, session)
    here, board, stories = _seen(session)
    waits, cycles, parcels = _on_board(here, board)
    failures = {rank: dict(copied(worker.failed_calls)) for rank, worker in here.items()}
    rounds = align(stories, here, failures, chosen, n, wanted)
    shown = set(chosen)
    return Diagnosis(
        title=_title(session),
        workers=tuple(status for status in session.status() if status.rank in shown),
        waits=tuple(e for e in waits if e.rank in shown or shown.intersection(e.whom)),
        deadlocks=tuple(sorted(cycle for cycle in cycles if shown.intersection(cycle))),
        messages=tuple(p for p in parcels if shown.intersection((p.sender, p.receiver))),
        rounds=rounds,
        failure=_last_failure(failures, {one.ordinal for one in rounds}),
        unseen=tuple(rank for rank in chosen if rank not in here),
    )


def waits(session: Session) -> tuple[Edge, ...]:
    """Who waits for whom at this moment; quick, for nothing is asked of the workers.

    Of a session that was shut down it is nobody.
    """
    if session.closed:
        return ()
    coordinator = _coordinator(session)
    here, board = (
        (coordinator.peers, coordinator.board) if coordinator is not None else _local(session)
    )
    if board is None:
        return ()
    with _held(board.lock):
        return tuple(_edge(rank, wait, here) for rank, wait in _live(here, board).items())


def forget(session: Session) -> None:
    """Have the doctor forget the collectives that are over."""
    coordinator = _coordinator(session)
    if coordinator is not None:
        coordinator.ledger.clear()
    for worker in session.workers_here().values():
        ledger_of(worker).clear()


# -- what to look at -------------------------------------------------------------------------


def _wanted_groups(group: Any, session: Session) -> Callable[[Group], bool]:
    """Which groups `group=` means."""
    if group is None:
        return lambda _: True
    if isinstance(group, Group):
        return lambda other: other == group
    mesh = session.current_mesh
    if group == "world":
        lines = {tuple(range(session.num_workers))}
    elif mesh is not None and isinstance(group, str) and group in mesh.axes:
        lines = {mesh.peers(group, of=rank) for rank in mesh.ranks}
    else:
        lines = {tuple(parse_ranks(group, session.num_workers, mesh))}
    return lambda other: other.ranks in lines


def _title(session: Session) -> str:
    count = session.num_workers
    plural = "" if count == 1 else "s"
    words = f"{session.name or 'session'}: {count} worker{plural} ({session.engine})"
    return f"{words}, shut down" if session.closed else words


def _coordinator(session: Session) -> Any:
    """Where workers in several processes meet, None if they are threads of this one."""
    return getattr(session, "services", {}).get("ccl") if session.num_workers > 1 else None


def _seen(
    session: Session,
) -> tuple[Mapping[int, Peer], Board | None, Mapping[int, Sequence[Call]]]:
    """The workers, where they meet (None before their first collective), and what they called."""
    coordinator = _coordinator(session)
    if coordinator is not None:
        if not session.closed:
            coordinator.refresh(_ANSWER)
        ledger: Ledger = coordinator.ledger
        return (
            coordinator.peers,
            coordinator.board,
            {rank: ledger.story(rank) for rank in coordinator.peers},
        )
    workers, board = _local(session)
    return workers, board, {rank: ledger_of(worker).story(rank) for rank, worker in workers.items()}


def _local(session: Session) -> tuple[Mapping[int, Worker], Board | None]:
    """The workers of this process, and where they meet."""
    here, board = session.workers_here(), None
    for worker in here.values():
        local: LocalBackend | None = worker.shared.get("discolab.ccl.local")
        if local is not None:
            board = local.rendezvous.board
    return here, board


@contextmanager
def _held(lock: Lock) -> Iterator[None]:
    """Hold a lock, if it can be had: nothing that examines a broken program may hang in it."""
    got = lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if got:
            lock.release()


# -- what is there ---------------------------------------------------------------------------


def _on_board(
    here: Mapping[int, Peer], board: Board | None
) -> tuple[list[Edge], set[tuple[int, ...]], list[Parcel]]:
    """Who waits, the deadlocks among those, and messages; nothing from before an interrupt."""
    if board is None:
        return [], set(), []
    cut = _cut(here)
    with _held(board.lock):
        waiting = _live(here, board)
        edges = [_edge(rank, wait, here) for rank, wait in waiting.items()]
        return edges, _cycles(waiting, here), _parcels(board, here, cut)


def _cut(here: Mapping[int, Peer]) -> int:
    """The call in which the last interrupt was: what is from before it is void."""
    return max(worker.resumed_at for worker in here.values())


def _live(here: Mapping[int, Peer], board: Board) -> dict[int, Wait]:
    """What workers still wait for, by rank; under the board's lock."""
    cut = _cut(here)
    waiting = sorted(board.waiting.items())
    return {rank: wait for rank, wait in waiting if not wait.settled() and wait.ordinal >= cut}


def _edge(rank: int, wait: Wait, here: Mapping[int, Peer]) -> Edge:
    whom = wait.missing()
    any_of = isinstance(wait, Reception) and len(wait.pairs) > 1
    doing = ""
    if isinstance(wait, Reception) and any_of:
        whom = wait.senders
    elif isinstance(wait, PendingCollective) and wait.state is RUNNING:
        doing = _doing(wait, here[wait.executor])
    call = wait.call_of(rank)
    what = wait.title() if isinstance(wait, PendingCollective) else str(wait)
    seconds = time.monotonic() - call.began if call is not None else 0.0
    site = in_words(call.site if call else None)
    return Edge(rank, tuple(whom), any_of, what, site, seconds, doing)


def _doing(collective: PendingCollective, executor: Any) -> str:
    """What goes on in a collective to which all have come."""
    if not collective.abroad:
        return f"worker {executor.worker_id} is doing it for all"
    name = getattr(executor, "backend", "")  # as the coordinator knows it
    if not name:
        backend = executor.shared.get("discolab.ccl", {}).get(executor.worker_id)
        name = "a library" if backend is None else backend.name
    return f"{name} is moving the data"


def _cycles(waiting: Mapping[int, Wait], here: Mapping[int, Peer]) -> set[tuple[int, ...]]:
    """The sets of workers that wait for each other for ever."""
    cycles = set()
    for rank, wait in waiting.items():
        cycle = cycle_of(rank, waiting, here)
        if not cycle and isinstance(wait, Reception) and len(wait.pairs) > 1:
            cycle = stuck(rank, waiting, here)
        if cycle:
            cycles.add(tuple(sorted(cycle)))
    return cycles


def _parcels(board: Board, here: Mapping[int, Peer], cut: int) -> list[Parcel]:
    board.messages.purge(here)  # what a failed call has sent is no message
    return [
        Parcel(
            sender, receiver, kind(m.tensor.dtype, m.tensor.shape), shown_tag(tag), in_words(m.site)
        )
        for (sender, receiver, tag), messages in board.messages.waiting()
        for m in messages
        if m.ordinal >= cut
    ]


def _last_failure(failures: Mapping[int, Mapping[int, Failure]], shown: set[int]) -> str:
    """What was told of the last of these commands in which a collective failed; not of a Stop."""
    failed = {
        ordinal
        for line in failures.values()
        for ordinal, failure in line.items()
        if ordinal in shown and failed_in_collective(failure)
    }
    if not failed:
        return ""
    ends = [line[max(failed)] for line in failures.values() if max(failed) in line]
    causes = [f for f in ends if not (f.victim or f.interrupted)]
    if not causes and not any(f.interrupted for f in ends):
        causes = ends
    words: dict[str, list[int]] = {}
    for failure in causes:  # here it does not matter at which line each has failed
        text = f"failed in {failure.summary}: {failure.headline}"
        words.setdefault(text, []).append(failure.rank)
    return "\n".join(f"{name_ranks(ranks)} {text}" for text, ranks in words.items())

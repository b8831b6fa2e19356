"""The sessions of a notebook by their names: start, restart, status, doctor, mesh, the end.

The other parts of a `Lab` hold the one `Sessions` of the shell. What they do when a session starts
or stops they enter in its lists (`at_set_up`, `at_start`, `at_stop`, `status_notes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..ccl.doctor import Diagnosis, doctor, forget
from ..debugger.frames import WORKER_NAMES
from ..runtime.errors import ArgumentError, SessionError
from ..runtime.failures import name_ranks
from ..runtime.mesh import Mesh, parse_axes
from ..runtime.ranks import parse_ranks
from ..runtime.restart import RestartedWorker
from ..runtime.session import Session
from ..views.facts.tensors import limit_statistics
from .cell import names_made
from .cells import CellTeller
from .config import Disco
from .live import LiveView, is_watched
from .lock_watch import LockWatch, lock_note
from .output import OutputCapture
from .starting import Settings, taken_by
from .worker_shell import set_up

_LISTED = 8  # names of variables that are gone


class Sessions:
    """The sessions of one shell, by the names that they have in the notebook.

    Attributes
    ----------
    by_name
        All that were started, also those that have been shut down.
    current
        The name of the one used last.
    watches
        Of each, what looks how long its workers wait for the interpreter's lock.
    at_set_up
        Each is called with a session that starts, before the notebook has it.
    at_start, at_stop
        Each is called with a name and the session that now has it; that has just been shut down.
    status_notes
        What each says of a session that runs, if anything, ends its status.
    """

    def __init__(self, shell: Any, config: Disco, output: OutputCapture, cells: CellTeller) -> None:
        self.shell = shell
        self.config = config
        self.output = output
        self.by_name: dict[str, Session] = {}
        self.current: str | None = None
        self.watches: WeakKeyDictionary[Session, LockWatch] = WeakKeyDictionary()
        self.at_set_up: list[Callable[[Session], object]] = []
        self.at_start: list[Callable[[str, Session], object]] = []
        self.at_stop: list[Callable[[str, Session], object]] = []
        self.status_notes: list[Callable[[Session], str]] = []
        self._told_of_lock = False
        self._cells = cells
        self._settings: dict[str, Settings] = {}

    def get(self, name: str | None = None) -> Session:
        """The session of that name, or the one used last.

        Raises
        ------
        SessionError
            If there is none; says how to start one.
        """
        name = name or self.current
        if name is None:
            raise SessionError("no session is running: start one with %disco_session 4")
        found = self.by_name.get(name)
        if found is None:
            names = ", ".join(self.by_name) or "none"
            raise SessionError(f"there is no session {name!r} (running: {names})")
        if found.closed:
            raise SessionError(
                f"session {name!r} was shut down: %disco_restart starts it again with the same "
                "settings"
            )
        return found

    def free(self, name: str | None = None) -> Session:
        """As `get`, for what needs its workers.

        Raises
        ------
        SessionError
            Also while they are paused in a program: says where, and how to go on.
        """
        found = self.get(name)
        why = found.held_up() if found.held_up is not None else ""
        if why:
            raise SessionError(why)
        return found

    def name_of(self, name: str | None = None) -> str:
        """The name in the notebook of a session that runs."""
        found = self.get(name)
        return next(known for known, session in self.by_name.items() if session is found)

    def disco_session(
        self,
        num_workers: int,
        *,
        engine: str | None = None,
        devices: str | Sequence[str] | None = None,
        groups: int = 1,
        ccl: str = "auto",
        mesh: str | None = None,
        statistics_limit: int | None = None,
        name: str = "sess",
        **options: Any,
    ) -> Session:
        """Start a session and bind it to `name` in the notebook.

        A session of that name is shut down first. It becomes the one that ``%%disco`` uses.

        Parameters
        ----------
        num_workers, devices
            As for `make_session`.
        engine
            Where the workers live, one of `engines.ENGINES`; None: see `config.Disco`, as for
            `statistics_limit` and the options ``timeout`` and ``heartbeat``.
        groups
            Splits the workers into this many equal groups.
        ccl
            The collective backend, as for `Session.init_ccl`.
        mesh
            Arranges the workers as `disco_mesh` does it: ``dp=2,tp=2``.
        statistics_limit
            Bytes of a tensor up to which a picture reads all of its values.
        options
            What engines take: see their classes. One that is None is left out.

        Raises
        ------
        ArgumentError
            If something does not fit; a session already there is then left alone.
        """
        if not name.isidentifier():
            raise ArgumentError(f"a session's name is a Python name, got {name!r}")
        engine = engine or self.config.engine
        if statistics_limit is None:
            statistics_limit = self.config.statistics_limit
        given = {option: value for option, value in options.items() if value is not None}
        for option in ("timeout", "heartbeat"):
            default = getattr(self.config, option)
            if default is not None and option in taken_by(engine):
                given.setdefault(option, default)
        settings = Settings(
            num_workers, engine, devices, groups, ccl, mesh, statistics_limit, given
        )
        settings.check()
        gone, waited = self._what_goes(name), self._waited_for_lock(name)
        session = self._start(name, settings)
        if gone:
            print(gone)
        if waited and len(session.workers_here()) > 1:
            self._told_of_lock = True
            print(waited)
        return session

    def _waited_for_lock(self, name: str) -> str:
        """Said once, where somebody reads it, if workers of the session before waited for it."""
        before = self.by_name.get(name)
        watch = self.watches.get(before) if before is not None else None
        if watch is None or self._told_of_lock or not is_watched(self.shell):
            return ""
        return watch.parting_words()

    def _what_goes(self, name: str) -> str:
        """What is thrown away if another session takes this name; "" if that is nothing."""
        session = self.by_name.get(name)
        if session is None or session.closed:
            return ""
        there = session.look(names_made).values()
        names = sorted({name for made in there for name in made})
        if not names:
            return ""
        listed = ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
        count = "1 variable is" if len(names) == 1 else f"{len(names)} variables are"
        return (
            f"replaced the session of {session.num_workers} workers ({session.engine}); {count} "
            f"gone: {listed}"
        )

    def _start(self, name: str, settings: Settings) -> Session:
        before = self._settings.get(name)
        if before is not None and settings.takes_the_place_of(before):
            self.stop(name)
        session = settings.start(self.shell, self._set_up)
        self.stop(name)
        session.name = name
        self.by_name[name] = session
        self._settings[name] = settings
        self.current = name
        self.shell.user_ns[name] = session
        for note in self.at_start:
            note(name, session)
        return session

    def _set_up(self, session: Session) -> None:
        """Prepare a session and its workers for cells."""
        session.track_registers().cell = int(self.shell.displayhook.prompt_count)
        watch = self.watches[session] = LockWatch(session)
        view = LiveView(self.shell, self.output, session, progress_after=-1, watch=watch)
        session.tick = view.tick  # type: ignore[method-assign]  # for waits outside of cells
        session.call_packed(set_up, self._cells.known()).debug_get_from_all()
        for prepare in self.at_set_up:
            prepare(session)

    def for_new_worker(self, session: Session) -> list[tuple[str, Any, tuple[Any, ...]]]:
        """What prepares a worker for cells that has taken the place of a lost one."""
        if session not in self.watches:
            return []
        first: list[tuple[str, Any, tuple[Any, ...]]] = [
            ("to prepare it for cells", set_up, (self._cells.known(),))
        ]
        settings = self._settings.get(session.name or "")
        if settings is not None and settings.statistics_limit is not None:
            limit = (settings.statistics_limit,)
            first.append(("the limit for statistics", limit_statistics, limit))
        return first

    def disco_restart_worker(
        self, targets: str | Iterable[int], *, session: str | None = None
    ) -> list[RestartedWorker]:
        """Put new workers in the place of some; see `Session.restart_worker`.

        Parameters
        ----------
        targets
            A rank set: ``2``, ``1,3``, ``tp=0``.
        """
        sess = self.get(session)
        ranks = parse_ranks(targets, sess.num_workers, sess.current_mesh)
        try:
            return [sess.restart_worker(rank) for rank in ranks]
        finally:
            self.output.flush()

    def disco_mesh(self, axes: str | None = None, *, session: str | None = None) -> Mesh | None:
        """Arrange a session's workers in a mesh, ``dp=2,tp=2``; without axes, the one there is.

        Raises
        ------
        ArgumentError
            If the axes can't be read, or do not fit the number of workers.
        """
        if axes:
            return self.free(session).mesh(**parse_axes(axes))
        return self.get(session).current_mesh

    def disco_shutdown(self, name: str | None = None) -> None:
        """Stop a session's workers now; what they run is interrupted."""
        name = name or self.current
        if name not in self.by_name:
            self.get(name)  # raises with the names that there are
        assert name is not None
        self.stop(name)

    def stop(self, name: str) -> None:
        """End a session's workers, whatever they do; nothing if there is none of that name."""
        session = self.by_name.get(name)
        if session is None:
            return
        left = session.shutdown(cancel=True)
        self.output.flush()
        if left:
            print(
                f"{name}: {name_ranks(left)} did not stop, inside a call that Python can't "
                "interrupt; left behind until that returns"
            )
        for note in self.at_stop:
            note(name, session)

    def disco_restart(
        self, name: str | None = None, *, engine: str | None = None, **options: Any
    ) -> Session:
        """Start a session anew with the same settings, or on another engine.

        Its workers' values are gone. It need not be healthy: a worker may have died.

        Parameters
        ----------
        engine
            Where the workers are to live from now on; None: where they were.
        options
            As for `disco_session`; they are added to what the session was started with.
        """
        name = name or self.current
        if name is None or name not in self._settings:
            raise SessionError("there is nothing to restart: start one with %disco_session 4")
        given = {option: value for option, value in options.items() if value is not None}
        settings = self._settings[name].on(engine, given)
        gone = self._what_goes(name) if engine or given else ""
        self.stop(name)
        session = self._start(name, settings)
        if gone:
            print(gone)
        return session

    def disco_status(self, name: str | None = None) -> str:
        """What each worker does now, as text; waits for a tenth of a second at most."""
        if self.current is None:
            return "no session is running: start one with %disco_session 4"
        name = name or self.current
        if name not in self.by_name:
            self.get(name)  # raises with the names that there are
        session = self.by_name[name]
        if session.closed:
            return f"{name}: shut down (%disco_restart starts it again)"
        watch = self.watches[session]
        watch.measure()
        counts = session.statistics()
        rows = [("worker", "device", "state", "for", "queued", "")]
        for s in counts.workers:
            seconds = "" if s.state == "idle" else f"{s.seconds:.1f} s"
            rows.append((str(s.rank), s.device, s.state, seconds, str(s.queued), s.detail))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        head = f"{name}: {session!r}, {counts.live_registers} live registers"
        notes = [lock_note(session), watch.hint(), *(note(session) for note in self.status_notes)]
        return "\n".join([head, *lines, *filter(None, notes)])

    def disco_doctor(
        self,
        n: int = 8,
        *,
        targets: str | Iterable[int] | None = None,
        group: str | None = None,
        clear: bool = False,
        session: str | None = None,
    ) -> Diagnosis:
        """What the collectives of a session do and did; never waits, so it works during a hang.

        Parameters
        ----------
        n
            How many collectives of each worker.
        targets
            The workers to look at, a rank set; None: all.
        group
            ``world``, ranks, or an axis of the mesh: collectives of these groups only.
        clear
            Forget what is over, after this look.

        Raises
        ------
        ArgumentError
            If an argument can't be read.
        """
        sess = self.get(session)
        found = doctor(sess, n, targets, group)
        if clear:
            forget(sess)
        return found

    def describe(self, session: Session) -> str:
        """One line for a session that has just started."""
        kinds = ", ".join(sorted({str(device) for device in session.devices}))
        backend, mesh = session.collectives.partition(":")[0], session.current_mesh
        names = [*WORKER_NAMES, *(["mesh"] if mesh else [])]
        nodes = getattr(session, "num_nodes", None)
        place = f"{session.engine} on {nodes} nodes" if nodes else session.engine
        return (
            f"{session.name}: {name_ranks(range(session.num_workers))} on {kinds} "
            f"({place}, {backend} collectives{f', mesh {mesh}' if mesh else ''}); "
            f"names in %%disco: {', '.join(names)}"
        )

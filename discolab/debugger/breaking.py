"""The breakpoints of a session: those that last, and those of the program that runs.

The middle part of a `Debugger`.
"""

from __future__ import annotations

from dataclasses import replace

from ..runtime.errors import ArgumentError
from ..runtime.session import Session
from .breaks import Break, check_hits, check_log, parse_break
from .looking import ANSWER, Looking, Ranks
from .named import line_in_file, locate, locate_in_frame, read_name

_NAMED_AT = f"{locate_in_frame.__module__}:{locate_in_frame.__name__}"


class Breaking(Looking):
    """A session's program with breakpoints."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.breaks: dict[int, Break] = {}
        self._own: dict[int, Break] = {}  # those of the program alone
        self._next_break = 1

    def break_at(
        self,
        text: str,
        file: str = "",
        ranks: Ranks = None,
        *,
        hits: str = "",
        log: str = "",
        timeout: float | None = None,
    ) -> Break:
        """Set a breakpoint: ``model.py:12``, ``12 if rank == 2 and loss.isnan().any()``, or, where
        a function begins, ``Block.forward``.

        It holds for the program that runs and for those that begin later. All workers gather at the
        line; then it is decided, and all stop or none.

        Parameters
        ----------
        file
            For a line alone; "": the file in which the workers stand.
        ranks
            On which workers its condition counts; None: all.
        hits
            At which of the times that a worker would stop it does: ``3``, ``>= 3``, ``% 10`` for
            each tenth.
        log
            Each worker prints this instead of stopping, with values for ``{expressions}``.
        timeout
            Seconds to wait for the workers if one must be asked where a function is; None: the
            session's.

        Raises
        ------
        ArgumentError
            If there is no such line or file, or the condition can't be compiled.
        """
        if hits:
            check_hits(hits)
        check_log(log)
        chosen = None if ranks is None else tuple(self._ranks(ranks))
        found = self._parse(text, file or self._here(), timeout)
        found = replace(found, number=self._number(), ranks=chosen, hits=hits, log=log)
        self.breaks[found.number] = found
        self._tell_breaks()
        return found

    def clear(self, number: int | None = None) -> list[Break]:
        """Remove a breakpoint, or all; those removed.

        Raises
        ------
        ArgumentError
            If there is none of that number.
        """
        known = {**self.breaks, **self._own}
        if number is not None and number not in known:
            numbers = ", ".join(map(str, sorted(known))) or "none"
            raise ArgumentError(f"there is no breakpoint {number!r} (there are: {numbers})")
        gone = [known[n] for n in sorted(known) if number in (None, n)]
        for one in gone:
            self.breaks.pop(one.number, None)
            self._own.pop(one.number, None)
        self._tell_breaks()
        return gone

    def all_breaks(self) -> list[Break]:
        """Those that are set, and those of the program that runs."""
        own = self._own if self.is_active else {}
        return [one for _, one in sorted({**self.breaks, **own}.items())]

    def _parse(self, text: str, file: str, timeout: float | None = None) -> Break:
        """A breakpoint in words, which may be the name of a function."""
        named = read_name(text) if isinstance(text, str) else None
        if named is None:
            return parse_break(text, file, is_file=bool(file))
        name, condition = named
        line = line_in_file(file, name) if file else None
        if line is None:
            file, line = self._locate(name, timeout)
        return parse_break(f"{line}{condition}", file, is_file=True)

    def _locate(self, name: str, timeout: float | None) -> tuple[str, int]:
        """Where a function of the workers begins."""
        if not self.is_active:
            found = self.session.call_packed(locate, name)
            file, line, why = found.debug_get_from_remote(0, timeout)
            if why:
                raise ArgumentError(f"breakpoint: {why}")
            return file, line
        first = self._paused(None)[0]
        well, place_ = self._ask([first], _NAMED_AT, (name,), ANSWER)[first]
        if not well:
            raise ArgumentError(f"breakpoint: there is no function {name}: {place_}")
        return place_[0], place_[1]

    def _number(self) -> int:
        self._next_break += 1
        return self._next_break - 1

    def _tell_breaks(self) -> None:
        if self.is_active:
            self._station.set_breaks(tuple(one.packed() for one in self.all_breaks()))
        with self._station.lock:
            self._station._has_changed()

    def _here(self) -> str:
        """The file in which workers stand; of those that run, that of their program."""
        lockstep = self._station.lockstep
        groups = lockstep.groups() if lockstep is not None and lockstep.paused else ()
        if lockstep is not None and groups:
            return lockstep.at[groups[0][0]].here.file
        return self._station.file if self.is_active else ""

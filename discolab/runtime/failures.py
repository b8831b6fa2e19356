"""Failure: how a worker describes a command that went wrong, and how that reads.

A worker never sends a live exception across: it sends this, which is plain data apart from
the exception object itself (kept where both sides share an address space).
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from .sources import Paint, excerpt, is_cell, is_installed, is_own_file, place, plain
from .user_code import is_library_file, is_user_file, library_module

_MOST_GROUPS = 4  # tracebacks shown of one error
_MOST_FRAMES = 12  # frames shown of one traceback, a run of a library's as one
_LONGEST = 2_000  # characters of a message or a line
_END = 500  # of these, taken from the end
_MOST_TEXT = 100_000  # characters of an exception's arguments and notes that are kept
_MOST_LINES = 40  # of a message
_MOST_UNREPORTED = 16  # failures that a worker keeps of each kind
_AROUND = 2  # source lines shown before and after the line of a cell


# past what an exception's class may override
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_CAUSE: Any = vars(BaseException)["__cause__"]
_CONTEXT: Any = vars(BaseException)["__context__"]
_PARTS: Any = vars(BaseExceptionGroup)["exceptions"]
_SUPPRESS: Any = vars(BaseException)["__suppress_context__"]

Frames = tuple[tuple[str, int, str], ...]

CAUSED = "… was the cause of:"
HANDLED = "… and while that was handled:"


@dataclass(slots=True)
class Failure:
    """What a poisoned register holds: one command that failed on one worker.

    Attributes
    ----------
    rank
        The worker on which it failed.
    command
        What was run, as text: ``call of 'fn'``.
    call_site
        Where the controller called it, or "" when unknown.
    type_name, message
        Of the exception.
    frames
        ``(file, line, function)`` of the worker's stack at the raise, outermost first,
        without discolab's own.
    details
        The last lines of a Python traceback: the exception with its notes, its parts if it is
        a group, the place of a syntax error.
    earlier
        What led to it, oldest first: frames, details, and how it led to the next.
    victim
        True if the exception only says that another worker failed.
    interrupted
        True if the command ended because it was interrupted or cancelled.
    exception
        The exception itself where the worker shares the controller's address space.
    orphan
        True if the command has no result register: the next wait for that worker raises it.
    reported
        Set once it was raised; a sync does not raise it again.
    number
        Of this failure among those of its worker; 0 if it has none.
    call
        The call that failed, by its ordinal, which is the same on all workers; -1: no call.
    """

    rank: int
    command: str
    call_site: str
    type_name: str
    message: str
    frames: Frames = field(default=(), repr=False)
    details: tuple[str, ...] = field(default=(), repr=False)
    earlier: tuple[tuple[Frames, tuple[str, ...], str], ...] = field(default=(), repr=False)
    victim: bool = False
    interrupted: bool = False
    exception: BaseException | None = field(default=None, repr=False)
    orphan: bool = False
    reported: bool = False
    number: int = 0
    call: int = -1

    @classmethod
    def from_exception(cls, rank: int, command: str, call_site: str, exc: BaseException) -> Failure:
        """Describe `exc`, whatever its class does; its frames, which keep tensors, are let go.

        Of interrupts that came while another one was handled the first is told: it says where.
        """
        whole, exc = exc, _first_interrupt(exc)
        frames = user_frames(exc)
        message, kind = _cut(safe_str(exc)), type(exc)
        exc = _shortened(exc)
        details, earlier = _details(exc), _earlier(exc)
        _drop_frames(whole)
        _drop_frames(exc)
        try:
            victim = bool(getattr(exc, "victim", False))
        except BaseException:
            victim = False
        return cls(
            rank=rank,
            command=command,
            call_site=call_site,
            type_name=kind.__name__,
            message=message,
            frames=frames,
            details=details,
            earlier=earlier,
            victim=victim,
            interrupted=issubclass(kind, KeyboardInterrupt),
            exception=exc,
        )

    @classmethod
    def of_text(cls, rank: int, command: str, call_site: str, exc: BaseException) -> Failure:
        """Describe one of our own exceptions whose frames, notes and causes say nothing: fast."""
        name, message = type(exc).__name__, str(exc)
        exc.__traceback__ = None
        return cls(
            rank, command, call_site, name, message, details=(f"{name}: {message}",), exception=exc
        )

    @property
    def headline(self) -> str:
        """``ValueError: text``, as Python would end its traceback."""
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    @property
    def summary(self) -> str:
        """What failed where, called from where."""
        site = f" (called at {self.call_site})" if self.call_site else ""
        return f"{self.command}{site}"

    def same_as(self, other: Failure) -> bool:
        """Whether the two would read the same but for their ranks."""
        mine = (self.headline, self.frames, self.details, self.earlier)
        return mine == (other.headline, other.frames, other.details, other.earlier)


class UnreportedFailures:
    """The failures of one worker that no wait has raised yet, in the order in which they came.

    Pure state, of the worker's own thread. Orphans of commands without a result are kept apart: a
    crowd of results that nobody reads must not push them out. Of each kind the first ones are kept,
    for those are the causes; one more record counts the others.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._results: list[Failure] = []
        self._orphans: list[Failure] = []
        self._counts = {False: 0, True: 0}
        self._numbers = itertools.count(-1, -1)  # the workers count theirs from 1

    def add(self, failure: Failure) -> None:
        """Keep a failure, or count it."""
        self._forget()
        kept = self._orphans if failure.orphan else self._results
        if len(kept) < _MOST_UNREPORTED:
            kept.append(failure)
            self._counts[failure.orphan] = 0
            return
        self._counts[failure.orphan] += 1
        count = self._counts[failure.orphan]
        kept[_MOST_UNREPORTED:] = [
            Failure(
                rank=self._rank,
                command="later commands",
                call_site="",
                type_name="DiscoError",
                message=f"+{count} more failure{'s' if count > 1 else ''} not kept",
                orphan=failure.orphan,
                number=next(self._numbers),
            )
        ]

    def keeps(self, failure: Failure) -> bool:
        """Whether it is kept here; else nobody will be told of it."""
        return any(kept is failure for kept in self.kept())

    def kept(self) -> list[Failure]:
        """What is kept, whether it was reported or not."""
        return [*self._results, *self._orphans]

    def all(self) -> list[Failure]:
        """What a sync raises. They stay here until `reported`: the wait may have been given up."""
        self._forget()
        return [*self._results, *self._orphans]

    def orphan(self) -> Failure | None:
        """The first one that no register holds, or holds any more; a fetch raises it."""
        orphans = [f for f in self.kept() if f.orphan and not f.reported]
        return min(orphans, key=lambda f: abs(f.number), default=None)

    def _forget(self) -> None:
        self._results = [f for f in self._results if not f.reported]
        self._orphans = [f for f in self._orphans if not f.reported]


def summarize(failures: Sequence[Failure], words: bool = True) -> str:
    """One line for a few failures: whose, in what, and with `words` the exception."""
    groups = _groups(failures)
    if not words:
        groups = [[f for group in alike for f in group] for alike in _alike(groups, _summary)]
    lines = [
        f"{name_ranks(f.rank for f in group)} failed in {group[0].summary}"
        + (f": {group[0].headline}" if words else "")
        for group in groups[:_MOST_GROUPS]
    ]
    if len(groups) > _MOST_GROUPS:
        lines.append(f"… and {len(groups) - _MOST_GROUPS} more")
    return "\n".join(lines)


def explain(
    failures: Sequence[Failure], *, whole: bool = False, paint: Paint = plain, hint: str = ""
) -> list[str]:
    """The stacks of a few failures, the likely cause first, equal ones folded.

    Parameters
    ----------
    failures
    whole
        Show each frame; else those of a library in a row are one line, but for the last one, in
        which the error was raised.
    paint
        Colours the parts of a line.
    hint
        How to see what was folded; shown once.
    """
    groups = _groups(failures)
    lines: list[str] = []
    hints = iter([f" ({hint})"] if hint else [])
    most = len(groups) if whole else _MOST_GROUPS
    stacks = _alike(groups[:most], lambda f: (f.summary, f.earlier, f.frames))
    for alike, after in zip(stacks, [*stacks[1:], None], strict=True):
        first = alike[0][0]
        lines.append(f"{name_ranks(f.rank for group in alike for f in group)} · {first.summary}")
        for frames, details, relation in first.earlier:
            lines += [*_stack(frames, whole, paint, hints), *_painted(details, paint), relation]
        lines += _stack(first.frames, whole, paint, hints)
        if len(alike) > 1:  # one stack, but the words of the error differ
            for group in alike:
                whose = name_ranks(f.rank for f in group)
                head, *rest = _end_of(group[0])
                lines += [f"{whose}: {paint('error', head)}", *rest]
            lines.append("")
        elif after is None or _end_of(first) != _end_of(after[0][0]):  # or it is shown once, below
            lines += [*_painted(_end_of(first), paint), ""]
    if groups[most:]:
        others = name_ranks(f.rank for group in groups[most:] for f in group)
        lines += [f"… and {others} with {len(groups) - most} more{next(hints, '')}", ""]
    causes = {f.rank for group in groups for f in group}
    victims = [f for f in failures if f.rank not in causes]
    for group in fold(victims)[:_MOST_GROUPS]:
        whose = name_ranks(f.rank for f in group)
        lines += [f"{whose} ended because of it: {group[0].headline}", ""]
    return lines[:-1]


def _summary(failure: Failure) -> str:
    return failure.summary


def _painted(details: Sequence[str], paint: Paint) -> list[str]:
    """The last lines of a traceback: the name of the exception in colour."""
    lines = list(details)
    name, colon, words = lines[0].partition(":") if lines else ("", "", "")
    if name.isidentifier():
        lines[0] = f"{paint('error', name)}{colon}{words}"
    return lines


def _end_of(failure: Failure) -> Sequence[str]:
    """The last lines of its traceback."""
    return failure.details or failure.headline.splitlines()


def _alike(
    groups: Sequence[list[Failure]], key: Callable[[Failure], object]
) -> list[list[list[Failure]]]:
    """Groups with the same `key` together, in the order of the first of each."""
    found: list[list[list[Failure]]] = []
    for group in groups:
        for alike in found:
            if key(alike[0][0]) == key(group[0]):
                alike.append(group)
                break
        else:
            found.append([group])
    return found


def fold(failures: Iterable[Failure]) -> list[list[Failure]]:
    """Group failures that read the same, in the order of the first of each."""
    groups: list[list[Failure]] = []
    for failure in failures:
        for group in groups:
            if group[0].same_as(failure):
                group.append(failure)
                break
        else:
            groups.append([failure])
    return groups


def name_ranks(ranks: Iterable[int]) -> str:
    """``worker 2`` or ``workers 0-2, 5``; -1 is the controller."""
    ordered = sorted(set(ranks))
    if ordered and ordered[0] < 0:
        rest = f", {name_ranks(ordered[1:])}" if ordered[1:] else ""
        return f"the controller{rest}"
    return ("worker " if len(ordered) == 1 else "workers ") + fold_ranks(ordered)


def fold_ranks(ranks: Iterable[int]) -> str:
    """Write ranks short: ``0-3, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def user_frames(exc: BaseException) -> Frames:
    """The frames of `exc`, discolab's own left out, endless recursion folded.

    What lies between a user's line and an error of discolab, such as torch.distributed's
    wrappers of a collective, is left out too.
    """
    found: list[tuple[str, int, str]] = []
    times = 1
    ours = False
    for frame, line in traceback.walk_tb(_TRACEBACK.__get__(exc)):
        code = frame.f_code
        here = (code.co_filename, line, code.co_name)
        ours = is_own_file(code.co_filename)
        if ours:
            continue
        if found and found[-1] == here:
            times += 1
            continue
        _note_times(found, times)
        times = 1
        found.append(here)
    _note_times(found, times)
    users = [number for number, frame in enumerate(found, 1) if not is_installed(frame[0])]
    if ours and users:
        del found[users[-1] :]
    return tuple(found)


def _note_times(found: list[tuple[str, int, str]], times: int) -> None:
    if times > 1:
        file, line, name = found[-1]
        found[-1] = (file, line, f"{name} ({times} times)")


def safe_str(value: object) -> str:
    """`str(value)`, whatever its `__str__` does; a plain string, not of a class of the user's."""
    try:
        return str.__str__(str(value))
    except BaseException as exc:
        return f"<unprintable {type(value).__name__}: its __str__ raised {type(exc).__name__}>"


def _cut(text: str) -> str:
    left_out = len(text) - _LONGEST
    if left_out <= 0:
        return text
    return f"{text[: _LONGEST - _END]} … {left_out:,} characters … {text[-_END:]}"


def _shortened(exc: BaseException) -> BaseException:
    """The exception, or of one with megabytes of text a copy with the ends of them.

    Else they would be sent, kept and shown several times. Of a class that is not Python's own
    nobody knows what makes a copy.
    """
    try:
        args, notes = tuple(exc.args), getattr(exc, "__notes__", ())
        texts = [text for text in (*args, *notes) if isinstance(text, str | bytes)]
        if sum(map(len, texts)) <= _MOST_TEXT or type(exc).__module__ != "builtins":
            return exc
        made = type(exc)(*map(_short_text, args))
        made.__dict__.update(vars(exc))
        if notes:
            made.__notes__ = list(map(_short_text, notes))
    except BaseException:
        return exc
    made.__cause__, made.__context__ = _CAUSE.__get__(exc), _CONTEXT.__get__(exc)
    made.__suppress_context__ = _SUPPRESS.__get__(exc)
    return made


def _short_text(value: Any) -> Any:
    if isinstance(value, str):
        return _cut(value)
    return value[:_LONGEST] if isinstance(value, bytes) else value


def _details(exc: BaseException, depth: int = 0) -> tuple[str, ...]:
    """The exception in lines, as a traceback ends; parts of a group below it."""
    try:
        text = "".join(traceback.format_exception_only(exc))
    except BaseException:
        text = f"{type(exc).__name__}: {safe_str(exc)}"
    name, _, rest = text.partition(":")
    if name.endswith("." + type(exc).__name__):  # the module of the class says little here
        text = f"{type(exc).__name__}:{rest}"
    lines = [_cut(line) for line in text.rstrip().splitlines()[:_MOST_LINES]]
    if issubclass(type(exc), BaseExceptionGroup) and depth < 3:
        for part in _PARTS.__get__(exc)[:_MOST_GROUPS]:
            frames = user_frames(part)
            where = [frame for frame in frames if is_user_file(frame[0])] or frames
            inner = [f"{place(file, line)}, in {name}" for file, line, name in where[-1:]]
            lines += ["  | " + line for line in (*inner, *_details(part, depth + 1))]
    return tuple(lines)


def _first_interrupt(exc: BaseException) -> BaseException:
    for _ in range(_MOST_GROUPS):
        before = _CONTEXT.__get__(exc)
        if not (isinstance(exc, KeyboardInterrupt) and isinstance(before, KeyboardInterrupt)):
            break
        exc = before
    return exc


def _earlier(exc: BaseException) -> tuple[tuple[Frames, tuple[str, ...], str], ...]:
    """The chain that led to `exc`, oldest first, as Python shows it."""
    chain: list[tuple[Frames, tuple[str, ...], str]] = []
    seen = {id(exc)}
    one = exc
    while len(chain) < _MOST_GROUPS:
        cause = _CAUSE.__get__(one)
        context = None if _SUPPRESS.__get__(one) else _CONTEXT.__get__(one)
        before = cause or context
        if before is None or id(before) in seen:
            break
        seen.add(id(before))
        relation = CAUSED if cause is not None else HANDLED
        chain.insert(0, (user_frames(before), _details(before), relation))
        one = before
    return tuple(chain)


def _groups(failures: Sequence[Failure]) -> list[list[Failure]]:
    """The failures that caused the others, folded; if there is none, those that there are."""
    return fold([f for f in failures if not f.victim] or failures)


def _stack(frames: Frames, whole: bool, paint: Paint, hints: Iterator[str]) -> list[str]:
    runs = [[frame] for frame in frames] if whole else _runs(frames)
    cut = 0 if whole else max(0, len(runs) - _MOST_FRAMES)
    lines = []
    for number, run in enumerate(runs):
        if number == 2 and cut:
            left_out = sum(map(len, runs[2 : 2 + cut]))
            lines.append(paint("folded", f"  … {left_out} frames …{next(hints, '')}"))
        if 2 <= number < 2 + cut:
            continue
        if len(run) > 1 or (not whole and is_library_file(run[0][0]) and run is not runs[-1]):
            lines.append(paint("folded", f"  … {_folded(run)}{next(hints, '')}"))
            continue
        filename, line, function = run[0]
        inside = "" if function == "<module>" else f", in {paint('function', function)}"
        lines.append(f"  {paint('place', place(filename, line))}{inside}")
        around = _AROUND if is_cell(filename) else 0
        lines += ["  " + text for text in excerpt(filename, line, around, paint)]
    return lines


def _runs(frames: Frames) -> list[list[tuple[str, int, str]]]:
    """Frames of libraries in a row together, but for the last frame; any other alone."""
    runs: list[list[tuple[str, int, str]]] = []
    before = False
    for frame in frames[:-1]:
        library = is_library_file(frame[0])
        if library and before:
            runs[-1].append(frame)
        else:
            runs.append([frame])
        before = library
    return [*runs, *([frame] for frame in frames[-1:])]


def _all_equal(values: Sequence[str]) -> bool:
    return len(set(values)) == 1


def _folded(run: Sequence[tuple[str, int, str]]) -> str:
    """``3 frames in torch.nn.modules``: how many, and the module that they have in common."""
    modules = [library_module(file).split(".") for file, _, _ in run]
    common = [steps[0] for steps in takewhile(_all_equal, zip(*modules, strict=False))]
    tops = list(dict.fromkeys(module[0] for module in modules))
    names = [".".join(common)] if common else tops[:3] + ["…"] * (len(tops) > 3)
    return f"{len(run)} frame{'s' if len(run) > 1 else ''} in {', '.join(names)}"


def _drop_frames(exc: BaseException) -> None:
    """Forget the frames of `exc` and of what led to it, past what its class may override."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [exc]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            _TRACEBACK.__set__(one, None)
            todo.append(_CAUSE.__get__(one))
            todo.append(_CONTEXT.__get__(one))
            if issubclass(type(one), BaseExceptionGroup):
                todo += _PARTS.__get__(one)

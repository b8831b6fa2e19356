"""What the tracer has for a frame of the user's: a `Plan` for its code, a `Watch` for itself.

What is done with the frames of a code object is decided once (`Plans.decide`), and looked up at
each call. `Watch.trace` and `after_raise` are local trace functions: Python calls them for each
line of the frame, so they do as little as they can. A watch knows no frame, which would keep its
variables alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..runtime.failures import safe_str
from ..runtime.user_code import is_user
from .breaks import Break, BreakTable
from .code_objects import Loop, inner_offsets, is_comprehension, loops_of, parts_of_statements

if TYPE_CHECKING:
    from .records import Spot
    from .tracer import Tracer

_MOST = 50_000  # code objects that are remembered: programs may make them without end


class Plan(NamedTuple):
    """What is done with the frames of one code object.

    Attributes
    ----------
    breaks
        The breakpoints of its lines.
    steps
        Whether stepping stops there: not in comprehensions, nor in library code, unless something
        else has stopped there.
    imports
        Whether it is a module that is being imported: then nothing is done with its lines.
    loops, heads
        Those of the code (code_objects.py), and by their first lines.
    inner
        The instructions of comprehensions that are part of the code.
    parts
        Those at which a statement goes on (code_objects.py).
    """

    breaks: Mapping[int, tuple[Break, ...]] = MappingProxyType({})
    steps: bool = True
    imports: bool = False
    loops: tuple[Loop, ...] = ()
    heads: Mapping[int, int] = MappingProxyType({})
    inner: Mapping[int, bool] = MappingProxyType({})
    parts: Mapping[int, bool] = MappingProxyType({})


class Plans:
    """The plans of one tracer, on its thread.

    Attributes
    ----------
    known
        By the id of the code object; None: its frames are not watched.
    """

    def __init__(self, breaks: BreakTable) -> None:
        self.known: dict[int, Plan | None] = {}
        self._codes: list[CodeType] = []  # kept, so that no other takes over the id of one
        self._breaks = breaks

    def clear(self) -> None:
        """Decide anew."""
        self.known.clear()
        self._codes.clear()

    def decide(self, frame: FrameType) -> Plan | None:
        """The plan for the code of a frame, remembered."""
        code = frame.f_code
        if len(self._codes) >= _MOST:
            self.clear()
        users = is_user(code)
        breaks = self._breaks.of(code)
        comprehension = is_comprehension(code)
        if breaks and comprehension:
            breaks = _inner_lines(breaks, frame)
        plan = None
        if users or breaks:
            imports = users and code.co_name == "<module>" and _is_import(frame.f_back)
            loops = loops_of(code)
            inner = inner_offsets(code)
            steps, parts = users and not comprehension, parts_of_statements(code)
            plan = Plan(breaks, steps, imports, loops, dict(loops), inner, parts)
        self.known[id(code)] = plan
        self._codes.append(code)
        return plan


def _is_import(caller: FrameType | None) -> bool:
    """Whether the caller of a module's code is Python's import."""
    return caller is not None and caller.f_code.co_filename.startswith("<frozen importlib")


def _inner_lines(
    breaks: Mapping[int, tuple[Break, ...]], frame: FrameType
) -> Mapping[int, tuple[Break, ...]]:
    """Without those on lines of the function around a comprehension, which stops there itself."""
    around = frame.f_back
    while around is not None and around.f_code.co_filename != frame.f_code.co_filename:
        around = around.f_back
    outer = {line for *_, line in around.f_code.co_lines()} if around is not None else set()
    return {line: there for line, there in breaks.items() if line not in outer}


# -- frames ----------------------------------------------------------------------------------------


_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
_OPTIMIZED = 1  # of `co_flags`: a function, not the body of a class or a module


class Watch:
    """See the module.

    Attributes
    ----------
    line
        The last line that it has come to.
    trips
        First line of a loop -> how often the frame has come to it since it has entered the loop.
    inner, parts, loops, heads, breaks, steps
        See `Plan`; the last two may change.
    call
        The how-manieth call of the line that runs in `parent` it is.
    calls
        How many frames were entered from the line that runs here.
    parent
        The watch of the nearest frame above that has one.
    raising
        The exception that passes through it at this moment, in words.
    recorded
        What the recording knows of the frame; see recording.py.
    spot
        Where it stood when it was last looked at.
    """

    __slots__ = (
        "breaks",
        "call",
        "calls",
        "heads",
        "inner",
        "line",
        "loops",
        "parent",
        "parts",
        "raising",
        "recorded",
        "spot",
        "steps",
        "tracer",
        "trips",
    )

    def __init__(self, tracer: Tracer, plan: Plan) -> None:
        self.tracer = tracer
        self.breaks, self.steps, _, self.loops, self.heads, self.inner, self.parts = plan
        self.line = 0
        self.trips: dict[int, int] = {}
        self.call = 1
        self.calls = 0
        self.parent: Watch | None = None
        self.raising = ""
        self.recorded: Any = None
        self.spot: Spot | None = None

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Local trace function."""
        if event == "line":
            line = frame.f_lineno
            if line in self.heads:
                # one that is entered, not gone through once more, has had no trip yet
                again = line <= self.line <= self.heads[line]
                self.trips[line] = self.trips.get(line, 0) + 1 if again else 1
            self.line = line
            tracer = self.tracer
            agent = tracer.agent
            if self.inner and frame.f_lasti in self.inner:
                attentive = False  # part of a line that has begun
            else:
                attentive = tracer.attentive
                self.calls = 0
            if (
                attentive
                or agent.pause_wanted
                or line in self.breaks
                or agent.breaks.version != tracer.version
            ):
                tracer.at_line(self, frame, line)
        elif event == "return":
            self.tracer.left(self, frame, arg)
        elif self.tracer.attentive and not issubclass(arg[0], _ENDS_OF_LOOPS):
            self.raising = headline(arg[1])
            return self.after_raise
        return self.trace

    def place(self, line: int) -> tuple[tuple[int, int, int], ...]:
        """The loops around a line, the outermost first, each with its trips."""
        return tuple(
            (first, last, self.trips.get(first, 0))
            for first, last in self.loops
            if first <= line <= last
        )

    def after_raise(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Local trace function after an exception: the next line is where it is dealt with."""
        if event != "line":
            return self.trace(frame, event, arg)
        try:
            return self.trace(frame, event, arg)
        finally:
            self.raising = ""


def watch_of(frame: FrameType) -> Watch | None:
    """The watch of a frame, None if it has none."""
    found = getattr(frame.f_trace, "__self__", None)
    return found if type(found) is Watch else None


def raising_in(frame: FrameType, exc: BaseException | None) -> str:
    """The exception that is being handled, in words, if it has passed through `frame`."""
    if exc is None or isinstance(exc, _ENDS_OF_LOOPS):
        return ""
    trace = exc.__traceback__
    while trace is not None:
        if trace.tb_frame is frame:
            return headline(exc)
        trace = trace.tb_next
    return ""


def headline(exc: BaseException) -> str:
    """``ValueError: text``."""
    text = safe_str(exc)
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def is_class_body(code: CodeType) -> bool:
    """Whether a code object is the body of a class; its first line is that of ``class`` itself."""
    return not code.co_flags & _OPTIMIZED and not code.co_name.startswith("<")

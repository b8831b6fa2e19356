"""What is done with the frames of a code object: decided once, then looked up at each call."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FrameType, MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ..runtime.user_code import is_user
from .breaks import Break
from .comprehensions import inner_offsets, is_comprehension
from .loops import Loop, loops_of

if TYPE_CHECKING:
    from .port import Port

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
        Those of the code (loops.py), and by their first lines.
    inner
        The instructions of comprehensions that are part of the code (comprehensions.py).
    """

    breaks: Mapping[int, tuple[Break, ...]] = MappingProxyType({})
    steps: bool = True
    imports: bool = False
    loops: tuple[Loop, ...] = ()
    heads: Mapping[int, int] = MappingProxyType({})
    inner: Mapping[int, bool] = MappingProxyType({})


class Plans:
    """The plans of one tracer, on its thread.

    Attributes
    ----------
    known
        By the id of the code object; None: its frames are not watched.
    """

    def __init__(self, port: Port) -> None:
        self.known: dict[int, Plan | None] = {}
        self._codes: list[CodeType] = []  # kept, so that no other takes over the id of one
        self._port = port

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
        breaks = self._port.breaks.of(code)
        comprehension = is_comprehension(code)
        if breaks and comprehension:
            breaks = _inner_lines(breaks, frame)
        plan = None
        if users or breaks:
            imports = users and code.co_name == "<module>" and _is_import(frame.f_back)
            loops = loops_of(code)
            inner = inner_offsets(code)
            plan = Plan(breaks, users and not comprehension, imports, loops, dict(loops), inner)
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

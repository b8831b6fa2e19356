"""Where an exception that one thread sends to another lands. No state.

An exception that lands between the taking of a lock and the block that frees it leaves the lock
taken for ever, and so does one that lands as the function begins that is to free it: after a Stop
in a loop that logs, nobody could log any more, on any worker and in the notebook. The locks of the
standard library are meant, and those of others; discolab's own know better (interrupts.py). Two
things are done about that.

**Before**: while the sender has the GIL, the other thread stands still, and raises the exception
right there: CPython looks for one when it gets the GIL back, or as the call in C ends in which it
is. So the sender looks first (`raise_where_harmless`). Between its look and what it does another
thread may run, so it looks again, and sends in the same call of C code if the thread is still at
that place. Without the GIL the other thread runs on, and it is sent blindly.

**After**: the traceback says where it has landed, and so what it left taken (`give_back_locks`).
This is for what is sent blindly, to threads too that do nothing but take a lock. Gradients that
`torch.no_grad`, or an optimizer's step, has turned off and was about to turn on, are on again too.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import inspect
import multiprocessing.synchronize
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import compress, starmap, takewhile
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from .frames import frame_of, frames_now, outwards, quietly
from .interpreter_lock import is_on
from .sources import is_own_file

# what takes and frees, in `threading`, `logging` and elsewhere; and a finalizer is not begun again
_HANDS_OVER = frozenset(
    ("acquire", "release", "__enter__", "__exit__", "_acquireLock", "_releaseLock", "__del__")
)
_NEAR = 3  # frames: such a function, what it calls, who calls it
_GRAD = "torch.autograd.grad_mode"
_STEP = "torch.optim.optimizer"
_DEEP = 50  # frames of a traceback that may have taken one, the innermost
_MANY = 100  # items of a list that is not looked through
_LOAD_SPECIAL = dis.opmap.get("LOAD_SPECIAL", -1)  # 3.14: fetches `__enter__` before it is called
_CONDITION_EXIT = threading.Condition.__exit__.__code__
_Lock: Any = type(threading.Lock())
_RLock: Any = type(threading.RLock())
# instructions that leave what was loaded where it is
_MOVES = frozenset(
    ("CACHE", "NOP", "COPY", "SWAP", "LOAD_SPECIAL", "PRECALL", "PUSH_NULL", "RESUME", "NOT_TAKEN")
)
_traceback_of: Any = BaseException.__dict__["__traceback__"].__get__
_context_of: Any = BaseException.__dict__["__context__"].__get__
_tries: Any = getattr(dis, "_parse_exception_table", lambda code: [])
_WAIT = threading.Condition.wait.__code__  # takes a lock that nobody else knows
_place_of = operator.attrgetter("f_code", "f_lasti")


def raise_in_thread(thread_id: int, exception: type[BaseException]) -> None:
    """Have a thread raise an exception at the next place in Python code at which it can."""
    _sending(thread_id, exception)()


def _sending(thread_id: int, exception: type[BaseException]) -> Callable[[], object]:
    send = ctypes.pythonapi.PyThreadState_SetAsyncExc
    return partial(send, ctypes.c_ulong(thread_id), ctypes.py_object(exception))


def raise_where_harmless(thread_id: int, exception: type[BaseException]) -> bool:
    """As `raise_in_thread`, unless that would leave a lock taken; whether it was sent."""
    frame = frame_of(thread_id) if is_on() else None
    if frame is None:
        raise_in_thread(thread_id, exception)
        return True
    code, at = place = _place_of(frame)
    if code is not _WAIT:
        near = outwards(frame)[:_NEAR]
        if any(one.f_code.co_name in _HANDS_OVER for one in near):
            return False
        if _taken_at(code, at) is not None:
            return False
    send = _sending(thread_id, exception)
    is_there = map(partial(operator.eq, place), map(_place_of, frames_now(thread_id, frame)))
    return bool(quietly(partial(list, starmap(send, compress([()], is_there)))))


def give_back_locks(exc: BaseException | None) -> None:
    """Free what an exception has left locked, on the thread to which it was sent, its work over.

    A lock that knows its owner is free then altogether, one that was kept from earlier work too.
    """
    for _ in range(_NEAR):
        if exc is None:
            return
        with contextlib.suppress(Exception):  # of code that is looked at
            _give_back(_traceback_of(exc))
        exc = _context_of(exc)


def _give_back(traceback: TracebackType | None) -> None:
    near: deque[FrameType] = deque(maxlen=_DEEP)
    while traceback is not None:
        landed = traceback.tb_frame, traceback.tb_lasti
        if not is_own_file(landed[0].f_code.co_filename):
            near.append(landed[0])
        traceback = traceback.tb_next
    for value in _values(near):
        if issubclass(type(value), _RLock):
            while _RLock._is_owned(value):
                _RLock.release(value)
        elif type(value) is multiprocessing.synchronize.RLock:
            while value._semlock._is_mine():  # type: ignore[attr-defined]
                value._semlock.release()  # type: ignore[attr-defined]
    steps = [frame for frame in near if frame.f_globals.get("__name__") == _STEP]
    if any(_variables(frame).get("prev_grad") for frame in steps):
        torch.set_grad_enabled(True)
    if not near or landed[0] is not near[-1]:
        return
    modes = [*takewhile(lambda frame: frame.f_globals.get("__name__") == _GRAD, reversed(near))]
    if modes and _variables(modes[-1])["self"].prev:
        torch.set_grad_enabled(True)
    lock = _left_taken(*landed)
    if type(lock) is _Lock:
        lock.release()


def _values(frames: Iterable[FrameType]) -> Iterator[Any]:
    """Variables, what these hold, and those of modules; past what classes may override."""
    values = [value for frame in frames for value in _variables(frame).values()]
    for value in values[:]:
        with contextlib.suppress(Exception):
            own = object.__getattribute__(value, "__dict__")
            values += list(own.values()) if type(own) is dict else []
    for names in {id(frame.f_globals): frame.f_globals for frame in frames}.values():
        values += list(names.values())
    for value in values:
        if type(value) is threading.Condition:
            yield value._lock  # type: ignore[attr-defined]
        elif type(value) is list and len(value) < _MANY:
            yield from value
        else:
            yield value


def _variables(frame: FrameType) -> dict[str, Any]:
    known = frame.f_locals
    variables = dict(known)
    if type(known) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        known.clear()  # before 3.13 the frame keeps it, and all that is in it
    return variables


def _left_taken(frame: FrameType, at: int) -> Any:
    """The lock that a function has just taken, or was about to free, as it was interrupted."""
    code = frame.f_code
    if code is _CONDITION_EXIT:
        begun = any(one.opname.startswith("CALL") for one in _until(code, at))
        return None if begun else _variables(frame)["self"]._lock
    names = _taken_at(code, at)
    if not names:
        return None
    name, *attributes = names
    variables = _variables(frame)
    value = variables[name] if name in variables else frame.f_globals[name]
    for attribute in attributes:
        value = inspect.getattr_static(value, attribute)
    return value._lock if type(value) is threading.Condition else value  # type: ignore[attr-defined]


def _until(code: CodeType, at: int) -> Iterator[dis.Instruction]:
    return takewhile(lambda one: one.offset <= at, dis.get_instructions(code))


def _taken_at(code: CodeType, at: int) -> list[str] | None:
    """What an instruction, by its offset, takes: a name and attributes; [] if that is not clear.

    It takes something if it calls an `acquire`, an `__enter__`, or, on 3.14, what `with` does. Not
    clear is what is no plain ``a.b.acquire()``, and one that a `try` around it may free itself.
    """
    by_with = at >= 2 and code.co_code[at - 2] == _LOAD_SPECIAL
    if not (by_with or "acquire" in code.co_names or "__enter__" in code.co_names):
        return None
    names: list[str] = []  # of what was loaded last
    calls: list[str] | None = None  # whose `acquire` was
    taken: list[str] | None = None
    for one in _until(code, at):
        kind, name = one.opname, one.argval
        taken = None
        if one.is_jump_target:
            names, calls = [], calls and []
        if kind.startswith("CALL"):
            taken = names if by_with else calls
            if taken is not None and (kind != "CALL" or one.arg != 0):
                taken = []  # with arguments it may not have taken it
            names, calls = [], None
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            if name in ("acquire", "__enter__"):
                calls = names
            names = [*names, name] if names else []
        elif kind.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")):
            names = [name] if isinstance(name, str) else [name[-1]]
        elif kind not in _MOVES:
            names = []
    return [] if taken and not by_with and _is_freed_around(code, at) else taken


def _is_freed_around(code: CodeType, at: int) -> bool:
    """Whether a `try` around an instruction frees something in its `finally`."""
    ends = [one.target for one in _tries(code) if one.start <= at < one.end]
    for end in ends:
        for one in dis.get_instructions(code):
            if one.offset >= end and one.argval == "release":
                return True
            if one.offset >= end and one.opname == "RERAISE":
                break
    return False

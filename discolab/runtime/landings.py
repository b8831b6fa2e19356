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
This is for what is sent blindly, to threads too that do nothing but take a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import multiprocessing.synchronize
import operator
import sys
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import compress, starmap
from types import CodeType, FrameType, TracebackType
from typing import Any

from .frames import frame_of, outwards, quietly
from .interpreter_lock import is_on
from .sources import is_own_file

# what takes and frees, in `threading`, `logging` and elsewhere; and a finalizer is not begun again
_HANDS_OVER = frozenset(
    ("acquire", "release", "__enter__", "__exit__", "_acquireLock", "_releaseLock", "__del__")
)
_NEAR = 3  # frames: such a function, what it calls, who calls it
_MANY = 100  # items of a list that is not looked through
_LOAD_SPECIAL = dis.opmap.get("LOAD_SPECIAL", -1)  # 3.14: fetches `__enter__` before it is called
_CONDITION_EXIT = threading.Condition.__exit__.__code__
_Lock, _RLock = type(threading.Lock()), type(threading.RLock())
_place_of = operator.attrgetter("f_code", "f_lasti")


def raise_in_thread(thread_id: int, exception: type[BaseException]) -> None:
    """Have a thread raise an exception at the next place in Python code at which it can."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), ctypes.py_object(exception)
    )


def raise_where_harmless(thread_id: int, exception: type[BaseException]) -> bool:
    """As `raise_in_thread`, unless that would leave a lock taken; whether it was sent."""
    frame = frame_of(thread_id) if is_on() else None
    if frame is None:
        raise_in_thread(thread_id, exception)
        return True
    code, at = place = _place_of(frame)
    near = outwards(frame)[:_NEAR]
    if any(one.f_code.co_name in _HANDS_OVER for one in near) or _taken_at(code, at) is not None:
        return False
    send = partial(
        ctypes.pythonapi.PyThreadState_SetAsyncExc,
        ctypes.c_ulong(thread_id),
        ctypes.py_object(exception),
    )
    frames = map(operator.call, [sys._current_frames])
    places = map(_place_of, map(operator.methodcaller("get", thread_id, frame), frames))
    is_there = map(partial(operator.eq, place), places)
    return bool(quietly(partial(list, starmap(send, compress([()], is_there)))))


def give_back_locks(exc: BaseException | None) -> None:
    """Free what an exception has left locked, on the thread to which it was sent, its work over."""
    for _ in range(_NEAR):
        if exc is None:
            return
        with contextlib.suppress(Exception):  # of code that is looked at
            _give_back(exc.__traceback__)
        exc = exc.__context__


def _give_back(traceback: TracebackType | None) -> None:
    near: deque[FrameType] = deque(maxlen=_NEAR)
    while traceback is not None:
        landed = traceback.tb_frame, traceback.tb_lasti
        if not is_own_file(landed[0].f_code.co_filename):
            near.append(landed[0])
        traceback = traceback.tb_next
    for frame in near:
        for lock in _locks_known(frame):
            while _owned(lock):  # a thread whose work is over holds none
                lock.release()
    if near and landed[0] is near[-1]:
        lock = _left_taken(*landed)
        if type(lock) is _Lock:
            lock.release()


def _locks_known(frame: FrameType) -> Iterator[Any]:
    """Those that know their owner: a frame's variables, what these hold, what its module has."""
    values = list(frame.f_locals.values())
    for value in values[:]:
        with contextlib.suppress(AttributeError):  # past what its class may override
            values += list(object.__getattribute__(value, "__dict__").values())
    for value in values + list(frame.f_globals.values()):
        if type(value) is list and len(value) < _MANY:
            yield from filter(_knows_owner, value)
        elif type(value) is threading.Condition:
            value = value._lock  # type: ignore[attr-defined]
            yield from [value] if _knows_owner(value) else []
        elif _knows_owner(value):
            yield value


def _knows_owner(value: object) -> bool:
    return issubclass(type(value), (_RLock, multiprocessing.synchronize.SemLock))


def _owned(lock: Any) -> bool:
    owned: bool = lock._is_owned() if issubclass(type(lock), _RLock) else lock._semlock._is_mine()
    return owned


def _left_taken(frame: FrameType, at: int) -> Any:
    """The lock that a function has just taken, or was about to free, as it was interrupted."""
    code = frame.f_code
    if code is _CONDITION_EXIT and "CALL" not in _instruction(code, at):
        return frame.f_locals["self"]._lock
    names = _taken_at(code, at)
    if not names:
        return None
    name, *attributes = names
    value = frame.f_locals[name] if name in frame.f_locals else frame.f_globals[name]
    for attribute in attributes:
        value = getattr(value, attribute)
    return value


def _instruction(code: CodeType, at: int) -> str:
    return [one.opname for one in dis.get_instructions(code) if one.offset <= at][-1]


def _taken_at(code: CodeType, at: int) -> list[str] | None:
    """What an instruction, by its offset, takes: names and attributes, none if that is not clear.

    It takes something if it calls an `acquire`, an `__enter__`, or, on 3.14, what `with` does.
    """
    by_with = at >= 2 and code.co_code[at - 2] == _LOAD_SPECIAL
    if not (by_with or "acquire" in code.co_names or "__enter__" in code.co_names):
        return None
    names: list[str] = []  # of what was loaded last
    calls: list[str] | None = None  # whose `acquire` was
    taken: list[str] | None = None
    for one in dis.get_instructions(code):
        if one.offset > at:
            break
        kind, name = one.opname, one.argval
        taken = None
        if kind.startswith("CALL"):
            taken, calls = (names if by_with else calls), None
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            if name in ("acquire", "__enter__"):
                calls = names
            names = [*names, name] if names else []
        elif kind.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")):
            names = [name] if isinstance(name, str) else [name[-1]]
            if calls is not None:
                calls = []  # with arguments: it may not have taken it
        elif kind.startswith("LOAD_CONST") and calls is not None:
            calls = []
        elif kind.startswith(("LOAD_SMALL", "BINARY", "LOAD_CLOSURE", "STORE", "POP_TOP")):
            names = []
    return taken

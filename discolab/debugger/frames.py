"""The user's frames of a worker: its stack, its variables, and values worked out in a frame.

Runs on the worker's own thread while it stands, but for what a probe reads from beside it. The
values stay on the worker: a stack and variables are told as records.

The names that every cell is given (`given_names`) are known wherever a value is worked out: a
function of an imported module has no `rank` of its own, and a condition may speak of it all the
same.
"""

from __future__ import annotations

import ast
import ctypes
import difflib
import enum
import inspect
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dis import opname
from itertools import takewhile
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from .. import ccl, rpc
from ..runtime.errors import ArgumentError, WorkerInterrupted
from ..runtime.frames import Place, frame_of, outwards, places_of
from ..runtime.interpreter_lock import is_on
from ..runtime.user_code import is_user, is_user_file
from ..runtime.worker import Worker, current_worker_or_none
from ..views import describe
from ..views.facts.guard import type_name
from .code_objects import fast_variables, is_comprehension, scope_of
from .records import Spot
from .watch import watch_of

_OWN = ("rank", "world_size", "device", "worker", "ccl", "torch", "dist", "rpc")
_AS_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

FUNCTIONS: dict[str, Any] = {}
"""Functions of the debugger's own; their modules, which are above this one, enter them."""
WORKER_NAMES = (*_OWN, "disco_assert")
GIVEN = frozenset((*WORKER_NAMES, *_AS_TORCHRUN))


def given_names(worker: Worker) -> dict[str, Any]:
    """Name -> value, for the cells of a worker."""
    rank, size = worker.worker_id, worker.num_workers
    values = (rank, size, worker.device, worker, ccl, torch, torch.distributed, rpc)
    named: dict[str, Any] = dict(zip(_OWN, values, strict=True))
    return {
        **named,
        **FUNCTIONS,
        "RANK": rank,
        "LOCAL_RANK": worker.local_worker_id,
        "WORLD_SIZE": size,
    }


def given_here() -> dict[str, Any]:
    """The same for the worker whose thread this is; nothing elsewhere."""
    worker = current_worker_or_none()
    return {} if worker is None else given_names(worker)


# -- frames ----------------------------------------------------------------------------------------


Record = dict[str, object]

FLOORS: set[CodeType] = {Worker._call_packed.__code__}
"""Below a frame of these no frame belongs to the program."""

_MOST_NAMES = 200
_LARGE = 2**20  # bytes of a tensor whose data are not read at each stop
_ALL = 4 * 2**20  # bytes that are read at each stop
_ONE = 2**17  # as many bytes does it take to begin with one
_MOST_ITEMS = 100  # of a container that are looked at for their size
_PATIENCE = 1.0  # seconds after which no more values with a mind of their own are looked at
_GIVEN = GIVEN | {"mesh"}
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_YIELDS = ("YIELD_VALUE", "SEND")
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_OPTIMIZED = 1  # of `co_flags`: a function's code, whose variables are not in a dict


# -- the stack -----------------------------------------------------------------------------------


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """The user's frames from `frame` outwards, the outermost first.

    Frames of library code that are traced for a breakpoint count too.
    """
    above = takewhile(lambda one: one.f_code not in FLOORS, outwards(frame))
    return [one for one in above if is_user(one.f_code) or watch_of(one) is not None][::-1]


def stack_of(frame: FrameType) -> tuple[Spot, ...]:
    """Where the user's frames from `frame` outwards stand, the outermost first; never empty."""
    found = user_frames(frame) or [frame]
    return stack_of_frames(found, [one.f_lineno for one in found])


def places_beside(worker: Worker) -> list[Place]:
    """Where the user's functions of a worker that runs stand, the outermost first.

    From any thread. Frames of library code that are traced for a breakpoint count where the
    interpreter lock is on: else they can't be looked at (runtime/frames.py).
    """
    if is_on():
        found = user_frames(frame_of(worker.thread_id))
        return [Place(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_name) for f in found]
    floors = {(code.co_filename, code.co_name) for code in FLOORS}
    within = takewhile(
        lambda one: (one.file, one.function) not in floors, places_of(worker.thread_id)
    )
    return [one for one in within if is_user_file(one.file)][::-1]


def stack_of_frames(found: Sequence[FrameType], lines: Sequence[int | None]) -> tuple[Spot, ...]:
    """The same of given frames, such as those of a traceback, which knows their lines."""
    return tuple(_spot(frame, line or 0) for frame, line in zip(found, lines, strict=True))


def _spot(frame: FrameType, line: int) -> Spot:
    code, watch = frame.f_code, watch_of(frame)
    if watch is None:
        return Spot(code.co_filename, line, code.co_name)
    spot = watch.spot
    if spot is None or spot.line != line or spot.call != watch.call or watch.loops:
        spot = Spot(code.co_filename, line, code.co_name, watch.place(line), watch.call)
        watch.spot = spot  # most frames of a deep stack are where they were before
    return spot


def is_suspended(frame: FrameType) -> bool:
    """Whether a frame that is left goes on later: it yields, or awaits."""
    code, at = frame.f_code, frame.f_lasti
    if not code.co_flags & _SUSPENDABLE:
        return False
    if at and opname[code.co_code[at]] == "RESUME":  # 3.13 tells of where it goes on
        at -= 2
    return opname[code.co_code[at]] in _YIELDS


def has_returned(frame: FrameType) -> bool:
    """Whether a frame that is left has returned; else it goes on later, or an exception ends it."""
    return opname[frame.f_code.co_code[frame.f_lasti]] in _RETURNS


# -- variables -----------------------------------------------------------------------------------


class EvaluationEnded(BaseException):
    """The debugger does not wait for a value any more."""


def variables(
    frame: FrameType,
    names: Iterable[str] | None = None,
    stats: Any = "auto",
    into: dict[str, Record] | None = None,
) -> dict[str, Record]:
    """Describe the variables of a frame: name -> record, see `views.describe`.

    A value may be slow to tell what it is, or do harm. So tensors, numbers and the like come first;
    once the others have taken a second, of those that are left only the type is told.

    Parameters
    ----------
    frame
    names
        Which, as far as they exist; None: those that the user made, in the order in which they
        appear, functions and classes last; of a cell without functions and classes.
    stats
        As `describe` takes it; "auto" reads little, as this is done at every stop.
    into
        Filled with what is known so far, for who does not wait for all of it; what is given back.
    """
    scope = _locals_of(frame)
    if names is None:
        chosen = _own_names(frame, scope)[:_MOST_NAMES]
    else:
        scope = {**frame.f_globals, **scope}
        chosen = [name for name in names if name in scope]
    found = {} if into is None else into
    found.update((name, _unseen(scope[name], "not looked at: others are slow")) for name in chosen)
    left = _ALL
    chosen.sort(key=lambda name: not _is_plain(scope[name]))
    until = time.monotonic() + _PATIENCE
    try:
        for name in chosen:
            value, read = scope[name], stats
            if stats == "auto":
                size = size_of(value)
                read = "auto" if not size or size <= min(_LARGE, left) else False
                left -= size + _ONE if size and read else 0
            if not _is_plain(value):
                if time.monotonic() > until:
                    break
                found[name] = _unseen(value, "slow: not waited for")
            found[name] = record_of(value, read)
    except EvaluationEnded:  # whoever asked knows what was found so far
        pass
    return found


def number_of_variables(frame: FrameType) -> int:
    """How many the user made, of which `variables` may leave some out."""
    return len(_own_names(frame, _locals_of(frame)))


def record_of(value: Any, stats: Any = "auto") -> Record:
    """The record of a value that may do anything when it is looked at."""
    try:
        record = describe(value, stats)
        if str(record.get("repr", "")).startswith("<") and _is_a_librarys(type(value)):
            record["cut"] = True  # as of threads and process groups: it tells not what is in it
        return record
    except (WorkerInterrupted, EvaluationEnded):
        raise
    except BaseException as exc:  # such as a KeyboardInterrupt of its own
        return _unseen(value, f"raised {type(exc).__name__} when it was looked at")


def _is_a_librarys(kind: type) -> bool:
    """Whether the repr of a class is not the user's work; that of an enum tells its value."""
    code = getattr(kind.__repr__, "__code__", None)
    return not issubclass(kind, enum.Enum) and (code is None or not is_user(code))


def _unseen(value: Any, why: str) -> Record:
    return {"kind": "object", "type": type_name(value), "repr": "…", "cut": True, "error": why}


def _is_plain(value: Any) -> bool:
    """Whether none of the user's code runs when it is looked at; never asks the value."""
    kind = type(value)
    if kind in (list, tuple, dict):
        items = value.values() if kind is dict else value
        return len(value) <= _MOST_ITEMS and all(type(item) in _ATOMS for item in items)
    return kind in _ATOMS or kind in (torch.Tensor, torch.nn.Parameter)


def _own_names(frame: FrameType, scope: Mapping[str, Any]) -> list[str]:
    """The names that the user made, functions and classes last."""
    names = list(scope)
    if frame.f_code.co_name == "<module>":  # of cells that ran before, too: first this one's
        used = dict.fromkeys(name for name in frame.f_code.co_names if name in scope)
        names = [*used, *(name for name in names if name not in used)]
        if issubclass(type(scope.get("worker")), Worker):
            names = [name for name in names if name not in _GIVEN]
        # functions and classes of a notebook are many, and seldom what one looks for
        names = [name for name in names if not issubclass(type(scope[name]), _FUNCTIONS)]
    shown = [
        name
        for name in names
        if isinstance(name, str)
        and name.isidentifier()
        and not (name.startswith("__") and name.endswith("__"))
        and not issubclass(type(scope[name]), ModuleType)  # not isinstance: it asks the value
    ]
    return sorted(shown, key=lambda name: issubclass(type(scope[name]), _FUNCTIONS))


def names_in_cell(frame: FrameType) -> list[str]:
    """The variables that the code of a cell mentions; what every cell is given is left out."""
    scope = scope_of(frame)
    given = _GIVEN if issubclass(type(scope.get("worker")), Worker) else ()
    return [
        name
        for name in frame.f_code.co_names
        if name in scope and name not in given and not name.startswith("__")
    ]


def size_of(value: Any, depth: int = 0) -> int:
    """About how many bytes of data `describe` would read."""
    try:
        if isinstance(value, torch.Tensor):
            return int(value.numel() * value.element_size())
        if isinstance(value, torch.nn.Module):
            return sum(p.numel() * p.element_size() for p in value.parameters())
        if type(value) in (list, tuple, dict) and depth < 3:
            items = list(value.values()) if isinstance(value, dict) else value
            return sum(size_of(item, depth + 1) for item in items[:_MOST_ITEMS])
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return int(value.nbytes)
    except (WorkerInterrupted, EvaluationEnded):
        raise
    except BaseException:  # a tensor without storage, a class with its own mind
        return 0
    return 0


# -- values --------------------------------------------------------------------------------------


def evaluate(frame: FrameType, expression: str) -> Any:
    """The value of an expression in a frame; what it raises is raised.

    Raises
    ------
    ArgumentError
        If it is not an expression.
    """
    text = expression.strip()
    if not text:
        raise ArgumentError("there is nothing to evaluate: write an expression")
    try:
        code = compile(text, "<eval>", "eval", dont_inherit=True)
    except (SyntaxError, ValueError) as exc:
        raise ArgumentError(_not_an_expression(text, exc)) from None
    return value_of(code, frame)


def value_of(code: CodeType, frame: FrameType) -> Any:
    """The value of a compiled expression in a frame; what it binds by ``:=`` is forgotten.

    Names that cells are given (`rank`) are known everywhere.
    """
    names = _locals_of(frame)
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        # its inner functions look for names among globals alone
        return eval(code, {**given_here(), **frame.f_globals, **names})
    for name in GIVEN.intersection(code.co_names):
        if name not in names and name not in frame.f_globals and (given := given_here()):
            names[name] = given[name]
    return eval(code, frame.f_globals, names)


def assign(frame: FrameType, name: str, expression: str) -> None:
    """Give a variable of a frame, an item or an attribute the value of an expression.

    Raises
    ------
    ArgumentError
        If `name` can't be assigned to, or is no variable of a function.
    """
    target = _target(name)
    value = evaluate(frame, expression)
    if not isinstance(target, ast.Name):
        names = {**given_here(), **frame.f_globals, **_locals_of(frame)}
        holder = {**names, "__disco_value__": value}
        exec(compile(f"{name.strip()} = __disco_value__", "<set>", "exec"), holder)
        return
    code = frame.f_code
    fast = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if not code.co_flags & _OPTIMIZED:
        _set_in_namespace(frame, target.id, value)
    elif target.id in fast:
        _set_fast(frame, target.id, value)
    elif target.id in frame.f_globals:
        frame.f_globals[target.id] = value
    else:
        near = difflib.get_close_matches(target.id, [*fast, *frame.f_globals], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "it can't get new ones"
        raise ArgumentError(f"{code.co_name} has no variable {target.id!r}: {hint}")


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """A copy of its variables; of a comprehension also those of the function that it is in."""
    names = dict(scope_of(frame))
    if is_comprehension(frame.f_code) and frame.f_back is not None and is_user(frame.f_back.f_code):
        return {**_locals_of(frame.f_back), **names}
    return names


def _set_in_namespace(frame: FrameType, name: str, value: Any) -> None:
    """Set a variable of a module or of the body of a class."""
    own = fast_variables(frame)
    if name in own:
        raise ArgumentError(f"{name!r} is the variable of a comprehension, which can't be set")
    (frame.f_globals if own else frame.f_locals)[name] = value


def _set_fast(frame: FrameType, name: str, value: Any) -> None:
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # later ones write through
        # at once, and only what is bound: the next look at `f_locals` would undo it
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _target(name: str) -> ast.expr:
    try:
        found = ast.parse(f"({name.strip()}\n) = 0", "<set>").body
    except (SyntaxError, ValueError):
        found = []
    first = found[0] if len(found) == 1 else None
    if isinstance(first, ast.Assign) and len(first.targets) == 1:
        target = first.targets[0]
        if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
            return target
    raise ArgumentError(f"{name!r} can't be set: name a variable, an item x[0] or an attribute x.y")


def _not_an_expression(text: str, exc: Exception) -> str:
    try:
        compile(text, "<eval>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        why = exc.msg if isinstance(exc, SyntaxError) else str(exc)
        return f"can't read {text!r}: {why}"
    return f"{text!r} is a statement, and eval takes an expression; to change a variable: set"

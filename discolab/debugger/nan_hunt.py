"""NaN hunt: stop at the first operation of a program that makes a value that is not finite.

While `hunting` a `TorchDispatchMode` sees each operation of torch on the worker's thread: forward,
and backward too, as workers run autograd on their own thread. The outputs are checked by one sum
each; only where that is not finite are the inputs looked at, to tell who made it:

- the inputs are finite, or they have infinities and the output a NaN: this operation made it;
- an input has a NaN: it came from outside, as by a collective, or from before the program. This is
  its first use;
- inputs and output have infinities alone, or the operation was given an infinity as a number, as to
  mask attention: nothing is said.

Not looked at: integers, sparse tensors, memory that is not initialised (`torch.empty`), views, and
what discolab itself computes. Not seen: compiled code, threads that the program starts.

Each worker stops once; the rest of its program runs with next to no cost. A `Finding` is made and
taken away on the worker's thread, which stands while others ask for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import isolation
from ..runtime.sources import is_own_file
from ..runtime.user_code import is_user
from ..runtime.worker import Worker
from ..views.facts.describe import describe
from ..views.facts.tensors import describe_tensor
from ..views.summary import summarize
from .asserted import count_words
from .frames import FLOORS
from .nan_checks import (
    Inputs,
    Kind,
    copies,
    first_odd,
    inputs_of,
    is_checked,
    is_meant,
    is_odd,
    kind_of,
    outputs,
    unwraps,
)
from .stopping import stop_here

_ISOLATION = str(Path(isolation.__file__).parent)  # its functions stand in the place of torch's
_FINDINGS = "discolab.debugger.findings"
_COMPILER = "torch._dynamo"
_MOST_INPUTS = 4  # named in words


@dataclass(frozen=True)
class Finding:
    """Where the first value that is not finite was made or used.

    Attributes
    ----------
    op
        The operation: ``aten.div``.
    output
        Its first output that is not finite, as it lies there.
    inputs
        The tensors that it was given, by the names of its arguments; one that it has overwritten
        as it was before, if that was small.
    numbers
        The numbers that it was given, likewise.
    outside
        Whether the value was in an input already.
    text
        What is told at the stop.
    """

    op: str
    output: torch.Tensor
    inputs: dict[str, torch.Tensor]
    numbers: dict[str, float]
    outside: bool
    text: str

    def records(self) -> dict[str, dict[str, object]]:
        """``input NAME`` of each, and ``output``, as `describe` tells them."""
        given = {**self.inputs, **self.numbers}
        found = {f"input {name}": describe(value) for name, value in given.items()}
        return found | {"output": describe(self.output)}


@contextmanager
def hunting(worker: Worker) -> Iterator[None]:
    """Within it, on the worker's thread, the hunt is on."""
    try:
        with (_HuntApart if _COMPILER in sys.modules else _Hunt)(worker):
            yield
    finally:
        _findings(worker).pop(worker.worker_id, None)


def finding(worker: Worker) -> Finding | None:
    """What a worker has found, while it stands there; its tensors are the program's own."""
    return _findings(worker).get(worker.worker_id)


def _findings(worker: Worker) -> dict[int, Finding]:
    found: dict[int, Finding] = worker.shared.setdefault(_FINDINGS, {})
    return found


class _Hunt(TorchDispatchMode):
    """See the module. `_over` is set once something was found."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._worker = worker
        self._over = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for that, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if type(self) is _Hunt and _COMPILER in sys.modules:
            self.__class__ = _HuntApart  # it was imported since
        if self._over:
            return func(*args, **kwargs)
        if types and any(map(unwraps, types)):
            return NotImplemented  # what it does with the tensors that it holds comes here again
        kind = kind_of(func)
        if kind.skip or types:
            return func(*args, **kwargs)
        before = copies(kind, args, kwargs) if kind.writes else {}
        out = func(*args, **kwargs)
        odd = first_odd(outputs(kind, out, args, kwargs))
        if odd is not None:
            self._judge(func, kind, odd, args, kwargs, before)
        return out

    def _judge(
        self,
        func: Any,
        kind: Kind,
        odd: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: dict[int | str, Any],
    ) -> None:
        """Whether an operation with an output that is not finite is to be stopped at."""
        if self._worker.alone:
            return  # a value is worked out for the debugger
        frame = _whose()
        if frame is None:
            return
        given = inputs_of(func, kind, args, kwargs, before)
        if kind.looks if given.nan else is_meant(odd, given):
            return
        self._over = True
        name = f"{func.namespace}.{func._schema.name.partition('::')[2]}"
        text = _words(name, odd, given, kind.between) + _whereabouts(frame)
        findings = _findings(self._worker)
        findings[self._worker.worker_id] = Finding(
            name, odd, given.tensors, given.numbers, given.nan, text
        )
        try:
            stop_here("non-finite", text, frame=frame)
        finally:
            findings.pop(self._worker.worker_id, None)


class _HuntApart(_Hunt):
    """The same where torch's compiler is at hand, and kept out of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


# -- words ---------------------------------------------------------------------------------------


def _whose() -> FrameType | None:
    """The user's frame that has led to this operation; None if it is discolab's own."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and frame.f_code not in FLOORS:
        if is_user(frame.f_code):
            return frame
        file = frame.f_code.co_filename
        if is_own_file(file) and not file.startswith(_ISOLATION):
            return None
        frame = frame.f_back
    return None


def _words(name: str, odd: torch.Tensor, inputs: Inputs, between: bool) -> str:
    """``aten.div made 3 NaN and 1 inf in float32[4, 4], the first at [0, 2]; inputs: ...``."""
    found = describe_tensor(odd.detach(), True)
    places = found.get("places")
    first = f", the first at {places[0][1]}" if isinstance(places, list) and places else ""
    result = f"{count_words(odd)} in {summarize(found)}{first}"
    told = [f"{label} {_input_words(one)}" for label, one in inputs.tensors.items()]
    told += [f"{label} {number}" for label, number in inputs.numbers.items()]
    if len(told) > _MOST_INPUTS:
        told[_MOST_INPUTS:] = [f"{len(told) - _MOST_INPUTS} more"]
    given = f"; inputs: {', '.join(told)}" if told else ""
    if between:
        return f"a collective brought {result} from other workers"
    if inputs.nan:
        return (
            f"{name} is the first to use a NaN that was there before (by a collective, from before "
            f"this program, or written on purpose): {result}{given}"
        )
    return f"{name} made {result}{given}"


def _input_words(tensor: torch.Tensor) -> str:
    text = summarize(describe(tensor.detach(), False))
    if is_odd(tensor):
        return f"{text} with {count_words(tensor)}"
    if not is_checked(tensor):
        return text
    low, high = (float(end) for end in torch.aminmax(tensor.detach().abs().float()))
    between = f"magnitudes {low:.4g} to {high:.4g}" if low != high else f"{low:.4g}"
    return f"{text} of {between}"


def _whereabouts(frame: FrameType) -> str:
    """The step of autograd that runs, and the module whose forward does."""
    node = torch._C._current_autograd_node()
    if node is not None:
        return f"; in backward, {node.name()}"
    name, module = "", None
    one: FrameType | None = sys._getframe(1)
    while one is not None and one.f_code not in FLOORS:
        owner = one.f_locals.get("self") if one.f_code is _CALL else None
        if isinstance(owner, torch.nn.Module):
            if module is None:
                module, name = owner, type(owner).__name__
            else:
                path = next((p for p, m in owner.named_modules() if m is module), "")
                name = f"{path} ({type(module).__name__})" if path else name
        one = one.f_back
    return f"; in {name}" if module is not None else ""


_CALL = torch.nn.Module._call_impl.__code__

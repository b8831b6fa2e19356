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

import functools
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import isolation
from ..runtime.sources import is_own_file
from ..runtime.user_code import is_user
from ..runtime.worker import Worker
from ..views.facts.describe import describe
from ..views.facts.guard import FAILURES
from ..views.facts.tensors import describe_tensor
from ..views.summary import summarize
from .assertion_facts import count_words
from .frames import FLOORS
from .tracer import stop_here

_COPIED = 2**20  # bytes of a tensor that is written in place, of which a copy is kept
_NO_MEMORY = ("empty", "new_empty", "resize", "_efficientzerotensor", "set_")
_OVERWRITING = (
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "_foreach_zero_", "_foreach_copy_",
)  # fmt: skip
_FIRST_ONLY = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_LOOKS = ("abs",)  # with which `isfinite` looks for a NaN, and which hands it on
_BETWEEN = ("_c10d_functional", "c10d", "_dtensor", "_c10d_functional_autograd")


class Kind(NamedTuple):
    """What is known of an operation.

    Attributes
    ----------
    skip
        There is nothing to check.
    writes, over
        Positions and names of arguments that it writes to, and those whose old content it ignores.
    first
        Only its first output is a result.
    between
        It brings values from other workers.
    looks
        To have a NaN handed on by it is no use of that yet.
    """

    skip: bool
    writes: frozenset[int | str]
    over: frozenset[int | str]
    first: bool
    between: bool
    looks: bool


# -- operations ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def kind_of(func: Any) -> Kind:
    """What an operation does, by its schema."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    between = func.namespace in _BETWEEN
    writes: set[int | str] = set()
    over: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            where: int | str = argument.name if argument.kwarg_only else place
            writes.add(where)
            if argument.is_out or name in _OVERWRITING or between:
                over.add(where)
    returns = [one for one in schema.returns if "Tensor" in str(one.type)]
    views = bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )
    skip = (
        name.startswith(_NO_MEMORY)
        or (views and not writes)
        or (not returns and not writes)
        or (between and name != "wait_tensor")
    )
    first = name.startswith(_FIRST_ONLY)
    return Kind(skip, frozenset(writes), frozenset(over), first, between, name in _LOOKS)


def unwraps(kind: type) -> bool:
    """Whether a class of tensors runs operations on tensors that it holds, as DTensor does.

    Those with which torch traces and infers shapes hold none.
    """
    own = getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__
    return own and not kind.__module__.startswith("torch._subclasses")


def outputs(
    kind: Kind, out: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that an operation has made or written."""
    if isinstance(out, torch.Tensor):
        yield out
        return
    if isinstance(out, list | tuple):
        for one in out[:1] if kind.first else out:
            if isinstance(one, torch.Tensor):
                yield one
            elif isinstance(one, list | tuple):
                yield from (each for each in one if isinstance(each, torch.Tensor))
    for where in kind.writes:
        for leaf in tree_leaves(_at(where, args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _at(where: int | str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(where, str):
        return kwargs.get(where)
    return args[where] if where < len(args) else None


def copies(kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """What an operation is about to change, as it is now; of large tensors if they are finite."""
    found: dict[int | str, Any] = {}
    for where in kind.writes - kind.over:
        value = _at(where, args, kwargs)
        found[where] = (
            [_copy(one) for one in value] if isinstance(value, list | tuple) else _copy(value)
        )
    return found


class _Was(NamedTuple):
    """In place of a copy: whether there was a NaN, and whether there was an infinity."""

    nan: bool
    inf: bool


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not is_checked(value):
        return value
    if value.nbytes <= _COPIED:
        return value.clone()
    return _Was(has_nan(value), _has_inf(value)) if is_odd(value) else _Was(False, False)


class Inputs(NamedTuple):
    """What an operation was given; what it has overwritten, as it was before.

    Attributes
    ----------
    tensors
        By name.
    numbers
        Python's own, by name.
    nan, inf
        Whether there is a NaN, or an infinity, in a tensor.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float]
    nan: bool
    inf: bool


def inputs_of(
    func: Any,
    kind: Kind,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    before: dict[int | str, Any],
) -> Inputs:
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float] = {}
    nan = inf = False
    names = [argument.name for argument in func._schema.arguments]
    given: list[tuple[str, int | str, Any]] = [
        (name, place, value) for place, (name, value) in enumerate(zip(names, args, strict=False))
    ]
    given += [(name, name, value) for name, value in kwargs.items()]
    for name, where, value in given:
        if where in kind.over:
            continue
        value = before.get(where, value)
        several = isinstance(value, list | tuple) and type(value) is not _Was
        for n, leaf in enumerate(value if several else [value]):
            label = f"{name}[{n}]" if several else name
            if isinstance(leaf, torch.Tensor):
                tensors[label] = leaf
                if is_odd(leaf):
                    nan, inf = nan or has_nan(leaf), inf or _has_inf(leaf)
            elif type(leaf) is _Was:
                nan, inf = nan or leaf.nan, inf or leaf.inf
            elif type(leaf) in (int, float):
                numbers[label] = leaf
    return Inputs(tensors, numbers, nan, inf)


# -- checks --------------------------------------------------------------------------------------


def first_odd(outputs: Iterator[torch.Tensor]) -> torch.Tensor | None:
    for out in outputs:
        if is_odd(out):
            return out
    return None


def is_checked(tensor: torch.Tensor) -> bool:
    """Whether it has numbers that may not be finite, and that can be read."""
    return (
        (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.layout is torch.strided
        and tensor.device.type not in ("meta", "xla")
        and not _is_fake(tensor)
        and tensor.numel() > 0
    )


def _is_fake(tensor: torch.Tensor) -> bool:
    return getattr(
        type(tensor), "__torch_dispatch__", None
    ) is not torch.Tensor.__torch_dispatch__ or (torch._is_functional_tensor(tensor))


def is_odd(tensor: torch.Tensor) -> bool:
    """Whether an element is not finite.

    A sum is several times faster than to look at each, and cannot be finite if an element is not;
    where it is not, it may only have become too large.
    """
    try:
        if not is_checked(tensor):
            return False
        if tensor.dtype.is_complex:
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.dtype in (torch.float32, torch.float64):
            total = tensor.sum().item()
        elif tensor.dtype in (torch.float16, torch.bfloat16):
            total = tensor.sum(dtype=torch.float32).item()
        else:  # float8: torch has no sum of it
            tensor = tensor.to(torch.float32)
            total = tensor.sum().item()
        return not math.isfinite(total) and not bool(tensor.isfinite().all())
    except FAILURES:  # of a kind of tensor that can't be read
        return False


def has_nan(tensor: torch.Tensor) -> bool:
    try:
        return is_odd(tensor) and bool(tensor.isnan().any())
    except FAILURES:
        return False


def _has_inf(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.isinf().any())
    except FAILURES:
        return False


def is_meant(odd: torch.Tensor, inputs: Inputs) -> bool:
    """Whether what is not finite was asked for, or comes from an infinity that was there."""
    numbers = inputs.numbers.values()
    if any(map(math.isnan, numbers)):
        return True
    return (inputs.inf or any(map(math.isinf, numbers))) and not has_nan(odd)


# -- the hunt --------------------------------------------------------------------------------------


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
    return f"{text} of {_extent(tensor.detach())}"


def _extent(tensor: torch.Tensor) -> str:
    """How large the numbers are, as matters to a divisor, and their signs, as to a logarithm."""
    wide = torch.float64 if tensor.dtype in _WIDE else torch.float32  # not every device has float64
    numbers = tensor if tensor.is_complex() else tensor.to(wide)
    low, high = torch.aminmax(numbers.abs().to(wide))
    sizes = f"magnitudes {low:.4g} to {high:.4g}" if low != high else f"magnitude {low:.4g}"
    if tensor.is_complex():
        return sizes
    least, most = torch.aminmax(numbers)
    if least == most:
        return f"{least:.4g}"
    return sizes if least >= 0 else f"{sizes}, {'all' if most < 0 else 'some'} negative"


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
_WIDE = (torch.float64, torch.complex128)

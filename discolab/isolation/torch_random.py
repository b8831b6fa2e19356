"""Each worker thread has its own CPU random state, as each process would.

torch's default CPU generator belongs to the process: four threads that each say
``torch.manual_seed(0); torch.randn(3)`` would draw from one stream and get different numbers.
Two things are changed while the row is installed:

- What torch dispatches to draw on the CPU (`_OPERATORS`) looks who calls. On a worker it draws from
  `worker.generator`, where the default generator is meant. That is below everything that comes to
  it: functions bound by name before, ``torch.ops.aten``, graphs of torch.compile, modes, vmap.
- ``torch.default_generator`` is an object that stands for the worker's generator on a worker and
  for the process's elsewhere, under every name that a module has for it: so `torch.manual_seed`,
  `torch.get_rng_state` and what else asks it for its state are the worker's.

C++ code that takes the process's generator itself is not reached: extensions that draw random
numbers. What inductor makes (``cpp_wrapper``, AOTInductor) is reached: it draws through torch's
dispatcher.
A GPU has one generator a process, so workers that share a GPU share it: they are warned.
"""

from __future__ import annotations

import atexit
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..runtime import accelerators
from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment

_OPERATORS = (
    "_sample_dirichlet", "_standard_gamma", "bernoulli.out", "bernoulli_.Tensor",
    "bernoulli_.float", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "multinomial", "multinomial.out", "normal.Tensor_Tensor", "normal.Tensor_Tensor_out",
    "normal.Tensor_float", "normal.Tensor_float_out", "normal.float_Tensor",
    "normal.float_Tensor_out", "normal_", "poisson", "random_", "random_.from", "random_.to",
    "randperm.generator_out", "rrelu_with_noise", "rrelu_with_noise.out", "rrelu_with_noise_",
    "uniform_",
)  # fmt: skip
"""All that draw on the CPU: what else torch has is made of them."""

_SMALL = 4096  # so many numbers are drawn faster than the interpreter lock is let go and taken

_default: torch.Generator = torch.default_generator  # the process's own
_library: list[Any] = []  # what is registered with the dispatcher


def _install(patches: Patches) -> None:
    patches.replace(torch, "default_generator", lambda _: _GENERATOR, everywhere=True)
    patches.at_undo(_take_away)  # first: Ctrl-C may come at any line
    library: Any = torch._C._dispatch_library("IMPL", "aten", "", __file__, 0)
    _library.append(library)
    for name in _OPERATORS:
        if torch._C._dispatch_has_kernel(f"aten::{name}"):  # else not in this version of torch
            # the key at which no operator here has a kernel, the last one before the device's
            library.impl(name, "BackendSelect", _from_own(name), True)
    module = _device_module()
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        if hasattr(module, name):
            patches.replace(module, name, functools.partial(_seed_own_gpu, name))
    for owner in {module, _functions_of(module)}:
        patches.replace(owner, "set_rng_state", _warn_of_shared_gpu)


@atexit.register
def _take_away() -> None:
    while _library:
        _library.pop().reset()


# -- drawing ---------------------------------------------------------------------------------


@functools.cache
def _operator(name: str) -> tuple[Callable[..., Any], int]:
    """How one is called without the interpreter lock, and the generator's place, -1: by name."""
    base, _, overload = name.partition(".")
    find: Any = torch._C._dispatch_find_schema_or_throw
    schema = torch._C._get_schema(f"aten::{base}", overload)
    place = [arg.name for arg in schema.arguments if not arg.kwarg_only]
    position = place.index("generator") if "generator" in place else -1
    return find(f"aten::{base}", overload).redispatch_boxed, position


@functools.cache
def _from_own(name: str) -> Callable[..., Any]:
    """What is registered for one operator: it draws from the generator of the worker that calls."""
    base = name.partition(".")[0]
    redispatch, position = _operator(name)
    defaults: Any = (_default._cdata, _GENERATOR._cdata)  # type: ignore[attr-defined]
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    known: dict[int, tuple[Any, bool]] = {}
    quick: Any = None
    count: Callable[[Any], int] = int if base == "randperm" else torch.Tensor.numel
    if base == "randperm" or base.endswith("_"):
        quick = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def draw(keys: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if position >= 0 and len(args) > position:
            args, generator = args[:position], args[position]
        raw = keys.raw_repr()
        keys, on_cpu = known.get(raw) or known.setdefault(raw, _below(keys))
        if generator is None or generator._cdata in defaults:  # each time a new object of Python
            worker = current_worker_or_none()
            if not on_cpu:
                generator = None
            elif worker is None:
                generator = _default
            else:
                generator = worker.generator
                if quick is not None and count(args[0]) < _SMALL:
                    return quick(cpu, *args, generator=generator, **kwargs)
        return redispatch(keys, *args, generator=generator, **kwargs)

    return draw


def _below(keys: Any) -> tuple[Any, bool]:
    """The keys that come after ours, and whether the CPU's is the next one."""
    key = torch._C.DispatchKey
    rest = keys - torch._C.DispatchKeySet(key.BackendSelect)
    return rest, rest.highestPriorityTypeId() == key.CPU


# -- the state -------------------------------------------------------------------------------


class _GeneratorOfWorkers(torch.Generator):
    """``torch.default_generator``: the calling worker's, elsewhere the process's."""


def _generator_here() -> torch.Generator:
    worker = current_worker_or_none()
    return _default if worker is None else worker.generator


def _method(name: str) -> Callable[..., Any]:
    def of_worker(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_generator_here(), name)(*args, **kwargs)

    return functools.wraps(getattr(torch.Generator, name))(of_worker)


for _name in ("__reduce__", *(name for name in dir(torch.Generator) if not name.startswith("_"))):
    if callable(getattr(torch.Generator, _name)):
        setattr(_GeneratorOfWorkers, _name, _method(_name))

_GENERATOR = _GeneratorOfWorkers()


def _in_compiled_code(module: Any, patches: Patches) -> None:
    """torch.compile knows a generator by its very class, and breaks the graph where it is asked."""

    def over(wrap: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(wrap)
        def wrap_as_generator(self: Any, value: Any) -> Any:
            return self.wrap_user_defined(value) if value is _GENERATOR else wrap(self, value)

        return wrap_as_generator

    patches.replace(module.VariableBuilder, "_wrap", over)


# -- GPUs, and other accelerators ------------------------------------------------------------


def _device_module() -> Any:
    """What torch has for the accelerators of this process, `torch.cuda` where there are none."""
    kind = accelerators.kind()
    return torch.cuda if kind is None else torch.get_device_module(kind)


def _functions_of(module: Any) -> Any:
    """Where a device's module defines what seeds it: `torch.cuda.random`, or itself."""
    return getattr(module, "random", module)


def shares_gpu(worker: Worker) -> bool:
    """Whether another worker of this process draws from the generator of this one's GPU."""
    return accelerators.on_accelerator(worker.device) and any(
        peer is not worker and peer.device == worker.device for peer in list(worker.peers.values())
    )


def _warn(worker: Worker) -> None:
    if shares_gpu(worker):
        warnings.warn(
            f"workers share {worker.device} and with it the generator of its random numbers, so "
            "seeds don't give the numbers that processes would draw there. Give each worker a GPU, "
            "draw from torch.Generator(device) or on the CPU, or use --engine processes",
            stacklevel=4,
        )


def _warn_of_shared_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def warned(*args: Any, **kwargs: Any) -> Any:
        worker = current_worker_or_none()
        if worker is not None:
            _warn(worker)
        return function(*args, **kwargs)

    return warned


def _seed_own_gpu(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A worker seeds its own GPU: each of the others is another worker's."""

    @functools.wraps(function)
    def seed(*args: Any) -> Any:
        worker = current_worker_or_none()
        if worker is None:
            return function(*args)
        if not accelerators.on_accelerator(worker.device):
            return None
        _warn(worker)
        return own(*args)

    own: Callable[..., Any] = function
    if name.endswith("_all"):
        own = getattr(_functions_of(_device_module()), name.removesuffix("_all"))
    return seed


def _in_child(worker: Worker) -> None:
    torch.default_generator.set_state(worker.generator.get_state())


table.add(
    Row(
        state="torch's random state on the CPU",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker draws from `worker.generator`, however it comes to it: by names bound "
        "before, `torch.ops`, graphs of `torch.compile`, models of AOTInductor, `cpp_wrapper`. "
        "`torch.manual_seed` seeds it. C++ extensions that draw by themselves take the process's "
        "state.",
        test="tests/engines/test_randomness.py::"
        "test_the_same_seed_gives_the_numbers_of_a_single_process",
        install=_install,
        on_import={"torch._dynamo.variables.builder": _in_compiled_code},
        in_child=_in_child,
    )
)
table.add(
    Row(
        state="a GPU's random state",
        treatment=Treatment.SHARED,
        meaning="One for all workers on one GPU; seeding it there warns. A worker that has a GPU "
        "for itself has its state.",
    )
)

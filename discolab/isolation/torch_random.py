"""Each worker thread has its own CPU random state, as each process would.

torch's default CPU generator belongs to the process: four threads that each say
``torch.manual_seed(0); torch.randn(3)`` would draw from one stream and get different numbers.
While the row is installed, the functions of torch that draw from it look first who calls. On a
worker they use `worker.generator`: handed over where the function takes a generator, otherwise (or
when another torch mode is active) swapped in under `_swap_lock` for the call. Elsewhere, and
while torch compiles, they are torch's own.

``torch.default_generator`` given by name means the worker's to the functions wrapped here.
Others draw within `drawing`: DTensor's random functions do (ccl/distributed/guards.py).

Not covered, and drawn from the process's state: methods of ``torch.default_generator``;
``torch.ops.aten.*`` and so graphs that torch.compile makes of random functions; names bound
before the first session (``from torch import randn``); any draw while another worker's code is
being compiled. CUDA generators are one a device, as in torch; Python's and numpy's random
modules stay the process's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..runtime.worker import Worker, current_worker_or_none
from . import table
from .patches import Patches
from .table import Row, Treatment

_TAKE_GENERATOR = (
    "bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm",
)  # fmt: skip
_METHODS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "multinomial", "normal_", "random_", "uniform_",
)  # fmt: skip
_DRAW_WITHOUT = (
    "_sample_dirichlet",
    "_standard_gamma",
    "alpha_dropout", "alpha_dropout_", "dropout", "dropout_", "feature_alpha_dropout",
    "feature_alpha_dropout_", "feature_dropout", "feature_dropout_", "rrelu", "rrelu_",
)  # fmt: skip

_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")  # with dropout between their layers

_swap_lock = threading.Lock()
_swapper = 0  # the thread that holds it


def _after_fork() -> None:
    """A child must not wait for a thread that only its parent has."""
    global _swap_lock, _swapper
    _swap_lock, _swapper = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _install(patches: Patches) -> None:
    """Have torch's random functions look who calls."""

    def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        if hasattr(owner, name):  # else not in this version of torch
            patches.replace(owner, name, make)

    for name in _TAKE_GENERATOR:
        replace(torch, name, _handed)
    for name in _METHODS:
        replace(torch.Tensor, name, _handed)
    for owner in (torch, torch._VF):
        for name in _DRAW_WITHOUT:
            replace(owner, name, _swapped)
        for name in _RECURRENT:
            replace(owner, name, _swapped)
    replace(torch.nn.functional, "scaled_dot_product_attention", _swapped)
    replace(torch.utils.data.dataset, "randperm", _handed)  # bound by name there: random_split
    for owner in (torch, torch.random):
        replace(owner, "manual_seed", _manual_seed)
        replace(owner, "seed", _seed)
        replace(owner, "initial_seed", lambda f: _own(f, lambda w: w.generator.initial_seed()))
        replace(owner, "get_rng_state", lambda f: _own(f, lambda w: w.generator.get_state()))
        replace(owner, "set_rng_state", _set_rng_state)


def _worker() -> Worker | None:
    """The worker that draws, None where torch's own state is meant."""
    return None if torch.compiler.is_compiling() else current_worker_or_none()


def _handed(original: Any) -> Callable[..., Any]:
    """A function that takes ``generator=``."""

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        worker = _worker()
        if worker is None:
            return original(*args, **kwargs)
        if kwargs.get("generator") not in (None, torch.default_generator):
            return original(*args, **kwargs)  # one of the program's own
        if torch._C._len_torch_function_stack() > 0:  # a device may be set from outside
            kwargs.pop("generator", None)
            return _swap(worker, original, args, kwargs)
        if not _on_cpu(args, kwargs):
            return original(*args, **kwargs)
        kwargs["generator"] = worker.generator
        return original(*args, **kwargs)

    return draw


def _swapped(original: Any) -> Callable[..., Any]:
    """A function that only knows the default generator."""

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        worker = _worker()
        if worker is None or not _on_cpu(args, kwargs):
            return original(*args, **kwargs)
        return _swap(worker, original, args, kwargs)

    return draw


def _swap(worker: Worker, original: Any, args: Any, kwargs: Any) -> Any:
    with drawing(worker.generator):
        return original(*args, **kwargs)


@contextlib.contextmanager
def drawing(generator: torch.Generator) -> Iterator[None]:
    """Have what draws from the process's CPU state, on this thread, draw from `generator`.

    Other workers that do the same wait meanwhile: nothing may wait for a worker in here.
    """
    global _swapper
    if _swapper == threading.get_ident():  # code of a torch mode that draws inside of a draw
        yield
        return
    default = torch.default_generator
    with _swap_lock:
        before = default.get_state()
        default.set_state(generator.get_state())
        _swapper = threading.get_ident()
        try:
            yield
        finally:
            _swapper = 0
            generator.set_state(default.get_state())
            default.set_state(before)


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the numbers are drawn by a CPU generator; plain tensors only."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    for arg in (*args[:2], kwargs.get("out"), kwargs.get("input")):
        if isinstance(arg, torch.Tensor):
            return arg.device.type == "cpu" and type(arg) in (torch.Tensor, torch.nn.Parameter)
    return True


def _own(original: Any, mine: Callable[[Worker], Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def of_worker(*args: Any, **kwargs: Any) -> Any:
        worker = _worker()
        return original(*args, **kwargs) if worker is None else mine(worker)

    return of_worker


def _manual_seed(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def manual_seed(seed: Any) -> Any:
        worker = _worker()
        if worker is None:
            return original(seed)
        if worker.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        return worker.generator.manual_seed(int(seed))

    return manual_seed


def _seed(original: Any) -> Callable[..., Any]:
    return _own(original, lambda worker: worker.generator.seed())


def _set_rng_state(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor) -> None:
        worker = _worker()
        if worker is None:
            original(new_state)
        else:
            worker.generator.set_state(new_state)

    return set_rng_state


table.add(
    Row(
        state="torch's random state on the CPU",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker draws from `worker.generator`, and `torch.manual_seed` seeds it.",
        test="tests/engines/test_randomness.py",
        install=_install,
        in_own_process=True,
    )
)

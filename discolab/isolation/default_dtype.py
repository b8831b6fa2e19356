"""torch's default dtype, of which a process has one: each worker has its own, as has the notebook.

torch keeps it in C++ and reads it without asking whose thread it is. So while the row is installed
that one never changes; a thread whose own default is another has a `_Mode` among its torch function
modes, which does what C++ would do with the other default:

- a function that makes a tensor (``torch.ones``) is called with ``dtype=``;
- one that takes Python numbers (``torch.tensor([0.5])``) too, unless they are integers or bools, as
  torch's rules of inference have it;
- one that makes floating numbers of integral tensors (``count / 2``) gets them in the default
  dtype, which is what type promotion does.

What can't be done so is an error, never a tensor of another dtype. Not reached:
``torch.ops.aten.*`` called by name, which use the process's default, and ``get_default_dtype``
bound by name before the first session.

A worker starts with the default dtype of the thread that starts its session, on every engine. Its
own value is `Worker.default_dtype`, written by its threads; a thread's mode is the thread's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from ..runtime import worker as workers
from ..runtime.errors import SessionError
from ..runtime.interrupts import plain_lock
from ..runtime.worker import Worker, current_worker_or_none
from . import import_effects, table
from .patches import Patches
from .table import Row, Treatment

_process_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
# .mode: the calling thread's `_Mode`, if it has one; .keeps: set while that one is to stay
_thread = threading.local()
_reaching = plain_lock()  # guards what is done in `_reach_constructor`
_patches: Patches | None = None  # while the row is installed
_notebook: _Mode | None = None  # the one that was set last on a thread that is no worker's

_COMPLEX = {torch.float64: torch.complex128, torch.float16: torch.complex32}

# Always of the default dtype, unless a dtype or an output is given.
_MAKERS = tuple(
    getattr(owner, name)
    for owner, names in (
        (
            torch,
            "bartlett_window blackman_window empty empty_permuted empty_strided eye hamming_window "
            "hann_window kaiser_window linspace logspace ones rand randn scalar_tensor zeros",
        ),
        (torch.fft, "fftfreq rfftfreq"),
    )
    for name in names.split()
    if hasattr(owner, name)
)
_INFERRING = (torch.tensor, torch.as_tensor, torch.asarray, torch.nested.nested_tensor)
_SPARSE = tuple(
    getattr(torch, f"sparse_{kind}_tensor") for kind in ("bsc", "bsr", "compressed", "csc", "csr")
)
# What these give has the dtype that they say.
_EXPLICIT = tuple(
    getattr(torch.Tensor, name)
    for name in [
        "bfloat16",
        "cdouble",
        "cfloat",
        "chalf",
        "dequantize",
        "double",
        "float",
        "half",
        "to",
        "type",
        "view",
    ]
    if hasattr(torch.Tensor, name)
)


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return _COMPLEX.get(dtype, torch.complex64)


class _Mode(TorchFunctionMode):
    """Has torch functions on this thread use `dtype` where C++ would use the process's default.

    Attributes
    ----------
    dtype
        None: the process's, since the row was uninstalled on another thread than this mode's.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.dtype in (None, _process_dtype()) or kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        if any(isinstance(arg, torch.dtype) for arg in args) or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        assert self.dtype is not None
        return _call(self.dtype, func, args, kwargs)


def _call(own: torch.dtype, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function to which no dtype was given, with `own` as the default dtype."""
    if func in _MAKERS:
        numbers = [own, *_scalars((args, kwargs))] if func in _OF_NUMBERS else [own]
        return func(*args, **{**kwargs, "dtype": _promoted(numbers, own)})
    if func in _INFERRING:
        data = args[0] if args else next(iter(kwargs.values()))
        return _with_dtype_of(data, own, func, args, kwargs)
    if func is torch.full:
        fill = args[1] if len(args) > 1 else kwargs.get("fill_value")
        return _with_dtype_of(fill, own, func, args, kwargs, keep_tensors=False)
    if func is torch.arange:
        bounds = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
        return _with_dtype_of(bounds, own, func, args, kwargs, keep_tensors=False)
    if func is torch.sparse_coo_tensor:
        values = args[1] if len(args) > 1 else kwargs.get("values")
        if values is None or (len(args) == 2 and _is_size(values)):
            return func(*args, **{**kwargs, "dtype": own})
        return _with_dtype_of(values, own, func, args, kwargs)
    if func in _SPARSE:
        values = args[2] if len(args) > 2 else kwargs.get("values")
        return _with_dtype_of(values, own, func, args, kwargs)
    if func is torch.where and len(args) == 3:
        condition, *choices = args
        if not any(isinstance(choice, torch.Tensor) for choice in choices):
            dtype = _inferred(choices, own)
            choices = [torch.scalar_tensor(c, dtype=dtype) for c in choices]
            return func(condition, *choices, **kwargs)
    if func is torch.normal and not any(isinstance(a, torch.Tensor) for a in _flat((args, kwargs))):
        return func(*args, **{**kwargs, "dtype": own})
    result = func(*args, **kwargs)
    if func in _EXPLICIT or not _is_defaulted(result):
        return result
    given = [arg for arg in _flat((args, kwargs)) if isinstance(arg, torch.Tensor)]
    if any(tensor.is_floating_point() or tensor.is_complex() for tensor in given):
        return result
    if not given:
        raise SessionError(_REFUSAL.format(own=own, func=_name(func)))
    kept = _KEPT.get(func, ())
    return func(
        *(arg if place in kept else _cast(arg, own) for place, arg in enumerate(args)),
        **{name: arg if name in kept else _cast(arg, own) for name, arg in kwargs.items()},
    )


_KEPT: dict[Any, tuple[int | str, ...]] = {  # arguments that can't have a floating dtype
    torch.where: (0, "condition"),
    torch.Tensor.where: (1, "condition"),
    torch.cov: ("fweights",),
    torch.Tensor.cov: ("fweights",),
}
_OF_NUMBERS = (torch.linspace, torch.logspace)
_REFUSAL = (
    "the default dtype of this worker is {own}, and discolab can't tell {func} so, as torch has "
    "one default for the process and workers are threads of it: give dtype= or a tensor, or use "
    "engine='processes' (--engine processes)"
)


def _name(func: Any) -> str:
    return str(getattr(func, "__qualname__", None) or getattr(func, "__name__", func))


def _with_dtype_of(
    data: Any,
    own: torch.dtype,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keep_tensors: bool = True,
) -> Any:
    """Call `func` with the dtype that torch infers of `data`; of its own for what has one."""
    if keep_tensors and (isinstance(data, torch.Tensor) or hasattr(data, "dtype")):
        return func(*args, **kwargs)
    dtype = _inferred(data, own)
    if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "dtype": dtype})


def _inferred(data: Any, own: torch.dtype) -> torch.dtype | None:
    """The dtype of a tensor made of `data`; None for what is no number or sequence of numbers."""
    found: list[Any] = []
    for item in _scalars(data):
        found.append(item.dtype if isinstance(item, torch.Tensor) else item)
    if not found:
        return own if isinstance(data, list | tuple) else None
    return _promoted(found, own)


def _promoted(items: list[Any], own: torch.dtype) -> torch.dtype:
    dtypes = [item if isinstance(item, torch.dtype) else _dtype_of(item, own) for item in items]
    return functools.reduce(torch.promote_types, dtypes)


def _dtype_of(item: Any, own: torch.dtype) -> torch.dtype:
    if isinstance(item, bool | np.bool_):
        return torch.bool
    if isinstance(item, torch.Tensor | torch.SymInt | torch.SymBool | np.integer | int):
        return item.dtype if isinstance(item, torch.Tensor) else torch.int64
    if isinstance(item, complex):
        return _complex_of(own)
    if isinstance(item, float | torch.SymFloat):
        return own
    kind: torch.dtype = torch.as_tensor(item).dtype  # a number of numpy's, say
    return kind


def _scalars(data: Any) -> Iterator[Any]:
    """The numbers in nested sequences; arrays and tensors as they are."""
    if isinstance(data, dict):
        for item in data.values():
            yield from _scalars(item)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _scalars(item)
    elif isinstance(
        data, int | float | complex | torch.Tensor | torch.SymInt | torch.SymFloat
    ) or hasattr(data, "dtype"):
        yield data


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) or (
        isinstance(value, list | tuple) and all(isinstance(size, int) for size in value)
    )


def _is_defaulted(result: Any) -> bool:
    """Whether a tensor that was given back may owe its dtype to the process's default."""
    process = _process_dtype()
    kinds = (process, _complex_of(process))
    return any(isinstance(item, torch.Tensor) and item.dtype in kinds for item in _flat(result))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value


def _cast(value: Any, own: torch.dtype) -> Any:
    """The same arguments with tensors in the default dtype, which are integral."""
    if isinstance(value, torch.Tensor):
        return value.to(own)
    if isinstance(value, dict):
        return {name: _cast(item, own) for name, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in _flat(value)):
        return type(value)(_cast(item, own) for item in value)
    return value


# -- whose it is ----------------------------------------------------------------------------------


def _own_dtype() -> torch.dtype:
    """The default dtype on the calling thread."""
    mode = getattr(_thread, "mode", None)
    return (mode and mode.dtype) or _process_dtype()


def _use(dtype: torch.dtype) -> None:
    """Have the calling thread use this default dtype."""
    mode: Any = getattr(_thread, "mode", None)
    if getattr(_thread, "keeps", False):
        mode.dtype = dtype
    elif dtype is _process_dtype():
        if mode is not None:
            _thread.mode = None
            _restack(lambda modes: [one for one in modes if one is not mode])
    elif mode is not None:
        mode.dtype = dtype
    else:
        _add_mode(dtype)


@contextmanager
def one_mode() -> Iterator[None]:
    """Have the calling thread keep one mode, as whatever workers it acts until the end.

    For a backward: before each node of the graph torch puts back the modes that there were at its
    beginning.
    """
    if _patches is None or getattr(_thread, "keeps", False):
        yield
        return
    own = _own_dtype()
    if getattr(_thread, "mode", None) is None:
        _add_mode(own)
    _thread.keeps = True
    try:
        yield
    finally:
        _thread.keeps = False
        _use(own)


def _add_mode(dtype: torch.dtype) -> None:
    _reach_constructor()
    _thread.mode = new = _Mode(dtype)
    _restack(lambda modes: _inserted(new, modes))


def _inserted(new: _Mode, modes: list[Any]) -> list[Any]:
    """Lowest, as contexts take away what is highest.

    Only what ``torch.set_default_device`` has put there stays below, where torch looks for it.
    """
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if modes and modes[0] is device:
        return [modes[0], new, *modes[1:]]
    return [new, *modes]


def _restack(change: Callable[[list[Any]], list[Any]]) -> None:
    """Change the stack of modes, which is listed from the lowest to the highest."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    for mode in change(modes):
        _push_mode(mode)


def _bound(worker: Worker | None) -> None:
    """The calling thread is this worker's from now on."""
    if worker is not None:
        _use(worker.default_dtype)
    elif getattr(_thread, "mode", None) is not None:
        _use(_process_dtype())


def _set(dtype: torch.dtype) -> None:
    global _notebook
    worker = current_worker_or_none()
    if worker is not None:
        worker.default_dtype = dtype
    _use(dtype)
    if worker is None:
        _notebook = getattr(_thread, "mode", None)


def _set_dtype_over(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def set_own(dtype: Any, /) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            original(dtype)  # which refuses it
        _set(dtype)
        import_effects.is_set("the default dtype", dtype)

    return set_own


def _range_over(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def own_range(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is None and kwargs.get("out") is None:
            kwargs["dtype"] = _own_dtype()
        return original(*args, **kwargs)

    return own_range


def _set_type_over(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def set_own(kind: Any, /) -> None:
        if not isinstance(kind, type) or getattr(kind, "is_cuda", True):
            raise SessionError(
                f"torch.set_default_tensor_type({kind!r}): the default tensor type belongs to the "
                "process, which workers share as threads. Use torch.set_default_dtype and "
                "torch.set_default_device, which are each worker's own"
            )
        _set(kind.dtype)  # type: ignore[attr-defined]

    return set_own


def _reach_constructor() -> None:
    """Have ``torch.Tensor(2, 3)`` ask for the thread's default, from now on.

    Only once a thread has one of its own: torch._dynamo, when it is imported, looks at the
    constructor, and must see torch's.
    """
    import torch._dynamo

    with _reaching:
        if _patches is not None and "__new__" not in vars(torch.Tensor):
            _patches.replace(torch.Tensor, "__new__", _tensor_over)


def _tensor_over(_: Any) -> Callable[..., Any]:
    make = torch._C.TensorBase.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """``torch.Tensor(2, 3)`` and ``torch.Tensor([0.5])``, which have the default dtype."""
        own = _own_dtype()
        if cls is not torch.Tensor or own is _process_dtype():
            return make(cls, *args, **kwargs)
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            if isinstance(args[0], torch.Tensor):
                return args[0].to(own).detach()
            return torch.tensor(args[0], dtype=own)
        return torch.empty(*(args or (0,)), dtype=own, **kwargs)

    return new


def _backward_over(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_with_mode(*args: Any, **kwargs: Any) -> Any:
        """Run backward, and what the user has put there, with the mode that torch has put aside.

        ``Tensor.backward`` and ``autograd.grad`` are torch functions, so modes are off within.
        """
        mode = getattr(_thread, "mode", None)
        if mode is None or mode in _get_current_function_mode_stack():
            return run(*args, **kwargs)
        _push_mode(mode)
        try:
            return run(*args, **kwargs)
        finally:
            _restack(lambda modes: [one for one in modes if one is not mode])

    return run_with_mode


def _install(patches: Patches) -> None:
    global _patches
    _patches = patches
    patches.replace(torch.autograd.graph, "_engine_run_backward", _backward_over, everywhere=True)
    set_process_dtype = torch._C._set_default_dtype
    patches.replace(torch, "get_default_dtype", lambda _: _own_dtype)
    patches.replace(torch, "range", _range_over)  # the modes don't hear of it
    patches.replace(torch._C, "_set_default_dtype", _set_dtype_over)
    patches.replace(torch._C, "_set_default_tensor_type", _set_type_over)
    workers.at_bind.append(_bound)

    def put_back() -> None:
        """What the notebook has set meanwhile is the process's own again."""
        global _notebook, _patches
        _patches = None
        workers.at_bind.remove(_bound)
        mode, _notebook = _notebook, None
        if mode is None or mode.dtype is None:
            return
        dtype = mode.dtype
        set_process_dtype(dtype)
        if getattr(_thread, "mode", None) is mode:
            _use(dtype)
        else:
            mode.dtype = None

    patches.at_undo(put_back)


def _in_child(worker: Worker) -> None:
    _use(_process_dtype())  # ends the mode that the thread had
    torch.set_default_dtype(worker.default_dtype)


table.add(
    Row(
        state="the default dtype",
        treatment=Treatment.PER_WORKER,
        meaning="`torch.set_default_dtype` on a worker is that worker's, in the notebook the "
        "notebook's (on the thread that calls it). A worker starts with what the notebook has when "
        "the session starts, on every engine.",
        test="tests/isolation/test_default_dtype.py::test_each_worker_has_its_own",
        install=_install,
        in_child=_in_child,
    )
)

"""torch.fx, make_fx, torch.export and torch.jit in worker threads: one thread at a time traces.

While torch traces a program it replaces methods of all modules of the process and sets a flag that
compiled functions ask for. Two threads that trace at once would leave both for ever; and what
another thread does meanwhile has nothing to do with the trace.

`_tracing` counts, for each thread, the traces that it is in; a thread writes its own entry.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from ..runtime.interrupts import shield
from ..runtime.worker import current_worker_or_none
from . import table
from .patches import ModuleWithProperties, Patches
from .table import Row, Treatment
from .turns import Exclusive, in_turn
from .worker_local import PerWorker

tracing = Exclusive("trace")
_tracing: dict[int, int] = {}


@contextmanager
def _counted() -> Iterator[None]:
    thread = threading.get_ident()
    _tracing[thread] = _tracing.get(thread, 0) + 1
    try:
        yield
    finally:
        _tracing[thread] -= 1
        if not _tracing[thread]:
            del _tracing[thread]


def _on_this_thread(new: Any, before: Any, like: Any) -> Callable[..., Any]:
    """What calls `new` on the calling thread, and on others what was there `before`."""
    owner = threading.get_ident()

    @functools.wraps(like)
    def here_or_before(*args: Any, **kwargs: Any) -> Any:
        function = new if threading.get_ident() == owner else before
        return function(*args, **kwargs)

    return here_or_before


def _traces_here() -> bool:
    return threading.get_ident() in _tracing


_discolab_traces_here, _is_fx_tracing_flag = _traces_here, False


# In the place of torch's own code: each compiled function has bound torch's by name when it was
# made, also before the session. It runs with the global names of torch.fx._symbolic_trace.


def _is_fx_symbolic_tracing() -> bool:
    return _is_fx_tracing_flag and _discolab_traces_here() and not torch.compiler.is_compiling()


def _with_code(theirs: Any, ours: Callable[..., Any], patches: Patches) -> None:
    before = theirs.__code__
    theirs.__code__ = ours.__code__
    patches.at_undo(functools.partial(setattr, theirs, "__code__", before))


def _symbolic_trace(module: Any, patches: Patches) -> None:
    """What a tracer replaces is replaced for its own thread."""

    def trace_over(trace: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(trace)
        def trace_in_turn(*args: Any, **kwargs: Any) -> Any:
            with tracing.taken("a program"), _counted():
                return trace(*args, **kwargs)

        return trace_in_turn

    def method_over(patch_method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(patch_method)
        def patch_for_thread(
            self: Any, cls: type, name: str, new: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            here_or_before = _on_this_thread(new, getattr(cls, name), new)
            return patch_method(self, cls, name, here_or_before, *args, **kwargs)

        return patch_for_thread

    patches.replace(module.Tracer, "trace", trace_over)
    patches.add(module, "_discolab_traces_here", _traces_here)
    _with_code(module.is_fx_symbolic_tracing, _is_fx_symbolic_tracing, patches)
    patches.replace(module._Patcher, "patch_method", method_over)


_in_turn = functools.partial(in_turn, tracing)


def _compile_in_turn(module: ModuleType, patches: Patches) -> None:
    """torch.jit keeps the classes that it has compiled for all threads."""

    def over(compiles: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiles)
        def compile_in_turn(*args: Any, _frames_up: int, **kwargs: Any) -> Any:
            with tracing.taken("a program for torch.jit"):
                # names of a class are looked up in the caller's frame, which is one further up
                return compiles(*args, _frames_up=_frames_up + 1, **kwargs)

        return compile_in_turn

    patches.replace(module, "_script_impl", over)


class _Flags(threading.local):
    """What the calling thread does of what ``torch.compiler`` has a flag for."""

    _is_compiling_flag = False
    _is_exporting_flag = False
    _is_non_strict_tracing_flag = False


_flags = _discolab_flags = _Flags()


def _flag(name: str) -> Any:
    return property(lambda _: getattr(_flags, name), lambda _, value: setattr(_flags, name, value))


class _Compiler(ModuleWithProperties):
    """``torch.compiler``, whose flags are the calling thread's for who asks from elsewhere."""

    _is_compiling_flag = _flag("_is_compiling_flag")
    _is_exporting_flag = _flag("_is_exporting_flag")
    _is_non_strict_tracing_flag = _flag("_is_non_strict_tracing_flag")


# In the place of torch's own code: Dynamo knows these functions by what they are, and other modules
# have bound them by name, so the functions stay. They run with the global names of torch.compiler.
# torch.jit compiles the first of them, by this text, with every script that asks it.


def _is_compiling() -> bool:
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return False
    else:  # torch.jit leaves this branch out
        return _discolab_flags._is_compiling_flag


def _is_exporting() -> bool:
    return _discolab_flags._is_exporting_flag


def _is_non_strict_tracing() -> bool:
    return _discolab_flags._is_non_strict_tracing_flag


def _setting(name: str) -> Callable[[Any], Any]:
    @contextmanager
    def set_here() -> Iterator[None]:
        before = getattr(_flags, name)
        try:
            setattr(_flags, name, True)
            yield
        finally:
            setattr(_flags, name, before)

    return lambda _: set_here


def _compiling(module: ModuleType, patches: Patches) -> None:
    """Whether torch compiles or exports: the thread that does, and no other.

    Else the others compute meanwhile as if they were being traced: optimizers and layers of torch
    take other paths, of other numbers. And of two threads that do at once, the one that ends last
    would leave the flag set for ever.
    """
    patches.add(module, "_discolab_flags", _flags)
    for name, ours in (
        ("is_compiling", _is_compiling),
        ("is_exporting", _is_exporting),
        ("_is_non_strict_tracing", _is_non_strict_tracing),
    ):
        theirs = getattr(module, name, None)
        if theirs is not None:
            _with_code(theirs, ours, patches)
    for context, flag in (
        ("_compile_session_context", "_is_compiling_flag"),
        ("_non_strict_tracing_context", "_is_non_strict_tracing_flag"),
    ):
        if hasattr(module, context):
            patches.replace(module, context, _setting(flag), everywhere=True)
    patches.change_class(module, _Compiler)


def _builtins_of_export(module: ModuleType, patches: Patches) -> None:
    """`max`, `min` and `math.pow` of tensors, which an export has in the place of Python's."""

    if not hasattr(module, "_tensor_min_max"):
        return
    choose = functools.partial(functools.partial, module._tensor_min_max)

    @contextmanager
    def override_here() -> Iterator[None]:
        overrides: list[tuple[Any, str, Any, Any]] = [
            (builtins, "max", max, choose(real_callable=max, tensor_callable=torch.maximum)),
            (builtins, "min", min, choose(real_callable=min, tensor_callable=torch.minimum)),
            (math, "pow", math.pow, operator.pow),
        ]
        try:
            with shield():
                for owner, name, before, new in overrides:
                    setattr(owner, name, _on_this_thread(new, before, before))
            yield
        finally:
            with shield():  # an interrupt would leave them for all
                for owner, name, before, _ in overrides:
                    setattr(owner, name, before)

    patches.replace(module, "_override_builtin_ops", lambda _: override_here, everywhere=True)


class _MakeFx(threading.local):
    """With what the calling thread traces by make_fx."""

    tracer: Any = None


_make_fx = _MakeFx()


class _ProxyTensor(ModuleWithProperties):
    """``torch.fx.experimental.proxy_tensor``, whose tracer is the calling thread's."""

    _CURRENT_MAKE_FX_TRACER = property(lambda _: _make_fx.tracer)


def _branches(module: ModuleType, patches: Patches) -> None:
    """`torch.cond` and its like trace their branches with the tracer that make_fx has put there.

    It does so before the trace that waits for its turn.
    """

    @contextmanager
    def set_here(tracer: Any) -> Iterator[None]:
        before, _make_fx.tracer = _make_fx.tracer, tracer
        try:
            yield
        finally:
            _make_fx.tracer = before

    patches.replace(module, "_set_make_fx_tracer", lambda _: set_here)
    patches.change_class(module, _ProxyTensor)


def _modes(module: ModuleType, patches: Patches) -> None:
    """The stack of modes that make_fx uses before dispatch: one for each worker's thread."""
    own = threading.local()

    def stack_over(stack_of: Callable[[], Any]) -> Callable[[], Any]:
        kind = type(stack_of())

        @functools.wraps(stack_of)
        def stack_here() -> Any:
            if current_worker_or_none() is None:
                return stack_of()
            if not hasattr(own, "stack"):
                own.stack = kind()
            return own.stack

        return stack_here

    patches.replace(module, "mode_stack_state_for_pre_dispatch", stack_over)


class _MetaOfCaller(MutableMapping[str, Any]):
    """``traceback.current_meta``, what nodes get that a trace makes: that of who asks."""

    def __init__(self, of: PerWorker[dict[str, Any]]) -> None:
        self._here = of.here

    def __getitem__(self, key: str) -> Any:
        return self._here()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._here()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._here()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._here())

    def __len__(self) -> int:
        return len(self._here())


class _Truth:
    """A truth value: that of who asks."""

    def __init__(self, of: PerWorker[bool]) -> None:
        self._here = of.here

    def __bool__(self) -> bool:
        return self._here()


def _annotations(module: ModuleType, patches: Patches) -> None:
    """What torch notes on nodes. Its two functions that put another dictionary there are ours."""
    meta = PerWorker[dict[str, Any]](module.current_meta, dict)
    keeps = PerWorker[bool](module.should_preserve_node_meta, bool)
    patches.replace(module, "current_meta", lambda _: _MetaOfCaller(meta), everywhere=True)
    patches.replace(module, "should_preserve_node_meta", lambda _: _Truth(keeps))

    @contextmanager
    def preserve_node_meta(enable: bool = True) -> Iterator[None]:
        kept, noted = keeps.here(), meta.here().copy()
        try:
            keeps.set(enable)
            yield
        finally:
            keeps.set(kept)
            meta.set(noted)

    @contextmanager
    def set_current_meta(node: Any, pass_name: str = "") -> Iterator[None]:
        if not (keeps.here() and node.meta):
            yield
            return
        before = meta.here()
        source = module.NodeSource(node, pass_name, module.NodeSourceAction.CREATE)
        meta.set({**node.meta, "from_node": [source]})
        try:
            yield
        finally:
            meta.set(before)

    patches.replace(module, "preserve_node_meta", lambda _: preserve_node_meta, everywhere=True)
    patches.replace(module, "set_current_meta", lambda _: set_current_meta, everywhere=True)


table.add(
    Row(
        state="`torch.fx.traceback.annotate`",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker annotates, also by `region_activation_memory_budget`, is noted in "
        "the graphs that are traced for it.",
        test="tests/isolation/test_torch_settings.py::test_each_worker_annotates_its_graphs",
        on_import={"torch.fx.traceback": _annotations},
    )
)
table.add(
    Row(
        state="tracing of programs",
        treatment=Treatment.IN_TURNS,
        meaning="`torch.fx`, `make_fx`, `torch.export` and `torch.jit` trace or compile one "
        "worker's program after the other, and `torch.export` decomposes, saves and loads them so; "
        "a trace with real collectives can't complete, and is told so.",
        test="tests/ccl/test_dist_limits.py::test_workers_trace_programs_in_turn",
        on_import={
            "torch._ops": _modes,
            "torch.fx.experimental.proxy_tensor": _branches,
            "torch.fx._symbolic_trace": _symbolic_trace,
            # they keep what they do in global variables, of torch and of single operators
            "torch.export._trace": _in_turn(
                "a program for export", "_export", "_export_for_training"
            ),
            "torch.export.exported_program": _in_turn(
                "a program that is exported",
                "ExportedProgram.run_decompositions",
                "ExportedProgram._transform_do_not_use",
            ),
            "torch._export.serde.serialize": _in_turn(
                "a program that is saved or loaded",
                "serialize",
                "deserialize",
                "serialize_torch_artifact",
                "deserialize_torch_artifact",
                "GraphModuleDeserializer.deserialize",
            ),
            "torch.jit._trace": _in_turn("a program for torch.jit", "trace", "trace_module"),
            "torch.jit._script": _compile_in_turn,
        },
    )
)
table.add(
    Row(
        state="`torch.compiler.is_compiling`, `is_exporting`, and what an export replaces of "
        "`builtins` and `math`",
        treatment=Treatment.PER_WORKER,
        meaning="They are true only on the thread that compiles or exports: others meanwhile "
        "compute as they do alone, and what they compile is compiled.",
        test="tests/isolation/test_tracing.py::test_who_compiles_does_so_alone",
        on_import={
            "torch.compiler": _compiling,
            "torch._export.non_strict_utils": _builtins_of_export,
        },
    )
)

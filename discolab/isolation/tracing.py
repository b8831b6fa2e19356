"""torch.fx, make_fx, torch.export and torch.jit in worker threads: one thread at a time traces.

While torch traces a program it replaces methods of all modules of the process and sets a flag that
compiled functions ask for. Two threads that trace at once would leave both for ever; and what
another thread does meanwhile has nothing to do with the trace.

`_tracing` counts, for each thread, the traces that it is in; a thread writes its own entry.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..runtime.worker import current_worker_or_none
from . import table
from .patches import Patches
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


def _symbolic_trace(module: ModuleType, patches: Patches) -> None:
    """What a tracer replaces is replaced for its own thread."""

    def trace_over(trace: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(trace)
        def trace_in_turn(*args: Any, **kwargs: Any) -> Any:
            with tracing.taken("a program"), _counted():
                return trace(*args, **kwargs)

        return trace_in_turn

    def flag_over(is_tracing: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(is_tracing)
        def is_tracing_here() -> bool:
            return threading.get_ident() in _tracing and is_tracing()

        return is_tracing_here

    def method_over(patch_method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(patch_method)
        def patch_for_thread(
            self: Any, cls: type, name: str, new: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            before, owner = getattr(cls, name), threading.get_ident()

            @functools.wraps(new)
            def here_or_before(*args: Any, **kwargs: Any) -> Any:
                method = new if threading.get_ident() == owner else before
                return method(*args, **kwargs)

            return patch_method(self, cls, name, here_or_before, *args, **kwargs)

        return patch_for_thread

    patches.replace(module.Tracer, "trace", trace_over)
    patches.replace(module, "is_fx_symbolic_tracing", flag_over)
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


def _exporting(module: ModuleType, patches: Patches) -> None:
    """torch.compile is ignored while torch exports: only on the thread that exports."""

    def flag_over(is_exporting: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(is_exporting)
        def is_exporting_here() -> bool:
            return is_exporting() and (current_worker_or_none() is None or tracing.is_held_here())

        return is_exporting_here

    patches.replace(module, "is_exporting", flag_over)


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
        state="`torch.compiler.is_exporting`",
        treatment=Treatment.PER_WORKER,
        meaning="It is true only on the worker that exports, so that `torch.compile` is not "
        "ignored on others meanwhile.",
        test="tests/isolation/test_switches.py::test_others_compile_while_one_exports",
        on_import={"torch.compiler": _exporting},
    )
)

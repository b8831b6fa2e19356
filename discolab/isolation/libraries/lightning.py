"""Lightning's rank, kept in an attribute of a function; and whether there is a prompt.

Its loggers write on rank 0 alone: with the rank of the last worker for all, nobody would log.

While Lightning asks for loaders it replaces methods of all classes of loaders, and puts them back
in the order in which it ends. Two threads that do so at once would leave each other's methods in
place, or take the arguments of one class for those of another. Here they stay replaced until the
last worker ends, and look whether their own thread is within; `_loaders` guards the replacing.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ...runtime.interrupts import plain_lock
from ...runtime.worker import current_worker_or_none
from .. import table
from ..imports import is_importing
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OwnSetting

_NAME = "_IS_INTERACTIVE"
_MODULES = (
    "fabric.utilities.imports",
    "fabric.connector",
    "fabric.strategies.launchers.multiprocessing",
    "pytorch.trainer.connectors.accelerator_connector",
    "pytorch.callbacks.progress.rich_progress",
)


class _Interactive:
    """False on a worker, elsewhere as it was found."""

    def __init__(self, found: bool) -> None:
        self._found = found

    def __bool__(self) -> bool:
        return self._found and current_worker_or_none() is None


def _over(found: object) -> object:
    return found if isinstance(found, _Interactive) else _Interactive(bool(found))


def _change(module: ModuleType, patches: Patches) -> None:
    if hasattr(module, _NAME):
        patches.replace(module, _NAME, _over)


def _names_of(module: str) -> tuple[str, str]:
    """In the package with both parts, and in the part's own."""
    part, _, rest = module.partition(".")
    own = {"fabric": "lightning_fabric", "pytorch": "pytorch_lightning"}[part]
    return f"lightning.{module}", f"{own}.{rest}"


class _RankZeroOnly:
    """The decorator ``rank_zero_only``, whose attribute ``rank`` is that of who asks."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original, updated=())
        self._original: Any = original
        self._own = OwnSetting[int](f"rank of {original.__module__}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)

    @property
    def rank(self) -> int:
        if current_worker_or_none() is None:
            rank: int = self._original.rank
            return rank
        return self._own.get(lambda: int(os.environ.get("RANK", 0)))

    @rank.setter
    def rank(self, value: int) -> None:
        if current_worker_or_none() is None:
            self._original.rank = value
        elif is_importing():  # it is imported once, and the notebook is no rank
            vars(self._original).setdefault("rank", 0)
        else:
            self._own.set(value)


def _rank_zero(module: ModuleType, patches: Patches) -> None:
    patches.replace(module, "rank_zero_only", _RankZeroOnly, everywhere=True)


_loaders = plain_lock()


class _Recording(threading.local):
    """For which classes, with their subclasses, Lightning notes arguments on this thread."""

    def __init__(self) -> None:
        self.bases: list[type] = []


def _record_own(module: ModuleType, patches: Patches) -> None:
    recording = _Recording()
    replaced: set[tuple[type, str]] = set()
    tags = {"__setattr__": module._WrapAttrTag.SET, "__delattr__": module._WrapAttrTag.DEL}

    def method_over(plain: Any, base: type, wrap: Callable[[Any], Any]) -> Any:
        noting = wrap(plain)

        @functools.wraps(plain)
        def note_within(self: Any, *args: Any, **kwargs: Any) -> None:
            (noting if base in recording.bases else plain)(self, *args, **kwargs)

        return note_within

    def replace(cls: type, name: str, base: type, wrap: Callable[[Any], Any]) -> None:
        if (cls, name) not in replaced and (name in vars(cls) or (cls is base and name in tags)):
            replaced.add((cls, name))
            patches.replace(cls, name, functools.partial(method_over, base=base, wrap=wrap))

    @contextmanager
    def replace_dunder_methods(
        base_cls: type, store_explicit_arg: str | None = None
    ) -> Iterator[None]:
        wrap_init = functools.partial(
            module._wrap_init_method, store_explicit_arg=store_explicit_arg
        )
        with _loaders:
            for cls in module.get_all_subclasses(base_cls) | {base_cls}:
                replace(cls, "__init__", base_cls, wrap_init)
                for name, tag in tags.items():
                    replace(
                        cls, name, base_cls, functools.partial(module._wrap_attr_method, tag=tag)
                    )
        recording.bases.append(base_cls)
        try:
            yield
        finally:
            recording.bases.remove(base_cls)

    patches.replace(
        module, "_replace_dunder_methods", lambda _: replace_dunder_methods, everywhere=True
    )


table.add(
    Row(
        state="the rank of `rank_zero_only` (Lightning, torchmetrics)",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker has its own, so loggers and what is decorated with it work on rank 0.",
        test="tests/isolation/test_libraries.py::test_rank_zero_of_lightning_is_one_worker",
        on_import={
            "lightning_utilities.core.rank_zero": _rank_zero,
            "torchmetrics.utilities.prints": _rank_zero,
        },
        library="lightning",
    )
)
table.add(
    Row(
        state="whether Lightning is in an interactive session",
        treatment=Treatment.PER_WORKER,
        meaning="On a worker it is not, as in a process of torchrun: strategies that processes "
        "need may be used. In the notebook it is.",
        test="tests/isolation/test_libraries.py::test_lightning_on_a_worker_is_not_interactive",
        on_import={name: _change for module in _MODULES for name in _names_of(module)},
        library="lightning",
    )
)
table.add(
    Row(
        state="what Lightning replaces while it asks for loaders",
        treatment=Treatment.PER_WORKER,
        meaning="Lightning notes the arguments of the loaders that the worker itself makes, and so "
        "can give them a distributed sampler.",
        test="tests/isolation/test_libraries.py::test_lightning_makes_own_loaders_distributed",
        on_import=dict.fromkeys(_names_of("fabric.utilities.data"), _record_own),
        library="lightning",
    )
)

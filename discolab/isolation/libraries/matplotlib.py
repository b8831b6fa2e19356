"""pyplot keeps its figures and matplotlib its settings for the process; drawing is not for threads.

Who draws takes the turn of those who import, since drawing imports modules and caches fonts.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.worker import current_worker_or_none
from .. import table
from ..imports import import_turn
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import DictOfWorkers, PerWorker

Function = Callable[..., Any]

_TO_FILES = frozenset({"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"})


def _figures(module: ModuleType, patches: Patches) -> None:
    def own(shared: OrderedDict[Any, Any]) -> PerWorker[OrderedDict[Any, Any]]:
        return PerWorker(shared, OrderedDict)

    patches.replace(module.Gcf, "figs", own)


def _settings(module: ModuleType, patches: Patches) -> None:
    """Give `matplotlib.rcParams` a class that looks first at what the worker has set."""
    kind: Any = module.RcParams
    settings = module.rcParams

    class RcParamsOfWorkers(kind):  # type: ignore[misc]
        def _get(self, key: str) -> Any:
            own = values.here()
            return own[key] if own is not self and key in own else super()._get(key)

        def _set(self, key: str, value: Any) -> None:
            own = values.here()
            if own is self:
                super()._set(key, value)
            else:
                own[key] = value

        def _update_raw(self, other_params: Any) -> None:
            if isinstance(other_params, kind):
                other_params = dict.items(other_params)
            for key, value in dict(other_params).items():
                self._set(key, value)

        def copy(self) -> Any:
            copied = kind()
            for key in self:
                copied._set(key, self._get(key))
            return copied

        def find_all(self, pattern: str) -> Any:
            return self.copy().find_all(pattern)

    values: PerWorker[Any] = PerWorker(settings, dict, imports_share=True)
    patches.change_class(settings, RcParamsOfWorkers)


def _colormaps(module: ModuleType, patches: Patches) -> None:
    own = functools.partial(DictOfWorkers, "matplotlib.colormaps")
    patches.replace(module._colormaps, "_cmaps", own)


def _use(module: ModuleType, patches: Patches) -> None:
    """It looks for pyplot, which no other worker may be importing meanwhile."""

    def use_over(use: Function) -> Function:
        @functools.wraps(use)
        def use_whole(*args: Any, **kwargs: Any) -> Any:
            with import_turn.taken("matplotlib", by_all=True):
                return use(*args, **kwargs)

        return use_whole

    patches.replace(module, "use", use_over)


def _switch(module: ModuleType, patches: Patches) -> None:
    """A worker that wants to draw to files does not take the notebook's backend away."""

    def switch_over(switch: Function) -> Function:
        @functools.wraps(switch)
        def switch_own(newbackend: str) -> None:
            if current_worker_or_none() is None or newbackend.lower() not in _TO_FILES:
                switch(newbackend)
                return
            if module._backend_mod is None:  # nobody has drawn yet: the notebook's, if it has one
                chosen = dict.__getitem__(module.rcParams, "backend")
                switch(chosen if isinstance(chosen, str) else newbackend)
            module.rcParams["backend"] = newbackend

        return switch_own

    patches.replace(module, "switch_backend", switch_over)


def _in_turn(function: Function) -> Function:
    @functools.wraps(function)
    def draw_in_turn(*args: Any, **kwargs: Any) -> Any:
        with import_turn.taken("a figure", by_all=True):
            return function(*args, **kwargs)

    return draw_in_turn


def _canvas(module: ModuleType, patches: Patches) -> None:
    patches.replace(module.FigureCanvasBase, "print_figure", _in_turn)


def _agg(module: ModuleType, patches: Patches) -> None:
    patches.replace(module.FigureCanvasAgg, "draw", _in_turn)


table.add(
    Row(
        state="pyplot's figures",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker has figures, and a current one, of its own.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_figures_of_its_own",
        on_import={"matplotlib._pylab_helpers": _figures},
        library="matplotlib",
    )
)
table.add(
    Row(
        state="`matplotlib.rcParams`",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets, also by a style, `rc_context` or `plt.ion`, is its own; for "
        "all else it sees the notebook's.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_settings_of_matplotlib",
        on_import={"matplotlib": _settings},
        library="matplotlib",
    )
)
table.add(
    Row(
        state="`matplotlib.colormaps`",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker registers is its own; the others are there on all.",
        test="tests/isolation/test_libraries.py::test_each_worker_registers_a_colormap",
        on_import={"matplotlib.cm": _colormaps},
        library="matplotlib",
    )
)
table.add(
    Row(
        state="matplotlib's backend",
        treatment=Treatment.PER_WORKER,
        meaning="`matplotlib.use` on a worker with a backend that draws to files leaves the "
        "notebook's as it is.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_figures_of_its_own",
        on_import={"matplotlib": _use, "matplotlib.pyplot": _switch},
        library="matplotlib",
    )
)
table.add(
    Row(
        state="drawing with matplotlib",
        treatment=Treatment.IN_TURNS,
        meaning="One figure is drawn at a time: fonts and their caches are the process's.",
        test="tests/notebook/test_matplotlib.py",
        on_import={"matplotlib.backend_bases": _canvas, "matplotlib.backends.backend_agg": _agg},
        library="matplotlib",
    )
)

"""hydra keeps its configuration in singletons, OmegaConf the functions that configurations call."""

from __future__ import annotations

import copy
import functools
import threading
from collections import ChainMap
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.worker import current_worker_or_none
from .. import table
from ..imports import worker_unless_importing
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT, DictOfWorkers, PerWorker

# of the others plugins are entered when modules are imported; `_Repository` is of the stored ones
_OWN = ("GlobalHydra", "HydraConfig")


class _Instances(dict[type, Any]):
    """hydra's singletons, some of which a worker has for itself."""

    def __init__(self, shared: dict[type, Any]) -> None:
        super().__init__(shared)
        self.own: PerWorker[dict[type, Any]] = PerWorker({}, dict)

    def _is_own(self, kind: type) -> bool:
        return current_worker_or_none() is not None and kind.__name__ in _OWN

    def __contains__(self, kind: object) -> bool:
        assert isinstance(kind, type)
        return kind in self.own.here() if self._is_own(kind) else super().__contains__(kind)

    def __getitem__(self, kind: type) -> Any:
        return self.own.here()[kind] if self._is_own(kind) else super().__getitem__(kind)

    def __setitem__(self, kind: type, value: Any) -> None:
        if self._is_own(kind):
            self.own.here()[kind] = value
        else:
            super().__setitem__(kind, value)

    def __delitem__(self, kind: type) -> None:
        if self._is_own(kind):
            del self.own.here()[kind]
        else:
            super().__delitem__(kind)


def _singletons(module: ModuleType, patches: Patches) -> None:
    shared = module.Singleton._instances
    new = patches.replace(module.Singleton, "_instances", _Instances)

    def put_back() -> None:
        shared.clear()
        shared.update(new)

    patches.at_undo(put_back)


class _Tree(dict[str, Any]):
    """Configurations by their names, in groups; a copy has groups of its own."""

    def __copy__(self) -> _Tree:
        return _Tree({n: copy.copy(v) if isinstance(v, _Tree) else v for n, v in self.items()})

    def fill_in(self, shared: dict[str, Any]) -> _Tree:
        """Add what is not there."""
        for name, value in shared.items():
            if isinstance(value, dict):
                group = self.setdefault(name, _Tree())
                if isinstance(group, _Tree):
                    group.fill_in(value)
            else:
                self.setdefault(name, value)
        return self


class _Scanning(threading.local):
    """Of each thread: whether hydra executes its plugins, by other ways than imports."""

    plugins = False


_scanning = _Scanning()


def _scan_for_all(module: ModuleType, patches: Patches) -> None:
    def scan_over(scan: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(scan)
        def scan_for_all(*args: Any, **kwargs: Any) -> Any:
            before, _scanning.plugins = _scanning.plugins, True
            try:
                return scan(*args, **kwargs)
            finally:
                _scanning.plugins = before

        return scan_for_all

    patches.replace(module.Plugins, "_initialize", scan_over)


class _Repository:
    """``ConfigStore.repo``: on a worker what it has stored, beside what is there for all."""

    key = f"{OF_SCRIPT}ConfigStore"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        shared: dict[str, Any] = vars(instance)["repo"]
        worker = worker_unless_importing()
        if worker is None or _scanning.plugins:
            return shared
        own: _Tree = worker.process_state.setdefault(self.key, _Tree())
        return own.fill_in(shared)

    def __set__(self, instance: Any, value: dict[str, Any]) -> None:
        vars(instance)["repo"] = value


def _stored(module: ModuleType, patches: Patches) -> None:
    patches.add(module.ConfigStore, "repo", _Repository())


def _resolvers(module: ModuleType, patches: Patches) -> None:
    patches.replace(
        module.BaseContainer, "_resolvers", lambda shared: DictOfWorkers("resolvers", shared)
    )


def _clearing(module: ModuleType, patches: Patches) -> None:
    def clear_own() -> None:
        own = module.BaseContainer._resolvers.here()
        if isinstance(own, ChainMap):  # a worker's, in which it sees the shared ones no more
            own.maps[:] = [{}]
        else:
            own.clear()
        module.register_default_resolvers()

    patches.replace(module.OmegaConf, "clear_resolvers", lambda _: staticmethod(clear_own))


table.add(
    Row(
        state="hydra's `GlobalHydra` and `HydraConfig`",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker initializes hydra for itself. Plugins are shared: modules enter them "
        "when they are imported.",
        test="tests/isolation/test_libraries.py::test_each_worker_composes_with_a_hydra_of_its_own",
        on_import={"hydra.core.singleton": _singletons},
        library="hydra",
    )
)
table.add(
    Row(
        state="hydra's `ConfigStore`",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker stores is its own, and so are the classes of it; what a module "
        "stores when it is imported, and the notebook, is there on all. A script's end takes away "
        "what it has stored.",
        test="tests/isolation/test_libraries.py::test_each_worker_stores_its_own_configurations",
        on_import={"hydra.core.config_store": _stored, "hydra.core.plugins": _scan_for_all},
        library="hydra",
    )
)
table.add(
    Row(
        state="OmegaConf's resolvers",
        treatment=Treatment.PER_WORKER,
        meaning="Those that a worker registers are its own; those that a module registers when it "
        "is imported, and the notebook's, are there on all.",
        test="tests/isolation/test_libraries.py::test_each_worker_composes_with_a_hydra_of_its_own",
        on_import={"omegaconf.basecontainer": _resolvers, "omegaconf.omegaconf": _clearing},
        library="hydra",
    )
)

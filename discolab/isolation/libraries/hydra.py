"""hydra keeps its configuration in singletons, OmegaConf the functions that configurations call."""

from __future__ import annotations

from collections import ChainMap
from types import ModuleType
from typing import Any

from ...runtime.worker import current_worker_or_none
from .. import table
from ..own import DictOfWorkers, PerWorker
from ..patches import Patches
from ..table import Row, Treatment

# the others, plugins and stored configurations, are entered when modules are imported
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
        meaning="Each worker initializes hydra for itself. `ConfigStore` and plugins are shared: "
        "modules fill them when they are imported.",
        test="tests/isolation/test_libraries.py::test_each_worker_composes_with_a_hydra_of_its_own",
        on_import={"hydra.core.singleton": _singletons},
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

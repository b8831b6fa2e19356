"""yaml keeps with each class of loaders and dumpers what is registered with it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.interrupts import plain_lock
from .. import table
from ..imports import worker_unless_importing
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import DictOfWorkers

_NAMES = {  # by module: its class, and what each method writes to
    "yaml.constructor": (
        "BaseConstructor",
        {
            "add_constructor": "yaml_constructors",
            "add_multi_constructor": "yaml_multi_constructors",
        },
    ),
    "yaml.representer": (
        "BaseRepresenter",
        {
            "add_representer": "yaml_representers",
            "add_multi_representer": "yaml_multi_representers",
        },
    ),
    "yaml.resolver": (
        "BaseResolver",
        {
            "add_implicit_resolver": "yaml_implicit_resolvers",
            "add_path_resolver": "yaml_path_resolvers",
        },
    ),
}
_guard = plain_lock()  # guards the making of a class's own table


class _Resolvers(ChainMap[Any, Any]):
    """Lists of which one that is appended to becomes the worker's own."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self.maps[0]:
            self.maps[0][key] = list(self.get(key, default))
        return self.maps[0][key]


def _give_own(cls: Any, name: str, patches: Patches) -> None:
    """Have a class a table of its own, to which each worker adds its entries."""
    with _guard:
        if isinstance(vars(cls).get(name), DictOfWorkers):
            return
        inherited = getattr(cls, name)
        of_process = inherited
        if name not in vars(cls):  # the class's own from here on, as yaml has it
            of_process = dict(getattr(inherited, "shared", inherited))
        of_worker = dict(inherited) if isinstance(inherited, DictOfWorkers) else {}
        kind = _Resolvers if name == "yaml_implicit_resolvers" else ChainMap
        entries = DictOfWorkers(
            f"{cls.__module__}.{cls.__qualname__}.{name} {id(cls)}",
            of_process,
            lambda: kind(dict(of_worker), of_process),
        )
        setattr(cls, name, entries)
        patches.at_undo(lambda: setattr(cls, name, of_process))


def _registration(module: ModuleType, patches: Patches) -> None:
    owner, methods = _NAMES[module.__name__]
    base = getattr(module, owner)

    def over(method: str, name: str) -> None:
        plain = vars(base)[method]

        def add_own(cls: Any, *args: Any, **kwargs: Any) -> None:
            if worker_unless_importing() is not None:
                _give_own(cls, name, patches)
            add: Callable[..., None] = plain.__func__
            add(cls, *args, **kwargs)

        setattr(base, method, classmethod(add_own))
        patches.at_undo(lambda: setattr(base, method, plain))

    for method, name in methods.items():
        over(method, name)


table.add(
    Row(
        state="what is registered with loaders and dumpers of yaml (`yaml.add_constructor` and its "
        "like, `YAMLObject`)",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker reads and writes with the functions that it has registered. What a "
        "module registers when it is imported, and the notebook, is there on all.",
        test="tests/isolation/test_libraries.py::test_each_worker_registers_with_yaml",
        on_import=dict.fromkeys(_NAMES, _registration),
        library="yaml",
    )
)

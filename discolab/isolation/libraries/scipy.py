"""scipy's distributions, which put a generator in an attribute while they draw; its FFT's backend.

``norm.rvs(random_state=seed)`` makes the generator that of `norm`, draws, and puts back what was
there. `norm` is one object for all: of two threads within it, one would draw from the other's.
Unless somebody sets another, the attribute holds numpy's legacy state, which scipy may have put
there before the first session.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

from .. import table
from ..host_random import of_caller
from ..imports import worker_unless_importing
from ..patches import Patches, refused
from ..table import Row, Treatment
from ..thread_state import of_libraries
from ..worker_local import OF_SCRIPT

of_libraries["scipy.special"] = lambda module: (
    module.geterr,
    lambda errors: module.seterr(**errors),
)


def _backends(module: ModuleType, patches: Patches) -> None:
    why = "is for the whole process: use `with scipy.fft.set_backend(...)`"
    for name in ("set_global_backend", "register_backend"):
        patches.replace(module, name, refused(f"scipy.fft.{name}", why), everywhere=True)


_GENERATORS = f"{OF_SCRIPT}generators of scipy.stats"
_of_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # distributions that workers have made


def _own_generator() -> property:
    """The attribute of a distribution: of one that is there for all, each worker has its own."""
    name = "_random_state"

    def own(distribution: Any, *, make: bool) -> Any:
        worker = worker_unless_importing()
        if worker is None or distribution in _of_workers:
            return None
        if make and _GENERATORS not in worker.process_state:
            worker.process_state[_GENERATORS] = weakref.WeakKeyDictionary()
        return worker.process_state.get(_GENERATORS)

    def get(distribution: Any) -> Any:
        generators = own(distribution, make=False)
        if generators is not None and distribution in generators:
            return generators[distribution]
        try:
            return of_caller(vars(distribution)[name])
        except KeyError:
            raise AttributeError(name) from None

    def set_(distribution: Any, generator: Any) -> None:
        if name not in vars(distribution) and worker_unless_importing() is not None:
            _of_workers.add(distribution)
        generators = own(distribution, make=True)
        if generators is None:
            vars(distribution)[name] = generator
        else:
            generators[distribution] = generator

    return property(get, set_)


def _inherit(generators: weakref.WeakKeyDictionary[Any, Any]) -> None:
    for distribution, generator in generators.items():
        vars(distribution)["_random_state"] = generator


table.inherits(_GENERATORS, _inherit)


def _generators(kind: str) -> table.Change:
    def change(module: ModuleType, patches: Patches) -> None:
        patches.add(getattr(module, kind), "_random_state", _own_generator())

    return change


table.add(
    Row(
        state="`random_state` of scipy's distributions",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker gives to `rvs`, or sets, is that worker's.",
        test="tests/isolation/test_libraries.py::test_each_worker_draws_from_scipys_distributions",
        on_import={
            "scipy.stats._distn_infrastructure": _generators("rv_generic"),
            "scipy.stats._multivariate": _generators("multi_rv_generic"),
        },
        library="scipy",
    )
)
table.add(
    Row(
        state="`scipy.fft.set_global_backend`, `register_backend`",
        treatment=Treatment.REFUSED,
        meaning="Others would transform with one worker's backend. `scipy.fft.set_backend` is "
        "the calling thread's; or use `--engine processes`.",
        test="tests/isolation/test_libraries.py::test_a_worker_may_not_set_scipys_backend_for_all",
        on_import={"scipy.fft._backend": _backends},
        library="scipy",
    )
)

"""polars draws random numbers in Rust, from one state of the process."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..patches import Patches, refused
from ..table import Row, Treatment


def _seed(module: ModuleType, patches: Patches) -> None:
    why = "seeds numbers that polars draws for the whole process: give `seed=` to what draws"
    patches.replace(
        module, "set_random_seed", refused("polars.set_random_seed", why), everywhere=True
    )


table.add(
    Row(
        state="`polars.set_random_seed`",
        treatment=Treatment.REFUSED,
        meaning="polars draws from one state of the process. Give `seed=` to `sample` and "
        "`shuffle`, or use `--engine processes`.",
        test="tests/isolation/test_libraries.py::test_a_worker_may_not_seed_polars",
        on_import={"polars.functions.random": _seed},
        library="polars",
    )
)
table.add(
    Row(
        state="`polars.Config`",
        treatment=Treatment.SHARED,
        meaning="It changes variables that polars reads in Rust: how frames are printed, which is "
        "one for all.",
        library="polars",
    )
)

"""statsmodels keeps in one object how formulas become columns."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .. import table
from ..own_objects import own_object
from ..patches import Patches
from ..table import Row, Treatment


def _options(module: ModuleType, patches: Patches) -> None:
    shared = vars(module.options)

    def make() -> Any:
        own = module._FormulaOption()
        vars(own).update(shared)
        return own

    own_object(module.options, "options of statsmodels", make, patches)


table.add(
    Row(
        state="`statsmodels.formula.options`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; a script's end forgets what it has set.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_options_of_statsmodels",
        on_import={"statsmodels.formula": _options},
        library="statsmodels",
    )
)

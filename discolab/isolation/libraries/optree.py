"""optree keeps for the process in what order leaves of dictionaries come."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import table
from ..imports import is_importing
from ..patches import Patches, refused
from ..table import Row, Treatment


def _order(module: ModuleType, patches: Patches) -> None:
    why = "changes the order of leaves for all threads of the process"
    refuse = refused("optree.dict_insertion_ordered", why)

    def over(ordered: Callable[..., Any]) -> Callable[..., Any]:
        on_worker = refuse(ordered)
        return functools.wraps(ordered)(
            # what a module sets while it is imported, as one of torch does, is for all
            lambda *args, **kwargs: (ordered if is_importing() else on_worker)(*args, **kwargs)
        )

    patches.replace(module, "dict_insertion_ordered", over, everywhere=True)


table.add(
    Row(
        state="`optree.dict_insertion_ordered`",
        treatment=Treatment.REFUSED,
        meaning="It changes the order of leaves for all threads. Sort dictionaries yourself, or "
        "use `collections.OrderedDict` or `--engine processes`.",
        test="tests/isolation/test_libraries.py::test_a_worker_may_not_change_the_order_of_optree",
        on_import={"optree": _order},
        library="optree",
    )
)

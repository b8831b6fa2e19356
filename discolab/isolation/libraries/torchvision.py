"""torchvision keeps in a variable what operations on its tensors give."""

from __future__ import annotations

import functools

from .. import table
from ..table import Row, Treatment
from ..worker_local import inherit_variables, owning_variables

_MODULE = "torchvision.tv_tensors._torch_function_helpers"


_NAMES = ("_ReturnTypeCM", "set_return_type", "_must_return_subclass")

table.add(
    Row(
        state="`torchvision.tv_tensors.set_return_type`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; a script's end forgets what it has set.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_return_type_of_torchvision",
        on_import={_MODULE: owning_variables(*_NAMES)},
        in_child=functools.partial(inherit_variables, _MODULE),
        library="torchvision",
    )
)

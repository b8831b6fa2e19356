"""torchvision keeps in variables what its operations give, and who reads images."""

from __future__ import annotations

from .. import table
from ..table import Row, Treatment
from ..worker_local import owning_variables

_VARIABLES = {
    "torchvision.tv_tensors._torch_function_helpers": (
        "_ReturnTypeCM",
        "set_return_type",
        "_must_return_subclass",
    ),
    "torchvision": ("set_image_backend", "get_image_backend"),
}


table.add(
    Row(
        state="`torchvision.tv_tensors.set_return_type`, `torchvision.set_image_backend`",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; a script's end forgets what it has set.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_return_type_of_torchvision",
        on_import={module: owning_variables(*names) for module, names in _VARIABLES.items()},
        library="torchvision",
    )
)

"""torchvision keeps in variables what its operations give, who reads images, and its models."""

from __future__ import annotations

import functools
from types import ModuleType

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import DictOfWorkers, owning_variables

_VARIABLES = {
    "torchvision.tv_tensors._torch_function_helpers": (
        "_ReturnTypeCM",
        "set_return_type",
        "_must_return_subclass",
    ),
    "torchvision": ("set_image_backend", "get_image_backend"),
}


def _models(module: ModuleType, patches: Patches) -> None:
    own = functools.partial(DictOfWorkers, "models of torchvision")
    patches.replace(module, "BUILTIN_MODELS", own)


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
table.add(
    Row(
        state="`torchvision.models.register_model`",
        treatment=Treatment.PER_WORKER,
        meaning="`get_model` calls the function that the worker has registered. What a module "
        "registers when it is imported, and the notebook, is there on all.",
        test="tests/isolation/test_libraries.py::test_each_worker_registers_a_model_of_torchvision",
        on_import={"torchvision.models._api": _models},
        library="torchvision",
    )
)

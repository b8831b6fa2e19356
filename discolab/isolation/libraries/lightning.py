"""Lightning looks once, when it is imported, whether there is a prompt."""

from __future__ import annotations

from types import ModuleType

from ...runtime.worker import current_worker_or_none
from .. import table
from ..patches import Patches
from ..table import Row, Treatment

_NAME = "_IS_INTERACTIVE"
_MODULES = (
    "fabric.utilities.imports",
    "fabric.connector",
    "fabric.strategies.launchers.multiprocessing",
    "pytorch.trainer.connectors.accelerator_connector",
    "pytorch.callbacks.progress.rich_progress",
)


class _Interactive:
    """False on a worker, elsewhere as it was found."""

    def __init__(self, found: bool) -> None:
        self._found = found

    def __bool__(self) -> bool:
        return self._found and current_worker_or_none() is None


def _over(found: object) -> object:
    return found if isinstance(found, _Interactive) else _Interactive(bool(found))


def _change(module: ModuleType, patches: Patches) -> None:
    if hasattr(module, _NAME):
        patches.replace(module, _NAME, _over)


def _names_of(module: str) -> tuple[str, str]:
    """In the package with both parts, and in the part's own."""
    part, _, rest = module.partition(".")
    own = {"fabric": "lightning_fabric", "pytorch": "pytorch_lightning"}[part]
    return f"lightning.{module}", f"{own}.{rest}"


table.add(
    Row(
        state="whether Lightning is in an interactive session",
        treatment=Treatment.PER_WORKER,
        meaning="On a worker it is not, as in a process of torchrun: strategies that processes "
        "need may be used. In the notebook it is.",
        test="tests/isolation/test_libraries.py::test_lightning_on_a_worker_is_not_interactive",
        on_import={name: _change for module in _MODULES for name in _names_of(module)},
        library="lightning",
    )
)

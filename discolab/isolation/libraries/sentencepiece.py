"""sentencepiece starts every thread's random numbers anew when somebody seeds them."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..patches import Patches, refused
from ..table import Row, Treatment


def _seed(module: ModuleType, patches: Patches) -> None:
    why = "starts the random numbers of all threads of the process anew"
    for name in ("SetRandomGeneratorSeed", "set_random_generator_seed"):
        if hasattr(module, name):
            patches.replace(module, name, refused(f"sentencepiece.{name}", why), everywhere=True)


table.add(
    Row(
        state="`sentencepiece.set_random_generator_seed`",
        treatment=Treatment.REFUSED,
        meaning="It starts the sampling of all threads anew, so workers would sample what another "
        "has asked for. Without a seed each samples for itself; or use `--engine processes`.",
        test="tests/isolation/test_libraries.py::test_a_worker_may_not_seed_sentencepiece",
        on_import={"sentencepiece": _seed},
        library="sentencepiece",
    )
)

"""scipy has one backend of its Fourier transforms for all threads; those of a context are apart."""

from __future__ import annotations

from types import ModuleType

from .. import table
from ..patches import Patches, refused
from ..table import Row, Treatment


def _backends(module: ModuleType, patches: Patches) -> None:
    why = "is for the whole process: use `with scipy.fft.set_backend(...)`"
    for name in ("set_global_backend", "register_backend"):
        patches.replace(module, name, refused(f"scipy.fft.{name}", why), everywhere=True)


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

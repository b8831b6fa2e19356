"""xarray keeps its options in a dictionary, which `set_options` changes and restores."""

from __future__ import annotations

from .. import table
from ..table import Row, Treatment
from ..worker_local import owning_dicts

table.add(
    Row(
        state="options of xarray",
        treatment=Treatment.PER_WORKER,
        meaning="What a worker sets with `set_options`, also as a context, is its own; for all "
        "else it sees the notebook's. Accessors that are registered are shared.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_options_of_xarray",
        on_import={"xarray.core.options": owning_dicts("OPTIONS")},
        library="xarray",
    )
)

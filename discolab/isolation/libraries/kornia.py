"""kornia's solvers of polynomials keep tables, and put one of the dtype that is asked for there.

One worker would multiply float64 by the table that another has made float32 meanwhile.
"""

from __future__ import annotations

from .. import table
from ..table import Row, Treatment
from ..worker_local import owning_variables

table.add(
    Row(
        state="tables of kornia's solvers of polynomials",
        treatment=Treatment.PER_WORKER,
        meaning="Workers may solve in different dtypes at once. `disable_checks` of kornia is one "
        "for all: it changes which errors are raised, and no number.",
        test="tests/isolation/test_libraries.py::test_each_worker_solves_in_a_dtype_of_kornia",
        on_import={
            "kornia.geometry.solvers.polynomial_solver": owning_variables(
                "multiply_deg_one_poly", "multiply_deg_two_one_poly", "determinant_to_polynomial"
            )
        },
        library="kornia",
    )
)

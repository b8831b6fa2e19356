"""xgboost keeps its configuration for each thread, in C++."""

from __future__ import annotations

from ..thread_state import of_libraries

of_libraries["xgboost"] = lambda module: (
    module.get_config,
    lambda config: module.set_config(**config),
)

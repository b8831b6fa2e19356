"""numba keeps random numbers of compiled functions for each thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..thread_state import of_libraries


def _random_states(numba: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    functions: Any = sys.modules["numba._helperlib"]
    here = functions.rnd_get_np_state_ptr, functions.rnd_get_py_state_ptr

    def get() -> Any:
        return [functions.rnd_get_state(state()) for state in here]

    def set_(states: Any) -> None:
        for state, value in zip(here, states, strict=True):
            functions.rnd_set_state(state(), value)

    return get, set_


of_libraries["numba"] = _random_states

"""lightgbm keeps the logger for the process; its C code has who writes to it for each thread.

The network of distributed training is each thread's, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...runtime.worker import current_worker_or_none
from .. import table
from ..patches import Patches
from ..programs import call_at_end
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT, own_value, own_variables

_CHUNKS = f"{OF_SCRIPT}chunks of lightgbm's messages"


def _logger(module: ModuleType, patches: Patches) -> None:
    own_variables(module, patches, "register_logger", "_log_info", "_log_warning")

    def register_over(register: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(register)
        def register_on_thread(*args: Any, **kwargs: Any) -> None:
            register(*args, **kwargs)
            module._LIB.LGBM_RegisterLogCallback(module._LIB.callback)

        return register_on_thread

    def native_over(log: Callable[[str], None]) -> Callable[[str], None]:
        make = functools.partial(
            module._normalize_native_string, lambda message: module._log_info(message)
        )
        return lambda message: (own_value(_CHUNKS, make) or log)(message)

    patches.replace(module, "register_logger", register_over, everywhere=True)
    patches.replace(module, "_log_native", native_over)


def _network(module: ModuleType, patches: Patches) -> None:
    def set_over(set_network: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(set_network)
        def set_until_end(*args: Any, **kwargs: Any) -> Any:
            worker = current_worker_or_none()
            if worker is not None:
                call_at_end(worker, module._LIB.LGBM_NetworkFree)
            return set_network(*args, **kwargs)

        return set_until_end

    patches.replace(module.Booster, "set_network", set_over)


table.add(
    Row(
        state="lightgbm's network (`machines`)",
        treatment=Treatment.PER_WORKER,
        meaning="Each worker trains with the machines that it has named. A script's end frees its "
        "network, without which the next script would find it.",
        test="tests/isolation/test_libraries.py::test_workers_train_with_a_network_of_lightgbm",
        on_import={"lightgbm.basic": _network},
        in_own_process=True,
        library="lightgbm",
    )
)
table.add(
    Row(
        state="`lightgbm.register_logger`",
        treatment=Treatment.PER_WORKER,
        meaning="What is trained on a worker is told to the worker's logger; a worker that "
        "registers none has the notebook's. What lightgbm's C++ code prints goes to stdout there.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_logger_of_lightgbm",
        on_import={"lightgbm.basic": _logger},
        library="lightgbm",
    )
)

"""What NCCL, or RCCL where torch is built for ROCm, is told about the process that uses it."""

from __future__ import annotations

import os

# Read by torch whenever it makes a process group. What the user has set stays.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort communicators, never the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # or a watchdog of the watchdog ends it
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "CUDA_MODULE_LOADING": "EAGER",  # loading a kernel may wait for one that waits for us
}


def set_environment() -> None:
    """Have torch leave the process alone when NCCL fails, unless the user wants it otherwise."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)

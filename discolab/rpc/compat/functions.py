"""`torch.distributed.rpc.functions`."""

from __future__ import annotations

from ..futures import async_execution

__all__ = ["async_execution"]

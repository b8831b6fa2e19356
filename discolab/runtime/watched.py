"""Which of a worker's values have been written to since they were made: pure state, of its thread.

After a worker's death a value is made again by its recipe only if nobody has written to it since,
here or on the other workers (restart.py). torch counts the in-place operations on a tensor; what
goes past that count (``tensor.data``, a numpy view) goes past this one too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch


class WatchedValues:
    """Watches tensors by the registers that hold them.

    Attributes
    ----------
    tensors
        By a key: the register, the tensor in it, and its count of in-place operations. The key is
        the register, or for what a value was made from, minus the register of that value.
    changed
        Key -> the call after which it was found changed.
    """

    __slots__ = ("changed", "tensors")

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[int, weakref.ref[torch.Tensor], int]] = {}
        self.changed: dict[int, int] = {}

    def watch(self, reg: int, value: Any, key: int = 0) -> None:
        """Watch what a register holds from now on, as it is now."""
        key = key or reg
        self.changed.pop(key, None)
        if isinstance(value, torch.Tensor) and not value.is_inference():
            self.tensors[key] = reg, weakref.ref(value), value._version
        else:
            self.tensors.pop(key, None)

    def look(self, registers: Mapping[int, Any], ordinal: int) -> list[int]:
        """Find what has changed since, in the call of that ordinal; each is told of once."""
        found: list[int] = []
        for key, (reg, ref, version) in self.tensors.copy().items():
            tensor = ref()
            if tensor is None or id(registers.get(reg)) != id(tensor):
                del self.tensors[key]
            elif tensor._version != version:
                del self.tensors[key]
                self.changed[key] = ordinal
                found.append(key)
        return found

    def is_unchanged(self, key: int) -> bool:
        """Whether it is watched, and was found as it was at the last look."""
        return key in self.tensors

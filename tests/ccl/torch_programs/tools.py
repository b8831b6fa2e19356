"""Models of torch's own test utilities, which ship with torch."""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any
from unittest import mock

import torch

try:
    import expecttest  # noqa: F401 - which torch's utilities import, for comparing long texts
except ImportError:
    empty: Any = types.ModuleType("expecttest")
    empty.TestCase = unittest.TestCase
    sys.modules["expecttest"] = empty

# torch's utilities freeze the flags of torch.backends for the whole process: other tests set them
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal.distributed._tensor.common_dtensor import (
        MLPModule,
        MLPStacked,
        ModelArgs,
        Transformer,
    )

__all__ = ["MLPModule", "MLPStacked", "ModelArgs", "Transformer"]

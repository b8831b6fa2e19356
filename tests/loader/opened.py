"""What the tests of the formats share: everything is read, or one error says why not."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import DiscoError
from discolab.loader.catalog import Catalog
from discolab.loader.errors import CheckpointError
from discolab.loader.formats import open_checkpoint
from discolab.loader.read import Files, read_entry

from .checkpoints import same_bits

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.zeros(2)}


def refused(
    path: Path, says: str, file: str | None = None, parameter: str | None = None
) -> CheckpointError:
    """Open it, and see that the one error says what it should."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    error = caught.value
    assert re.search(says, error.text), error.text
    assert os.path.basename(error.file) == (file or path.name)
    assert error.parameter == parameter
    assert str(error).startswith(error.file)
    assert isinstance(error, DiscoError)
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    return error


Change = Callable[[Any], Any]


def edit(path: Path, change: Change) -> None:
    """Change a JSON file in place."""
    root = json.loads(path.read_text())
    change(root)
    path.write_text(json.dumps(root))


def put(value: Any, *keys: Any) -> Change:
    """A change that puts `value` under these keys."""

    def change(root: Any) -> None:
        for key in keys[:-1]:
            root = root[key]
        root[keys[-1]] = value

    return change


def drop(*keys: Any) -> Change:
    """A change that takes away what is under these keys."""

    def change(root: Any) -> None:
        for key in keys[:-1]:
            root = root[key]
        del root[keys[-1]]

    return change


# No sizes or offsets, whatever else they are.
NOT_WHOLE = [-1, 2**63, 10**30, 1.0, True, math.nan, math.inf, None, "8", [], {}]


def read_all(catalog: Catalog) -> dict[str, torch.Tensor]:
    """Every tensor, whole."""
    with Files(catalog.files) as files:
        return {name: read_entry(files, entry) for name, entry in catalog.entries.items()}


def assert_holds(catalog: Catalog, tensors: dict[str, torch.Tensor]) -> None:
    """Fails unless these are its tensors, in this order, bit by bit."""
    found = read_all(catalog)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert catalog.entries[name].shape == tuple(tensor.shape)
        assert same_bits(found[name], tensor.detach()), name

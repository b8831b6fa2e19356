"""What torch.save and DCP write: flattened, found in place, and no code is run."""

from __future__ import annotations

import argparse
import pickle
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from discolab.loader.errors import CheckpointError
from discolab.loader.formats import open_checkpoint

from .checkpoints import (
    SAFETENSORS_NAMES,
    filled,
    write_dcp,
    write_dcp_chunks,
    write_torch,
    write_torch_index,
)
from .opened import assert_holds

# torch.save


def test_what_torch_save_can_nest(tmp_path: Path) -> None:
    weights = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.nn.Parameter(torch.ones(3))}
    state = {
        "model": OrderedDict(weights),
        "optimizer": {"state": {0: {"m": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]},
        "lists": [torch.ones(1), (torch.ones(2),)],
        "args": argparse.Namespace(x=1),
        "tags": {"a", "b"},
        "empty": {},
        "epoch": 3,
    }
    catalog = open_checkpoint(write_torch(tmp_path / "m.pt", state))
    assert_holds(
        catalog,
        {
            "model.w": weights["w"],
            "model.b": weights["b"],
            "optimizer.state.0.m": torch.zeros(2),
            "lists.0": torch.ones(1),
            "lists.1.0": torch.ones(2),
        },
    )
    assert catalog.metadata == {"non_tensors": 4}


def test_views_and_tied_tensors_of_torch_save(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "whole": whole,
        "tied": whole,
        "row": whole[2],
        "column": whole[:, 1],
        "turned": whole.t(),
        "inner": whole[1:3, 2:5],
        "last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    catalog = open_checkpoint(write_torch(tmp_path / "m.pth", tensors))
    assert_holds(catalog, tensors)
    assert catalog.entries["turned"].pieces[0].strides == (1, 6)
    assert catalog.entries["row"].pieces[0].strides is None
    assert catalog.entries["tied"].pieces == catalog.entries["whole"].pieces


@pytest.mark.parametrize("dtype", [*SAFETENSORS_NAMES, torch.complex128])
def test_dtypes_of_torch_save(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"w": filled((3, 4), dtype)}
    assert_holds(open_checkpoint(write_torch(tmp_path / "m.bin", tensors)), tensors)


def test_the_index_of_several_files_of_torch_save(tmp_path: Path) -> None:
    tensors = {f"p{i}": filled((2, 3), torch.bfloat16, i) for i in range(5)}
    names = list(tensors)
    halves = [{n: tensors[n] for n in half} for half in (names[:3], names[3:])]
    index = write_torch_index(tmp_path, halves)
    for path in (tmp_path, index):
        catalog = open_checkpoint(path)
        assert (catalog.format, catalog.path, len(catalog.files)) == ("torch", str(path), 2)
        assert_holds(catalog, tensors)


def test_offsets_are_those_that_torch_itself_finds(tmp_path: Path) -> None:
    """In a file of more than 4 GiB too, whose zip has wider numbers; it is a hole on the disk."""
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        state = {"large": torch.empty(2**32 + 5, dtype=torch.uint8), "small": torch.empty(3, 4)}
        torch.save(state, tmp_path / "m.pt")
    catalog = open_checkpoint(tmp_path)
    with FakeTensorMode():
        found = torch.load(tmp_path / "m.pt", weights_only=True)
    for name, tensor in found.items():
        offset = tensor.untyped_storage()._checkpoint_offset
        assert catalog.entries[name].pieces[0].offset == offset
    assert catalog.entries["small"].pieces[0].offset > 2**32


def test_one_tensor_alone(tmp_path: Path) -> None:
    write_torch(tmp_path / "m.pt", torch.arange(3))
    assert_holds(open_checkpoint(tmp_path), {"tensor": torch.arange(3)})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle(tmp_path: Path, protocol: int) -> None:
    tensors = {"w": torch.arange(6.0), "v": torch.nn.Parameter(torch.ones(1))}
    torch.save(tensors, tmp_path / "m.pt", pickle_protocol=protocol)
    assert_holds(open_checkpoint(tmp_path), tensors)


class Runs:
    """A pickle of it runs code when it is loaded by pickle."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "it ran"
    write_torch(tmp_path / "a" / "m.pt", {"w": torch.ones(2), "x": Runs(target)})
    assert list(open_checkpoint(tmp_path / "a").entries) == ["w"]
    write_dcp(tmp_path / "b", {"w": torch.ones(2)})
    metadata = tmp_path / "b" / ".metadata"
    about = pickle.loads(metadata.read_bytes())
    about.planner_data = Runs(target)
    metadata.write_bytes(pickle.dumps(about))
    assert list(open_checkpoint(tmp_path / "b").entries) == ["w"]
    assert not target.exists()
    pickle.loads(metadata.read_bytes())
    assert target.exists()  # it would have


# DCP


def test_chunks_of_dcp_are_pieces(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(20.0).reshape(5, 4), "s": torch.tensor(2)}
    write_dcp_chunks(tmp_path, tensors, 3)
    catalog = open_checkpoint(tmp_path)
    assert_holds(catalog, tensors)
    pieces = catalog.entries["w"].pieces
    assert [piece.start for piece in pieces] == [(0, 0), (2, 0), (4, 0)]
    assert [piece.shape for piece in pieces] == [(2, 4), (2, 4), (1, 4)]


def test_dcp_with_several_files_and_other_things(tmp_path: Path) -> None:
    state = {"model": {f"p{i}": filled((4, i + 1), torch.bfloat16) for i in range(6)}, "epoch": 3}
    write_dcp(tmp_path, state, thread_count=3)
    catalog = open_checkpoint(tmp_path)
    assert len(catalog.files) == 3
    assert_holds(catalog, {f"model.{name}": t for name, t in state["model"].items()})
    assert catalog.metadata == {"non_tensors": 1}


def test_a_tensor_of_dcp_that_is_not_in_c_order(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(20.0).reshape(5, 4).t()}
    write_dcp(tmp_path, tensors)
    assert_holds(open_checkpoint(tmp_path), tensors)


def test_safetensors_of_dcp(tmp_path: Path) -> None:
    """Consolidated ones are like any other; the part of one process is refused."""
    import torch.distributed.checkpoint as dcp

    tensors = {"w": filled((4, 2), torch.bfloat16), "v": torch.ones(3)}
    writer = dcp.HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, enable_consolidation=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that there is one process
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    assert_holds(open_checkpoint(tmp_path), tensors)
    with pytest.raises(CheckpointError, match="one process's part of a DCP checkpoint"):
        open_checkpoint(tmp_path / "sharded")


def test_processes_that_hold_nothing_of_a_tensor(tmp_path: Path) -> None:
    """Of 5 rows over 4 processes the last one has none; DCP has a chunk of it nevertheless."""
    tensors = {"w": torch.arange(10.0).reshape(5, 2)}
    write_dcp_chunks(tmp_path, tensors, 4)
    metadata = tmp_path / ".metadata"
    about = pickle.loads(metadata.read_bytes())
    chunks = about.state_dict_metadata["w"].chunks
    chunks.append(replace(chunks[0], offsets=torch.Size([5, 0]), sizes=torch.Size([0, 2])))
    metadata.write_bytes(pickle.dumps(about))
    assert_holds(open_checkpoint(tmp_path), tensors)

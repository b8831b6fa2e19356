"""Boxes of files land in tensors: whatever lies in one run, does not, is cast, or is padded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from discolab.layouts.layout import Layout, Workers, chunk, cut
from discolab.loader import read
from discolab.loader.catalog import Entry, File, Piece
from discolab.loader.errors import CheckpointError
from discolab.loader.read import Files, read_entry
from tests.loader.checkpoints import COMMON_DTYPES, filled, raw, same_bits


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    if not shape or draw(st.booleans()):
        return shape, Layout()
    return shape, Layout(
        (draw(st.integers(0, len(shape) - 1)),), pad_to=draw(st.sampled_from([0, 4]))
    )


def expected(tensor: torch.Tensor, layout: Layout, workers: int, rank: int) -> torch.Tensor:
    if not layout.cuts:
        return tensor
    dim = layout.dims[0]
    assert dim is not None
    size = tensor.shape[dim]
    full = -(-size // layout.pad_to) * layout.pad_to if layout.pad_to else size
    shape = [*tensor.shape]
    shape[dim] = full
    padded = torch.zeros(shape, dtype=tensor.dtype)
    padded.narrow(dim, 0, size).copy_(tensor)
    return padded.narrow(dim, *chunk(full, workers, rank)).contiguous()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    case=layouts(),
    dtype=st.sampled_from(COMMON_DTYPES),
    target=st.sampled_from([None, torch.float32]),
    offset=st.integers(0, 9),
    workers=st.integers(1, 4),
    block=st.sampled_from([7, 64, read.BLOCK]),
    mmap=st.booleans(),
)
def test_what_a_worker_holds_is_read_bit_for_bit(
    tmp_path: Path,
    case: tuple[tuple[int, ...], Layout],
    dtype: torch.dtype,
    target: torch.dtype | None,
    offset: int,
    workers: int,
    block: int,
    mmap: bool,
) -> None:
    shape, layout = case
    tensor = filled(shape, dtype)
    path = tmp_path / "f"
    path.write_bytes(b"x" * offset + raw(tensor) + b"yy")
    entry = Entry("p", shape, dtype, dtype, (Piece(0, offset, (0,) * len(shape), shape),))
    file = File(str(path), path.stat().st_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "BLOCK", block)
        for rank in range(workers):
            part = cut(layout, shape, Workers.of(workers), rank)
            with Files([file], mmap) as files:
                found = read_entry(files, entry, part, target)
            assert same_bits(found, expected(tensor.to(target or dtype), layout, workers, rank))


def test_a_transposed_piece_is_read_in_its_own_order(tmp_path: Path) -> None:
    tensor = filled((6, 4), torch.float32)
    path = tmp_path / "f"
    path.write_bytes(raw(tensor))
    entry = Entry("p", (4, 6), torch.float32, torch.float32, (Piece(0, 0, (0, 0), (4, 6), (1, 4)),))
    with Files([File(str(path), 96)]) as files:
        assert torch.equal(read_entry(files, entry), tensor.T)


def test_bytes_are_counted_as_they_land(tmp_path: Path) -> None:
    tensor = filled((64, 64), torch.float32)
    path = tmp_path / "f"
    path.write_bytes(raw(tensor))
    entry = Entry("p", (64, 64), torch.float32, torch.float32, (Piece(0, 0, (0, 0), (64, 64)),))
    for layout, target in ((Layout(), None), (Layout((1,)), None), (Layout(), torch.float16)):
        landed: list[int] = []
        with Files([File(str(path), 64 * 64 * 4)], report=landed.append) as files:
            part = cut(layout, (64, 64), Workers.of(2), 1)
            found = read_entry(files, entry, part, target)
        assert sum(landed) == found.numel() * found.element_size()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("layout", [Layout(), Layout((1,))])
def test_a_file_that_has_shrunk_is_an_error(tmp_path: Path, layout: Layout, mmap: bool) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(100))
    entry = Entry("w", (5, 5), torch.float32, torch.float32, (Piece(0, 0, (0, 0), (5, 5)),))
    file = File(str(path), 100)
    path.write_bytes(bytes(60))
    part = cut(layout, (5, 5), Workers.of(2), 0)
    with Files([file], mmap) as files, pytest.raises(CheckpointError) as caught:
        read_entry(files, entry, part)
    assert "has 60 bytes here, and had 100" in str(caught.value)
    assert caught.value.parameter == "w"
    assert caught.value.file == str(path)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    entry = Entry("w", (1,), torch.int8, torch.int8, (Piece(0, 0, (0,), (1,)),))
    with (
        Files([File(str(tmp_path / "f"), 1)]) as files,
        pytest.raises(CheckpointError, match=r"'w': can't be opened on this worker: No such file"),
    ):
        read_entry(files, entry)

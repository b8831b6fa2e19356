"""Bad files of torch.save and DCP: each gives one error, and none runs code or hangs."""

from __future__ import annotations

import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab.loader.formats import open_checkpoint

from .checkpoints import (
    write_dcp,
    write_dcp_chunks,
    write_torch,
    write_torch_index,
)
from .opened import TENSORS, Change, edit, put, refused

# torch.save


def test_files_that_torch_save_has_not_written(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", TENSORS)
    good = path.read_bytes()
    for content, says in [
        (good[:-30], "truncated or no file of torch.save"),
        (good[:100], "truncated or no file of torch.save"),
        (good[40:], "expected the zip that torch.save writes"),
        (b"", "is empty"),
        (good.replace(b"byteorder", b"byteordxr"), ""),
        (good.replace(b"little", b"bigbig"), "not in little-endian order; load it with torch.load"),
        (good.replace(b"data.pkl", b"data.pkx"), "has no data.pkl"),
    ]:
        path.write_bytes(content)
        if says:
            refused(path, says)
        else:
            assert len(open_checkpoint(path).entries) == 3
    torch.save(TENSORS, path, _use_new_zipfile_serialization=False)
    refused(path, "before 1.6, or in its old format; load it with torch.load and save it again")


def _rezip(path: Path, method: int, change: Callable[[str, bytes], bytes] = lambda _, d: d) -> None:
    with zipfile.ZipFile(path) as old:
        records = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w", method) as new:
        for name, data in records:
            new.writestr(name, change(name, data))


def test_a_compressed_zip(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", TENSORS)
    _rezip(path, zipfile.ZIP_STORED)
    assert len(open_checkpoint(path).entries) == 3
    _rezip(path, zipfile.ZIP_DEFLATED)
    refused(path, "compressed or encrypted; load it with torch.load and save it again")


def test_a_storage_that_is_missing_or_of_another_size(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", TENSORS)
    _rezip(path, zipfile.ZIP_STORED, lambda n, d: d[:-4] if n.endswith("data/1") else d)
    refused(path, "its storage has 12 bytes; expected 16", parameter="b")
    path = write_torch(tmp_path / "n.pt", TENSORS)
    path.write_bytes(path.read_bytes().replace(b"/data/1", b"/data/9"))
    refused(path, "has no record .data/1", parameter="b")


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "says"),
    [
        ((2, 4), (4, 1), 0, "reaches element 7 of a storage of 6 float32"),
        ((2, 3), (3, 1), 1, "reaches element 6 of a storage of 6"),
        ((2, 3), (-3, 1), 0, "a stride is -3; expected a whole number"),
        ((2, 3), (3, 1), -1, "its offset in the storage is -1"),
        ((2, 3), (3, 1), 2**70, "its offset in the storage is"),
        ((2, -3), (3, 1), 0, "a size in shape .* is -3"),
        ((2, 3.0), (3, 1), 0, "a size in shape .* is 3.0"),
        ((2, 3), (3,), 0, "strides .* do not fit shape"),
        (7, (3,), 0, "expected a list of sizes"),
        ((2**40,), (0,), 0, "has 1099511627776 elements, and its storage 6: it was expanded"),
    ],
)
def test_a_tensor_that_is_not_in_its_storage(
    tmp_path: Path, shape: Any, strides: Any, offset: Any, says: str
) -> None:
    class Odd(torch.Tensor):
        def __reduce_ex__(self, protocol: Any) -> Any:
            untyped = TENSORS["a"].untyped_storage()
            storage = torch.storage.TypedStorage(
                wrap_storage=untyped, dtype=torch.float32, _internal=True
            )
            args = (storage, offset, shape, strides, False, {})
            return torch._utils._rebuild_tensor_v2, args

    path = write_torch(tmp_path / "m.pt", {"x": {"w": TENSORS["a"].as_subclass(Odd)}})
    refused(path, says, parameter="x.w")


def test_tensors_of_torch_that_are_no_plain_ones(tmp_path: Path) -> None:
    for number, (tensor, says) in enumerate(
        [
            (torch.eye(2).to_sparse(), "no plain dense tensor .*to_dense"),
            (torch.ones(2, device="meta"), "no plain dense tensor"),
            (torch.ones(2, dtype=torch.complex64).conj(), "no plain dense tensor .*resolve_conj"),
            (torch.ones(1).expand(4), "it was expanded; save it with .contiguous()"),
        ]
    ):
        path = write_torch(tmp_path / f"{number}.pt", {"model": {"w": tensor}})
        refused(path, says, parameter="model.w")


def test_a_whole_model_instead_of_its_weights(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m.pt", torch.nn.Linear(2, 2))
    refused(path, "a whole object of torch.nn.modules.linear.Linear.*save its state_dict")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    refused(write_torch(tmp_path / "m.pt", state), "is there twice", parameter="a.b")


def test_pickles_that_would_take_for_ever(tmp_path: Path) -> None:
    laughs: Any = {"w": 1}
    for _ in range(40):
        laughs = {"a": laughs, "b": laughs}
    refused(write_torch(tmp_path / "laughs.pt", laughs), "more than .* things|letters")
    loop: dict[str, Any] = {}
    loop["again"] = loop
    refused(write_torch(tmp_path / "loop.pt", loop), "deeper than 64 levels")
    long: Any = {"x" * 2**20: 1}
    refused(
        write_torch(tmp_path / "long.pt", {str(i): long for i in range(100)}), "names have more"
    )


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x02r\xff\xff\xff\x7f.",  # LONG_BINPUT far away
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a bytearray of a terabyte
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of all there is
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",  # bytes
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x02" + b")" + b"\x85" * 60_000 + b"}" + b"\x8c\x01a" + b"s.",
        b"\x80\x02}" + b")" + b"\x85" * 60_000 + b"Ns.",  # a key that is nested deeply
        b"\x80\x02\x8f(" + b")" + b"\x85" * 60_000 + b"\x90.",  # a set of the same
        b"\x80\x02" + b"]" * 60_000 + b"a" * 59_999 + b".",
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00trueq\x00\x85R.",
    ],
)
def test_pickles_that_ask_for_too_much(tmp_path: Path, code: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(code)
    tracemalloc.start()
    try:
        refused(tmp_path, "pickle can't be read|expected a Metadata", ".metadata")
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 100 * len(code)
    finally:
        tracemalloc.stop()


def test_the_index_of_several_files_of_torch_save(tmp_path: Path) -> None:
    index = write_torch_index(tmp_path, [TENSORS, {"d": torch.ones(1)}])
    second = "pytorch_model-00002-of-00002.bin"
    good = index.read_text()
    for value, says, file in [
        ("../x", "leaves the checkpoint's folder", index.name),
        (7, "not the name of a file", index.name),
        ("gone.bin", "no such file", "gone.bin"),
        ("pytorch_model-00001-of-00002.bin", "none of its files has it", index.name),
    ]:
        edit(index, put(value, "weight_map", "d"))
        refused(tmp_path, says, file, "d")
        index.write_text(good)
    write_torch(tmp_path / second, {"d": torch.ones(1), "a": torch.ones(1)})
    refused(tmp_path, "is there twice", index.name, "a")


# DCP


def _edit_metadata(folder: Path, change: Change) -> None:
    path = folder / ".metadata"
    about = pickle.loads(path.read_bytes())
    change(about)
    path.write_bytes(pickle.dumps(about))


def _chunk(number: int, **fields: Any) -> Change:
    """A change of chunk `number` of the tensor `a`."""
    return lambda about: about.state_dict_metadata["a"].chunks[number].__dict__.update(fields)


def _about(name: str, **fields: Any) -> Change:
    return lambda about: about.state_dict_metadata[name].__dict__.update(fields)


def _place(**fields: Any) -> Change:
    """A change of where the first chunk of `a` is."""

    def change(about: Any) -> None:
        info = next(v for k, v in about.storage_data.items() if k.fqn == "a")
        info.__dict__.update(fields)

    return change


@pytest.mark.parametrize(
    ("change", "says", "file"),
    [
        (_about("a", size=torch.Size([2, 4])), "6 elements together; expected 8", ".metadata"),
        (_about("a", size=(2, -3)), "a size in shape .* is -3", ".metadata"),
        (_about("a", size=(2, 2**70)), "a size in shape", ".metadata"),
        (_about("a", size=None), "expected a list of sizes", ".metadata"),
        (_about("a", chunks=None), "chunks is None; expected a list", ".metadata"),
        (_about("a", chunks=[3]), "holds 3; expected a ChunkStorageMetadata", ".metadata"),
        (_about("a", chunks=[]), "0 elements together; expected 6", ".metadata"),
        (_about("a", properties=None), "dtype None is not known", ".metadata"),
        (_chunk(0, sizes=(1, 4)), "expected float32 .1, 4", "__0_0.distcp"),
        (_chunk(0, offsets=(1, 1)), "no place for the chunk that starts at .1, 1", ".metadata"),
        (_chunk(1, offsets=(0, 0)), "overlap", ".metadata"),
        (_place(relative_path="../x"), "leaves the checkpoint's folder", ".metadata"),
        (_place(relative_path="/etc/passwd"), "is absolute", ".metadata"),
        (_place(relative_path=None), "not the name of a file", ".metadata"),
        (_place(relative_path="gone"), "no such file", "gone"),
        (_place(relative_path="pipe"), "is a named pipe", "pipe"),
        (_place(offset=-1), "offset is -1; expected a whole number", ".metadata"),
        (_place(offset=True), "offset is True", ".metadata"),
        (_place(offset=7), "the chunk at 7: ", "__0_0.distcp"),
        (_place(length=2**63), "length is", ".metadata"),
        (_place(length=2**62), "expected a chunk from 0 to", "__0_0.distcp"),
        (_place(length=3), "the chunk at 0: is truncated or no file of torch.save", "__0_0.distcp"),
        (_place(transform_descriptors=["zstd"]), "transformed by .*zstd.*without", ".metadata"),
    ],
)  # fmt: skip
def test_metadata_of_dcp(tmp_path: Path, change: Change, says: str, file: str) -> None:
    write_dcp_chunks(tmp_path, TENSORS, 2)
    os.mkfifo(tmp_path / "pipe")
    _edit_metadata(tmp_path, change)
    refused(tmp_path, says, file, "a")


def test_other_faults_of_dcp(tmp_path: Path) -> None:
    write_dcp(tmp_path, TENSORS)
    data, about = tmp_path / "__0_0.distcp", tmp_path / ".metadata"
    good, whole = about.read_bytes(), data.read_bytes()
    about.write_bytes(good[: len(good) // 2])
    refused(tmp_path, "its pickle can't be read", ".metadata")
    about.write_bytes(pickle.dumps({"a": 1}))
    refused(tmp_path, "expected a Metadata", ".metadata")
    about.write_bytes(good)
    os.truncate(data, len(whole) - 1)
    refused(tmp_path, f"has {len(whole) - 1} bytes; expected a chunk", data.name, "c")
    data.unlink()
    refused(tmp_path, "no such file", data.name, "a")


def test_names_that_cannot_be_printed_do_not_hide_the_error(tmp_path: Path) -> None:
    """A pickle may hold halves of surrogate pairs anywhere."""
    lone = b"\x8c\x03\xed\xa0\x80"
    for code in (
        b"\x80\x04" + lone + lone + b"\x93.",
        b"\x80\x04" + lone * 2 + b"\x93)R.",
        b"\x80\x04(X\x07\x00\x00\x00storage" + lone * 2 + b"\x93" + lone * 2 + b"K\x01tQ.",
    ):
        (tmp_path / ".metadata").write_bytes(code)
        str(refused(tmp_path, "expected a Metadata|can't be read", ".metadata")).encode()

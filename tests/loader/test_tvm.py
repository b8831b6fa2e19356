"""TVM's own loader and ours, on files that TVM and we have written. Needs the wheel apache-tvm."""

import importlib
import importlib.util
import json
import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import Session, make_session
from discolab.loader import shard

from . import tvm_side
from .tvm_side import WORKERS, dump, raw, raw_all

if importlib.util.find_spec("tvm") is None:
    pytest.skip("needs TVM: pip install -e '.[tvm]'", allow_module_level=True)

tvm = tvm_side.register()

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES += ["int8", "uint8", "int32", "int64", "bool"]

Call = tuple[Any, ...]


@pytest.fixture(scope="module")
def child() -> Iterator[Executor]:
    """A process for TVM's sessions: if one ends it, the test fails, and that is all."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def duo() -> Iterator[Session]:
    """A session of ours of as many workers."""
    with make_session(WORKERS, "threads", devices="cpu", timeout=30) as sess:
        yield sess


def theirs(child: Executor, index: str, *calls: Call, info: Any = None) -> list[Any]:
    found: list[Any] = child.submit(tvm_side.load, index, list(calls), info).result(60)
    return found


def ours(sess: Session, index: str, *calls: Call, info: Any = None) -> list[Any]:
    create = sess.get_global_func("runtime.disco.ShardLoader")
    loader = create(index, Path(index).read_text(), json.dumps(info or {}), None)
    found = []
    for name, *args in calls:
        func = sess.get_global_func(f"runtime.disco.ShardLoader{name}")
        found.append([raw_all(value) for value in func(loader, *args).debug_get_from_all()])
    return found


def numbers(*shape: int, dtype: str = "float32") -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 50
    return made.to(getattr(torch, dtype))


@pytest.mark.parametrize("encode_format", ["raw", "f32-to-bf16"])
def test_every_dtype_that_tvm_writes(
    tmp_path: Path, duo: Session, child: Executor, encode_format: str
) -> None:
    params = {f"param_{i}": numbers(4, 3, dtype=dtype) for i, dtype in enumerate(DTYPES)}
    index = dump(params, tmp_path, encode_format=encode_format)
    want = list(params.values())
    if encode_format == "f32-to-bf16":
        want[0] = want[0].bfloat16().float()
    got = ours(duo, index, ("LoadAll",))
    assert got == theirs(child, index, ("LoadAll",))
    assert got == [[raw_all(want)] * WORKERS]


def test_the_index_of_bfloat16_beside_it(tmp_path: Path, duo: Session, child: Executor) -> None:
    params = {"param_0": numbers(5, 3), "param_1": numbers(4, dtype="float16")}
    dump(params, tmp_path)
    index = str(tmp_path / "tensor-cache-b16.json")
    got = ours(duo, index, ("LoadAll",))
    assert got == theirs(child, index, ("LoadAll",))
    assert got == [[raw_all([params["param_0"].bfloat16(), params["param_1"]])] * WORKERS]


def test_one_function_does_for_both(tmp_path: Path, duo: Session, child: Executor) -> None:
    params = {
        "x_0": numbers(64, 128, dtype="float16"),
        "x_1": numbers(32, 12),
        "x_2": numbers(6),
        "x_3": numbers(4, 6),
    }
    info = {
        "x_0": [["tests.loader.tvm_dim_1", [[WORKERS, 64, 64], "float16"], WORKERS]],
        "x_1": [["tests.loader.tvm_dim_0", [[WORKERS, 16, 12], "float32"], WORKERS]],
        "x_3": [
            ["tests.loader.tvm_dim_0", [[WORKERS, 2, 6], "float32"], WORKERS],
            ["tests.loader.tvm_flat", [[WORKERS, 12], "float32"]],
        ],
    }
    index = dump(params, tmp_path, encode_format="raw")
    calls: list[Call] = [("Load", [i]) for i in range(4)]
    got = ours(duo, index, *calls, info=info)
    assert got == theirs(child, index, *[("Load", i) for i in range(4)], info=info)
    assert got[0] == raw_all(params["x_0"].chunk(WORKERS, 1))
    assert got[2] == raw_all([params["x_2"]] * WORKERS)


def test_records_out_of_order(tmp_path: Path, duo: Session, child: Executor) -> None:
    """A large one has a file of its own, before those that were waiting for theirs."""
    params = {f"param_{i}": numbers(8, 8) + i for i in range(3)}
    params["param_3"] = numbers(1024, 256)
    params["param_4"] = numbers(3)
    info = {"param_3": [["tests.loader.tvm_dim_0", [[WORKERS, 512, 256], "float32"], WORKERS]]}
    index = dump(params, tmp_path, encode_format="raw", shard_cap_mb=1)
    records = json.loads(Path(index).read_text())["records"]
    assert records[0]["records"][0]["name"] == "param_3"
    got = ours(duo, index, ("LoadAll",), ("Load", [0]), info=info)
    assert got[:1] == theirs(child, index, ("LoadAll",), info=info)
    assert [one[3] for one in got[0]] == raw_all(params["param_3"].chunk(WORKERS))
    assert got[1] == raw_all([params["param_0"]] * WORKERS)  # TVM counts records: param_3


def parts_of(params: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    return {
        f"{name}_shard-{rank + 1}-of-{WORKERS}": tensor.chunk(WORKERS, dim)[rank].clone(
            memory_format=torch.contiguous_format  # TVM takes no memory that is not aligned
        )
        for rank in range(WORKERS)
        for name, tensor in params.items()
    }


@pytest.mark.parametrize("dim", [0, 1])
def test_presharded_by_tvm(tmp_path: Path, duo: Session, child: Executor, dim: int) -> None:
    params = {f"param_{i}": numbers(8, 4 * (i + 1), dtype="float16") for i in range(4)}
    index = dump(parts_of(params, dim), tmp_path, encode_format="raw")
    calls: list[Call] = [("LoadAllPresharded",), *(("LoadPresharded", i) for i in range(4))]
    got = ours(duo, index, *calls)
    assert got == theirs(child, index, *calls)
    assert got[2] == raw_all(params["param_1"].chunk(WORKERS, dim))


def test_presharded_out_of_order(tmp_path: Path, duo: Session, child: Executor) -> None:
    params = {"param_0": numbers(8, 2), "param_1": numbers(1024, 300), "param_2": numbers(2, 5)}
    index = dump(parts_of(params, 0), tmp_path, encode_format="raw", shard_cap_mb=1)
    # with the number of a record TVM ends the process here
    calls: list[Call] = [("LoadAllPresharded",), *(("LoadPresharded", i) for i in range(3))]
    got = ours(duo, index, *calls)
    assert got[:1] == theirs(child, index, ("LoadAllPresharded",))
    assert got[1:] == [raw_all(tensor.chunk(WORKERS)) for tensor in params.values()]


def test_on_worker_0_alone(tmp_path: Path, duo: Session) -> None:
    index = dump({"param_0": numbers(3), "param_1": numbers(2, 2)}, tmp_path, encode_format="raw")
    assert ours(duo, index, ("LoadParamOnWorker0", 1))[0][0] == raw(numbers(2, 2))


def test_a_module_of_tvm_ffi(tmp_path: Path, duo: Session) -> None:
    """What it has no function for is looked up in the registry."""
    from discolab.loader.disco.shard_loader import create

    whole = numbers(4, 6)
    index = dump({"x": whole}, tmp_path, encode_format="raw")
    info = {"x": [["tests.loader.tvm_dim_0", [[WORKERS, 2, 6], "float32"], WORKERS]]}

    def load() -> torch.Tensor:
        library = importlib.import_module("tvm_ffi").system_lib()
        return create(index, "", info, library).load("x")

    assert raw_all(duo.call_packed(load).debug_get_from_all()) == raw_all(whole.chunk(WORKERS))


LIBRARY = r"""
void rows_plus(tvm::ffi::TensorView x, int64_t parts, tvm::ffi::TensorView y) {
  for (int64_t i = 0; i < x.size(0) * x.size(1); ++i)
    static_cast<float*>(y.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i] + parts;
}
tvm::ffi::String get_shard_info() {
  return R"({"param_0": [["rows_plus", [[2, 2, 3], "float32"], 2]]})";
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_module_has_functions_and_shard_info(tmp_path: Path, duo: Session) -> None:
    build = importlib.import_module("tvm_ffi.cpp").build_inline
    library = build(
        "shards",
        cpp_sources=LIBRARY,
        functions=["rows_plus", "get_shard_info"],
        build_directory=str(tmp_path),
    )
    whole = numbers(4, 3)
    index = dump({"param_0": whole}, tmp_path, encode_format="raw")
    create = duo.get_global_func("runtime.disco.ShardLoader")
    loader = create(index, Path(index).read_text(), "", duo.load_module(library))
    load = duo.get_global_func("runtime.disco.ShardLoaderLoad")
    got = load(loader, [0]).debug_get_from_all()
    assert raw_all(got) == raw_all((whole + WORKERS).chunk(WORKERS))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # TVM's reader leaves files open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_catalog_of_what_tvm_has_written(tmp_path: Path) -> None:
    from discolab.loader.formats import open_checkpoint, verify
    from discolab.loader.read import Files, read_entry

    params = {"a": numbers(3, 5), "b": numbers(7, dtype="bfloat16"), "c": numbers(2, dtype="int8")}
    index = dump(params, tmp_path, meta_data={"made by": "tvm"})
    catalog = open_checkpoint(tmp_path)
    assert catalog.metadata["made by"] == "tvm"
    verify(catalog)
    known, _ = tvm.contrib.tvmjs.load_tensor_cache(index, tvm.cpu())
    with Files(catalog.files) as files:
        for name, entry in catalog.entries.items():
            assert raw(read_entry(files, entry)) == raw_all(known[name])


# -- files of ours ------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16_as", ["raw", "f32-to-bf16"])
def test_what_convert_has_written(
    tmp_path: Path, duo: Session, child: Executor, bf16_as: str
) -> None:
    params = {f"param_{i}": numbers(4, 6, dtype=dtype) for i, dtype in enumerate(DTYPES)}
    params["param_0"] = numbers(1024, 256)
    source = dump(params, tmp_path / "whole", encode_format="raw")
    dims = {name: i % 2 for i, name in enumerate(params)}
    plan = {name: f"shard({dim})" for name, dim in dims.items()}
    out = tmp_path / "shards"
    options: dict[str, Any] = {"format": "tensor-cache", "bf16_as": bf16_as, "progress": False}
    shard(source, out, plan, WORKERS, max_file_bytes=1 << 20, **options)
    index = str(out / "tensor-cache.json")
    wanted = dict(params)
    if bf16_as == "f32-to-bf16":
        wanted["param_2"] = wanted["param_2"].float()
    chunks = [tensor.chunk(WORKERS, dims[name]) for name, tensor in wanted.items()]
    got = ours(duo, index, ("LoadAllPresharded",))
    assert got == theirs(child, index, ("LoadAllPresharded",))
    assert got == [[raw_all([chunk[rank] for chunk in chunks]) for rank in range(WORKERS)]]

    shard(index, tmp_path / "again", workers=1, presharded=False, **options)
    index = str(tmp_path / "again" / "tensor-cache.json")
    assert theirs(child, index, ("LoadAll",)) == [[raw_all(list(wanted.values()))] * WORKERS]


@pytest.mark.parametrize("presharded", [False, True])
def test_what_a_session_has_saved(
    tmp_path: Path, duo: Session, child: Executor, presharded: bool
) -> None:
    params = {f"param_{i}": numbers(4, 6, dtype=dtype) for i, dtype in enumerate(DTYPES)}
    source = dump(params, tmp_path / "whole", encode_format="raw")
    weights = duo.load(source, {"*": "shard(1)"}, progress=False)
    out = tmp_path / "out"
    duo.save(out, weights, format="tensor-cache", presharded=presharded, progress=False)
    name = "LoadAllPresharded" if presharded else "LoadAll"
    index = str(out / "tensor-cache.json")
    got = ours(duo, index, (name,))
    assert got == theirs(child, index, (name,))
    chunks = [tensor.chunk(WORKERS, 1) for tensor in params.values()]
    shards = [[chunk[rank] for chunk in chunks] for rank in range(WORKERS)]
    assert got == [raw_all(shards if presharded else [list(params.values())] * WORKERS)]

"""What Disco's ShardLoader says of bad files, functions and arguments, on every worker."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from discolab import ArgumentError, DRef, Session, WorkerError
from discolab.loader.disco import shard_info
from discolab.loader.errors import CheckpointError

from .shard_loading import call, create, numbers, same, values, write, write_functions


@pytest.fixture
def functions(tmp_path: Path) -> str:
    return write_functions(tmp_path)


@pytest.fixture
def failing(sess: Session) -> Callable[..., WorkerError]:
    """Fetch what fails; the session must be usable after it."""

    def fetch(ref: DRef) -> WorkerError:
        with pytest.raises(WorkerError) as caught:
            values(ref)
        sess.sync_all()
        ones = sess.call_packed(torch.ones, 2)
        assert values(sess.allreduce(ones, sess.empty((2,), "float32"), in_group=False))[3][0] == 4
        return caught.value

    return fetch


def about(error: WorkerError) -> dict[int, str]:
    return {failure.rank: f"{failure.type_name}: {failure.message}" for failure in error.failures}


def test_a_file_that_goes_missing_fails_on_all_workers(
    sess: Session, tmp_path: Path, failing: Callable[..., WorkerError]
) -> None:
    index = write(tmp_path, {"param_0": numbers(4)}, {"param_1": numbers(4, 2)})
    loader = create(sess, index, {"param_1": 0})
    values(call(sess, "Load", loader, 0))
    (tmp_path / "params_shard_1.bin").unlink()
    for name, args in (("Load", [1]), ("LoadAll", [])):
        error = failing(call(sess, name, loader, *args))
        found = about(error)
        assert found[0].startswith("CheckpointError: ")
        assert "params_shard_1.bin" in found[0]
        assert "'param_1'" in found[0]
        assert sorted(found) == [0, 1, 2, 3]
        assert [failure.victim for failure in error.failures] == [False, True, True, True]
    assert same(values(call(sess, "Load", loader, 0)), [numbers(4)] * 4)


def test_a_file_that_is_not_there_is_told_at_once(
    sess: Session, tmp_path: Path, failing: Callable[..., WorkerError]
) -> None:
    index = write(tmp_path, {"param_0": numbers(4)}, {"param_1": numbers(4, 2)})
    (tmp_path / "params_shard_1.bin").unlink()
    loader = create(sess, index)
    found = about(failing(loader))
    assert list(found) == [0]  # the others have no use for the files
    assert "params_shard_1.bin: is not there" in found[0]
    assert sorted(about(failing(call(sess, "LoadAll", loader)))) == [0, 1, 2, 3]


def test_parts_may_be_elsewhere(pair: Session, tmp_path: Path) -> None:
    x = numbers(4, 2)
    first, second = ({f"param_0_shard-{k + 1}-of-2": x.chunk(2)[k]} for k in range(2))
    index = write(tmp_path, first, second)
    (tmp_path / "params_shard_0.bin").unlink()  # as if it were on worker 0's machine
    loader = create(pair, index)
    ref = call(pair, "LoadPresharded", loader, 0)
    assert same([ref.debug_get_from_remote(1)], x.chunk(2)[1:])
    with pytest.raises(WorkerError, match=r"params_shard_0\.bin"):
        ref.debug_get_from_remote(0)


def test_a_file_that_was_cut_off_fails_on_all_workers(
    sess: Session, tmp_path: Path, failing: Callable[..., WorkerError]
) -> None:
    index = write(tmp_path, {"param_0": numbers(64)})
    loader = create(sess, index)
    sess.sync_all()
    (tmp_path / "params_shard_0.bin").write_bytes(b"\0" * 100)
    found = about(failing(call(sess, "Load", loader, 0)))
    assert sorted(found) == [0, 1, 2, 3]
    assert "256" in found[0]
    assert "params_shard_0.bin" in about(failing(create(sess, index)))[3]  # and at once


def test_a_loader_that_failed_on_worker_0_alone(
    sess: Session, tmp_path: Path, failing: Callable[..., WorkerError]
) -> None:
    index = write(tmp_path, {"x": numbers(4, 2)})
    loader = create(sess, index, {"x": [["tests.loader.nobody", [[4, 1, 2], "float32"], 4]]})
    found = about(failing(call(sess, "Load", loader, 0)))
    assert "tests.loader.nobody" in found[0]
    assert "'x'" in found[0]
    assert sorted(found) == [0, 1, 2, 3]


def test_a_function_that_fails_fails_on_all_workers(
    sess: Session, tmp_path: Path, functions: str, failing: Callable[..., WorkerError]
) -> None:
    check_function("fails", ["RuntimeError", "no more shards today"], sess, functions, failing)


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns", ["ArgumentError", "returns a tensor", "out.copy_"]),
        ("resizes", ["ArgumentError", "float32[4, 1, 2]", "float32[1]"]),
        ("dim_1", ["RuntimeError"]),
    ],
)
def test_a_function_that_does_not_fill_what_it_is_given(
    sess: Session,
    tmp_path: Path,
    functions: str,
    failing: Callable[..., WorkerError],
    name: str,
    words: list[str],
) -> None:
    check_function(name, words, sess, functions, failing)


def check_function(
    name: str, words: list[str], sess: Session, functions: str, failing: Callable[..., WorkerError]
) -> None:
    index = write(Path(functions).parent, {"x": numbers(4, 2)})
    info = {"x": [[name, [[4, 1, 2], "float32"], 4]]}
    error = failing(call(sess, "Load", create(sess, index, info, sess.load_module(functions)), 0))
    found = about(error)
    assert sorted(found) == [0, 1, 2, 3]
    for word in words:
        assert word in found[0], found[0]
    told = "\n".join(error.__notes__)
    assert name in told
    assert "'x'" in told or "'x'" in found[0]


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"x": [["dim_0", [[2, 2, 2], "float32"], 2]]}, ["'x'", "[2, 2, 2]", "workers, 4"]),
        ({"x": [["dim_0", [[], "float32"]]]}, ["'x'", "workers, 4"]),
        ({"x": 5}, ["'x'", "dimension 5", "[4, 2]"]),
        ({"x": 1}, ["'x'", "dimension 1", "4 equal parts"]),
        ({"x": [["dim_0", [[4, 1, 2], "float33"], 4]]}, ["'x'", "dim_0", "float33"]),
        ({"x": [["dim_0", [[4, -1], "float32"], 4]]}, ["'x'", "negative"]),
        ({"x": [["dim_0", [[4, 1.5], "float32"], 4]]}, ["'x'", "integers"]),
        ({"x": [["dim_0", [[4, 1, 2], "float32"], True]]}, ["'x'", "integers"]),
        ({"x": [["dim_0"]]}, ["'x'", "float16"]),
        ({"x": "dim_0"}, ["'x'", "dimension"]),
        ([1], ["[1]", "form"]),
    ],
)
def test_a_shard_info_that_does_not_fit(
    sess: Session,
    tmp_path: Path,
    failing: Callable[..., WorkerError],
    info: Any,
    words: list[str],
) -> None:
    found = about(failing(create(sess, write(tmp_path, {"x": numbers(4, 2)}), info)))
    assert sorted(found) == [0, 1, 2, 3]
    for word in ["ArgumentError", "shard_info", *words]:
        assert word in found[0], found[0]


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("name", "index", "words"),
    [
        ("Load", [7], ["param_7", "param_0 to param_1"]),
        ("Load", [-1], ["-1"]),
        ("Load", [0, 1], ["[0, 1]", "such as 3"]),
        ("Load", True, ["True"]),
        ("Load", "param_", ["param_", "did you mean"]),
        ("LoadParamOnWorker0", 2, ["param_2"]),
        ("LoadPresharded", 0, ["no parts", "_shard-1-of-4", "ShardLoaderLoad"]),
    ],
)
def test_a_parameter_that_is_not_there(
    sess: Session,
    tmp_path: Path,
    failing: Callable[..., WorkerError],
    name: str,
    index: Any,
    words: list[str],
) -> None:
    loader = create(sess, write(tmp_path, {"param_0": numbers(4), "param_1": numbers(4)}))
    found = about(failing(call(sess, name, loader, index)))
    assert sorted(found) == [0, 1, 2, 3]
    for word in words:
        assert word in found[2], found[2]


@pytest.mark.one_process
def test_load_all_needs_numbered_names(
    sess: Session, tmp_path: Path, failing: Callable[..., WorkerError]
) -> None:
    def told(*names: str, name: str = "LoadAll") -> str:
        folder = tmp_path / "-".join(names)
        folder.mkdir()
        loader = create(sess, write(folder, {key: numbers(4) for key in names}))
        return about(failing(call(sess, name, loader)))[1]

    assert "has 'norm'" in told("param_0", "norm")
    assert "has no 'param_1'" in told("param_0", "param_2")
    assert "ShardLoaderLoadAllPresharded" in told("param_0_shard-1-of-2", "param_0_shard-2-of-2")
    parts = [f"norm_shard-{k}-of-4" for k in range(1, 5)]
    assert "has 'norm'" in told(*parts, name="LoadAllPresharded")


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["x_shard-1-of-2", "x_shard-2-of-2"], ["2 parts", "4 workers", "discolab shard"]),
        (["x_shard-1-of-4", "x_shard-2-of-4", "x_shard-4-of-4"], ["worker 2", "1, 2, 4"]),
        ([f"x_shard-{k}" for k in range(6)], ["6 parts", "4 workers"]),
        (["x_shard-0", "x_shard-1", "x_shard-3"], ["worker 2", "0, 1, 3"]),
        (["x", *(f"x_shard-{k}-of-4" for k in range(1, 5))], ["can't be told from"]),
        (["x_shard-0", *(f"x_shard-{k}-of-4" for k in range(1, 5))], ["can't be told from"]),
        ([f"x_shard-{k}-of-4" for k in range(6)], ["too many"]),
    ],
)
def test_parts_that_are_not_one_for_each_worker(
    sess: Session,
    tmp_path: Path,
    failing: Callable[..., WorkerError],
    names: list[str],
    words: list[str],
) -> None:
    loader = create(sess, write(tmp_path, {name: numbers(2) for name in names}))
    found = about(failing(call(sess, "LoadPresharded", loader, 0)))
    assert sorted(found) == [0, 1, 2, 3]
    for word in ["CheckpointError", "tensor-cache.json", *words]:
        assert word in found[0], found[0]


@pytest.mark.one_process
def test_what_is_no_loader_and_no_index(
    sess: Session, tmp_path: Path, failing: Callable[..., WorkerError]
) -> None:
    found = about(failing(call(sess, "Load", sess.call_packed(int), 0)))
    assert "runtime.disco.ShardLoader gave; got int" in found[0]
    found = about(failing(call(sess, "", str(tmp_path / "none.json"))))
    assert "none.json: can't be read: No such file" in found[0]
    found = about(failing(call(sess, "", str(tmp_path / "x.json"), "[]", "{}", None)))
    assert found[0].startswith("CheckpointError: ")
    index = write(tmp_path, {"x": numbers(2)})
    found = about(failing(call(sess, "", index, "", '{"x": 0, "x": 1}', None)))
    assert "shard_info has 'x' twice" in found[0]
    found = about(failing(call(sess, "", index, "", "{", None)))
    assert "not JSON" in found[0]


@pytest.mark.one_process
def test_a_name_that_the_checkpoint_lacks_is_told(pair: Session, tmp_path: Path) -> None:
    index = write(tmp_path, {"layers.0.weight": numbers(4, 2)})
    loader = create(pair, index, {"layer.0.weight": 0})
    with pytest.raises(WorkerError, match=r"'layer\.0\.weight' \(is 'layers\.0\.weight' meant\?\)"):
        values(loader)  # a warning, which is an error in these tests


# -- shard_info by itself ---------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    dim=st.integers(0, 3),
    workers=st.integers(1, 4),
)
def test_equal_slices_are_those_of_torch(shape: list[int], dim: int, workers: int) -> None:
    dim %= len(shape)
    shape[dim] *= workers
    source = numbers(*shape)
    step = shard_info.old_form("x", tuple(shape), source.dtype, dim, workers)
    out = torch.empty(step.shape)
    shard_info.slices(source, dim, workers, out, None)
    assert torch.equal(out, torch.stack(source.tensor_split(workers, dim)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=JSON)
def test_any_json_is_a_shard_info_or_one_error(value: Any) -> None:
    try:
        found = shard_info.parse(json.dumps(value))
    except ArgumentError as exc:
        assert "shard_info" in str(exc)  # noqa: PT017 - there may be no error
    else:
        assert isinstance(found, dict)


def test_json_that_is_too_deep_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="not JSON"):
        shard_info.parse('{"x":' * 100_000)


def test_a_checkpoint_error_names_file_and_parameter() -> None:
    assert str(CheckpointError("a.json", "is bad", "x")) == "a.json: 'x': is bad"

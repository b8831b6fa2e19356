"""Disco's ShardLoader by its functions' names, on every engine."""

from pathlib import Path

import pytest
import torch

from discolab import Session, make_session, register_func

from .shard_loading import call, create, numbers, parts_of, same, values, write, write_functions


@pytest.fixture
def functions(tmp_path: Path) -> str:
    return write_functions(tmp_path)


def test_each_parameter_goes_through_its_functions(sess: Session, tmp_path: Path) -> None:
    def disco_dim_1(src: torch.Tensor, parts: int, out: torch.Tensor) -> None:
        out.copy_(src.view(src.shape[0], parts, -1).transpose(0, 1))

    register_func("tests.loader.dim_1", disco_dim_1, override=True)
    sess.get_global_func("tests.loader.dim_1")  # sends it to workers elsewhere
    x, y = numbers(6, 8, dtype=torch.float16), numbers(3, 5)
    index = write(tmp_path, {"x": x, "y": y})
    loader = create(sess, index, {"x": [["tests.loader.dim_1", [[4, 6, 2], "float16"], 4]]})
    assert same(values(call(sess, "Load", loader, [0])), x.chunk(4, 1))
    assert same(values(call(sess, "Load", loader, 1)), [y] * 4)  # no function: broadcast
    assert same(values(call(sess, "Load", loader, "x")), x.chunk(4, 1))


def test_functions_are_chained_and_come_from_a_module(
    sess: Session, tmp_path: Path, functions: str
) -> None:
    q, kv, head, hidden = 8, 4, 3, 5
    w_q, w_k, w_v = (numbers(n * head, hidden) + i for i, n in enumerate((q, kv, kv)))
    index = write(tmp_path, {"w_qkv": torch.cat([w_q, w_k, w_v])})
    each = (q + 2 * kv) // 4
    info = {
        "w_qkv": [
            ["qkv", [[4, each, head, hidden], "float32"], 4, q, kv],
            ["flat", [[4, each * head, hidden], "float32"]],
            ["half", [[4, each * head, hidden], "bfloat16"]],
        ]
    }
    loader = create(sess, index, info, sess.load_module(functions))
    want = [
        (torch.cat([w_q.chunk(4)[r], w_k.chunk(4)[r], w_v.chunk(4)[r]]) / 2).bfloat16()
        for r in range(4)
    ]
    assert same(values(call(sess, "Load", loader, [0])), want)


def test_what_a_function_returns_is_ignored(pair: Session, tmp_path: Path, functions: str) -> None:
    whole = numbers(6, 2)
    info = {"x": [["piecewise", [[2, 3, 2], "float32"], 2]]}
    loader = create(pair, write(tmp_path, {"x": whole}), info, pair.load_module(functions))
    assert same(values(call(pair, "Load", loader, 0)), whole.chunk(2))


def test_load_all_is_in_the_order_of_the_numbers(sess: Session, tmp_path: Path) -> None:
    params = {f"param_{i}": numbers(4, i + 1) + i for i in range(12)}
    late = {name: params[name] for name in ("param_7", "param_2")}
    rest = {name: tensor for name, tensor in params.items() if name not in late}
    loader = create(sess, write(tmp_path, late, rest), {"param_2": 0})
    want = list(params.values())
    for rank, got in enumerate(values(call(sess, "LoadAll", loader))):
        assert same(got, [*want[:2], want[2].chunk(4)[rank], *want[3:]])
    assert same(values(call(sess, "Load", loader, [7])), [params["param_7"]] * 4)


def test_only_worker_0_reads_for_load_param_on_worker_0(sess: Session, tmp_path: Path) -> None:
    params = {"param_1": numbers(2, 3), "param_0": numbers(5, dtype=torch.int8)}
    loader = create(sess, write(tmp_path, params))
    got = values(call(sess, "LoadParamOnWorker0", loader, 0))
    assert same(got[:1], [params["param_0"]])
    assert {(value.dtype, value.shape) for value in got} == {(torch.int8, (5,))}


def test_the_module_may_have_the_shard_info(sess: Session, tmp_path: Path, functions: str) -> None:
    whole = numbers(8, 6)
    index = write(tmp_path, {"param_0": whole})
    loader = call(sess, "", index, Path(index).read_text(), "", sess.load_module(functions))
    assert same(values(call(sess, "Load", loader, [0])), whole.chunk(4))


@pytest.mark.conformance
def test_each_worker_reads_its_own_part(sess: Session, tmp_path: Path) -> None:
    params = {"x_0": numbers(8, 4, dtype=torch.float16), "x_1": numbers(3, 8)}
    loader = create(sess, write(tmp_path, parts_of(params, {"x_0": 0, "x_1": 1}, 4)))
    assert same(values(call(sess, "LoadPresharded", loader, [0])), params["x_0"].chunk(4))
    assert same(values(call(sess, "LoadPresharded", loader, [1])), params["x_1"].chunk(4, 1))


def test_all_parts_by_number_in_whatever_order_they_lie(sess: Session, tmp_path: Path) -> None:
    params = {f"param_{i}": numbers(4, 4) + i for i in range(11)}
    stored = parts_of(params, dict.fromkeys(params, 1), 4)
    back = {name: stored[name] for name in reversed(stored)}
    loader = create(sess, write(tmp_path, back))
    want = [tensor.chunk(4, 1) for tensor in params.values()]
    for rank, got in enumerate(values(call(sess, "LoadAllPresharded", loader))):
        assert same(got, [chunks[rank] for chunks in want])
    assert same(values(call(sess, "LoadPresharded", loader, [10])), want[10])


def test_parts_as_mlc_names_them_with_what_is_stored_once(pair: Session, tmp_path: Path) -> None:
    x, norm = numbers(4, 2), numbers(3)
    stored = {"param_0_shard-0": x[:2], "param_1": norm, "param_0_shard-1": x[2:]}
    loader = create(pair, write(tmp_path, stored))
    got = values(call(pair, "LoadAllPresharded", loader))
    assert same(got[0], [x[:2], norm])
    assert same(got[1], [x[2:], norm])


def test_the_older_form_is_a_dimension(pair: Session, tmp_path: Path) -> None:
    params = {f"param_{i}": numbers(4, 6, 2) + i for i in range(4)}
    loader = create(pair, write(tmp_path, params), {f"param_{dim}": dim for dim in range(3)})
    for rank, got in enumerate(values(call(pair, "LoadAll", loader))):
        want = [params[f"param_{dim}"].chunk(2, dim)[rank] for dim in range(3)]
        assert same(got, [*want, params["param_3"]])


def test_the_older_form_may_have_a_function(pair: Session, tmp_path: Path) -> None:
    def shard(src: torch.Tensor, parts: int, out: torch.Tensor) -> None:
        before, size, after = src.shape
        out.copy_(src.view(before, parts, size // parts, after).transpose(0, 1).neg())

    x = numbers(3, 4, 5)
    loader = create(pair, write(tmp_path, {"x": x}), {"x": 1}, shard)
    assert same(values(call(pair, "Load", loader, 0)), [-part for part in x.chunk(2, 1)])


@pytest.mark.conformance
def test_every_dtype_is_broadcast_and_cut(pair: Session, tmp_path: Path) -> None:
    names = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    names += ["int8", "uint8", "int64", "bool"]
    params = {f"param_{i}": numbers(4, 3).to(getattr(torch, d)) for i, d in enumerate(names)}
    index = write(tmp_path, params)
    whole = values(call(pair, "LoadAll", create(pair, index)))
    cut = values(call(pair, "LoadAll", create(pair, index, dict.fromkeys(params, 0))))
    for rank in range(2):
        for name, got, part in zip(params.values(), whole[rank], cut[rank], strict=True):
            want = name.view(torch.uint8)
            assert got.dtype == part.dtype == name.dtype
            assert torch.equal(got.view(torch.uint8), want)
            assert torch.equal(part.view(torch.uint8), want.chunk(2)[rank])


def test_scalars_and_empty_parameters(pair: Session, tmp_path: Path) -> None:
    params = {"param_0": torch.tensor(2.5), "param_1": torch.empty(0, 3), "param_2": numbers(2, 0)}
    loader = create(pair, write(tmp_path, params), {"param_2": 0})
    for got in values(call(pair, "LoadAll", loader)):
        assert same(got[:2], list(params.values())[:2])
        assert got[2].shape == (1, 0)


def test_only_worker_0_needs_the_index_and_the_files(pair: Session, tmp_path: Path) -> None:
    index = write(tmp_path, {"param_0": numbers(4, 2)})
    text = Path(index).read_text()
    Path(index).unlink()
    assert same(
        values(call(pair, "Load", call(pair, "", index, text, "{}", None), [0])),
        [numbers(4, 2)] * 2,
    )


def test_without_text_the_index_is_read(pair: Session, tmp_path: Path) -> None:
    index = write(tmp_path, {"param_0": numbers(4, 2)}, name="ndarray-cache.json")
    assert same(values(call(pair, "Load", call(pair, "", index), 0)), [numbers(4, 2)] * 2)


@pytest.mark.one_process
def test_what_worker_0_was_sent_is_its_own(pair: Session, tmp_path: Path) -> None:
    loader = create(pair, write(tmp_path, {"param_0": numbers(4)}))
    got = values(call(pair, "Load", loader, 0))
    got[0].zero_()
    assert same(got[1:], [numbers(4)])
    assert "<ShardLoader of " in values(pair.call_packed(repr, loader))[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_on_a_gpu(tmp_path: Path, functions: str) -> None:
    params = {"param_0": numbers(4, 6), "param_1": numbers(3)}
    info = {"param_0": [["dim_1", [[2, 4, 3], "float32"], 2]]}
    index = write(tmp_path, params)
    with make_session(2, "threads", devices=["cuda:0", "cuda:0"], timeout=60) as sess:
        loader = create(sess, index, info, sess.load_module(functions))
        ref = call(sess, "LoadAll", loader)
        where = sess.call_packed(lambda loaded: {str(one.device) for one in loaded}, ref)
        assert values(where) == [{"cuda:0"}] * 2
        for rank, got in enumerate(values(ref)):
            part, whole = (one.cpu() for one in got)
            assert same([part, whole], [params["param_0"].chunk(2, 1)[rank], params["param_1"]])

"""torch.distributed on threads that a worker has started, or whose pool it uses."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from discolab import WorkerError

from .conftest import Start

pytestmark = pytest.mark.any_engine
N = 4


def seen(mesh: Any = None) -> list[Any]:
    """What a thread finds of its worker's groups."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    if mesh is None:
        mesh = init_device_mesh("cpu", (N,))
    group = dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
    parts = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    return [
        dist.get_rank(),
        dist.get_rank(group),
        group is dist.group.WORLD,
        mesh.get_local_rank(),
        mesh.get_group().rank(),
        list((parts * 2).shape),
    ]


def on_threads(pool: ThreadPoolExecutor | None = None) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(seen()))  # before any use of `dist`
    thread.start()
    thread.join()
    from torch.distributed.tensor import init_device_mesh

    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    pools = [ThreadPoolExecutor(2)] + ([pool] if pool is not None else [])
    for each in pools:
        found += each.map(seen, [None] * 3)
        rows = each.submit(lambda: (square["a"].get_group().rank(), square["b"].get_local_rank()))
        assert rows.result() == divmod(dist.get_rank(), 2)
        again = dist.new_group([0, 1, 2, 3])
        assert each.submit(dist.get_rank, again).result() == dist.get_rank()
        dist.destroy_process_group(again)
        gone = again.group_name
        with pytest.raises((RuntimeError, ValueError)):
            each.submit(dist.distributed_c10d._resolve_process_group, gone).result()
    pools[0].shutdown()
    return found


def test_a_workers_threads_find_its_groups(start: Start) -> None:
    with start(N) as sess:
        found = sess.call_packed(on_threads).debug_get_from_all()
    assert found == [[[rank, rank, True, rank, rank, [8]]] * 4 for rank in range(N)]


@pytest.mark.one_process
def test_a_pool_of_the_notebook_works_for_who_submits(start: Start) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(dist.is_initialized).result() is False
        with start(N) as sess:
            found = sess.call_packed(lambda: on_threads(pool)).debug_get_from_all()
            assert found == [[[rank, rank, True, rank, rank, [8]]] * 7 for rank in range(N)]
            assert pool.submit(dist.is_initialized).result() is False
        assert pool.submit(dist.is_initialized).result() is False


def tensor_parallel_logits(folder: str, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    weight = model.model.layers[0].self_attn.q_proj.weight
    return model(ids).logits.detach(), list(weight.to_local().shape)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_shards_a_model_over_the_workers(start: Start, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path)
    ids = torch.arange(8).reshape(1, 8)
    with start(N, timeout=60) as sess:
        found = sess.call_packed(tensor_parallel_logits, str(tmp_path), ids).debug_get_from_all()
    for logits, shape in found:
        torch.testing.assert_close(logits, whole(ids).logits.detach())
        assert shape == [8, 32]


def collective_on_thread() -> None:
    from torch.distributed import _functional_collectives as funcol

    dist.barrier()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(funcol.all_reduce, torch.ones(2), "sum", dist.group.WORLD).result()


def test_a_collective_on_such_a_thread_says_why_not(start: Start) -> None:
    with start(2) as sess, pytest.raises(WorkerError, match="run on the worker's own thread"):
        sess.call_packed(collective_on_thread).debug_get_from_all()

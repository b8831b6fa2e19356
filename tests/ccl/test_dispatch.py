"""Modes and the profiler see collectives of torch.distributed as on torch's own groups."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from discolab import WorkerError

from . import dispatch_program
from .conftest import Start

pytestmark = pytest.mark.any_engine


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--standalone", dispatch_program.__file__, str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_modes_see_the_operators_that_gloo_has(start: Start, on_gloo: list[dict[str, Any]]) -> None:
    with start(4) as sess:
        found = sess.call_packed(dispatch_program.facts).debug_get_from_all()
    assert found[0]["sharded"]
    for ours, theirs in zip(found, on_gloo, strict=True):
        assert ours == theirs


class Doubled(TorchDispatchMode):
    """Reduces twice what is reduced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            args = ([tensor * 2 for tensor in args[0]], *args[1:])
        return func(*args, **(kwargs or {}))


def test_a_mode_may_change_what_is_sent(start: Start) -> None:
    def run() -> Any:
        mine = torch.ones(2)
        with Doubled():
            work = dist.all_reduce(mine, async_op=True)
            work.wait()
            (result,) = work.result()
        refused = ""
        try:
            with Doubled():
                dist.all_reduce(mine, op=dist._make_nccl_premul_sum(2.0))
        except Exception as error:
            refused = str(error)
        return mine.tolist(), result.tolist(), refused

    with start(2) as sess:
        for mine, result, refused in sess.call_packed(run).debug_get_from_all():
            assert (mine, result) == ([1.0, 1.0], [4.0, 4.0])
            assert "multiply before the reduction" in refused


def test_an_error_in_an_operator_is_the_collectives_own(start: Start) -> None:
    def run() -> None:
        with Doubled():
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)

    match = "all_reduce: op 'band' is for integers"
    with start(2) as sess, pytest.raises(WorkerError, match=match):
        sess.call_packed(run).debug_get_from_all()


class Names(TorchDispatchMode):
    """The operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """How many functions it sees."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_do_not_see_how_data_is_moved(start: Start) -> None:
    def run() -> Any:
        mine, parts = torch.ones(3), [torch.zeros(3) for _ in range(2)]
        works = [dist.all_reduce(mine, async_op=True)]
        with Names() as names, Functions() as functions:
            works[0].wait()
            dist.all_gather(parts, mine)
            dist.all_gather(parts, mine, async_op=True).wait()
        return names.seen, functions.count, parts[1].tolist()

    with start(2) as sess:
        for seen, count, part in sess.call_packed(run).debug_get_from_all():
            assert seen == ["c10d.allgather_.default"] * 2
            assert count == 2  # the two calls
            assert part == [2.0] * 3

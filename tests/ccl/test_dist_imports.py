"""First imports of torch.distributed's large modules, by four workers at once; in new processes."""

import subprocess
import sys

import pytest

from tests.selection import slow

LIGHT = """
import sys
import torch
import torch.utils._device  # what `import discolab` itself takes; a file of functions
before = set(sys.modules)
import discolab
discolab.ThreadedSession(2).shutdown()
new = [name for name in set(sys.modules) - before if name.startswith("torch.")]
assert not new, new
"""

AT_ONCE = """
import sys
import torch.distributed as dist
from discolab import ThreadedSession

modules = [
    "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.checkpoint",
]

def first_import(order):
    rank = dist.get_rank()
    for i in range(4):
        __import__(modules[(rank * order + i) % 4])
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    import torch
    mesh = dist.init_device_mesh("cpu", (4,))
    return distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).full_tensor().sum().item()

with ThreadedSession(4, devices="cpu", timeout=60) as sess:
    assert sess.call_packed(first_import, int(sys.argv[1])).debug_get_from_all() == [28.0] * 4
"""


def run(program: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_session_imports_nothing_of_torch_distributed() -> None:
    run(LIGHT)


@pytest.mark.parametrize("order", [slow("0"), "1"], ids=["the same", "each another one"])
def test_four_workers_import_at_once(order: str) -> None:
    run(AT_ONCE, order)

"""What somebody does in a notebook with workers on a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from discolab.views.formats import format_bytes
from tests.accelerator import sim
from tests.gpus import GPU, needs_gpu

from .conftest import Kernel

pytestmark = needs_gpu

SIMULATED = """from tests.accelerator import sim
from discolab.runtime.services import PRELOAD
sim.load()
PRELOAD.insert(0, "tests.accelerator.register")"""
PROMPT = 2.0  # seconds from stop to a usable prompt
CELL = """%%disco
assert torch.accelerator.current_device_index() == device.index
x = torch.full((1 << 20,), float(rank), device=device)
for _ in range(100):
    y = ccl.all_reduce(x)
assert (y == sum(range(world_size))).all()
y"""
STEPPED = """x = torch.full((1 << 10,), float(rank), device=device)
y = ccl.all_reduce(x)
if rank == 1: y = y / 0
z = ccl.all_reduce(y)
z"""


@pytest.fixture(scope="module", params=["threads", "processes"])
def lab(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel with four workers on one GPU."""
    kernel = Kernel()
    if sim.loaded():
        kernel.ok(SIMULATED)
    kernel.ok("%load_ext discolab")
    kernel.ok("import json, time, torch\nfrom discolab import notebook")
    kernel.engine = request.param  # type: ignore[attr-defined]
    yield kernel
    kernel.close()


@pytest.fixture
def nb(lab: Any) -> Any:
    """With fresh workers."""
    lab.ok(f"%disco_session 4 --engine {lab.engine} --devices {GPU}")
    return lab


def test_a_cell_reduces_and_its_picture_says_so(nb: Any) -> None:
    for _ in range(2):
        text = nb.ok(CELL).text
        assert "equal on all workers" in text
        assert re.search(rf"\[0-3\]  A +{GPU} ", text), text
    nb.ok("assert [float(one.mean()) for one in sess['y'].debug_get_from_all()] == [6.0] * 4")


def test_devices_show_the_memory_that_torch_counts(nb: Any) -> None:
    nb.ok("%%disco\nkept = torch.ones(1 << (20 + rank), device=device)")
    nb.ok("rows = notebook.disco_devices().rows")
    counted = "sess.call_packed(torch.accelerator.memory_allocated).debug_get_from_all()"
    assert nb.ok(f"[row['memory']['used'] for row in rows] == {counted}").text == "True"
    rows = json.loads(nb.ok("print(json.dumps(rows))").stdout)
    text = nb.ok("%disco_devices").text
    for row in rows:
        assert row["device"] == str(GPU)
        assert row["device_name"] == torch.get_device_module(GPU).get_device_name(GPU)
        assert 0 <= row["gpu"]["utilisation"] <= 100
        assert sim.loaded() or 10 < row["gpu"]["temperature"] < 110
        assert format_bytes(row["memory"]["used"]) in text
    if nb.engine == "threads":
        assert f"workers 0-3 share {GPU}: its memory is what process " in text


def test_kernels_are_in_the_lanes_of_their_workers(nb: Any, tmp_path: Path) -> None:
    nb.ok(CELL)
    file = tmp_path / "trace.json"
    nb.ok("%disco_timeline --on --profile")
    nb.ok("%%disco\nfor _ in range(rank + 1): torch.sin(torch.ones(1 << 20, device=device))")
    nb.ok(f"%disco_timeline --off --export {file}", timeout=100)
    events = json.loads(file.read_text())["traceEvents"]
    gpu = [(e["pid"], e["name"]) for e in events if e.get("cat") == "gpu"]
    sines = [rank for rank, name in gpu if "sin" in name.lower()]
    assert [sines.count(rank) for rank in range(4)] == [1, 2, 3, 4], gpu


@pytest.mark.parametrize(
    "body",
    [
        "while True: ccl.all_reduce(x)",
        "while True: x.mul_(1.0)",
        "while True: dist.all_reduce(x)",
        "if rank: ccl.all_reduce(x)\nelse: time.sleep(600)",
    ],
)
@pytest.mark.parametrize("elements", [1 << 10, 1 << (20 if sim.loaded() else 26)])
def test_stop_ends_it_and_the_session_goes_on(nb: Any, body: str, elements: int) -> None:
    nb.ok(CELL)
    begin = f"import time\nx = torch.ones({elements}, device=device)\n"
    stopped = nb.fails(f"%%disco\n{begin}{body}", interrupt_after=1.0)
    assert stopped.seconds < PROMPT
    assert "equal on all workers" in nb.ok(CELL).text


def test_the_cell_is_stepped_through(nb: Any) -> None:
    first = nb.ok(f"%%disco --step\n{STEPPED}").text
    assert "→ 2  " in first
    assert "→ 3  " in nb.ok("%disco_next").text
    third = nb.ok("%disco_next").text
    assert "→ 4  " in third
    assert "float32[1024]" in third
    assert "→ 5  " in nb.ok("%disco_next").text
    nb.ok("%disco_next -r 1")
    parted = nb.ok("%disco_where").text
    assert "worker 1" in parted
    assert "wait" in parted, parted
    nb.ok("%disco_next")
    assert nb.ok("%disco_continue").text.startswith("DRef z")


def test_the_first_value_that_is_not_finite_is_found(nb: Any) -> None:
    found = nb.ok(f"%%disco --nan\n{STEPPED}").text
    assert "→ 4  " in found, found
    nb.ok("%disco_abort")


def test_a_checkpoint_is_loaded_onto_the_gpu(nb: Any, tmp_path: Path) -> None:
    whole = torch.arange(4096.0 * 512).view(4096, 512)
    save_file({"w": whole, "v": whole.t().contiguous()}, str(tmp_path / "model.safetensors"))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"w": "shard(0)", "v": "shard(1)"}))
    nb.ok(f"%disco_load {tmp_path}/model.safetensors --plan {plan}")
    nb.ok(
        "%%disco\n"
        "whole = torch.arange(4096.0 * 512).view(4096, 512)\n"
        "assert weights['w'].device == weights['v'].device == device\n"
        "assert torch.equal(weights['w'].cpu(), whole.chunk(4)[rank])\n"
        "assert torch.equal(weights['v'].cpu(), whole.t().chunk(4, 1)[rank])"
    )


def test_a_worker_out_of_memory_says_so_and_the_others_go_on(nb: Any) -> None:
    failed = nb.fails("%%disco\nif rank == 2: torch.empty(1 << 50, device=device)\nok = rank")
    assert "OutOfMemoryError" in failed.traceback
    assert "worker 2" in failed.traceback
    assert "equal on all workers" in nb.ok(CELL).text


def test_the_devices_library_is_refused_where_workers_share_a_gpu(nb: Any) -> None:
    library = sim.COLLECTIVES if sim.loaded() else "nccl"
    refused = nb.fails(f"sess.init_ccl({library!r})").traceback
    assert "share" in refused
    assert "'local'" in refused or "'gloo'" in refused

"""Snapshots: what comes back is what was there, on as many workers and on others."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from discolab import ArgumentError, Session, WorkerError, current_worker
from discolab.loader import CheckpointError, load, save
from discolab.notebook.cell import run_cell
from discolab.snapshots import list_snapshots, open_snapshot
from discolab.snapshots.manifest import KEY

SETUP = """
import threading
import numpy as np
import random
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight  # tied

    def forward(self, x):
        return scale * self.b(self.a(x))

scale = 2.0
torch.manual_seed(1)
model = Net()
opt = torch.optim.Adam(model.parameters())

def step():
    opt.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    opt.step()
    return loss.item()

step()
base = torch.arange(12.0)
view, base2 = base[3:6], base.view(3, 4).t()
arr = np.arange(5)
holder = {"arr": arr, "itself": None}
holder["itself"] = holder
meta = nn.Linear(3, 3, device="meta")
generator = torch.Generator().manual_seed(5 + rank)
mine = f"of worker {rank}"
half = torch.full((3,), 1.5, dtype=torch.bfloat16)
eighth = torch.ones(4).to(torch.float8_e4m3fn)
sparse = torch.eye(3).to_sparse()
empty = torch.empty(0, 3)
torch.manual_seed(rank); np.random.seed(rank); random.seed(rank)
"""
DRAW = """
(step(), torch.rand(2).tolist(), float(np.random.rand()), random.random(),
 torch.rand(2, generator=generator).tolist())
"""
SAME = """
base[4] = 77.0
(model.b.weight is model.a.weight,
 opt.param_groups[0]["params"][0] is model.a.weight,
 next(iter(opt.state)) is model.a.weight,
 model.a.weight.grad is not None,
 view[1].item() == base2[0, 1].item() == 77.0,
 holder["arr"] is arr, holder["itself"] is holder, arr.flags.writeable,
 meta.weight.is_meta, mine == f"of worker {rank}",
 half.dtype == torch.bfloat16, eighth.float().sum().item() == 4.0,
 sparse.to_dense().sum().item() == 3.0, empty.shape == (0, 3),
 isinstance(model, Net), step.__globals__ is globals(), scale == 2.0)
"""


def cell(session: Session, source: str) -> list[Any]:
    """What a cell's last line is, on each worker."""
    return session.call_packed(run_cell, source, "Cell In[1]", None).debug_get_from_all()


@pytest.mark.conformance
def test_what_comes_back_is_what_was_there(make: Callable[..., Session], tmp_path: Path) -> None:
    first = make(2)
    cell(first, SETUP)
    saved = first.snapshot(tmp_path / "setup")
    assert saved.left_out == saved.notes == {}
    assert {"Net", "model", "opt", "np", "step"} <= set(saved.variables)
    assert not {"rank", "torch", "worker"} & set(saved.variables)
    expected = cell(first, DRAW)
    second = make(2)
    restored = second.restore(tmp_path / "setup")
    assert restored.left_out == {}
    assert cell(second, DRAW) == expected
    assert cell(second, SAME) == [(True,) * 17] * 2
    # a function of a cell sees what later cells bind
    cell(second, "scale = 0.0")
    assert cell(second, "step()") == [0.0, 0.0]
    assert cell(second, "rank, dist is not None") == [(0, True), (1, True)]


def test_what_cannot_be_saved_is_named(pair: Session, tmp_path: Path) -> None:
    cell(
        pair,
        "import threading\nclass Run: ...\nrun = Run()\nrun.log = {'file': open('/dev/null')}\n"
        "lock, event = threading.Lock(), threading.Event()\ngood = [1]\ncount = (i for i in good)\n"
        "if rank == 1: thread = threading.current_thread()\n"
        "graph = torch.ones(2, requires_grad=True) * 2",
    )
    names = ["run", "lock", "event", "good", "count", "thread", "graph"]
    saved = pair.snapshot(tmp_path / "s", names=names)
    left_out = saved.left_out
    assert left_out["run"] == "run.log['file'] is an open file (/dev/null)"
    assert left_out["lock"] == "a lock or an event"
    assert left_out["count"] == "a generator, which can't be pickled"
    assert left_out["event"] == "a lock or an event"
    assert left_out["thread"] == (
        "this worker has no such variable (worker 0); a thread (worker 1)"
    )
    assert saved.notes == {
        "graph": "the graph for backward is not saved: it is a leaf when restored"
    }
    assert saved.variables == ["good", "graph"]
    assert "left out  lock: a lock or an event" in repr(saved)
    cell(pair, "run.log['file'].close()\ndel run, lock, event, good, count, graph")
    assert pair.restore(tmp_path / "s").variables == ["good", "graph"]
    assert cell(pair, "graph.requires_grad and graph.tolist()") == [[2.0, 2.0]] * 2


@pytest.mark.one_process
def test_functions_that_name_modules_of_a_class_of_their_own(pair: Session, tmp_path: Path) -> None:
    cell(pair, "def seed():\n    return torch.backends.cudnn.benchmark, torch.ops.aten.add")
    assert pair.snapshot(tmp_path / "s").left_out == {}
    cell(pair, "del seed")
    pair.restore(tmp_path / "s")
    assert cell(pair, "seed() == (False, torch.ops.aten.add)") == [True] * 2


def test_drefs_and_weights(pair: Session, make: Callable[..., Session], tmp_path: Path) -> None:
    rows = pair.call_packed(lambda: torch.full((2, 3), float(current_worker().worker_id)))
    rows.placements = (Shard(0),)
    save(pair, tmp_path / "c", {"w": rows})
    weights = load(pair, tmp_path / "c", {"w": "shard(0)"})
    pair.snapshot(tmp_path / "s", {"rows": rows, "weights": weights}, names=[])
    back = pair.restore(tmp_path / "s")
    assert set(back) == {"rows", "weights"}
    assert back["rows"].placements == (Shard(0),)
    assert back["rows"].debug_get_from_remote(1).eq(1).all()
    other = make(4).restore(tmp_path / "s")
    assert other.left_out.keys() == {"(random states)"}
    parts = [part[0, 0].item() for part in other["rows"].debug_get_from_all()]
    assert parts == [0.0, 0.0, 1.0, 1.0]
    assert [w["w"].shape[0] for w in other["weights"].debug_get_from_all()] == [1] * 4


SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
mesh2 = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
whole = torch.arange(35.0).view(7, 5)
d = distribute_tensor(whole, mesh2, [Shard(0)])
layer = torch.nn.Linear(5, 7)
torch.nn.init.ones_(layer.weight), torch.nn.init.zeros_(layer.bias)
layer.weight = torch.nn.Parameter(d)
alias = layer.weight.to_local().detach()
r = distribute_tensor(whole, mesh2, [Replicate()])
cut = whole.chunk(world_size, 1)[rank].contiguous()
table = {"k": whole.clone().chunk(world_size, 0)[rank]}  # a view of more
unknown = torch.full((2,), float(rank))
alike = {"x": torch.ones(2), "n": 3}
"""


def test_dtensors_and_layouts_on_another_number_of_workers(
    make: Callable[..., Session], engine: str, tmp_path: Path
) -> None:
    first = make(2)
    first.mesh(tp=2)
    cell(first, SHARDED)
    plan = {"cut": "shard(1)", "table.k": "shard(0)"}
    assert first.snapshot(tmp_path / "s", plan=plan).left_out == {}
    again = make(2)
    assert again.restore(tmp_path / "s").left_out == {}
    look = (
        "(layer.weight.placements == (Shard(0),), layer.weight.full_tensor().equal(whole),"
        " layer.weight.to_local().untyped_storage()._cdata == alias.untyped_storage()._cdata,"
        " layer.weight.requires_grad, r.to_local().equal(whole), mesh is not None)"
    )
    assert cell(again, look) == [(True,) * 6] * 2
    if engine == "sockets":  # on two nodes, over which three can't be divided
        return
    other = make(3)
    restored = other.restore(tmp_path / "s")
    assert restored.left_out.keys() == {"unknown", "(random states)"}
    assert "nothing says how it is laid out" in restored.left_out["unknown"]
    look = (
        "(layer.weight.full_tensor().equal(whole), layer.weight.device_mesh.shape == (world_size,),"
        " layer.weight.to_local().untyped_storage()._cdata == alias.untyped_storage()._cdata,"
        " r.to_local().equal(whole), cut.equal(whole.chunk(world_size, 1)[rank]),"
        " table['k'].equal(whole.chunk(world_size, 0)[rank]), alike['x'].tolist() == [1.0, 1.0])"
    )
    assert cell(other, look) == [(True,) * 7] * 3


PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.manual_seed(3)
net = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
mesh = torch.distributed.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
opt = torch.optim.Adam(net.parameters(), lr=0.05, foreach=False)

def step():
    opt.zero_grad()
    loss = (net(torch.arange(8.0).view(2, 4)) - 1).square().mean()
    loss.backward()
    opt.step()
    return loss.item()

step()
"""


@pytest.mark.one_process  # whose workers number hooks together
def test_a_parallel_module_goes_on_with_another_number_of_workers(
    make: Callable[..., Session], tmp_path: Path
) -> None:
    first = make(2)
    cell(first, PARALLEL)
    assert first.snapshot(tmp_path / "s").left_out == {}
    wanted = cell(first, "[step(), step()]")[0]
    other = make(3)
    assert other.restore(tmp_path / "s").left_out.keys() <= {"(random states)"}
    for found in cell(other, "[step(), step()]"):
        assert found == pytest.approx(wanted, rel=1e-5)


MARKED = """
from torch.distributed.tensor import Shard, distribute_tensor

mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
shards = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
cut = torch.ones(2, 2)
shards.lr_scale, cut.lr_scale = 0.5, 0.25
ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
stepped = torch.nn.Parameter(torch.ones(2))
stepped.register_post_accumulate_grad_hook(print)
"""


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_attributes_of_shards_and_what_no_plan_can_lay(
    pair: Session, make: Callable[..., Session], tmp_path: Path
) -> None:
    cell(pair, MARKED)
    taken = pair.snapshot(tmp_path / "s", plan={"*": "shard(0)"})
    assert taken.left_out == {}
    assert "stepped: hooks of tensors are not saved" in str(taken)
    again = make(2)
    assert again.restore(tmp_path / "s").left_out == {}
    look = "(shards.lr_scale, cut.lr_scale, isinstance(shards, torch.nn.Parameter), ragged.size(0))"
    assert cell(again, look) == [(0.5, 0.25, True, 2)] * 2


HOOKED = """
seen = []
net = torch.nn.Linear(2, 2)

def hook(what, **options):
    return net.register_forward_hook(lambda *_: seen.append(what), **options)

for n in range(2):
    hook(n)
"""


@pytest.mark.one_process
def test_a_hook_takes_no_number_of_one_that_was_restored(
    pair: Session, make: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell(pair, HOOKED)
    assert pair.snapshot(tmp_path / "s").left_out == {}
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in another kernel
    again = make(2)
    again.restore(tmp_path / "s")
    cell(again, "for n in range(9): hook(10 + n)")
    cell(again, "net(torch.ones(2))")
    assert cell(again, "seen") == [[0, 1, *range(10, 19)]] * 2


@pytest.mark.one_process
def test_what_removes_a_hook_still_does(
    pair: Session, make: Callable[..., Session], tmp_path: Path
) -> None:
    cell(pair, HOOKED)
    cell(pair, "first, second = hook('first'), hook('second', always_call=True)")
    assert pair.snapshot(tmp_path / "s").left_out == {}
    again = make(2)
    again.restore(tmp_path / "s")
    cell(again, "net(torch.ones(2)); first.remove(); net(torch.ones(2)); second.remove()")
    cell(again, "net(torch.ones(2))")
    assert cell(again, "seen") == [[0, 1, "first", "second", 0, 1, "second", 0, 1]] * 2
    assert cell(again, "len(net._forward_hooks_always_called)") == [0, 0]


@pytest.mark.one_process
def test_what_is_on_a_mesh_of_several_axes_needs_one(
    make: Callable[..., Session], tmp_path: Path
) -> None:
    first = make(4)
    first.mesh(dp=2, tp=2)
    cell(
        first,
        "from torch.distributed.tensor import *\nwhole = torch.arange(12.).view(4, 3)\n"
        "d = distribute_tensor(whole, mesh.to_torch(), [Replicate(), Shard(0)])",
    )
    first.snapshot(tmp_path / "s")
    other = make(2)
    why = other.restore(tmp_path / "s").left_out["d"]
    assert "on a mesh dp=2, tp=2" in why
    assert "give the session of 2 a mesh of the same axes" in why
    other.mesh(dp=1, tp=2)
    assert "d" not in other.restore(tmp_path / "s").left_out
    assert cell(other, "d.full_tensor().equal(whole), d.to_local().shape[0]") == [(True, 2)] * 2


@pytest.mark.one_process
def test_classes_of_worker_threads_stay_their_own(pair: Session, tmp_path: Path) -> None:
    cell(pair, "class C:\n    n = 0\nc = C()")
    pair.snapshot(tmp_path / "s")
    pair.restore(tmp_path / "s")
    cell(pair, "C.n = rank + 1")
    assert cell(pair, "(C.n, c.n, type(c) is C)") == [(1, 1, True), (2, 2, True)]


def test_a_bad_snapshot_changes_nothing(pair: Session, tmp_path: Path) -> None:
    cell(pair, "x = 1")
    pair.snapshot(tmp_path / "s")
    cell(pair, "x = 2")
    with pytest.raises(ArgumentError, match="has no 'y'; it has x"):
        pair.restore(tmp_path / "s", names=["y"])
    for file in (tmp_path / "s").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-3] ^= 1  # in the last pickle
        file.write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed since the snapshot was taken"):
        pair.restore(tmp_path / "s")
    assert cell(pair, "x") == [2, 2]
    pair.snapshot(tmp_path / "s")  # over the damaged one
    next((tmp_path / "s").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError):
        pair.restore(tmp_path / "s")
    pair.snapshot(tmp_path / "s")
    assert pair.restore(tmp_path / "s").variables == ["x"]


def with_manifest(folder: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite what the index says."""
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    manifest = json.loads(found["metadata"][KEY])
    changed = change(manifest)
    found["metadata"][KEY] = json.dumps(manifest if changed is None else changed)
    index.write_text(json.dumps(found))


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(version=9), "of version 9, and this discolab reads 1"),
        (lambda m: m["workers"][0]["bundles"][0].update(memories=[99]), "not one of a snapshot"),
        (lambda m: m["workers"][0]["bundles"][0].update(nbytes=1 << 40), "not one of a snapshot"),
        (lambda m: m["workers"].clear(), "not one of a snapshot: ValueError: it is of no workers"),
        (lambda m: m.pop("meshes"), "not one of a snapshot"),
        (lambda m: [1, 2], "not one of a snapshot"),
    ],
)
def test_a_manifest_is_not_believed(
    pair: Session, tmp_path: Path, change: Callable[[Any], Any], text: str
) -> None:
    cell(pair, "x = 1")
    pair.snapshot(tmp_path / "s")
    with_manifest(tmp_path / "s", change)
    with pytest.raises(CheckpointError, match=text):
        pair.restore(tmp_path / "s")


@pytest.mark.one_process
def test_other_checkpoints_are_left_alone(pair: Session, tmp_path: Path) -> None:
    ref = pair.call_packed(torch.ones, 3)
    save(pair, tmp_path / "c", {"w": ref}, {"w": "replicate"})
    before = (tmp_path / "c" / "model.safetensors").read_bytes()
    with pytest.raises(ArgumentError, match="a checkpoint that is no snapshot"):
        pair.snapshot(tmp_path / "c")
    with pytest.raises(CheckpointError, match="is a checkpoint and no snapshot"):
        pair.restore(tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == before


@pytest.mark.one_process
def test_what_fails_leaves_the_old_snapshot(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell(pair, "x = torch.full((1000,), 1.0)")
    pair.snapshot(tmp_path / "s")
    there = sorted(os.listdir(tmp_path / "s"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    cell(pair, "x = torch.full((1000,), 2.0)")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            pair.snapshot(tmp_path / "s")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            pair.snapshot(tmp_path / "s")
    assert sorted(os.listdir(tmp_path / "s")) == there
    pair.restore(tmp_path / "s")
    assert cell(pair, "x[0].item()") == [1.0, 1.0]
    cell(pair, "class Bad:\n    def __reduce__(self): raise KeyboardInterrupt\nbad = Bad()")
    with pytest.raises((KeyboardInterrupt, WorkerError)):
        pair.snapshot(tmp_path / "s")
    assert sorted(os.listdir(tmp_path / "s")) == there
    assert open_snapshot(tmp_path / "s").variables == ["x"]


@pytest.mark.one_process
def test_ctrl_c_right_after_the_rename(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell(pair, "x = 1")
    pair.snapshot(tmp_path / "s")
    rename = os.replace

    def interrupted(*args: Any) -> None:
        rename(*args)
        signal.raise_signal(signal.SIGINT)

    cell(pair, "x = 2")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.snapshot(tmp_path / "s")
    pair.restore(tmp_path / "s")
    assert cell(pair, "x") == [2, 2]
    pair.snapshot(tmp_path / "s")  # and the folder is not locked
    assert len(os.listdir(tmp_path / "s")) == 3


def test_ctrl_c_has_no_finalizer_to_be_lost_in(pair: Session, tmp_path: Path) -> None:
    """Python drops an exception that comes in a `__del__`, as one of Ctrl-C may in any of ours."""
    found: set[str] = set()

    def note(frame: Any, event: str, _arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__del__":
            found.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    pair.push({"x": 1})
    weights = {"x": pair.call_packed(torch.ones, 2)}
    for turn in range(2):  # what is imported at the first one has some
        gc.collect()
        gc.disable()
        sys.setprofile(note if turn else None)
        try:
            pair.snapshot(tmp_path / "snapshot", names=["x"])
            pair.restore(tmp_path / "snapshot")
            pair.save(tmp_path / "checkpoint", weights, {"x": "replicate"})
            pair.load(tmp_path / "checkpoint")
        finally:
            sys.setprofile(None)
            gc.enable()
    assert found == set()


@pytest.mark.one_process
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(pair: Session, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o555)
    with pytest.raises(CheckpointError, match="can't be written: Permission denied"):
        pair.snapshot(tmp_path / "s")


KILLED = """
import os, signal, sys
import torch
from discolab import make_session
from discolab.snapshots import saving
step, path = sys.argv[1:]
with make_session(2, devices="cpu") as s:
    s.push({"x": torch.full((100,), 1.0)})
    s.snapshot(path)
    s.push({"x": torch.full((100,), 2.0)})
    place = saving.Replacement
    method = getattr(place, step)
    def killed(*args):
        if step == "commit":
            os.kill(os.getpid(), signal.SIGKILL)
        found = method(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(place, step, killed)
    s.snapshot(path)
"""


@pytest.mark.one_process
@pytest.mark.slow
@pytest.mark.parametrize("step", ["create", "commit"])
def test_killed_while_it_writes(pair: Session, tmp_path: Path, step: str) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, step, str(tmp_path / "s")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert pair.restore(tmp_path / "s").variables == ["x"]
    assert cell(pair, "x[0].item()") == [1.0, 1.0]
    pair.snapshot(tmp_path / "s")  # clears what was left
    assert len(os.listdir(tmp_path / "s")) == 3


@pytest.mark.one_process
def test_code_that_is_gone_is_named(
    pair: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "gone_soon.py").write_text("class Thing: ...\n")
    monkeypatch.syspath_prepend(folder)
    cell(pair, "import gone_soon\nthing = gone_soon.Thing()\ngood = [1]")
    pair.snapshot(tmp_path / "s")
    shutil.rmtree(folder)
    cell(pair, "import sys\nsys.modules.pop('gone_soon', None)\nthing = good = None")
    restored = pair.restore(tmp_path / "s")
    assert "its code is not here: ModuleNotFoundError" in restored.left_out["thing"]
    assert cell(pair, "(thing, good)") == [(None, [1])] * 2


@pytest.mark.one_process
@pytest.mark.parametrize("path", ["a\0b", "\ud800", "", 5, None])
def test_what_is_no_path_is_said(pair: Session, path: Any) -> None:
    for write in (lambda: pair.snapshot(path), lambda: save(pair, path, {})):
        with pytest.raises(ArgumentError, match="folder to write to as a string or a Path"):
            write()


def test_listing(pair: Session, tmp_path: Path) -> None:
    cell(pair, "x = torch.ones(1000)")
    pair.snapshot(tmp_path / "a")
    pair.snapshot(tmp_path / "b")
    (tmp_path / "no").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"12345678")
    first, second, broken = list_snapshots(tmp_path)
    assert repr(first).startswith("b: x of 2 workers, 30.")
    assert repr(second).startswith("a: x of 2 workers")
    assert str(broken).startswith("bad: ")
    assert list_snapshots(tmp_path / "nowhere") == []

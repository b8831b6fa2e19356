"""Operators that cells define with torch.library, on all workers and again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import Session, WorkerError, current_worker
from discolab.notebook import cell
from discolab.notebook.script import run_script
from tests.alone import output_of

CELL = """
import torch
factor = rank + 1

@torch.library.custom_op("discolab_tests::scale", mutates_args=())
def scale(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * times * factor

@scale.register_fake
def _(x, times):
    return torch.empty_like(x)

def keep(ctx, inputs, output):
    ctx.times = inputs[1]

scale.register_autograd(lambda ctx, grad: (grad * ctx.times * factor, None), setup_context=keep)

found = []
for _ in range(5):
    leaf = torch.ones(2, requires_grad=True)
    out = torch.ops.discolab_tests.scale(leaf, 3) + scale(leaf, 3)
    out.sum().backward()
    found.append((out.tolist(), leaf.grad.tolist()))
compiled = torch.compile(lambda x: scale(x, 2) + 1, backend="eager", fullgraph=True)
[found[0], all(one == found[0] for one in found), compiled(torch.ones(1)).tolist()]
"""

LIBRARY = """
import torch
lib = torch.library.Library("discolab_tests", "FRAGMENT")
lib.define("shift(Tensor x) -> Tensor")
lib.impl("shift", lambda x, by=rank: x + by, "CPU")
torch.ops.discolab_tests.shift(torch.zeros(1)).tolist()
"""


def run(sess: Session, source: str) -> list[Any]:
    return sess.call_packed(cell.run_cell, source, "<a cell>", None).debug_get_from_all()


@pytest.mark.one_process
def test_each_worker_defines_an_operator(sess: Session) -> None:
    for _ in range(3):
        for rank, found in enumerate(run(sess, CELL)):
            by = float(rank + 1)
            assert found == [([6 * by] * 2, [6 * by] * 2), True, [2 * by + 1]]
        assert run(sess, LIBRARY) == [[float(rank)] for rank in range(4)]
    with pytest.raises(NotImplementedError, match="the notebook has no function"):
        torch.ops.discolab_tests.scale(torch.ones(1), 1)
    sess.shutdown()
    assert not hasattr(torch.ops.discolab_tests, "scale")
    assert not hasattr(torch.ops.discolab_tests, "shift")


@pytest.mark.one_process
def test_an_operator_that_is_gone_is_in_no_list(sess: Session) -> None:
    run(sess, LIBRARY)
    torch.ops.discolab_tests._dir.append("shift")  # as torch does if two workers ask first at once
    sess.shutdown()
    assert "shift" not in list(torch.ops.discolab_tests)


ONE_OF_TWO = """
import torch
wide = {wide}
lib = torch.library.Library("discolab_tests", "FRAGMENT")
lib.define("move(Tensor x" + ", int by=0" * wide + ") -> Tensor")
lib.impl("move", lambda x, by=rank: x + by, "CPU")
torch.ops.discolab_tests.move(torch.zeros(1)).tolist()
"""


@pytest.mark.one_process
def test_an_operator_has_one_schema(pair: Session) -> None:
    for wide in (0, 1, 0):  # a cell that was changed and runs again
        assert len(run(pair, ONE_OF_TWO.format(wide=wide))) == 2
    for wide in ("rank", "1 - rank"):
        with pytest.raises(WorkerError, match=r"a process has one operator of a name.*processes"):
            run(pair, ONE_OF_TWO.format(wide=wide))
        with contextlib.suppress(WorkerError):
            pair.sync_all()
    run(pair, "del lib")
    assert run(pair, ONE_OF_TWO.format(wide=0)) == [[0.0], [1.0]]


SCRIPT = """
import os, sys, torch
by, wide = int(os.environ["RANK"]), int(sys.argv[1])
more = ", int by=0" * wide
lib = torch.library.Library("discolab_tests", "DEF")
lib.define(f"slide(Tensor x{more}) -> Tensor")
lib.impl("slide", lambda x, _=0: x + by, "CPU")
torch.library.define("discolab_tests_2::slip", f"(Tensor x{more}) -> Tensor")
@torch.library.impl("discolab_tests_2::slip", "cpu")
def slip(x, _=0):
    return x - by
found = [torch.ops.discolab_tests.slide(torch.zeros(1)).item(),
         torch.ops.discolab_tests_2.slip(torch.zeros(1)).item()]
"""


def test_a_script_defines_its_operators_anew(sess: Session, tmp_path: Path) -> None:
    """Also with other schemas; after it cells can call them."""
    path = tmp_path / "defines.py"
    path.write_text(SCRIPT)
    for wide in (0, 0, 1, 0):
        sess.call_packed(run_script, str(path), SCRIPT, [str(wide)]).debug_get_from_all()
        assert sess["found"].debug_get_from_all() == [[r, -r] for r in range(4)]
        cells = run(sess, "torch.ops.discolab_tests.slide(torch.ones(1)).item()")
        assert cells == [r + 1 for r in range(4)]


KERNELS = """
import torch, warnings
from discolab import ccl
warnings.simplefilter("ignore")
x, ops = torch.ones(2), torch.ops.discolab_paints
lib = torch.library.Library("discolab_paints", "IMPL")
if rank < 2:
    lib.impl("shade", lambda x: torch.full_like(x, rank), "CPU")
    lib.impl("tint", lambda keys, x: torch.full_like(x, rank + 5), "AutogradCPU", with_keyset=True)
ccl.barrier()
found = [ops.shade(x).tolist() if rank < 2 else None, ops.tint(x).tolist()]
ccl.barrier()
lib._destroy()
ccl.barrier()
[found, ops.tint(x).tolist()]
"""


@pytest.fixture
def paints() -> Iterator[None]:
    """Operators of the notebook: `shade` has no kernel, `tint` has one for the CPU."""
    library = torch.library.Library("discolab_paints", "DEF")
    library.define("shade(Tensor x) -> Tensor")
    library.define("tint(Tensor x) -> Tensor")
    library.impl("tint", lambda x: x + 1, "CPU")
    yield
    library._destroy()


@pytest.mark.one_process
def test_each_worker_gives_an_operator_a_kernel(paints: None, sess: Session) -> None:
    for _ in range(2):
        for rank, (found, then) in enumerate(run(sess, KERNELS)):
            own = [[float(rank)] * 2, [rank + 5.0] * 2]
            assert found == (own if rank < 2 else [None, [2.0, 2.0]])
            assert then == [2.0, 2.0]
    assert torch.ops.discolab_paints.tint(torch.ones(1)).tolist() == [2]
    with pytest.raises(WorkerError, match="has no kernel for CPU"):
        run(sess, "import torch; torch.ops.discolab_paints.shade(torch.ones(1))")
    sess.shutdown()
    with pytest.raises(NotImplementedError):
        torch.ops.discolab_paints.shade(torch.ones(1))


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("name", "key"), [("silu", "Autograd"), ("sinc", "CPU"), ("linear", "CPU")]
)
def test_to_replace_a_kernel_is_refused(name: str, key: str, pair: Session) -> None:
    with pytest.raises(WorkerError, match="--engine processes"):
        run(pair, f'torch.library.Library("aten", "IMPL").impl("{name}", lambda x: x, "{key}")')


@torch.library.custom_op("discolab_paints::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.one_process
def test_kernels_of_modules_stay_on_and_a_workers_own_go_off(pair: Session) -> None:
    def switch_off() -> None:
        with _twice.set_kernel_enabled("cpu", False):
            raise AssertionError("it is off for all")

    with pytest.raises(WorkerError, match=r"set_kernel_enabled .*--engine processes"):
        pair.call_packed(switch_off).debug_get_from_all()
    own = """
import torch

@torch.library.custom_op("discolab_tests::switched", mutates_args=())
def switched(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@switched.register_kernel("cpu")
def _(x):
    return x * 3

found = [switched(torch.ones(1)).item()]
if rank == 0:
    with switched.set_kernel_enabled("cpu", False):
        found.append(switched(torch.ones(1)).item())
[*found, switched(torch.ones(1)).item()]
"""
    assert run(pair, own) == [[3.0, 2.0, 3.0], [3.0, 3.0]]


CONTEXT = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

@torch.library.custom_op("discolab_tests::nonzero", mutates_args=())
def nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()

found = []

@nonzero.register_fake
def _(x):
    together()
    context = torch.library.get_ctx()
    found.append(context._shape_env)
    size = context.new_dynamic_size()
    together()
    return x.new_empty([size, x.dim()], dtype=torch.int64)

shapes = ShapeEnv(allow_dynamic_output_shape_ops=True)
with FakeTensorMode(shape_env=shapes):
    nonzero(torch.ones(3))
found[0] is shapes
"""


@pytest.mark.one_process
def test_each_worker_has_the_context_of_its_mode(sess: Session) -> None:
    barrier = threading.Barrier(sess.num_workers)
    sess.call_packed(
        lambda: current_worker().namespace.update(together=lambda: barrier.wait(30))
    ).debug_get_from_all()
    assert run(sess, CONTEXT) == [True] * 4


COME_AND_GO = """
import contextlib, random, warnings
import torch
from discolab import ThreadedSession, current_worker

def program():
    warnings.simplefilter("ignore")
    rank, shade = current_worker().rank, torch.ops.discolab_paints.shade
    for _ in range(200):
        for _ in range(random.randrange(30)):
            with contextlib.suppress(NotImplementedError):
                shade(torch.ones(50))
        lib = torch.library.Library("discolab_paints", "IMPL")
        lib.impl("shade", lambda x: torch.full_like(x, 7.0 + rank), "CPU")
        assert shade(torch.ones(1)).item() == 7 + rank
        lib._destroy()

library = torch.library.Library("discolab_paints", "DEF")
library.define("shade(Tensor x) -> Tensor")
with ThreadedSession(4, devices="cpu") as sess:
    sess.call_packed(program).debug_get_from_all()
print("held")
"""


def test_kernels_come_and_go_while_others_are_in_the_operator() -> None:
    assert output_of(COME_AND_GO) == "held\n"


VMAP = """
import torch
from discolab import ThreadedSession

def program():
    mapped = torch.func.vmap(lambda x: x * 2)(torch.ones(2))
    target = torch.zeros(2, 3)
    loss = lambda x, y: torch.nn.functional.mse_loss(x, y)
    grads = torch.func.vmap(torch.func.grad(loss))(torch.ones(2, 3), target)
    return mapped.tolist(), grads.sum().item()

for _ in range(2):
    with ThreadedSession(2, devices="cpu", timeout=50) as sess:
        print(sess.call_packed(program).debug_get_from_all())
print(program())
"""


def test_the_kernels_that_torch_needs_for_vmap_are_for_all() -> None:
    """torch enters them at the first use in a process."""
    values = ([2.0, 2.0], 4.0)
    lines = output_of(VMAP).splitlines()
    assert lines == [str([values] * 2)] * 2 + [str(values)]

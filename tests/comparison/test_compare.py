"""`discolab.compare`: right programs, layouts, functions, what is left as it was, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import discolab
from discolab import ArgumentError, DRef, Session, WorkerError, ccl, compare, note
from discolab.ccl import autograd as dist_fn
from discolab.comparison.arguments import read_layout
from discolab.loader import Workers
from tests.comparison.transformer import (
    LENGTH,
    Column,
    Row,
    make_reference,
    make_sharded,
    place,
    tokens,
)


@pytest.fixture(scope="module")
def four() -> Iterator[Session]:
    with discolab.make_session(4, "threads", devices="cpu", timeout=30) as session:
        yield session


@pytest.fixture(scope="module")
def apart() -> Iterator[Session]:
    with discolab.make_session(2, "processes", devices="cpu", timeout=60) as session:
        yield session


def sharded_of(session: Session, reference: nn.Module, *bug: str) -> DRef:
    return session.call_packed(make_sharded, reference.state_dict(), *bug)


# -- programs that are right -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_right_program_agrees(four: Session, dtype: torch.dtype) -> None:
    reference = make_reference(dtype)
    found = compare(reference, sharded_of(four, reference), tokens())
    assert found.agrees, found
    assert found.first is None
    assert found.unmatched == ()
    assert found.only_in_reference == found.only_in_sharded == found.notes == ()
    assert found.worst is not None
    assert 0 < found.worst.relative < {torch.bfloat16: 0.1}.get(dtype, 1e-5)
    layouts = {point.name: point.layout for point in found.points}
    assert layouts["tok"] == "Replicate()"
    assert layouts["blocks.1.attn.q"] == layouts["blocks.1.mlp.down.input"] == "Shard(2)"
    assert len([p for p in found.gradients if p.kind == "parameter"]) == len(found.parameters) == 37
    assert "✓ agrees\n" in repr(found)


def test_a_right_program_agrees_in_other_processes(apart: Session) -> None:
    reference = make_reference()
    found = compare(reference, sharded_of(apart, reference), tokens())
    assert found.agrees, found
    assert len(found.parameters) == 37
    wrong = compare(
        reference, sharded_of(apart, reference, "no reduce", "blocks.1.mlp.down"), tokens()
    )
    assert wrong.first is not None
    assert wrong.first.module == "blocks.1.mlp.down"
    assert "an all-reduce is missing" in str(wrong.first)


def dtensor_model(state: dict[str, torch.Tensor]) -> nn.Module:
    """Parallel by torch's own DTensor (a worker function)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model.load_state_dict(state)
    mesh = init_device_mesh("cpu", (place()[1],))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def test_a_module_made_parallel_by_torch_agrees(four: Session) -> None:
    reference = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = four.call_packed(dtensor_model, reference.state_dict())
    found = compare(reference, model, torch.randn(4, 8))
    assert found.agrees, found
    assert found.unmatched == ()
    said = {p.name: (p.layout, p.source) for p in (*found.parameters, *found.gradients)}
    assert said["0.weight"] == said["0.weight.grad"] == ("Shard(0)", "DTensor")
    assert said["2.bias.grad"] == ("Replicate()", "DTensor")


# -- layouts ---------------------------------------------------------------------------------------


def test_a_layout_goes_on_the_mesh_of_its_axes() -> None:
    meshes = [Workers((4,)), Workers((2, 2))]
    for given in ("[replicate, shard(0)]", ["replicate", "shard(0)"], [Replicate(), Shard(0)]):
        assert read_layout(given, meshes).words == "Replicate(), Shard(0)"
    assert read_layout(Shard(0), meshes).words == "Shard(0)"
    assert read_layout(["partial", Shard(1)], meshes).words == "Partial(sum), Shard(1)"
    with pytest.raises(ArgumentError, match="has 2 placements, and the workers are in a mesh of 1"):
        read_layout("[replicate, shard(0)]", meshes[:1])


class Fused(nn.Module):
    """q, k and v in one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.qkv = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.qkv.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k.sigmoid() + v


class FusedPart(Fused):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dist_fn.gather_from_region(super().forward(dist_fn.copy_to_region(x)))


def fused_part(weight: torch.Tensor, whole_run: bool) -> Fused:
    me, n = place()
    if whole_run:
        return FusedPart(weight.chunk(n)[me].clone())
    return FusedPart(torch.cat([part.chunk(n)[me] for part in weight.chunk(3)]))


def test_fused_weights_are_seen_to_be_cut_part_by_part(four: Session) -> None:
    reference = Fused(torch.randn(24, 8))
    model = four.call_packed(fused_part, reference.qkv.weight.detach(), False)
    found = compare(reference, model, torch.randn(5, 8))
    assert found.agrees, found
    assert found.parameters[0].layout == "Shard(0, segments=3)"


def test_a_given_layout_finds_a_shard_that_was_cut_otherwise(four: Session) -> None:
    reference = Fused(torch.randn(24, 8))
    model = four.call_packed(fused_part, reference.qkv.weight.detach(), True)
    found = compare(
        reference, model, torch.randn(5, 8), layouts={"qkv.weight": "shard(0, segments=3)"}
    )
    assert found.first is not None
    assert found.first.point.name == "qkv.weight"
    assert found.first.point.source == "given"
    assert "it is the shard along dim 0" in str(found.first)


def test_inputs_can_be_cut_for_data_parallel_programs(four: Session) -> None:
    from torch.distributed.tensor import Shard

    reference = nn.Linear(6, 3)

    def add_up(parameter: torch.Tensor) -> None:
        ccl.all_reduce_(parameter.grad)

    def replica(state: dict[str, torch.Tensor], reduce: bool) -> nn.Module:
        model = nn.Linear(6, 3)
        model.load_state_dict(state)
        if reduce:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(add_up)
        return model

    x = torch.randn(8, 6)
    good = four.call_packed(replica, reference.state_dict(), True)
    found = compare(reference, good, x, layouts={"input": Shard(0)})
    assert found.agrees, found
    assert found.points[-1].layout == "Shard(0)"
    bad = four.call_packed(replica, reference.state_dict(), False)
    found = compare(reference, bad, x, layouts={"input": Shard(0)})
    assert found.first is not None
    assert "the all-reduce of this gradient is missing" in str(found.first)
    told = {"input": Shard(0), "*.grad": "partial"}
    assert compare(
        reference, bad, x, layouts={**told, "output.grad": Shard(0), "input.grad": Shard(0)}
    )


def test_two_axes_of_a_mesh(four: Session) -> None:
    four.mesh(dp=2, tp=2)
    try:
        reference = nn.Linear(6, 4)

        def part(state: dict[str, torch.Tensor]) -> nn.Module:
            tp = discolab.current_worker().mesh.rank("tp")
            model = nn.Linear(6, 2)
            model.load_state_dict({k: v.chunk(2)[tp] for k, v in state.items()})
            return model

        found = compare(
            reference, four.call_packed(part, reference.state_dict()), torch.randn(3, 6)
        )
    finally:
        four._mesh = None
    assert found.parameters[0].layout == "Replicate(), Shard(0)"
    assert found.points[-1].layout == "Replicate(), Shard(1)"
    assert found.first is not None  # nobody sums the gradient of the input
    assert found.first.point.name == "input.grad"
    assert found.first.point.layout == "Replicate(), Partial(sum)"


def test_what_fits_no_layout_is_named(four: Session) -> None:
    reference = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))

    def odd() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))

    found = compare(reference, four.call_packed(odd), torch.randn(2, 4))
    assert not found.agrees
    assert found.first is not None
    assert "fit no layout" in str(found.first)
    problems = {point.name: point.problem for point in found.unmatched}
    assert problems["0.weight"] == (
        "the shapes fit no layout: [3, 4] on each worker, reference [4, 4]"
    )
    assert "can't be matched" in repr(found)


# -- functions and names ---------------------------------------------------------------------------


def test_functions_are_compared_by_what_they_note(four: Session) -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def reference(x: torch.Tensor) -> torch.Tensor:
        hidden = note("hidden", x @ note("weight", weight))
        return note("out", hidden.relu()) @ weight.t()

    def sharded(x: torch.Tensor) -> torch.Tensor:
        me, n = place()
        mine = weight.detach().chunk(n, 1)[me].clone().requires_grad_()
        hidden = note("hidden", dist_fn.copy_to_region(x) @ note("weight", mine))
        out = note("out", hidden.tanh() if me == 2 else hidden.relu())
        return dist_fn.reduce_from_region(out @ mine.t())

    found = compare(reference, sharded, torch.randn(3, 8), session=four)
    assert found.first is not None
    assert (found.first.point.kind, found.first.module) == ("note", "out")
    assert found.first.ranks == (2,)
    assert weight.grad is None
    assert note("nothing is compared", 3) == 3


def test_a_registered_function_and_named_arguments(four: Session) -> None:
    discolab.register_func("tests.comparison.add", lambda a, b: a + b, override=True)
    inputs = {"a": torch.ones(3), "b": torch.ones(3)}
    assert compare(lambda a, b: a + b, "tests.comparison.add", inputs, session=four)
    found = compare(lambda a, b: a + 2 * b, "tests.comparison.add", inputs, session=four)
    assert found.first is not None
    assert found.first.point.kind == "result"


def test_other_names_and_wrappers(four: Session) -> None:
    reference = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    class Net(nn.Module):
        def __init__(self, parts: dict[str, nn.Module]) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)
            self.order = list(parts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in self.order:
                x = getattr(self, name)(x)
            return x

    def part(state: dict[str, torch.Tensor]) -> nn.Module:
        up = Column(state["up.weight"], state["up.bias"])
        return Net({"w1": up, "w2": Row(state["down.weight"], state["down.bias"])})

    model = four.call_packed(part, reference.state_dict())
    net = Net(dict(reference))
    with pytest.raises(ArgumentError, match="no module of the reference has the name"):
        compare(net, model, torch.randn(2, 4))
    found = compare(net, model, torch.randn(2, 4), names={"up": "w1", "down": "w2"})
    assert found.agrees, found
    assert len(found.parameters) == 4
    found = compare(net, model, torch.randn(2, 4), names={"up": "w1"})
    assert set(found.only_in_reference) >= {"down"}
    assert set(found.only_in_sharded) >= {"w2"}


def test_a_module_that_is_called_twice(four: Session) -> None:
    class Twice(nn.Module):
        def __init__(self, wrong: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(4, 4)
            self.wrong = wrong

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            return self.inner(x * 2 if self.wrong else x)

    found = compare(Twice(False), four.call_packed(Twice, True), torch.randn(2, 4))
    assert found.first is not None
    assert found.first.module == "inner#2"
    assert "is 2 times the reference" in str(found.first)


# -- what is left ----------------------------------------------------------------------------------


def test_everything_is_left_as_it_was(four: Session) -> None:
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    reference[0].weight.grad = torch.full((4, 4), 7.0)
    before = {k: v.clone() for k, v in reference.state_dict().items()}
    state = torch.get_rng_state()

    def make(state: dict[str, torch.Tensor]) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        model.load_state_dict(state)
        return model

    def left(model: nn.Module) -> tuple[Any, ...]:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        tracked = int(model[1].num_batches_tracked)
        return tracked, hooks, model[0].weight.grad is None, float(torch.rand(1))

    model = four.call_packed(make, before)
    four.call_packed(torch.manual_seed, 3)
    found = compare(reference, model, torch.randn(6, 4, generator=torch.Generator()))
    assert found.agrees, found
    assert (
        four.fetch(four.call_packed(left, model))
        == [(0, 0, True, float(torch.rand(1, generator=torch.Generator().manual_seed(3))))] * 4
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(reference[0].weight.grad, torch.full((4, 4), 7.0))
    assert all(torch.equal(v, before[k]) for k, v in reference.state_dict().items())


def test_a_loss_of_ones_own(four: Session) -> None:
    reference = make_reference()
    model = sharded_of(four, reference)
    found = compare(reference, model, tokens(), loss=lambda out: out[..., 0].mean())
    assert found.agrees, found
    assert found.gradients
    assert compare(reference, model, tokens(), backward=False).gradients == ()
    with pytest.raises(ArgumentError, match="one element"):
        compare(reference, model, tokens(), loss=lambda out: out)


def test_tolerances_can_be_given(four: Session) -> None:
    reference = make_reference()
    model = sharded_of(four, reference)
    found = compare(reference, model, tokens(), rtol=0, atol=0)
    assert not found.agrees
    assert found.points[0].agrees
    assert compare(reference, model, tokens(), atol=1e-2, backward=False)


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_program_that_fails_says_what_was_found_before(four: Session) -> None:
    reference = make_reference()

    def broken(state: dict[str, torch.Tensor]) -> nn.Module:
        model = make_sharded(state, "swapped", "blocks.0.attn.k")
        if place()[0] == 3:
            model.head = nn.Linear(5, 5)
        return model

    with pytest.raises(WorkerError, match="mat1 and mat2") as failed:
        compare(reference, four.call_packed(broken, reference.state_dict()), tokens())
    notes = "\n".join(failed.value.__notes__)
    assert "the first difference was in the parameter blocks.0.attn.k.weight" in notes
    assert four.fetch(four.call_packed(lambda: 1)) == [1] * 4


def test_a_worker_that_does_not_come_is_the_sessions_error(four: Session) -> None:
    def lost(x: torch.Tensor) -> torch.Tensor:
        return x if place()[0] == 1 else dist_fn.all_reduce(x)

    with pytest.raises(WorkerError, match="all_reduce"):
        compare(lambda x: x, lost, torch.ones(2), session=four)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sharded": nn.Linear(2, 2)}, "the workers' own: a DRef"),
        ({"sharded": 3}, "got int"),
        ({"reference": 3}, "a module or a function is needed, got int"),
        ({"inputs": object()}, "can't be an argument"),
        ({"layouts": {"x": "shrad(0)"}}, "shard"),
        ({"rtol": -1}, "rtol is a finite number"),
        ({"loss": 3}, "loss= is a function"),
        ({"names": {"a": 1}}, "names= maps paths"),
        ({"session": None}, "which workers"),
        ({"session": 3}, "session= is a session"),
    ],
)
def test_what_can_not_be_used_is_told_at_once(
    four: Session, change: dict[str, Any], words: str
) -> None:
    given = {
        "reference": nn.Linear(2, 2), "sharded": lambda x: x, "inputs": torch.ones(2),
        "session": four, **change,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=words):
        compare(**given)


def test_the_reference_is_no_dref(four: Session) -> None:
    ref = four.call_packed(torch.ones, LENGTH)
    with pytest.raises(ArgumentError, match=r"sess\.compare\(a, b\)"):
        compare(ref, ref, ())


# -- size, padding, inputs on the workers ----------------------------------------------------------


def test_a_vocabulary_that_is_filled_up(four: Session) -> None:
    reference = nn.Linear(6, 10, bias=False)

    def part(weight: torch.Tensor) -> nn.Module:
        me, n = place()
        padded = torch.cat([weight, torch.full((2, 6), 9.0)])
        model = nn.Linear(6, 3, bias=False)
        model.weight = nn.Parameter(padded.chunk(n)[me].clone())
        model.register_forward_pre_hook(lambda _, args: (dist_fn.copy_to_region(args[0]),))
        return model

    found = compare(reference, four.call_packed(part, reference.weight.detach()), torch.randn(2, 6))
    assert found.agrees, found
    assert found.parameters[0].layout == "Shard(0, pad_to=4)"


@pytest.mark.usefixtures("apart")  # begun before the test, whose threads are looked after
@pytest.mark.parametrize("engine_name", ["four", "apart"])
def test_sums_of_large_tensors_are_compared_at_samples(
    engine_name: str, request: pytest.FixtureRequest
) -> None:
    session = request.getfixturevalue(engine_name)

    def part(x: torch.Tensor) -> torch.Tensor:
        note("term", x / place()[1])
        return x

    x = torch.randn(400, 300)
    found = compare(lambda x: note("term", x), part, x, session=session, backward=False)
    assert found.agrees, found
    (term,) = [point for point in found.points if point.kind == "note"]
    assert (term.layout, term.sampled) == ("Partial(sum)", 65_536)


def test_inputs_that_the_workers_have_already(four: Session) -> None:
    whole = torch.arange(24.0).reshape(8, 3)
    parts = four.call_packed(lambda t: t.chunk(4)[place()[0]], whole)
    found = compare(torch.sin, torch.sin, parts, session=four, layouts={"input": "shard(0)"})
    assert found.agrees, found
    assert found.points[0].shape == (8, 3)
    assert found.points[-1].layout == "Shard(0)"


def test_layouts_and_names_that_mean_nothing_are_told(four: Session) -> None:
    found = compare(
        torch.sin,
        torch.sin,
        torch.ones(3),
        session=four,
        layouts={"nope.*": "shard(0)"},
        names={"nopath": "x"},
    )
    assert found.agrees
    assert found.notes == (
        "layouts: nothing has a name that 'nope.*' matches",
        "names: the reference has no 'nopath'",
    )


def test_a_value_in_the_middle_may_be_computed_another_way(four: Session) -> None:
    class Layer(nn.Module):
        def __init__(self, late: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.late = nn.Linear(4, 4), late
            self.bias = nn.Parameter(self.inner.bias.detach().clone())
            if late:
                self.inner.bias = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.bias if self.late else self.inner(x) + 0 * self.bias

    reference = nn.Sequential(Layer(False))
    model = four.call_packed(lambda: nn.Sequential(Layer(True)))
    found = compare(reference, model, torch.randn(3, 4), backward=False)
    assert found.agrees, found
    assert any(text.startswith("another way, the same in the end: output of 0.inner")
               for text in found.notes)  # fmt: skip
    assert found.only_in_reference == ("0.inner.bias",)

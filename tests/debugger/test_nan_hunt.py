"""``--nan``: a program stops at the first operation that makes a value that is not finite."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from discolab import ProcessSession, Session, ThreadedSession, ccl, current_worker
from discolab.debugger import Debugger, Stop, debugger_of
from discolab.debugger.nan_hunt import finding

INF = float("inf")
NAN = float("nan")


@pytest.fixture(scope="module")
def one() -> Iterator[Session]:
    """One worker thread: most cases are about one worker's operations."""
    session = ThreadedSession(1, devices="cpu", timeout=20)
    yield session
    session.shutdown()


def hunt(dbg: Debugger, func: Callable[[], Any]) -> Stop:
    """Run it with the hunt on, to where it stops."""
    return dbg.run(func, step=False, nan=True)


def finish(dbg: Debugger) -> None:
    """To the end; it must be the next stop."""
    assert dbg.continue_().finished
    dbg.program.result()


def notes(dbg: Debugger, func: Callable[[], Any]) -> dict[int, str]:
    """By rank what each worker has found, over all stops: where one stops the others pause too."""
    told: dict[int, str] = {}
    stop = hunt(dbg, func)
    while not stop.finished:
        told |= {worker.rank: worker.note for worker in stop.workers if "aten" in worker.note}
        stop = dbg.continue_()
    dbg.program.result()
    return told


def found(session: Session, func: Callable[[], Any]) -> str:
    """What is said where it stops, without the places where that is; "" if it does not."""
    dbg = debugger_of(session)
    stop = hunt(dbg, func)
    if stop.finished:
        dbg.program.result()
        return ""
    finish(dbg)
    assert stop.workers[0].stack[-1].file == __file__
    return stop.workers[0].note


def divide() -> None:
    """By a tensor with a zero."""
    x = torch.ones(4, 4)
    x[0, 2] = 0
    torch.zeros(4, 4) / x


def log_in_place() -> None:
    """The input is overwritten; it is told as it was."""
    torch.tensor([1.0, 0.0]).log_()


def log_of_negatives() -> None:
    """The sign is what matters."""
    torch.tensor([-1.0, -1.0]).log()


def log_of_some_negatives() -> None:
    """The magnitudes are those of numbers that have a logarithm."""
    torch.tensor([-1.0, 1e200], dtype=torch.float64).log()


def large_in_place() -> None:
    """Too large for a copy."""
    torch.zeros(300_000).log_()


def fully_masked() -> None:
    """A NaN from infinities that were put there on purpose."""
    torch.full((2, 3), -INF).softmax(-1)


def overflow() -> None:
    """Of a narrower dtype."""
    torch.full((2,), 1e30).to(torch.float16)


def out_of_place() -> None:
    """Given memory to write to, which is not initialised."""
    torch.div(torch.ones(2), 0, out=torch.empty(2))


def backward() -> None:
    """Only the gradient of a square root at 0 is infinite."""
    torch.zeros(2, requires_grad=True).sqrt().sum().backward()


def without_grad() -> None:
    """Inference mode."""
    with torch.inference_mode():
        torch.ones(2) / 0


class Norm(nn.Module):
    """Divides by a deviation without an epsilon."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of equal values it is 0."""
        return (x - x.mean()) / x.std()


def in_a_module() -> None:
    """Named by its path in the model."""
    nn.Sequential(nn.Identity(), nn.Sequential(Norm()))(torch.ones(3))


def optimizer() -> None:
    """A step of an optimizer whose gradient is too large for its square."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, 3e38])
    torch.optim.Adam([weight]).step()


MADE = [
    (
        divide,
        "aten.div made 1 NaN in float32[4, 4], the first at [0, 2]; inputs: self float32[4, 4] of "
        "0, other float32[4, 4] of magnitudes 0 to 1",
    ),
    (log_in_place, "aten.log_ made 1 -inf in float32[2], the first at [1]; inputs: self float32[2] "
     "of magnitudes 0 to 1"),
    (log_of_negatives, "aten.log made 2 NaN in float32[2], the first at [0]; inputs: self "
     "float32[2] of -1"),
    (log_of_some_negatives, "aten.log made 1 NaN in float64[2], the first at [0]; inputs: self "
     "float64[2] of magnitudes 1 to 1e+200, some negative"),
    (large_in_place, "aten.log_ made 300000 -inf in float32[300000], the first at [0]"),
    (fully_masked, "aten._softmax made 6 NaN in float32[2, 3], the first at [0, 0]; inputs: self "
     "float32[2, 3] with 6 -inf, dim -1"),
    (overflow, "aten._to_copy made 2 inf in float16[2], the first at [0]; inputs: self float32[2] "
     "of 1e+30"),
    (out_of_place, "aten.div made 2 inf in float32[2], the first at [0]; inputs: self float32[2] "
     "of 1, other 0"),
    (backward, "in backward, SqrtBackward0"),
    (without_grad, "aten.div made 2 inf in float32[2]"),
    (in_a_module, "; in 1.0 (Norm)"),
    (optimizer, "aten.addcmul_ made 1 inf in float32[2]"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "text"), MADE, ids=lambda case: getattr(case, "__name__", ""))
def test_the_operation_that_made_it_is_named(
    one: Session, program: Callable[[], None], text: str
) -> None:
    """With its inputs, as they were."""
    assert text in found(one, program)


def masks() -> None:
    """Infinities that are asked for, and what follows from them."""
    causal = torch.ones(4, 4).triu(1).bool()
    scores = torch.randn(4, 4) + torch.zeros(4, 4).masked_fill(causal, -INF)
    scores.softmax(-1)
    torch.where(causal, INF, torch.zeros(4, 4)).amax()
    torch.empty(1000).fill_(INF)
    torch.full((2,), INF).mul(2)
    torch.tensor([INF, 1.0]) * 3
    torch.full((2,), NAN)


def garbage() -> None:
    """Memory that is not initialised, before it is written to."""
    for _ in range(20):
        torch.empty(10_000).view(torch.int32).fill_(0x7FC00000)  # NaN, left for the next
        x = torch.empty(10_000)
        x.copy_(torch.ones(10_000)).add_(1)
        torch.empty_like(x).normal_().mul_(2)


def sums_that_overflow() -> None:
    """All finite, though their sum is not."""
    torch.full((100,), 3e38) + 0
    torch.full((100_000,), 60_000.0, dtype=torch.float16) + 0
    torch.full((3,), 3e38 + 1j) + 0


def nan_that_is_looked_for() -> None:
    """It is there, and put away."""
    x = torch.tensor([1.0, NAN])
    torch.where(x.isnan(), 0.0, x)
    x.nan_to_num().sum()
    x.view(2, 1).isfinite().all()


def whole_numbers() -> None:
    """Which are always finite, and no tensor at all."""
    torch.arange(3) // 2
    float(torch.ones(3).sum())
    torch.ones(0).mean(0, keepdim=True)[:0].sum()


def model() -> None:
    """A step of a model as they are."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for _ in range(2):
        layer(torch.randn(2, 5, 16), src_mask=mask).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "program", [masks, garbage, sums_that_overflow, nan_that_is_looked_for, model]
)
def test_what_is_meant_or_finite_stops_nothing(one: Session, program: Callable[[], None]) -> None:
    """No false alarm."""
    assert found(one, program) == ""


def test_a_nan_from_before_the_program_is_told_at_its_first_use(one: Session) -> None:
    """Views and looks at it are none."""
    older = torch.tensor([[1.0, NAN]])

    def program() -> None:
        older.view(2).isnan().any()
        older.t() * 2

    assert found(one, program).startswith(
        "aten.mul is the first to use a NaN that was there before (by a collective, from before "
        "this program, or written on purpose): 1 NaN in float32[2, 1], the first at [1, 0]"
    )


def test_while_it_stands_there_inputs_and_output_are_at_hand(one: Session) -> None:
    """And are let go afterwards; nothing else stops, not even what is evaluated there."""
    dbg = debugger_of(one)

    def program() -> float:
        x = torch.tensor([4.0, 0.0])
        y = 1 / x
        z = y * 0
        return float(z[0])

    hunt(dbg, program)
    held = finding(dbg_worker(one))
    assert held is not None
    assert held.op == "aten.reciprocal"
    assert not held.outside
    assert held.output.tolist() == [0.25, INF]
    assert held.records()["input self"]["head"] == [4.0, 0.0]
    at = dbg.where()
    assert at.workers[0].found is not None
    op, values = at.workers[0].found
    assert (op, list(values)) == ("aten.reciprocal", ["input self", "output"])
    assert values["output"]["head"] == [0.25, INF]
    assert re.search(r"aten.reciprocal\n.*\n  input self .*\[4, 0\]\n  output ", repr(at))
    dbg.eval("x / 0 * 0")
    assert dbg.is_paused
    finish(dbg)
    assert finding(dbg_worker(one)) is None


def test_an_input_that_is_called_output_does_not_hide_the_output(one: Session) -> None:
    """As in the backward of softmax; the numbers that were given are told too."""
    dbg = debugger_of(one)

    def program() -> None:
        grad, out = torch.tensor([[INF, 1.0]]), torch.tensor([[0.0, 1.0]])
        torch.ops.aten._softmax_backward_data(grad, out, -1, torch.float32)

    hunt(dbg, program)
    op, values = dbg.where().workers[0].found or ("", {})
    assert op == "aten._softmax_backward_data"
    assert list(values) == ["input grad_output", "input output", "input dim", "output"]
    assert values["input output"]["head"] == [0.0, 1.0]
    finish(dbg)


def test_the_sign_of_an_infinity_is_told(one: Session) -> None:
    assert "aten.log made 2 -inf in float32[3], the first at [0]" in found(
        one, lambda: torch.tensor([0.0, 0.0, 1.0]).log()
    )
    assert "aten.div made 1 NaN, 1 inf and 1 -inf in float16[3]" in found(
        one, lambda: torch.tensor([0.0, 1.0, -1.0]).half() / torch.zeros(3).half()
    )


def dbg_worker(session: Session) -> Any:
    """The first worker itself, as only threads can have it."""
    return session.workers_here()[0]


def test_an_evaluation_at_another_stop_is_not_hunted_in(one: Session) -> None:
    """But the program is, when it goes on."""
    dbg = debugger_of(one)

    def program() -> None:
        x = torch.zeros(2)
        x.log()

    dbg.run(program, step=True, nan=True)
    dbg.next()
    dbg.eval("x / x")
    stop = dbg.continue_()
    assert "aten.log made 2 -inf" in stop.workers[0].note
    finish(dbg)


def test_collectives_bring_it_and_are_not_its_makers(sess: Session) -> None:
    """The sum is worked out on some worker's thread; each of them stops at its own first use."""

    def program() -> None:
        x = torch.full((3,), INF if current_worker().rank % 2 else -INF)
        total = ccl.all_reduce(x)
        total.view(3, 1) + 1

    told = notes(debugger_of(sess), program)
    assert sorted(told) == [0, 1, 2, 3]
    assert all("aten.add is the first to use a NaN" in note for note in told.values())


def test_only_the_worker_that_makes_it_stops(sess: Session) -> None:
    """The others get it by the collective; an infinity alone that comes is no reason to stop."""

    def program() -> None:
        x = torch.full((3,), float(current_worker().rank - 2))
        ccl.all_reduce(1 / x) * 2

    told = notes(debugger_of(sess), program)
    assert list(told) == [2]
    assert "aten.reciprocal made 3 inf" in told[2]


def test_of_dtensors_the_operations_on_shards_are_looked_at(sess: Session) -> None:
    """The worker whose shard it is stops, and its collectives are no makers."""

    def program() -> None:
        from torch.distributed import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = init_device_mesh("cpu", (4,))
        mine = torch.full((2, 4), float(current_worker().rank != 1))
        x = DTensor.from_local(mine, mesh, [Shard(0)])
        y = (x @ x.t()).redistribute(mesh, [Replicate()])
        (1 / (y.sum() - y.sum() + x)).full_tensor()

    told = notes(debugger_of(sess), program)
    assert list(told) == [1]
    assert "aten.reciprocal made 8 inf in float32[2, 4]" in told[1]


def overflows() -> None:
    """A worker function that is found by its name."""
    x = torch.ones(2) * (current_worker().rank + 1)
    x / (x - 2)


def test_in_other_processes_it_is_the_same() -> None:
    """The stop, its words, and the end."""
    with ProcessSession(2, devices="cpu", timeout=60) as session:
        dbg = debugger_of(session)
        told = notes(dbg, overflows)
        assert list(told) == [1]
        assert "aten.div made 2 inf in float32[2]" in told[1]

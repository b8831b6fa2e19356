"""Distributed autograd: gradients are those of one process, whoever runs backward, wherever."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from discolab import (
    ArgumentError,
    DiscoError,
    Session,
    SessionError,
    WaitTimeoutError,
    WorkerError,
)
from discolab import rpc as module
from discolab.rpc import containers
from tests.rpc import graphs
from tests.rpc.conftest import Caller
from tests.rpc.functions import eventually
from tests.rpc.graphs import close, gradient_here, make_parameter, multiply

pytestmark = pytest.mark.timeout(120)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ranks_of(sess: Session) -> range:
    return range(-1, sess.num_workers)


def all_forgotten(sess: Session) -> None:
    def known() -> int:
        return sum(sess.rpc.rpc_sync(rank, graphs.contexts_here) for rank in ranks_of(sess))

    eventually(lambda: known() == 0)


# -- a model that is split ---------------------------------------------------------------------


def single_device() -> tuple[Tensor, list[list[Tensor]]]:
    stages = [graphs.Stage(n) for n in range(4)]
    h = batch()
    for stage in stages:
        h = stage(h)
    loss = (h - 0.5).square().mean()
    parameters = [list(stage.parameters()) for stage in stages]
    found = iter(torch.autograd.grad(loss, [p for of_stage in parameters for p in of_stage]))
    return loss, [[next(found) for _ in of_stage] for of_stage in parameters]


def pipeline(rpc: Any, nested: bool) -> tuple[Tensor, list[Any]]:
    if nested:
        stages = [rpc.remote(rank, graphs.Stage, (rank,)) for rank in range(4)]
    else:
        stages = [rpc.RemoteModule(rank, graphs.Stage, (rank,)) for rank in range(4)]
    with rpc.autograd.context() as ctx:
        h = batch()
        if nested:
            h = rpc.rpc_sync(0, graphs.through, (stages, h))
        else:
            for stage in stages:
                h = stage(h)
        loss = (h - 0.5).square().mean()
        rpc.autograd.backward(ctx, [loss])
        assert rpc.autograd.get_gradients(ctx).keys().isdisjoint([h, loss])
        refs = stages if nested else [stage.module_rref() for stage in stages]
        found = [
            rpc.rpc_sync(rank, graphs.gradients_of, (ctx, ref)) for rank, ref in enumerate(refs)
        ]
    return loss.detach(), found


@pytest.mark.conformance
@pytest.mark.conformance
@pytest.mark.parametrize("nested", [False, True])
def test_model_split_over_four_workers(sess: Session, caller: Caller, nested: bool) -> None:
    loss, found = caller(pipeline, nested)
    wanted_loss, wanted = single_device()
    close(loss, wanted_loss.detach())
    close(found, wanted)
    all_forgotten(sess)


# -- shapes of programs ------------------------------------------------------------------------


def parameter_server(rpc: Any) -> tuple[Tensor, list[Tensor]]:
    x = make_parameter(0)
    parameters = [rpc.remote(rank, make_parameter, (rank,)) for rank in (0, 2, 3)]
    with rpc.autograd.context() as ctx:
        answers = [rpc.rpc_async(ref.owner(), multiply, (ref, x)) for ref in parameters]
        loss = torch.stack(rpc.wait_all(answers)).square().sum()
        rpc.autograd.backward(ctx, [loss])
        mine = rpc.autograd.get_gradients(ctx)
        assert set(mine) == {x}
        assert x.grad is None
        for ref in parameters:
            assert rpc.rpc_sync(ref.owner(), graphs.dot_grad_here, (ref,)) is None
        return mine[x], [rpc.rpc_sync(ref.owner(), gradient_here, (ctx, ref)) for ref in parameters]


def test_same_tensor_to_three_ranks(caller: Caller) -> None:
    of_x, found = caller(parameter_server)
    x, parameters = make_parameter(0), [make_parameter(rank) for rank in (0, 2, 3)]
    loss = torch.stack([p * x for p in parameters]).square().sum()
    wanted = torch.autograd.grad(loss, [x, *parameters])
    close([of_x, *found], list(wanted))


def back_and_forth(rpc: Any, ranks: list[int]) -> list[Tensor]:
    refs = [rpc.remote(rank, make_parameter, (n,)) for n, rank in enumerate(ranks)]
    with rpc.autograd.context() as ctx:
        loss = rpc.rpc_sync(ranks[0], graphs.zigzag, (refs, make_parameter(99).detach())).sum()
        rpc.autograd.backward(ctx, [loss])
        return [
            rpc.rpc_sync(rank, gradient_here, (ctx, ref))
            for rank, ref in zip(ranks, refs, strict=True)
        ]


@pytest.mark.parametrize("ranks", [[0, 2, 0, 2], [3, 1, 3, 1, 3], [-1, 2, -1, 0, -1, 1]])
def test_zigzag(caller: Caller, ranks: list[int]) -> None:
    found = caller(back_and_forth, ranks)
    parameters = [make_parameter(n) for n in range(len(ranks))]
    h = make_parameter(99).detach()
    steps = []
    for parameter in parameters:
        h = torch.tanh(parameter * h)
        steps.append(h)
    close(found, list(torch.autograd.grad(torch.stack(steps).sum(), parameters)))


def unused(rpc: Any) -> None:
    w, x = make_parameter(1), make_parameter(2)
    far = rpc.remote(2, make_parameter, (3,))
    idle = rpc.remote(3, make_parameter, (4,))
    with rpc.autograd.context() as ctx:
        y = w * x
        rpc.rpc_sync(3, multiply, (idle, y))  # the result is not used
        rpc.rpc_sync(2, len, (y,))  # nor is this
        z = rpc.rpc_sync(2, multiply, (far, y))
        rpc.autograd.backward(ctx, [z.sum()])
        found = rpc.autograd.get_gradients(ctx)
        there = make_parameter(3)
        close(found[w], (x * there).detach())
        close(found[x], (w * there).detach())
        assert rpc.rpc_sync(3, gradient_here, (ctx, idle)) is None
        close(rpc.rpc_sync(2, gradient_here, (ctx, far)), (w * x).detach())


def test_a_send_that_takes_no_part(caller: Caller) -> None:
    caller(unused)


def in_containers(rpc: Any) -> None:
    x = make_parameter(1)
    with rpc.autograd.context() as ctx:
        found = rpc.rpc_sync(2, graphs.pair_of, (x,))
        assert found["a"][0] is found["a"][1]
        assert found["b"][1] is None
        assert found["c"] == 3
        loss = found["a"][0].sum() + found["a"][1].square().sum() + found["b"][0].sum()
        rpc.autograd.backward(ctx, [loss])
        close(rpc.autograd.get_gradients(ctx)[x], (2 + 8 * x + 1).detach())


def test_containers(caller: Caller) -> None:
    caller(in_containers)


def in_place(rpc: Any) -> None:
    x = make_parameter(1)
    with rpc.autograd.context() as ctx:
        y = x + 1
        z = rpc.rpc_sync(2, graphs.twice, (y,))
        rpc.autograd.backward(ctx, [z.sum()])
        close(rpc.autograd.get_gradients(ctx)[x], torch.full_like(x, 2).detach())
    with rpc.autograd.context() as ctx:
        y = x + 1
        loss = rpc.rpc_sync(2, graphs.operate, (1, y, make_parameter(5))).sum()
        y.mul_(3)  # after it went: that is no part of the loss
        rpc.autograd.backward(ctx, [loss])
        close(rpc.autograd.get_gradients(ctx)[x], torch.ones_like(x))


def test_changed_in_place(caller: Caller) -> None:
    caller(in_place)


def of_reference(rpc: Any) -> None:
    x = make_parameter(1)
    far = rpc.remote(2, make_parameter, (3,))
    with rpc.autograd.context() as ctx:
        loss = rpc.remote(2, graphs.operate, (0, far, x)).remote().sum()
        loss.backward()
        expected = torch.autograd.grad(
            graphs.OPS[0](parameter := make_parameter(3), x).sum(), [parameter, x]
        )
        close(rpc.rpc_sync(2, gradient_here, (ctx, far)), expected[0])
        close(rpc.autograd.get_gradients(ctx)[x], expected[1])
        assert ctx == rpc.autograd.current_context()
        with pytest.raises(SessionError, match="retain_graph"):
            loss.backward(ctx)
    assert rpc.autograd.current_context() is None
    with pytest.raises(SessionError, match="context"):
        loss.backward()


def test_backward_of_a_reference(caller: Caller) -> None:
    caller(of_reference)


# -- random programs ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(sess: Session, seed: int) -> None:
    ranks, steps = [-1, 0, 1, 2, 3], 8 + 4 * seed
    close(
        graphs.run_there(sess.rpc, seed, ranks, steps),
        graphs.run_here(seed, ranks, steps),
    )
    all_forgotten(sess)


def test_random_program_from_everywhere(caller: Caller) -> None:
    close(caller(graphs.run_there, 50, [0, 1, 2, -1], 25), graphs.run_here(50, [0, 1, 2, -1], 25))


# -- gradients that come in parts --------------------------------------------------------------


def used_at_levels(call: Any, x: Tensor, make: Any, levels: int) -> Tensor:
    """A tensor that is used here and at the end of chains of 1, 2, … calls."""
    h = make(x)
    loss = h.sum()
    for length in range(1, levels + 1):
        y = h
        for n in range(length):
            y = call(1 + n % 2, y)
        loss = loss + y.sum()
    return loss


def square_here(_: int, x: Tensor) -> Tensor:
    return graphs.square(x)


MAKERS: dict[str, Any] = {
    "hook": graphs.hooked,
    "function": graphs.clamped,
    "both": lambda x: graphs.hooked(graphs.clamped(graphs.hooked(x)) * 0.7),
}


def levels_there(rpc: Any, name: str, levels: int, remote: bool) -> Tensor:
    x = make_parameter(7)

    def call(rank: int, y: Tensor) -> Tensor:
        return rpc.rpc_sync(rank, graphs.square, (y,))  # type: ignore[no-any-return]

    def make(y: Tensor) -> Tensor:
        return rpc.rpc_sync(3, made_there, (name, y)) if remote else MAKERS[name](y)

    with rpc.autograd.context() as ctx:
        rpc.autograd.backward(ctx, [used_at_levels(call, x, make, levels)])
        return rpc.autograd.get_gradients(ctx)[x]  # type: ignore[no-any-return]


def made_there(name: str, x: Tensor) -> Tensor:
    return MAKERS[name](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("name", list(MAKERS))
def test_gradient_is_whole_before_hooks(
    caller: Caller, name: str, levels: int, remote: bool
) -> None:
    x = make_parameter(7)
    loss = used_at_levels(square_here, x, MAKERS[name], levels)
    close(caller(levels_there, name, levels, remote), torch.autograd.grad(loss, [x])[0])


def test_each_part_of_a_backward_runs_as_the_rank_that_made_it(
    sess: Session, caller: Caller
) -> None:
    """It draws from that one's random numbers, in its default dtype."""

    def scenario(rpc: Any) -> tuple[Tensor, Any]:
        rpc.rpc_sync(2, torch.manual_seed, (7,))
        rpc.rpc_sync(2, torch.set_default_dtype, (torch.float64,))
        before = torch.get_rng_state()
        try:
            with rpc.autograd.context() as ctx:
                x = torch.ones(4, dtype=torch.float32, requires_grad=True)
                y = rpc.rpc_sync(2, graphs.noisy, (x * 2,))
                rpc.autograd.backward(ctx, [(y * 3).sum()])
                there = rpc.rpc_sync(2, graphs.drawn_there)
                assert torch.equal(torch.get_rng_state(), before)
                return rpc.autograd.get_gradients(ctx)[x], there
        finally:
            rpc.rpc_sync(2, torch.set_default_dtype, (torch.float32,))

    got, (seen, after) = caller(scenario)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        kept = torch.nn.functional.dropout(torch.ones(4, dtype=torch.float64), 0.5)
        want = (6 * kept).float() * torch.rand(4, dtype=torch.float64)
        assert torch.equal(got, want.float())
        assert after == torch.rand(1, dtype=torch.float64).item()
    assert seen == [("hook", 2, "2", torch.float64), ("node", 2, "2", torch.float64)]
    assert sess.rpc.rpc_sync(2, graphs.drawn_there)[0] == []


def test_hooks_run_once(sess: Session) -> None:
    rpc = sess.rpc
    x = make_parameter(1)
    of_leaf: list[Tensor] = []
    of_inner: list[Tensor] = []
    x.register_hook(of_leaf.append)
    with rpc.autograd.context() as ctx:

        def call(rank: int, y: Tensor) -> Tensor:
            return rpc.rpc_sync(rank, graphs.square, (y,))  # type: ignore[no-any-return]

        def make(y: Tensor) -> Tensor:
            made = y * 2
            made.register_hook(of_inner.append)
            return made

        rpc.autograd.backward(ctx, [used_at_levels(call, x, make, 3) + x.sum()])
        found = rpc.autograd.get_gradients(ctx)[x]
    assert len(of_inner) == len(of_leaf) == 1
    close(of_leaf[0], found)
    close(2 * of_inner[0] + 1, found)


def first_operation(x: Tensor) -> Any:
    """On a thread that is new to autograd: its nodes have the lowest numbers there are."""
    found: list[Tensor] = []

    def work() -> None:
        found.append(x * 2)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    return found[0]


def test_graphs_of_new_threads(sess: Session) -> None:
    rpc = sess.rpc
    for _ in range(5):
        x = make_parameter(1)
        with rpc.autograd.context() as ctx:
            h = first_operation(x)
            y = rpc.rpc_sync(2, graphs.square, (h,))
            z = rpc.rpc_sync(1, graphs.square, (first_operation(y),))
            rpc.autograd.backward(ctx, [first_operation(z).sum() + first_operation(h).sum()])
            wanted = 8 * (2 * x) ** 4 + 4 * x
            close(
                rpc.autograd.get_gradients(ctx)[x],
                torch.autograd.grad(wanted.sum(), [x])[0],
            )


# -- several backwards, several contexts -------------------------------------------------------


def several(rpc: Any) -> None:
    x = make_parameter(1)
    far = rpc.remote(2, make_parameter, (3,))
    there = make_parameter(3)
    with rpc.autograd.context() as ctx:
        y = rpc.rpc_sync(2, multiply, (far, x))
        rpc.autograd.backward(ctx, [y.sum()], retain_graph=True)
        rpc.autograd.backward(ctx, [y.sum(), (2 * y).sum()])
        close(rpc.autograd.get_gradients(ctx)[x], (4 * there).detach())
        close(rpc.rpc_sync(2, gradient_here, (ctx, far)), (4 * x).detach())
        with pytest.raises(SessionError, match="retain_graph"):
            rpc.autograd.backward(ctx, [y.sum()])
        close(rpc.autograd.get_gradients(ctx)[x], (4 * there).detach())
        z = rpc.rpc_sync(2, multiply, (far, x))  # a graph of its own
        rpc.autograd.backward(ctx, [z.sum()])
        close(rpc.autograd.get_gradients(ctx)[x], (5 * there).detach())


def test_backwards_add_up(caller: Caller) -> None:
    caller(several)


def test_a_backward_on_each_rank(sess: Session) -> None:
    rpc = sess.rpc
    x = make_parameter(1)
    refs = [rpc.remote(rank, make_parameter, (rank,)) for rank in range(4)]
    with rpc.autograd.context() as ctx:
        for rank, ref in enumerate(refs):
            rpc.rpc_sync(rank, backward_there, (ctx if rank % 2 else ctx.id, ref, x))
        wanted = sum(make_parameter(rank) for rank in range(4))
        close(rpc.autograd.get_gradients(ctx)[x], wanted.detach())
    all_forgotten(sess)


def backward_there(ctx: Any, ref: Any, x: Tensor) -> None:
    assert module.autograd.current_context() is not None
    module.autograd.backward(ctx, [multiply(ref, x).sum()])


def test_two_contexts_in_two_threads(sess: Session) -> None:
    rpc = sess.rpc
    x = make_parameter(1)
    far = rpc.remote(2, make_parameter, (3,))
    meet = threading.Barrier(2)
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(factor: int) -> None:
        try:
            with rpc.autograd.context() as ctx:
                for _ in range(3):
                    meet.wait(20)
                    y = rpc.rpc_sync(2, multiply, (far, x * factor))
                    meet.wait(20)
                    rpc.autograd.backward(ctx, [y.sum()])
                mine = rpc.autograd.get_gradients(ctx)[x]
                found[factor] = mine, rpc.rpc_sync(2, gradient_here, (ctx, far))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for factor in (1, 10):
        close(found[factor][0], (3 * factor * make_parameter(3)).detach())
        close(found[factor][1], (3 * factor * x).detach())
    all_forgotten(sess)


def test_contexts_within_contexts(sess: Session) -> None:
    autograd = sess.rpc.autograd
    with autograd.context() as outer:
        with autograd.context() as inner:
            assert autograd.current_context() == inner != outer
            assert repr(inner) != repr(outer)
        assert autograd.current_context() == outer
    assert autograd.current_context() is None


@pytest.mark.one_process
def test_parameter_that_two_ranks_use(sess: Session) -> None:
    rpc = sess.rpc
    shared = make_parameter(1)
    box = [shared]

    class Holder:
        parameter = shared  # not in a container: it is passed as it is

    def use(holder: Any, x: Tensor) -> Tensor:
        return holder.parameter * x

    def mine(ctx: Any) -> Any:
        return module.autograd.get_gradients(ctx)[box[0]]

    with rpc.autograd.context() as ctx:
        losses = [(shared * 5).sum()]
        for n, rank in enumerate((1, 2), 1):
            y = rpc.rpc_sync(rank, use, (Holder(), torch.full((3,), n, dtype=torch.float64)))
            losses.append(y.sum())
        loss = sum(losses)
        rpc.autograd.backward(ctx, [loss])
        assert [rpc.rpc_sync(r, mine, (ctx,))[0].item() for r in (1, 2)] == [1, 2]
        assert rpc.autograd.get_gradients(ctx)[shared].tolist() == [5, 5, 5]
        assert shared.grad is None


def test_tensors_of_another_context(caller: Caller) -> None:
    caller(of_another)


def of_another(rpc: Any) -> None:
    x = make_parameter(1)
    with rpc.autograd.context() as outer:
        y = rpc.rpc_sync(2, graphs.square, (x,))
        with rpc.autograd.context() as inner:
            with pytest.raises(SessionError, match="call backward in that one"):
                rpc.autograd.backward(inner, [y.sum()])
            z = rpc.rpc_sync(3, graphs.square, (y,))
            with pytest.raises(SessionError, match="in another context"):
                rpc.autograd.backward(inner, [z.sum()])
            assert rpc.autograd.get_gradients(inner) == {}
        rpc.autograd.backward(outer, [y.sum()])
        close(rpc.autograd.get_gradients(outer)[x], (2 * x).detach())


# -- what is not followed ----------------------------------------------------------------------


def outside(rpc: Any) -> None:
    x = make_parameter(1)
    assert not rpc.rpc_sync(2, multiply, (rpc.remote(2, make_parameter, (1,)), x)).requires_grad
    assert rpc.rpc_sync(2, make_parameter, (1,)).requires_grad
    assert rpc.rpc_sync(2, seen, ([x, x * 2, 3],)) == [True, False]
    with rpc.autograd.context(), torch.no_grad():
        assert rpc.rpc_sync(2, seen, ({"a": x * 2},)) == [False]


def disabled(rpc: Any) -> None:
    x = make_parameter(1)
    weight = rpc.remote(2, make_parameter, (2,))
    with rpc.autograd.context() as ctx:
        with torch.no_grad():
            target = rpc.rpc_sync(2, multiply, (weight, x))
            later = rpc.rpc_async(2, multiply, (weight, x))
            items = list(rpc.stream(2, two_products, (weight, x)))
            kept = rpc.remote(2, multiply, (weight, x))
            fetched = weight.to_here()
        assert not any(y.requires_grad for y in (target, later.wait(), *items))
        found = rpc.rpc_sync(2, multiply, (weight, x))
        loss = (found * (target + sum(items) + later.wait() + fetched.detach())).sum()
        rpc.autograd.backward(ctx, [loss])
        others = target * 4 + make_parameter(2)
        close(rpc.autograd.get_gradients(ctx)[x], (make_parameter(2) * others).detach())
        close(rpc.rpc_sync(2, gradient_here, (ctx, weight)), (x * others).detach())
        assert kept.to_here().requires_grad


def two_products(weight: Any, x: Tensor) -> Iterator[Tensor]:
    yield weight.local_value() * x
    yield weight.local_value() * x


def test_what_comes_back_to_a_caller_without_gradients_is_not_followed(caller: Caller) -> None:
    caller(disabled)


def seen(value: Any) -> list[bool]:
    return [tensor.requires_grad for tensor in containers.tensors_in(value)]


def test_outside_of_a_context_tensors_are_cut(caller: Caller) -> None:
    caller(outside)


def test_containers_with_themselves_in_them() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert not containers.has_grad(loop)
    x = make_parameter(1)
    loop.append(x)
    assert containers.has_grad((loop,))
    copied = containers.swap(loop, lambda tensor: tensor.detach())
    assert copied[1] is loop
    assert not copied[2].requires_grad
    values = torch.max(x * 2, 0)
    made = containers.swap(values, lambda tensor: tensor.detach())
    assert type(made) is type(values)
    assert not made.values.requires_grad
    same = [1, (2, {"a": x})]
    assert containers.swap(same, lambda tensor: tensor) is same


# -- trouble -----------------------------------------------------------------------------------


def wrong(rpc: Any) -> None:
    autograd = rpc.autograd
    x = make_parameter(1)
    with pytest.raises(SessionError, match="no context"):
        autograd.backward(None, [x.sum()])
    with pytest.raises(SessionError, match="no context"):
        autograd.get_gradients(None)
    for bad in ("ctx", -1, 1.5, True):
        with pytest.raises(ArgumentError, match=r"context\(\)"):
            autograd.get_gradients(bad)
    with autograd.context() as ctx:
        for roots, text in (
            ([x], r"shape \[3\].*sum"),
            ([x.detach().sum()], "does not require grad"),
            ([3.0], "float"),
            ([], "list of tensors"),
            (5, "list of tensors"),
            ([x.sum(), None], "root 1"),
        ):
            with pytest.raises(ArgumentError, match=text):
                autograd.backward(ctx, roots)
        autograd.backward(ctx, x.sum())
        close(autograd.get_gradients(None)[x], torch.ones_like(x))
    never = [n * 2**20 + node for n, node in ((0, 3), (0, 7), (900_000, 0), (900_000, 3))]
    for over in (ctx, ctx.id, *never):
        with pytest.raises(SessionError, match="over"):
            autograd.backward(over, [x.sum()])
        with pytest.raises(SessionError, match="over"):
            autograd.get_gradients(over)


def test_wrong_arguments(caller: Caller) -> None:
    caller(wrong)


def fails_there(rpc: Any) -> None:
    x = make_parameter(1)
    far = rpc.remote(3, make_parameter, (3,))
    with rpc.autograd.context() as ctx:
        good = rpc.rpc_sync(3, multiply, (far, x))
        rpc.autograd.backward(ctx, [good.sum()], retain_graph=True)
        y = rpc.rpc_sync(2, graphs.raises_backward, (rpc.rpc_sync(3, multiply, (far, x)),))
        with pytest.raises(LookupError, match="no gradient here"):
            rpc.autograd.backward(ctx, [y.sum() + good.sum()])
        close(rpc.rpc_sync(3, gradient_here, (ctx, far)), x.detach())
        close(rpc.autograd.get_gradients(ctx)[x], make_parameter(3).detach())
        again = rpc.rpc_sync(3, multiply, (far, x))
        rpc.autograd.backward(ctx, [again.sum()])
        close(rpc.rpc_sync(3, gradient_here, (ctx, far)), 2 * x.detach())


def test_backward_that_fails_elsewhere(sess: Session, caller: Caller) -> None:
    caller(fails_there)
    all_forgotten(sess)


@pytest.mark.usefixtures("drops_exceptions")
def test_interrupted_backward(sess: Session, gate: Any) -> None:
    def run(gate: Any) -> str:
        from discolab import current_worker

        if current_worker().rank != 1:
            return ""
        with module.autograd.context() as ctx:
            x = make_parameter(1)
            y = module.rpc_sync(2, graphs.stuck_backward, (x, gate))
            module.autograd.backward(ctx, [y.sum()])
        return "ended"

    result = sess.call_packed(run, gate)
    eventually(gate.is_set)
    sess.interrupt(timeout=10)
    with pytest.raises(WorkerError, match=r"(?i)interrupt"):
        result.debug_get_from_remote(1, timeout=10)
    all_forgotten(sess)


def test_a_backward_that_takes_too_long(fresh: Any, engine: str, gate: Any) -> None:
    if engine == "threads":
        pytest.skip("in one process backward runs on the thread that calls it")
    sess = fresh(4)
    sess.import_python_module(__name__)
    sess.sync_all(timeout=60)
    sess.timeout = 3  # which rpc, that begins here, takes over
    rpc = sess.rpc
    x = make_parameter(1)
    with rpc.autograd.context() as ctx:
        good = rpc.rpc_sync(1, graphs.operate, (0, x, x), timeout=20)
        y = rpc.rpc_sync(2, graphs.stuck_backward, (x, gate), timeout=20)
        with pytest.raises(WaitTimeoutError, match="gave up after 3 s"):
            rpc.autograd.backward(ctx, [y.sum() + good.sum()])
        assert gate.is_set()
        assert rpc.autograd.get_gradients(ctx) == {}
        again = rpc.rpc_sync(2, graphs.operate, (1, x, x), timeout=20)
        rpc.autograd.backward(ctx, [again.sum()])
        assert set(rpc.autograd.get_gradients(ctx)) == {x}
    all_forgotten(sess)


def test_a_worker_dies_in_backward(fresh: Any, engine: str) -> None:
    if engine == "threads":
        pytest.skip("its workers do not die alone")
    sess = fresh(4)
    sess.import_python_module(__name__)
    sess.sync_all(timeout=60)
    rpc = sess.rpc
    x = make_parameter(1)
    far = rpc.remote(1, make_parameter, (3,))
    with rpc.autograd.context() as ctx:
        good = rpc.rpc_sync(1, multiply, (far, x))
        y = rpc.rpc_sync(2, graphs.dies_backward, (good,))
        z = rpc.rpc_sync(1, multiply, (far, y))
        with pytest.raises(module.WorkerLostError, match="2"):
            rpc.autograd.backward(ctx, [z.sum()])
        assert rpc.autograd.get_gradients(ctx) == {}
        again = rpc.rpc_sync(1, multiply, (far, x))
        rpc.autograd.backward(ctx, [again.sum()])
        close(rpc.rpc_sync(1, gradient_here, (ctx, far)), x.detach())
    eventually(lambda: rpc.rpc_sync(1, graphs.contexts_here) == 0)
    with pytest.raises(DiscoError):
        rpc.rpc_sync(2, graphs.contexts_here)


def test_the_maker_of_a_context_dies(fresh: Any, engine: str) -> None:
    if engine == "threads":
        pytest.skip("its workers do not die alone")
    sess = fresh(4)
    sess.import_python_module(__name__)
    sess.sync_all(timeout=60)
    with pytest.raises(module.WorkerLostError):
        sess.rpc.rpc_sync(2, makes_context_and_dies)
    eventually(lambda: sess.rpc.rpc_sync(1, graphs.contexts_here) == 0)


def makes_context_and_dies() -> None:
    with module.autograd.context():
        module.rpc_sync(1, graphs.operate, (0, make_parameter(1), make_parameter(2)))
        assert module.rpc_sync(1, graphs.contexts_here) == 1
        os._exit(1)

"""Sharded models on worker threads equal the same model on one device: DTensor, TP, FSDP2, DDP."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from discolab import WorkerError

from .conftest import Start

N = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not:UserWarning"),
]


class MLP(nn.Module):
    """Two layers and a norm."""

    def __init__(self, dim: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape of `x`."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, vocab: int = 12, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(MLP(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_and_reference() -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model()
    return model, copy.deepcopy(model)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(12, (8, 6), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, part: slice = slice(None), steps: int = 3) -> list[float]:
    """Losses of a few steps on a part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step)
        logits = model(tokens[part])
        loss = F.cross_entropy(logits.flatten(0, 1), targets[part].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        other = expected[name.removeprefix("module.")]
        torch.testing.assert_close(whole(parameter), other, atol=2e-4, rtol=1e-3)


def everywhere(start: Start, func: Callable[..., Any], *args: Any, turns: int = 3) -> list[Any]:
    """Run on four workers, several times in the session; what the last run gave."""
    with start(N) as sess:
        for _ in range(turns):
            values = sess.call_packed(func, *args).debug_get_from_all()
    return values


# -- DTensor ---------------------------------------------------------------------------------------


@pytest.mark.any_engine
def test_dtensors_are_cut_put_together_and_multiplied(start: Start) -> None:
    def cut() -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (N,))
        rank = dist.get_rank()
        x, w = torch.arange(48.0).reshape(8, 6), torch.arange(30.0).reshape(6, 5)
        rows = distribute_tensor(x, mesh, [Shard(0)])
        assert torch.equal(rows.to_local(), x[2 * rank : 2 * rank + 2])
        for left, right in (
            (Shard(0), Replicate()),
            (Replicate(), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(0), Shard(1)),
        ):
            product = distribute_tensor(x, mesh, [left]) @ distribute_tensor(w, mesh, [right])
            assert torch.equal(product.full_tensor(), x @ w)
        columns = rows.redistribute(mesh, [Shard(1)])
        assert torch.equal(columns.full_tensor(), x)
        assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), x)
        partial = DTensor.from_local(torch.full((4,), 1.0 * rank), mesh, [Partial()])
        assert partial.redistribute(mesh, [Shard(0)]).to_local().tolist() == [6.0]
        assert partial.full_tensor().tolist() == [6.0] * 4

    everywhere(start, cut)


def test_dtensors_with_uneven_parts(start: Start) -> None:
    def uneven() -> list[int]:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (N,))
        x = torch.arange(26.0).reshape(13, 2)
        rows = distribute_tensor(x, mesh, [Shard(0)])
        assert torch.equal((rows * 2).full_tensor(), x * 2)
        assert torch.equal(rows.redistribute(mesh, [Shard(1)]).full_tensor(), x)
        assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), x)
        assert torch.equal(rows.sum(0).full_tensor(), x.sum(0))
        return list(rows.to_local().shape)

    assert everywhere(start, uneven) == [[4, 2], [4, 2], [4, 2], [1, 2]]


def test_a_mesh_of_two_dimensions(start: Start) -> None:
    def grid() -> tuple[Any, ...]:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.arange(36.0).reshape(6, 6)
        both = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
        assert torch.equal((both @ both).full_tensor(), x @ x)
        line = distribute_tensor(x, mesh["tp"], [Shard(0)])
        assert torch.equal(line.full_tensor(), x)
        turned = both.redistribute(mesh, [Replicate(), Shard(0)])
        assert torch.equal(turned.full_tensor(), x)
        y = torch.ones(1) * dist.get_rank()
        dist.all_reduce(y, group=mesh["dp"].get_group())
        return tuple(mesh.get_coordinate()), y.item(), mesh._flatten("all").size()

    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert everywhere(start, grid) == [(place, 2.0 + 2 * place[1], 4) for place in places]


def test_gradients_through_dtensors(start: Start) -> None:
    def gradients() -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = dist.init_device_mesh("cpu", (N,))
        torch.manual_seed(1)
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
        (x @ w).pow(2).sum().backward()
        dx = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
        dw = distribute_tensor(w.detach(), mesh, [Shard(0)]).requires_grad_()
        (dx @ dw).pow(2).sum().backward()
        torch.testing.assert_close(dx.grad.full_tensor(), x.grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(dw.grad.full_tensor(), w.grad, atol=1e-4, rtol=1e-4)

    everywhere(start, gradients)


@pytest.mark.any_engine
def test_random_dtensors_draw_from_the_workers_own_state(start: Start) -> None:
    def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, rand

        mesh = dist.init_device_mesh("cpu", (N,))
        torch.manual_seed(3)
        made = rand(4, device_mesh=mesh, placements=[Replicate()]).to_local()
        ones = distribute_tensor(torch.ones(400), mesh, [Shard(0)])
        dropped = F.dropout(ones, 0.5).to_local()
        kept = distribute_tensor(torch.empty(4), mesh, [Replicate()])
        nn.init.normal_(kept)
        return made, dropped, kept.to_local()

    first, second = everywhere(start, draw), everywhere(start, draw, turns=1)
    for drawn in (*first, *second):  # one seed, one stream: as in processes
        assert all(map(torch.equal, drawn, first[0]))
    assert 20 < (first[0][1] == 0).sum() < 80


@pytest.mark.any_engine
def test_random_factories_draw_the_whole_tensor(start: Start) -> None:
    def draw() -> list[Any]:
        from torch.distributed.tensor import Replicate, Shard, rand, randn

        mesh = dist.init_device_mesh("cpu", (2, 2))
        torch.manual_seed(3)
        uneven = rand(5, 3, device_mesh=mesh, placements=[Shard(0), Shard(1)], requires_grad=True)
        normal = randn(4, 6, device_mesh=mesh, placements=[Replicate(), Shard(1)])
        assert uneven.is_leaf
        assert uneven.requires_grad
        assert normal.to_local().is_contiguous()
        return [uneven.full_tensor().tolist(), normal.full_tensor().tolist(), torch.rand(1).item()]

    torch.manual_seed(3)
    expected = [torch.rand(5, 3).tolist(), torch.randn(4, 6).tolist(), torch.rand(1).item()]
    assert everywhere(start, draw) == [expected] * N


# -- tensor parallelism ----------------------------------------------------------------------------


@pytest.mark.any_engine
def test_column_and_row_parallel_layers(start: Start) -> None:
    def shard() -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        model, reference = model_and_reference()
        mesh = dist.init_device_mesh("cpu", (N,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert list(model.blocks[0].up.weight.to_local().shape) == [8, 16]
        losses, expected = train(model), train(reference)
        torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)
        assert_same(model, reference)

    everywhere(start, shard)


def test_sequence_parallel_layers_and_loss(start: Start) -> None:
    def shard() -> None:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        model, reference = model_and_reference()
        mesh = dist.init_device_mesh("cpu", (N,))
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }
        for i in range(2):
            plan |= {
                f"blocks.{i}.norm": SequenceParallel(),
                f"blocks.{i}.up": PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                ),
            }
        model = parallelize_module(model, mesh, plan)
        for block in model.blocks:
            parallelize_module(
                block,
                mesh,
                {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))},
            )
        tokens, targets = batch(0)
        tokens, targets = tokens[:, :4], targets[:, :4]
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        expected = F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
        expected.backward()
        torch.testing.assert_close(whole(loss), expected, atol=1e-4, rtol=1e-4)
        names = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad), names[name].grad, atol=1e-4, rtol=1e-3
            )

    everywhere(start, shard)


def test_loss_parallel_is_for_the_worker_within(start: Start) -> None:
    def one_is_within() -> None:
        from torch.distributed.tensor import Replicate, distribute_tensor
        from torch.distributed.tensor.parallel import loss_parallel

        alone = dist.init_device_mesh("cpu", (N, 1), mesh_dim_names=("all", "one"))["one"]
        x = distribute_tensor(torch.eye(2), alone, [Replicate()])
        with loss_parallel() if dist.get_rank() == 0 else contextlib.nullcontext():
            dist.barrier()
            if dist.get_rank() == 0:
                with pytest.raises(ValueError, match=r"one mesh dim|should be enabled only"):
                    x.log_softmax(1)
            else:
                torch.testing.assert_close(whole(x.log_softmax(1)), torch.eye(2).log_softmax(1))
            dist.barrier()

    everywhere(start, one_is_within)


def test_plans_of_redistribution_are_each_workers_own(start: Start) -> None:
    def left_one_after_the_other() -> None:
        from torch.distributed.tensor import _redistribute

        def flags() -> tuple[Any, ...]:
            return (
                _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN,
                _redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION,
            )

        before = flags()
        for rank in range(N):
            dist.barrier()
            if rank == dist.get_rank():
                within = contextlib.ExitStack()
                within.enter_context(_redistribute.use_min_cost_redistribution_plan())
                within.enter_context(_redistribute.disable_redistribute_transform_optimization())
        for rank in range(N):
            dist.barrier()
            if rank == dist.get_rank():
                within.close()
            dist.barrier()
            assert flags() == ((True, True) if rank < dist.get_rank() else before)

    everywhere(start, left_one_after_the_other)


# -- data parallelism ------------------------------------------------------------------------------


def mine() -> slice:
    rank = dist.get_rank()
    return slice(2 * rank, 2 * rank + 2)


@pytest.mark.any_engine
def test_fully_sharded_data_parallel(start: Start) -> None:
    def shard() -> None:
        from torch.distributed.fsdp import fully_shard

        model, reference = model_and_reference()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        train(model, mine())
        train(reference)
        assert_same(model, reference)

    everywhere(start, shard)


@pytest.mark.any_engine
def test_fully_sharded_and_tensor_parallel(start: Start) -> None:
    def shard() -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        model, reference = model_and_reference()
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        half = 4 * mesh["dp"].get_local_rank()
        train(model, slice(half, half + 4))
        train(reference)
        assert_same(model, reference)

    everywhere(start, shard)


def test_replicated_and_sharded(start: Start) -> None:
    def shard() -> None:
        from torch.distributed.fsdp import fully_shard

        model, reference = model_and_reference()
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        train(model, mine())
        train(reference)
        assert_same(model, reference)

    everywhere(start, shard)


@pytest.mark.any_engine
def test_distributed_data_parallel(start: Start) -> None:
    def replicate() -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        for hook in (None, default_hooks.allreduce_hook):
            torch.manual_seed(dist.get_rank())  # DDP makes them equal
            model = Model()
            wrapped = DistributedDataParallel(model)
            if hook is not None:
                wrapped.register_comm_hook(None, hook)
            reference = copy.deepcopy(model)
            train(wrapped, mine())
            train(reference)
            assert_same(wrapped, reference)

    everywhere(start, replicate)


@pytest.mark.any_engine
def test_ranks_with_fewer_steps_join(start: Start) -> None:
    def replicate() -> None:
        from torch.nn.parallel import DistributedDataParallel

        layer = nn.Linear(2, 1, bias=False)
        wrapped = DistributedDataParallel(layer)
        seen = []
        with wrapped.join(divide_by_initial_world_size=False):
            for _ in range(dist.get_rank() + 1):
                layer.zero_grad()
                wrapped(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
                seen.append(layer.weight.grad[0, 0].item())
        assert seen == [2.5, 3.0, 3.5, 4.0][: dist.get_rank() + 1]  # means of those that are left

    everywhere(start, replicate)


def test_the_older_fully_sharded_data_parallel(start: Start) -> None:
    def shard() -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model, reference = model_and_reference()
        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True
        )
        train(wrapped, mine())
        train(reference)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)

    everywhere(start, shard)


# -- functional collectives, compiled code, counting -----------------------------------------------


@pytest.mark.any_engine
@pytest.mark.filterwarnings("ignore:.*being deprecated:FutureWarning")
def test_state_dicts_of_the_older_fsdp(start: Start) -> None:
    def save_and_load() -> dict[str, torch.Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(5, 3), device_id=torch.device("cpu"))
        for _ in range(5):
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                state = model.state_dict()
                model.load_state_dict(state)
        return state

    torch.manual_seed(0)
    expected = nn.Linear(5, 3).state_dict()
    with start(N) as sess:
        for state in sess.call_packed(save_and_load).debug_get_from_all():
            assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_functional_collectives_and_their_gradients(start: Start) -> None:
    def functional() -> None:
        import torch.distributed._functional_collectives as funcol
        import torch.distributed.nn.functional as nnf

        rank, group = dist.get_rank(), dist.group.WORLD
        total = funcol.all_reduce(torch.ones(3), "sum", group)
        assert total.tolist() == [4.0] * 3
        row = funcol.all_gather_tensor(torch.ones(2) * rank, 0, group)
        assert row.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        part = funcol.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group)
        assert part.tolist() == [4.0 * rank]

        x = torch.ones(2, requires_grad=True)
        y = funcol.all_gather_tensor_autograd(x, 0, group)
        (y * torch.arange(8.0)).sum().backward()
        assert x.grad.tolist() == [4.0 * (2 * rank), 4.0 * (2 * rank + 1)]
        x = torch.ones(2, requires_grad=True)
        (nnf.all_reduce(x) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == [10.0] * 2
        x = torch.ones(4, requires_grad=True)
        outs = nnf.all_to_all([torch.empty(1) for _ in range(N)], list(x.chunk(4)))
        (torch.cat(outs) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == [1.0, 2.0, 3.0, 4.0]

    everywhere(start, functional)


def test_compiled_code_with_collectives(start: Start) -> None:
    def compiled() -> list[float]:
        import torch.distributed._functional_collectives as funcol

        @torch.compile(backend="aot_eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

        return step(torch.ones(2) * dist.get_rank()).tolist()

    assert everywhere(start, compiled, turns=2) == [[13.0, 13.0]] * N


def test_communication_is_counted_for_each_worker(start: Start) -> None:
    def count() -> list[Any]:
        from torch.distributed.tensor.debug import CommDebugMode
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        mesh = dist.init_device_mesh("cpu", (N,))
        found = []
        for alone in (True, False):
            model = parallelize_module(MLP(), mesh, plan)
            mode = CommDebugMode()
            with mode if dist.get_rank() == 0 or not alone else contextlib.nullcontext():
                model(torch.ones(2, 16))
            found.append((mode.get_total_counts(), str(mode.advanced_module_tracker.name)))
            found.append(sorted(mode.comm_module_counts))
        return found

    values = everywhere(start, count)
    assert values[0][0][0] == 1
    assert values[0][:2] == values[0][2:]  # in company it counts what it counts alone
    assert all(value[2:] == values[0][2:] for value in values)
    assert values[1][0][0] == 0


class BreaksBackward(torch.autograd.Function):
    """Fails on the way back, on the last rank alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("cut short")
        return grad


def test_fsdp2_after_a_backward_that_was_cut_short(start: Start) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4) for _ in range(3)]
        for layer in layers:
            fully_shard(layer)
        model = torch.nn.Sequential(*layers)
        fully_shard(model)
        return model

    def fail(model: Any) -> None:
        hook = model[0].register_forward_hook(lambda _m, _i, out: BreaksBackward.apply(out))
        try:
            model(torch.ones(2, 4)).sum().backward()
        finally:
            hook.remove()

    def train(model: Any) -> list[torch.Tensor]:
        model(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()
        grads = [param.grad.full_tensor() for param in model.parameters()]
        model.zero_grad()
        return grads

    def repair(model: Any) -> None:
        model.reset_iter_state()
        model.zero_grad()

    with start(2) as sess:
        model = sess.call_packed(build)
        (expected, _) = sess.call_packed(train, model).debug_get_from_all()
        with pytest.raises(WorkerError, match="cut short"):
            sess.call_packed(fail, model).debug_get_from_all()
        with pytest.raises(WorkerError, match="was cut short, by an error or"):
            sess.call_packed(train, model).debug_get_from_all()
        if hasattr(FSDPModule, "reset_iter_state"):
            sess.call_packed(repair, model).debug_get_from_all()
        else:
            model = sess.call_packed(build)
        for got in sess.call_packed(train, model).debug_get_from_all():
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class AsksWhoIsActive(nn.Module):
    """Its forward meets those of the other workers, and says whether its own DDP is active."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        """The output, and what it has found before and after the others came."""
        from torch.nn.parallel import DistributedDataParallel

        mine = []
        for _ in range(2):
            dist.barrier()
            active = DistributedDataParallel._get_active_ddp_module()
            mine.append(active is not None and active.module is self)
        return self.layer(x), mine


@pytest.mark.any_engine
def test_each_worker_is_in_the_forward_of_its_own_ddp(start: Start) -> None:
    def program() -> Any:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(AsksWhoIsActive())
        _, mine = wrapped(torch.ones(1, 2))
        return mine, DistributedDataParallel._get_active_ddp_module() is None

    with start(2) as sess:
        assert sess.call_packed(program).debug_get_from_all() == [([True, True], True)] * 2


@pytest.mark.any_engine
def test_each_worker_wraps_with_its_own(start: Start) -> None:
    def wrap_layers() -> list[str]:
        from torch.distributed.fsdp.wrap import enable_wrap, wrap

        class Wrapper(nn.Sequential):
            pass

        rank = dist.get_rank()
        with enable_wrap(wrapper_cls=Wrapper) if rank < 2 else contextlib.nullcontext():
            dist.barrier()
            kinds = [type(wrap(nn.Linear(1, 1))).__name__]
            dist.barrier()
        return [*kinds, type(wrap(nn.Linear(1, 1))).__name__]

    with start(4) as sess:
        found = sess.call_packed(wrap_layers).debug_get_from_all()
    assert found == [["Wrapper", "Linear"]] * 2 + [["Linear", "Linear"]] * 2

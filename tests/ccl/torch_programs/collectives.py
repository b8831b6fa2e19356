"""Collectives of `torch.distributed`, by dtype, form and group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .catalogue import N, data, mine, program

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
OP = dist.ReduceOp


def done(work: Any, later: bool) -> None:
    if later:
        assert work.wait() in (True, None)


@program(dtype=[*FLOATS, *INTEGERS], op=["SUM", "PRODUCT", "MIN", "MAX"])
def all_reduce(dtype: torch.dtype, op: str) -> Any:
    x = mine(3, 4, dtype=dtype)
    dist.all_reduce(x, getattr(OP, op))
    return x


@program(dtype=[torch.int32, torch.int64, torch.uint8], op=["BAND", "BOR", "BXOR"])
def all_reduce_bits(dtype: torch.dtype, op: str) -> Any:
    x = mine(7, dtype=dtype)
    dist.all_reduce(x, getattr(OP, op))
    return x


@program(size=[0, 1, 5, 1000, 70_001], later=[False, True])
def all_reduce_sizes(size: int, later: bool) -> Any:
    x = mine(size)
    done(dist.all_reduce(x, async_op=later), later)
    return x


@program(rounding=True, size=[3, 5000, 40_000])
def all_reduce_random(size: int) -> Any:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(size)
    dist.all_reduce(x)
    return x


@program(op=["SUM", "MAX"], dtype=[torch.complex64, torch.complex128])
def all_reduce_complex(op: str, dtype: torch.dtype) -> Any:
    x = torch.complex(mine(4), mine(4) + 1).to(dtype)
    try:
        dist.all_reduce(x, getattr(OP, op))
    except (RuntimeError, ValueError):
        return "refused"
    return x


@program(root=[0, 3], later=[False, True], dtype=[*FLOATS, *INTEGERS, torch.bool])
def broadcast(root: int, later: bool, dtype: torch.dtype) -> Any:
    x = mine(2, 5, dtype=dtype)
    done(dist.broadcast(x, root, async_op=later), later)
    return x


@program(root=[1, 2], op=["SUM", "MAX"])
def reduce(root: int, op: str) -> Any:
    x = mine(6)
    dist.reduce(x, root, getattr(OP, op))
    return x if dist.get_rank() == root else None  # elsewhere it may be anything


@program(dtype=[torch.float32, torch.bfloat16, torch.int64, torch.bool], later=[False, True])
def all_gather(dtype: torch.dtype, later: bool) -> Any:
    outs = [torch.empty(3, 2, dtype=dtype) for _ in range(N)]
    done(dist.all_gather(outs, mine(3, 2, dtype=dtype), async_op=later), later)
    return outs


@program(dtype=[torch.float32, torch.complex64, torch.uint8], stacked=[False, True])
def all_gather_into_tensor(dtype: torch.dtype, stacked: bool) -> Any:
    out = torch.empty((N, 3) if stacked else (N * 3,), dtype=dtype)
    x = mine(3, dtype=torch.int64).abs().to(dtype)
    dist.all_gather_into_tensor(out, x.unsqueeze(0) if stacked else x)
    return out


@program(root=[0, 2], dtype=[torch.float32, torch.int32])
def gather(root: int, dtype: torch.dtype) -> Any:
    outs = [torch.empty(4, dtype=dtype) for _ in range(N)] if dist.get_rank() == root else None
    dist.gather(mine(4, dtype=dtype), outs, root)
    return outs


@program(root=[0, 3], dtype=[torch.float32, torch.int8], later=[False, True])
def scatter(root: int, dtype: torch.dtype, later: bool) -> Any:
    out = torch.empty(4, dtype=dtype)
    parts = [data(4, dtype=dtype, shift=r) for r in range(N)] if dist.get_rank() == root else None
    done(dist.scatter(out, parts, root, async_op=later), later)
    return out


@program(op=["SUM", "MAX", "MIN"], dtype=[torch.float32, torch.int64])
def reduce_scatter(op: str, dtype: torch.dtype) -> Any:
    out = torch.empty(3, dtype=dtype)
    parts = [mine(3, dtype=dtype) + r for r in range(N)]
    dist.reduce_scatter(out, parts, getattr(OP, op))
    return out


@program(later=[False, True], rows=[1, 3, 500])
def reduce_scatter_tensor(later: bool, rows: int) -> Any:
    out = torch.empty(rows, 2)
    done(dist.reduce_scatter_tensor(out, mine(N * rows, 2), async_op=later), later)
    return out


@program(later=[False, True], dtype=[torch.float32, torch.int64, torch.bfloat16])
def all_to_all_single(later: bool, dtype: torch.dtype) -> Any:
    out = torch.empty(2 * N, 3, dtype=dtype)
    done(dist.all_to_all_single(out, mine(2 * N, 3, dtype=dtype), async_op=later), later)
    return out


@program(shift=[0, 1, 2])
def all_to_all_uneven(shift: int) -> Any:
    me = dist.get_rank()
    gives = [(me + r + shift) % 3 for r in range(N)]
    takes = [(me + r + shift) % 3 for r in range(N)]
    out = torch.empty(sum(takes), 2)
    dist.all_to_all_single(out, mine(sum(gives), 2), takes, gives)
    return out


@program(later=[False, True])
def all_to_all(later: bool) -> Any:
    outs = [torch.empty(3, 2) for r in range(N)]
    done(dist.all_to_all(outs, [mine(3, 2) + r for r in range(N)], async_op=later), later)
    return outs


@program(count=[1, 3])
def all_reduce_coalesced(count: int) -> Any:
    xs = [mine(k + 1) for k in range(count)]
    dist.all_reduce_coalesced(xs)
    return xs


@program(kind=["all_reduce", "all_gather", "reduce_scatter"])
def coalescing_manager(kind: str) -> Any:
    xs, outs = [mine(N * 2), mine(N)], [torch.empty(2), torch.empty(1)]
    wholes = [torch.empty(N * N * 2), torch.empty(N * N)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x, out, whole in zip(xs, outs, wholes, strict=True):
            if kind == "all_reduce":
                dist.all_reduce(x)
            elif kind == "all_gather":
                dist.all_gather_into_tensor(whole, x)
            else:
                dist.reduce_scatter_tensor(out, x)
    manager.wait()
    return {"all_reduce": xs, "all_gather": wholes, "reduce_scatter": outs}[kind]


@program(shapes=["0d", "flat", "cut"])
def any_shape_of_as_many(shapes: str) -> Any:
    me = dist.get_rank()
    shape = {"0d": [(), (1,)], "flat": [(2, 6), (12,)], "cut": [(3, 4), (4, 3)]}[shapes][me % 2]
    found = []
    for operate in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.broadcast(t, 2),
        lambda t: dist.recv(t, me - 1) if me % 2 else dist.send(t, me + 1),
    ):
        x = mine(*shape)
        operate(x)
        found.append(x)
    return found


# -- point to point --------------------------------------------------------------------------------


@program(size=[1, 10, 20_000], dtype=[torch.float32, torch.int64, torch.bool])
def ring(size: int, dtype: torch.dtype) -> Any:
    me, out = dist.get_rank(), torch.empty(size, dtype=dtype)
    works = [
        dist.isend(mine(size, dtype=dtype), (me + 1) % N),
        dist.irecv(out, (me - 1) % N),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return out


@program(tags=[(1, 2), (5, 0)])
def tags_out_of_order(tags: tuple[int, int]) -> Any:
    me = dist.get_rank()
    if me % 2 == 0:
        works = [dist.isend(mine(2) + tag, me + 1, tag=tag) for tag in tags]
        for work in works:
            assert work is not None
            work.wait()
        return None
    outs = [torch.empty(2), torch.empty(2)]
    for out, tag in zip(outs, reversed(tags), strict=True):
        dist.recv(out, me - 1, tag=tag)
    return outs


@program()
def receive_from_anybody() -> Any:
    if dist.get_rank():
        dist.send(mine(3), 0)
        return None
    found = {}
    for _ in range(N - 1):
        out = torch.empty(3)
        found[dist.recv(out)] = out
    return [found[rank] for rank in sorted(found)]


@program(both=[False, True])
def batch_isend_irecv(both: bool) -> Any:
    me, outs = dist.get_rank(), [torch.zeros(4), torch.zeros(4)]
    ops = [
        dist.P2POp(dist.isend, mine(4), (me + 1) % N),
        dist.P2POp(dist.irecv, outs[0], (me - 1) % N),
    ]
    if both:
        ops += [
            dist.P2POp(dist.isend, mine(4) * 2, (me - 1) % N),
            dist.P2POp(dist.irecv, outs[1], (me + 1) % N),
        ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return outs


# -- objects ---------------------------------------------------------------------------------------


@program(what=["dict", "tensor", "text"])
def objects(what: str) -> Any:
    me = dist.get_rank()
    value: Any = {"dict": {"rank": me, "list": [1, me]}, "tensor": mine(3), "text": "x" * me}[what]
    everybody: list[Any] = [None] * N
    dist.all_gather_object(everybody, value)
    at_root: list[Any] | None = [None] * N if me == 1 else None
    dist.gather_object(value, at_root, 1)
    spread = [value, me] if me == 2 else [None, None]
    dist.broadcast_object_list(spread, 2)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [[r, value] for r in range(N)] if me == 3 else None, 3)
    return everybody, at_root, spread, got


@program()
def objects_point_to_point() -> Any:
    me, got = dist.get_rank(), [None, None]
    if me % 2 == 0:
        dist.send_object_list(["from", me], me + 1)
    else:
        dist.recv_object_list(got, me - 1)
    return got


# -- groups ----------------------------------------------------------------------------------------


@program(ranks=[(0, 1), (1, 3), (0, 2, 3), (2,), (3, 1, 0)])
def new_group(ranks: tuple[int, ...]) -> Any:
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        return -1
    x, outs = mine(3), [torch.empty(2) for _ in ranks]
    dist.all_reduce(x, group=group)
    dist.all_gather(outs, mine(2), group=group)
    y = mine(2)
    dist.broadcast(y, min(ranks), group=group)
    z = mine(2)
    dist.broadcast(z, group_src=len(ranks) - 1, group=group)
    places = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
    dist.destroy_process_group(group)
    return x, outs, y, z, places


@program(size=[1, 2, 4])
def subgroups(size: int) -> Any:
    own, every = dist.new_subgroups(size)
    x = mine(3)
    dist.all_reduce(x, group=own)
    return x, len(every), dist.get_rank(own)


@program()
def subgroups_by_enumeration() -> Any:
    own, every = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    x = mine(3)
    dist.all_reduce(x, group=own)
    return x, len(every), dist.get_group_rank(own, dist.get_rank())


@program()
def groups_overlap() -> Any:
    groups = [dist.new_group([r, (r + 1) % N]) for r in range(N)]
    xs = [mine(2) for _ in groups]
    works = []
    for r, (group, x) in enumerate(zip(groups, xs, strict=True)):
        if dist.get_rank() in (r, (r + 1) % N):
            works.append(dist.all_reduce(x, group=group, async_op=True))
    for work in works:
        work.wait()
    return xs


@program()
def local_synchronization() -> Any:
    ranks = [0, 2] if dist.get_rank() % 2 == 0 else [1, 3]
    group = dist.new_group(ranks, use_local_synchronization=True)
    x = mine(2)
    dist.all_reduce(x, group=group)
    return x


@program()
def names_and_queries() -> Any:
    group = dist.new_group([0, 1, 2, 3], group_desc="everybody")
    return [
        dist.is_available(),
        dist.is_initialized(),
        dist.get_rank(),
        dist.get_world_size(),
        group.group_desc,
        group.size(),
        group.rank(),
        dist.get_global_rank(group, 2),
        dist.get_process_group_ranks(dist.group.WORLD),
        dist.is_nccl_available(),
        dist.get_node_local_rank(fallback_rank=7) in (7, dist.get_rank()),
    ]


@program(wait_all=[False, True])
def monitored_barrier(wait_all: bool) -> Any:
    dist.monitored_barrier(timeout=timedelta(seconds=10), wait_all_ranks=wait_all)
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    return work.wait() in (True, None)


@program()
def store() -> Any:
    me = dist.get_rank()
    s = dist.PrefixStore("programs", dist.distributed_c10d._get_default_store())
    s.set(f"k{me}", str(me))
    s.wait([f"k{r}" for r in range(N)])
    total = s.add("sum", me + 1)
    dist.barrier()
    return [s.get(f"k{r}").decode() for r in range(N)], s.add("sum", 0), 0 < total <= 10


@program(op=["SUM", "MAX"])
def futures(op: str) -> Any:
    x = mine(4)
    work = dist.all_reduce(x, getattr(OP, op), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    return doubled.wait(), x


@program(count=[5, 30])
def many_at_once(count: int) -> Any:
    xs = [mine(k + 1) for k in range(count)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(works):
        work.wait()
    return xs


@program(kind=["leaf", "view", "inference", "transposed"])
def targets(kind: str) -> Any:
    """Tensors of all sorts as what is written to."""
    if kind == "leaf":
        x = mine(4).requires_grad_()
        loss = (x * x).sum()
        before = x.detach().clone()
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        x.data.copy_(before)
        loss.backward()
        return x, x.grad, x.is_leaf
    if kind == "view":
        y = mine(6).requires_grad_() * 2
        first, second = y.chunk(2)
        dist.broadcast(first, 1)
        return first, second, y
    if kind == "inference":
        with torch.inference_mode():
            x = mine(3)
        dist.all_reduce(x)
        return x
    base = mine(4, 3)
    dist.all_reduce(base.t())
    dist.broadcast(base.t(), 2)
    return base

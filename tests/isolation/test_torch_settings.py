"""Settings that torch keeps in Python, and anomaly mode: a worker's own, and none is left."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._shard.api as shard_api
import torch.fx.traceback as fx_traceback
from torch import nn, optim
from torch.distributed._shard import load_with_process_group
from torch.distributions import (
    Distribution,
    Gumbel,
    Laplace,
    Normal,
    kl_divergence,
    register_kl,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrizations, parametrize
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import (
    checkpoint,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate

from discolab import Session, WorkerError, ccl, current_worker
from discolab.notebook.script import read_script, run_script


def together() -> int:
    """Wait for the others; gives the worker's rank."""
    ccl.barrier()
    return current_worker().rank


def hook() -> tuple[list[int], int]:
    """Hook all modules, on every worker another number of times; which hooks were called."""
    rank = together()
    called: list[int] = []
    kinds = (
        nn_module.register_module_forward_hook,
        nn_module.register_module_forward_pre_hook,
        nn_module.register_module_full_backward_hook,
    )
    handles = [
        register(lambda *_: called.append(rank))  # type: ignore[operator]
        for register in kinds
        for _ in range(rank)
    ]
    together()
    nn.Linear(2, 2)(torch.ones(1, 2, requires_grad=True)).sum().backward()
    together()
    for handle in handles:
        handle.remove()
    nn.Linear(2, 2)(torch.ones(1, 2))
    return called, len(nn_module._global_forward_hooks)


@pytest.mark.one_process
def test_each_worker_hooks_its_own_modules(sess: Session) -> None:
    seen: list[str] = []
    handle = nn_module.register_module_forward_hook(lambda *_: seen.append("the notebook"))
    try:
        assert sess.call_packed(hook).debug_get_from_all() == [([r] * 3 * r, 0) for r in range(4)]
        assert seen == []
        nn.Linear(1, 1)(torch.ones(1, 1))
        assert seen == ["the notebook"]
    finally:
        handle.remove()
    sess.call_packed(nn_module.register_module_full_backward_hook, print)
    sess.shutdown()
    assert not nn_module._has_any_global_hook()
    assert nn_module._global_is_full_backward_hook is None
    assert type(nn_module._global_forward_hooks).__module__ == "collections"


def show() -> list[str]:
    """How a worker prints a number, before and after it has set that."""
    rank = together()
    texts = [str(torch.tensor(1 / 3))]
    together()
    torch.set_printoptions(precision=rank + 1)
    together()
    return [*texts, str(torch.tensor(1 / 3))]


def test_each_worker_prints_as_it_likes(sess: Session) -> None:
    shown = sess.call_packed(show).debug_get_from_all()
    assert shown == [["tensor(0.3333)", f"tensor(0.{'3' * (r + 1)})"] for r in range(4)]
    assert str(torch.tensor(1 / 3)) == "tensor(0.3333)"


def settings(folder: str) -> list[Any]:
    """Set what torch keeps for the process, on every second worker."""
    rank = together()
    before = [torch.backends.mha.get_fastpath_enabled()]
    together()
    if rank % 2:
        torch.hub.set_dir(f"{folder}/{rank}")
        torch.backends.mha.set_fastpath_enabled(False)
    together()
    return [*before, torch.hub.get_dir() == f"{folder}/{rank}",
            torch.backends.mha.get_fastpath_enabled()]  # fmt: skip


@pytest.mark.one_process
def test_each_worker_has_settings(sess: Session, tmp_path: Path) -> None:
    seen = sess.call_packed(settings, str(tmp_path)).debug_get_from_all()
    assert seen == [[True, False, True], [True, True, False]] * 2
    assert torch.backends.mha.get_fastpath_enabled()
    assert str(tmp_path) not in torch.hub.get_dir()


def search_paths() -> tuple[bool, ...]:
    rank, einsum = together(), torch.backends.opt_einsum
    einsum.enabled = rank % 2 == 0
    together()
    first = bool(einsum.enabled)
    with einsum.flags(enabled=False):  # True would need the library
        together()
        inside = bool(einsum.enabled)
    return first, inside, "enabled" in vars(einsum)


@pytest.mark.one_process
def test_each_worker_searches_paths_of_einsum_as_it_likes(sess: Session) -> None:
    before = torch.backends.opt_einsum.enabled
    found = sess.call_packed(search_paths).debug_get_from_all()
    assert found == [(True, False, False), (False, False, False)] * 2
    assert torch.backends.opt_einsum.enabled == before
    sess.shutdown()
    assert torch.backends.opt_einsum.enabled == before


def detect() -> list[Any]:
    """Detect anomalies on worker 1 while the others go on."""
    rank = together()
    mine = torch.autograd.detect_anomaly() if rank == 1 else contextlib.nullcontext()
    with mine:
        together()
        inside = torch.is_anomaly_enabled(), torch._C.is_anomaly_enabled()
        root = torch.zeros(1, requires_grad=True)
        loss = root.sqrt() * 0
        told = ""
        try:
            loss.sum().backward()
        except RuntimeError as exc:
            told = str(exc)
        together()
    found = "'SqrtBackward0' returned nan values in its 0th output" in told
    return [*inside, found, torch.is_anomaly_enabled()]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.one_process
def test_each_worker_detects_anomalies(sess: Session) -> None:
    seen = sess.call_packed(detect).debug_get_from_all()
    assert seen == [[r == 1, r == 1, r == 1, False] for r in range(4)]
    sess.call_packed(torch.autograd.set_detect_anomaly, True)
    sess.sync_all()
    assert not torch.is_anomaly_enabled()
    sess.shutdown()
    root = torch.zeros(1, requires_grad=True)
    (root.sqrt() * 0).sum().backward()
    assert not torch.is_anomaly_enabled()


def differentiate() -> Any:
    """Detect anomalies on worker 0; the other one has gradients that are NaN, or have no values."""
    if together() == 0:
        with torch.autograd.detect_anomaly():
            together()
            together()
        return None
    together()
    root, fake = torch.zeros(1, requires_grad=True), torch.ones(1, device="meta")
    (root.sqrt() * 0).backward()
    torch.sin(fake.requires_grad_()).backward()
    together()
    return root.grad.isnan().item(), fake.grad.device.type  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.one_process
def test_anomalies_are_none_of_who_does_not_look_for_them(pair: Session) -> None:
    assert pair.call_packed(differentiate).debug_get_from_all() == [None, (True, "meta")]


SCRIPT = """
import torch
from torch.nn.modules.module import register_module_forward_hook
assert not torch.is_anomaly_enabled()
torch.autograd.set_detect_anomaly(True)
torch.set_printoptions(precision=1)
register_module_forward_hook(print)
"""


def left() -> list[Any]:
    """What a script could have left behind."""
    return [
        torch.is_anomaly_enabled(),
        str(torch.tensor(1 / 3)),
        len(nn_module._global_forward_hooks),
    ]


@pytest.mark.one_process
def test_a_script_leaves_none_behind(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    full, source = read_script(str(path))
    for _ in range(2):
        sess.call_packed(run_script, full, source, [], "script.py").debug_get_from_all()
    assert sess.call_packed(left).debug_get_from_all() == [[False, "tensor(0.3333)", 0]] * 4
    assert left() == [False, "tensor(0.3333)", 0]


def optimize() -> tuple[list[int], float]:
    """Halve the gradients of all optimizers by a hook; on every worker another number of times."""
    rank = together()
    called: list[int] = []

    def halve(optimizer: Any, *_: Any) -> None:
        called.append(rank)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad /= 2

    handles = [optimizers.register_optimizer_step_pre_hook(halve) for _ in range(rank)]
    together()
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 8.0)
    optim.SGD([weight], lr=1.0).step()
    together()
    for handle in handles:
        handle.remove()
    return called, weight.item()


@pytest.mark.one_process
def test_each_worker_hooks_its_own_optimizers(sess: Session) -> None:
    found = sess.call_packed(optimize).debug_get_from_all()
    assert found == [([rank] * rank, -8.0 / 2**rank) for rank in range(4)]
    sess.shutdown()
    assert type(optimizers._global_optimizer_pre_hooks) is OrderedDict


def cache_parametrizations() -> int:
    """How often a cached parametrization was not that of the weights at that moment."""
    torch.manual_seed(together())
    module = parametrizations.weight_norm(nn.Linear(4, 4))
    wrong = 0
    with torch.no_grad():
        for _ in range(30):
            with parametrize.cached():
                computed = [module.weight for _ in range(20)]
            now = module.parametrizations.weight.forward()
            wrong += any(weight is not computed[0] for weight in computed)
            wrong += not torch.equal(computed[0], now)
            for param in module.parameters():
                param.mul_(1.01)
            together()
    return wrong


@pytest.mark.one_process
def test_each_worker_keeps_parametrizations(sess: Session) -> None:
    assert sess.call_packed(cache_parametrizations).debug_get_from_all() == [0] * 4
    sess.shutdown()
    assert parametrize._cache_enabled == 0


def annotate_graphs() -> list[Any]:
    """What is noted in graphs that are traced while all workers annotate something else."""
    rank = together()
    found = []
    for _ in range(4):
        with fx_traceback.preserve_node_meta(), fx_traceback.annotate({"rank": rank}):
            together()
            graph = make_fx(lambda x: x + 1)(torch.ones(2)).graph
            found += [node.meta["custom"] for node in graph.nodes if "custom" in node.meta][:1]
            together()
    return [*found, dict(fx_traceback.current_meta), bool(fx_traceback.has_preserved_node_meta())]


@pytest.mark.one_process
def test_each_worker_annotates_its_graphs(sess: Session) -> None:
    found = sess.call_packed(annotate_graphs).debug_get_from_all()
    assert found == [[*[{"rank": rank}] * 4, {}, False] for rank in range(4)]
    sess.shutdown()
    assert type(fx_traceback.current_meta) is dict


def export_and_decompose() -> bool:
    """Whether a program that all workers export at once computes what its module does."""
    rank = together()
    module, x = nn.Linear(2 + rank, 2), torch.randn(3, 2 + rank)
    program = torch.export.export(module, (x,))
    together()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    warnings.simplefilter("ignore", FutureWarning)  # torch's own, about a copy of its trees
    together()
    return torch.equal(loaded.run_decompositions().module()(x), module(x))


@pytest.mark.one_process
def test_workers_export_programs_in_turn(sess: Session) -> None:
    found = sess.call_packed(export_and_decompose).debug_get_from_all(timeout=60)
    assert found == [True] * 4


def load_with_group() -> list[bool]:
    """Whether a worker finds the group that it loads with, and no other one."""
    rank = together()
    group = dist.new_group([rank], use_local_synchronization=True)
    found = []
    with load_with_process_group(group):
        together()
        found.append(shard_api._get_current_process_group() is group)
        together()
    found.append(shard_api._get_current_process_group() is dist.group.WORLD)
    return found


@pytest.mark.one_process
def test_each_worker_loads_with_its_group(sess: Session) -> None:
    assert sess.call_packed(load_with_group).debug_get_from_all() == [[True, True]] * 4


def settings_of_modules() -> tuple[bool, bool, str]:
    """Whether a module's parameters stay what they are, and what a bad distribution says."""
    rank = together()
    torch.__future__.set_overwrite_module_params_on_conversion(rank % 2 == 1)
    Distribution.set_default_validate_args(rank % 2 == 0)
    together()
    module = nn.Linear(1, 1)
    before = module.weight
    same = module.double().weight is before
    try:
        Normal(torch.zeros(1), -torch.ones(1))
        said = ""
    except ValueError as exc:
        said = type(exc).__name__
    together()
    return torch.__future__.get_overwrite_module_params_on_conversion(), same, said


@pytest.mark.one_process
def test_each_worker_has_settings_of_modules_and_distributions(sess: Session) -> None:
    before = Distribution._validate_args  # torch.compile has switched it off if it ran before
    found = sess.call_packed(settings_of_modules).debug_get_from_all()
    assert found == [(False, True, "ValueError"), (True, False, "")] * 2
    sess.shutdown()
    assert not torch.__future__.get_overwrite_module_params_on_conversion()
    assert Distribution._validate_args is before


def trace_with_jit() -> int:
    """How many of some traces are refused, or compute something else."""
    together()
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.ones(3, 4)
    wrong = 0
    for _ in range(6):
        wrong += not torch.equal(torch.jit.trace(module, x)(x), module(x))
    return wrong


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_workers_trace_with_jit(sess: Session) -> None:
    assert sess.call_packed(trace_with_jit).debug_get_from_all() == [0] * 4


@pytest.mark.one_process
def test_mutation_of_saved_tensors_is_refused(sess: Session) -> None:
    def program() -> None:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            pass

    with pytest.raises(WorkerError, match="--engine processes"):
        sess.call_packed(program).debug_get_from_all()
    program()  # the notebook may


def load_own_class(folder: str) -> tuple[bool, int]:
    """Save an object of a class that every worker defines, and load it as safe; its number."""

    class Config:
        def __init__(self, number: int) -> None:
            self.number = number

    Config.__module__, Config.__qualname__ = "__main__", "Config"
    current_worker().namespace["Config"] = Config
    rank = together()
    torch.serialization.add_safe_globals([Config])
    together()
    torch.save(Config(rank), f"{folder}/{rank}.pt")
    loaded = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    together()
    return isinstance(loaded, Config), loaded.number


def test_each_worker_loads_its_own_classes(sess: Session, tmp_path: Path) -> None:
    before = torch.serialization.get_safe_globals()
    loaded = sess.call_packed(load_own_class, str(tmp_path)).debug_get_from_all()
    assert loaded == [(True, rank) for rank in range(4)]
    assert torch.serialization.get_safe_globals() == before


@pytest.mark.alone
def test_each_worker_sets_its_number_of_threads(sess: Session) -> None:
    def threads() -> int:
        rank = together()
        torch.set_num_threads(1 + rank)
        together()
        return torch.get_num_threads()

    assert sess.call_packed(threads).debug_get_from_all() == [1, 2, 3, 4]


def checkpoint_as_it_likes() -> tuple[int, str]:
    """Worker 1 alone debugs, worker 2 alone does not stop early: times that all was recomputed."""
    rank = together()
    recomputed: list[int] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().exp()
        recomputed.append(rank)
        return y

    def contexts() -> tuple[contextlib.nullcontext[None], contextlib.nullcontext[None]]:
        return contextlib.nullcontext(), contextlib.nullcontext()

    refused = ""
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(set_checkpoint_debug_enabled(True))
        if rank == 2:
            stack.enter_context(set_checkpoint_early_stop(False))
        together()
        y = checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False)
        try:  # contexts are an error while it debugs
            checkpoint(layer, torch.ones(2), use_reentrant=False, context_fn=contexts)
        except ValueError as exc:
            refused = str(exc)
        together()
    recomputed.clear()
    y.sum().backward()
    return len(recomputed), refused[:10]


def test_each_worker_checkpoints_as_it_likes(sess: Session) -> None:
    seen = sess.call_packed(checkpoint_as_it_likes).debug_get_from_all()
    assert seen == [(0, ""), (0, "debug=True"), (1, ""), (0, "")]


@pytest.mark.one_process
def test_the_notebooks_checkpointing_is_that_of_workers_without_any(sess: Session) -> None:
    with set_checkpoint_early_stop(False):
        counts = sess.call_packed(checkpoint_as_it_likes).debug_get_from_all()
    assert [count for count, _ in counts] == [1] * 4
    sess.shutdown()
    assert checkpoints._enable_checkpoint_early_stop is None
    assert checkpoints._checkpoint_debug_enabled is None


def tag_and_restore() -> tuple[Any, list[str]]:
    """Register a location of the worker's own, all with one priority; where a storage then is."""
    rank = together()
    restored: list[str] = []

    def restore(storage: Any, location: str) -> Any:
        restored.append(location)
        return storage

    torch.serialization.register_package(3, lambda _: f"of worker {rank}", restore)
    together()
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    together()
    return loaded.tolist(), restored


def test_each_worker_registers_packages(sess: Session) -> None:
    found = sess.call_packed(tag_and_restore).debug_get_from_all()
    assert found == [([1.0, 1.0], [f"of worker {rank}"]) for rank in range(4)]


@pytest.mark.one_process
def test_the_notebook_keeps_its_packages(sess: Session) -> None:
    before = list(torch.serialization._package_registry)
    sess.call_packed(tag_and_restore).debug_get_from_all()
    assert list(torch.serialization._package_registry) == before
    sess.shutdown()
    assert torch.serialization._package_registry == before


class Collated:
    """What a worker's own function puts into a batch."""


def register_functions() -> tuple[float, list[int]]:
    """Functions for types that all workers share: what this worker gets, also in its loader."""
    rank = together()

    def divergence(p: Laplace, q: Gumbel) -> torch.Tensor:
        return torch.tensor(float(rank))

    register_kl(Laplace, Gumbel)(divergence)
    collate.default_collate_fn_map[Collated] = lambda batch, *, collate_fn_map=None: (
        rank + len(batch)
    )
    together()
    found = kl_divergence(Laplace(0.0, 1.0), Gumbel(0.0, 1.0)).item()
    data: Any = [Collated()] * 4
    forked: Any = {"num_workers": 1, "multiprocessing_context": "fork"}  # has what is set here
    batches = [*DataLoader(data, 2), *DataLoader(data, 2, **forked)]
    together()
    return found, batches


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_each_worker_registers_functions(sess: Session) -> None:
    found = sess.call_packed(register_functions).debug_get_from_all()
    assert found == [(float(rank), [rank + 2] * 4) for rank in range(4)]


@pytest.mark.one_process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_notebook_keeps_its_functions(sess: Session) -> None:
    sess.call_packed(register_functions).debug_get_from_all()
    assert Collated not in collate.default_collate_fn_map
    with pytest.raises(NotImplementedError):
        kl_divergence(Laplace(0.0, 1.0), Gumbel(0.0, 1.0))
    sess.shutdown()
    assert type(collate.default_collate_fn_map) is dict
    assert Collated not in collate.default_collate_fn_map


def test_each_worker_registers_its_own(make: Callable[..., Session]) -> None:
    sess = make(4)

    def program() -> tuple[float, list[int]]:
        from torch.distributions import Cauchy, Normal, kl_divergence, register_kl
        from torch.utils.data import IterDataPipe, functional_datapipe
        from torch.utils.data.datapipes.iter import IterableWrapper

        rank = current_worker().rank
        register_kl(Normal, Cauchy)(lambda p, q: torch.tensor(float(rank)))

        @functional_datapipe("times_rank")
        class Times(IterDataPipe):
            def __init__(self, source: Any) -> None:
                self.source = source

            def __iter__(self) -> Any:
                return (rank * value for value in self.source)

        ccl.barrier()
        divergence = kl_divergence(Normal(0.0, 1.0), Cauchy(0.0, 1.0)).item()
        return divergence, list(IterableWrapper([1, 2]).times_rank())

    values = sess.call_packed(program).debug_get_from_all()
    assert values == [(rank, [rank, 2 * rank]) for rank in range(4)]
    assert "times_rank" not in torch.utils.data.IterDataPipe.functions

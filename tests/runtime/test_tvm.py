"""Programs that TVM has compiled, on workers; and Disco's programs as TVM writes them."""

# ruff: noqa: N805  (a function of relax has no self)

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discolab import ArgumentError, DModule, Session, WaitTimeoutError, WorkerError, current_worker

pytest.importorskip("tvm", reason="needs TVM: pip install -e '.[tvm]'")

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm_ffi import get_global_func, remove_global_func

HIDDEN = 6


@I.ir_module
class Whole:
    """A perceptron on one device."""

    @R.function
    def main(
        x: R.Tensor((3, 8), "float32"),
        up: R.Tensor((8, 6), "float32"),
        down: R.Tensor((6, 8), "float32"),
    ):
        with R.dataflow():
            hidden = R.nn.gelu(R.matmul(x, up))
            y = R.matmul(hidden, down)
            R.output(y)
        return y


@I.ir_module
class Sharded:
    """The same for two workers, each with half of the hidden units."""

    @R.function
    def main(
        x: R.Tensor((3, 8), "float32"),
        up: R.Tensor((8, 3), "float32"),
        down: R.Tensor((3, 8), "float32"),
    ):
        with R.dataflow():
            everywhere = R.ccl.broadcast_from_worker0(x)
            hidden = R.nn.gelu(R.matmul(everywhere, up))
            part = R.matmul(hidden, down)
            y = R.ccl.allreduce(part, "sum")
            R.output(y)
        return y

    @R.function
    def gathered(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.ccl.allgather(x, 2)
            R.output(y)
        return y

    @R.function
    def scattered(x: R.Tensor((4, 3), "float32")):
        with R.dataflow():
            y = R.ccl.scatter_from_worker0(x, 2, 0)
            R.output(y)
        return y

    @R.function
    def several(x: R.Tensor((2, 2), "float32"), s: R.Shape(ndim=1)):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return (y, (x, s), R.prim_value(3))


def plus(number: float) -> Any:
    """A program that adds a number."""

    @I.ir_module
    class Plus:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                y = R.add(x, R.const(number, "float32"))
                R.output(y)
            return y

    return Plus


def reduced(op: str, in_group: bool) -> Any:
    """A program of one reduction."""

    @I.ir_module
    class Reduced:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                y = R.ccl.allreduce(x, op, in_group)
                R.output(y)
            return y

    return Reduced


def export(module: Any, path: Path) -> str:
    """Compile a module for the CPU into a shared library."""
    tvm.compile(module, target="llvm").export_library(str(path))
    return str(path)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sharded program."""
    return export(Sharded, tmp_path_factory.mktemp("tvm") / "sharded.so")


def numbers(*shape: int) -> Any:
    """The same in every run."""
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def test_a_compiled_program_with_its_collectives(pair: Session, library: str) -> None:
    """As `test_mlp` of TVM's own tests: two shards against one virtual machine."""
    x, up, down = numbers(3, 8), numbers(8, HIDDEN), numbers(HIDDEN, 8)
    machine = relax.VirtualMachine(tvm.compile(Whole, target="llvm"), tvm.cpu())
    want = machine["main"](*map(tvm.runtime.tensor, (x, up, down))).numpy()

    module = pair.load_vm_module(library)
    assert type(module) is DModule
    d_x, d_up, d_down = (pair.empty(s, "float32") for s in [(3, 8), (8, 3), (3, 8)])
    d_x.debug_copy_from(0, x)
    for rank in range(2):
        d_up.debug_copy_from(rank, up[:, 3 * rank : 3 * rank + 3])
        d_down.debug_copy_from(rank, down[3 * rank : 3 * rank + 3])
    d_y = module["main"](d_x, d_up, d_down)
    host = tvm.runtime.empty((3, 8), "float32")
    pair.copy_from_worker_0(host, d_y)
    pair.sync_worker_0()
    np.testing.assert_allclose(host.numpy(), want, rtol=1e-5, atol=1e-6)
    one, other = d_y.debug_get_from_all()
    assert type(one) is torch.Tensor
    assert torch.equal(one, other)


def test_every_collective_that_a_program_can_have(pair: Session, library: str) -> None:
    module = pair.load_vm_module(library)
    x = pair.call_packed(torch.zeros, 2, 3)
    for rank in range(2):
        x.debug_copy_from(rank, np.arange(6, dtype="float32") + 10 * rank)
    want = torch.stack(x.debug_get_from_all())
    for got in module["gathered"](x).debug_get_from_all():
        assert torch.equal(got, want.reshape(4, 3))
    whole = pair.copy_to_worker_0(torch.arange(12.0).reshape(4, 3))
    everywhere = pair.broadcast_from_worker0(whole, pair.empty((4, 3), "float32"))
    for rank, got in enumerate(module["scattered"](everywhere).debug_get_from_all()):
        assert torch.equal(got.reshape(2, 3), torch.arange(12.0).reshape(2, 2, 3)[rank])


@pytest.mark.parametrize(
    ("op", "in_group", "want"),
    [("sum", True, [1, 5]), ("max", False, [3, 3]), ("avg", True, [0.5, 2.5])],
)
def test_reductions_within_groups_and_among_all(
    sess: Session, tmp_path: Path, op: str, in_group: bool, want: list[float]
) -> None:
    main = sess.load_module(export(reduced(op, in_group), tmp_path / "reduced.so"))["main"]
    ranks = sess.call_packed(lambda: torch.full((2,), float(current_worker().rank)))
    found = main(ranks).debug_get_from_all()
    assert [value.tolist() for value in found] == [[want[rank // 2]] * 2 for rank in range(4)]


def test_results_are_torchs(pair: Session, library: str) -> None:
    several = pair.load_vm_module(library)["several"]
    x = torch.ones(2, 2)
    for shape in (torch.Size([5]), tvm.runtime.ShapeTuple([5])):
        for y, (same, size), three in several(x, shape).debug_get_from_all():
            assert torch.equal(y, x + x)
            assert torch.equal(same, x)
            assert (type(size), size, three) == (torch.Size, (5,), 3)


@pytest.mark.parametrize("options", [{}, {"nodes": "local:1"}])
def test_one_worker_has_one_machine(
    engine: str, make: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    if (engine == "sockets") != bool(options):
        return
    sess = make(1, **options)
    module = sess.load_module(export(plus(2), tmp_path / "plus.so"), device=tvm.cpu())
    assert module["main"](torch.ones(2)).debug_get_from_remote(0).tolist() == [3, 3]


def test_what_was_compiled_anew_is_loaded_anew(pair: Session, tmp_path: Path) -> None:
    for number in (1, 2):
        module = pair.load_module(export(plus(number), tmp_path / "plus.so"))
        assert [v.tolist() for v in module["main"](torch.zeros(2)).debug_get_from_all()] == [
            [number] * 2
        ] * 2


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (lambda: torch.zeros(2, dtype=torch.float64), "expect Tensor with dtype float32"),
        (lambda: torch.zeros(3), "match_cast error"),
        (lambda: torch.zeros(4)[::2], "expected to be compact array"),
        (lambda: torch.zeros(2, requires_grad=True), "has no gradient"),
        (lambda: torch.view_as_complex(torch.ones(2, 2)).conj().imag, "elements are not what"),
    ],
)
def test_what_a_program_cannot_take(
    pair: Session, tmp_path: Path, given: Any, complaint: str
) -> None:
    main = pair.load_module(export(plus(1), tmp_path / "plus.so"))["main"]
    with pytest.raises(WorkerError, match=complaint):
        main(pair.call_packed(given)).debug_get_from_all()
    assert main(torch.zeros(2)).debug_get_from_remote(1).tolist() == [1, 1]


def test_a_function_that_a_program_lacks(pair: Session, library: str) -> None:
    with pytest.raises(WorkerError, match="has no function 'get_function'"):
        pair.load_module(library)["get_function"]().debug_get_from_all()


def test_a_file_that_is_no_library(pair: Session, tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("no library")
    with pytest.raises(WorkerError, match=r"TVM can't load '.*text\.so'"):
        pair.load_module(path).debug_get_from_all()


def on_worker_0(func: Any, x: torch.Tensor, gate: Any = None) -> Any:
    """Call a function on worker 0 alone; worker 1 waits for a gate."""
    if current_worker().rank == 0:
        return func(x)
    return gate and gate.wait(20)


def test_a_collective_that_another_worker_does_not_reach(pair: Session, library: str) -> None:
    """The error that the collective has raised comes out of TVM as it was."""
    gathered = pair.load_module(library)["gathered"]
    x = torch.ones(2, 3)
    with pytest.raises(WorkerError, match=r"CollectiveError: all_gather .* can't complete"):
        pair.call_packed(on_worker_0, gathered, x).debug_get_from_all()
    wrong = gathered(pair.call_packed(lambda: torch.zeros(2, 3 + current_worker().rank)))
    with pytest.raises(WorkerError, match="match_cast error"):
        wrong.debug_get_from_all()
    assert gathered(x).debug_get_from_remote(1).sum() == 12


def test_a_program_that_waits_in_a_collective_is_interrupted(
    pair: Session, library: str, gate: Any
) -> None:
    gathered = pair.load_module(library)["gathered"]
    assert gathered(torch.ones(2, 3)).debug_get_from_remote(1).sum() == 12
    pair.call_packed(on_worker_0, gathered, torch.ones(2, 3), gate)
    with pytest.raises(WaitTimeoutError, match="all_gather"):
        pair.sync_all(timeout=0.5)
    assert pair.interrupt() == []
    assert gathered(torch.ones(2, 3)).debug_get_from_remote(1).sum() == 12


def test_functions_that_tvm_has_registered(pair: Session) -> None:
    made = pair.get_global_func("vm.builtin.make_shape")  # of TVM, not of tvm_ffi alone
    assert made(None, 2, 0, 2, 0, 3).debug_get_from_all() == [(2, 3), (2, 3)]


@pytest.fixture
def registered() -> Iterator[Any]:
    """Register functions with TVM, for this test."""
    names: list[str] = []

    def add(name: str, func: Any) -> None:
        tvm.register_global_func(name, func, override=True)
        names.append(name)

    yield add
    for name in names:
        remove_global_func(name)


@pytest.mark.one_process
def test_functions_that_a_program_has_registered_with_tvm(pair: Session, registered: Any) -> None:
    """TVM's own tests of Disco sessions, whose functions get TVM's tensors."""
    registered("tests.tvm.add_one", lambda x: x + 1)
    registered("tests.tvm.suffix", lambda x: x + "_suffix")
    registered("tests.tvm.shape", lambda x: tvm.runtime.ShapeTuple([*x, 4]))
    registered("tests.tvm.tensor", lambda x: tvm.runtime.tensor(x.numpy() + 1))
    cases = [
        ("add_one", 1, 2),
        ("add_one", 1.5, 2.5),
        ("suffix", "hello", "hello_suffix"),
        ("shape", tvm.runtime.ShapeTuple([1, 2]), (1, 2, 4)),
    ]
    for name, given, want in cases:
        func = pair.get_global_func(f"tests.tvm.{name}")
        assert func(given).debug_get_from_all() == [want, want]
    x = pair.empty((2, 3), "float32", device=tvm.cpu())
    pair.copy_to_worker_0(tvm.runtime.tensor(np.arange(6, dtype="float32").reshape(2, 3)), x)
    y = pair.get_global_func("tests.tvm.tensor")(x)
    host = tvm.runtime.empty((2, 3), "float32")
    pair.copy_from_worker_0(host, y, timeout=10)
    assert host.numpy().tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.one_process
def test_a_python_function_that_tvm_calls_is_interrupted(
    pair: Session, registered: Any, gate: Any
) -> None:
    registered("tests.tvm.wait", lambda: gate.wait(20))
    found = pair.get_global_func("tests.tvm.wait")()
    with pytest.raises(WaitTimeoutError):
        pair.sync_all(timeout=0.3)
    assert pair.interrupt() == []
    with pytest.raises(WorkerError) as info:
        found.debug_get_from_all()
    assert "WorkerInterrupted" in str(info.value)
    assert "RuntimeError" not in str(info.value)


@pytest.mark.one_process
def test_sessions_of_tvm_find_their_own_functions(pair: Session, library: str) -> None:
    pair.load_module(library).debug_get_from_all()

    def call(name: str, *args: Any) -> Any:
        return get_global_func(f"runtime.disco.{name}")(*args)

    theirs = call("SessionThreaded", 2, 1)
    func = call("SessionGetGlobalFunc", theirs, "runtime.disco.worker_rank")
    ranks = call("SessionCallPacked", theirs, 0, 0, func)
    assert [call("DRefDebugGetFromRemote", ranks, rank) for rank in range(2)] == [0, 1]
    call("SessionShutdown", theirs)


def test_unknown_values_of_tvm_are_refused(pair: Session) -> None:
    with pytest.raises(ArgumentError, match="can't be an argument"):
        pair.call_packed(len, tvm.tirx.const(1, "int32"))

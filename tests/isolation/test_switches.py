"""Switches of torch: changed by all workers together, put back, and never behind one's back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from discolab import Session, WorkerError, ccl, current_worker
from discolab.isolation import switches
from discolab.notebook.script import read_script, run_script

MATMUL = torch.set_float32_matmul_precision


def seen() -> list[Any]:
    """Some switches as the caller finds them."""
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.mkldnn.matmul.fp32_precision == "bf16",  # type: ignore[attr-defined]
        torch.backends.cuda.flash_sdp_enabled(),
    ]


USUAL = [False, "highest", True, False, False, True]


def set_late() -> list[Any]:
    """Set some, worker 0 long before the others; what those see before that, and after."""
    if current_worker().rank:
        for _ in range(20):
            time.sleep(0.002)
            early = seen()
    else:
        early = seen()
    torch.use_deterministic_algorithms(True, warn_only=True)
    MATMUL("medium")
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.backends.cudnn.benchmark = True
    with sdpa_kernel(SDPBackend.MATH):
        inside = seen()
    return [early, inside, seen()]


@pytest.mark.one_process
def test_workers_change_a_switch_together(sess: Session) -> None:
    assert seen() == USUAL
    for early, inside, after in sess.call_packed(set_late).debug_get_from_all():
        assert early == USUAL
        assert inside == [True, "medium", False, True, True, False]
        assert after == [*inside[:-1], True]
    sess.sync_all()
    assert seen() == USUAL  # the notebook's
    MATMUL("high")
    later = sess.call_packed(seen).debug_get_from_all()
    assert later == [[True, "medium", False, True, True, True]] * 4
    assert torch.get_float32_matmul_precision() == "high"
    MATMUL("highest")
    sess.shutdown()
    assert seen()[:4] == USUAL[:4]


@pytest.mark.one_process
def test_what_the_notebook_sets_no_worker_sees_while_it_computes(pair: Session) -> None:
    begun, over = threading.Event(), threading.Event()

    def watch() -> set[tuple[Any, ...]]:
        found = set()
        while not over.is_set():
            found.add(tuple(seen()))
            begun.set()
        return found

    found = pair.call_packed(watch)
    assert begun.wait(20)
    try:
        for _ in range(200):
            with sdpa_kernel(SDPBackend.MATH):
                assert seen() == [*USUAL[:5], False]
            MATMUL("medium")
            torch.backends.mkldnn.enabled = False
            assert seen()[:4] == [False, "medium", False, False]
            torch.backends.mkldnn.enabled = True
            MATMUL("highest")
        MATMUL("high")
    finally:
        over.set()
    assert found.debug_get_from_all() == [{tuple(USUAL)}] * 2
    assert seen() == [False, "high", *USUAL[2:]], "in force for the notebook when they are idle"
    MATMUL("highest")
    assert seen() == USUAL


def parts() -> list[Any]:
    """Those that are read by parts, or with arguments."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    return [
        torch.get_deterministic_debug_mode(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k,
        torch.backends.fp32_precision,  # type: ignore[attr-defined]
        matmul.fp32_precision,
    ]


def put_back_all() -> None:
    """Read, set another value and put back, as programs do, and torch.compile for itself."""
    backends: Any = torch.backends
    product, matmul = backends.cuda.matmul, backends.mkldnn.matmul
    deterministic = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn" if deterministic != 1 else "error")
    torch.set_deterministic_debug_mode(deterministic)
    for owner, name, other in (
        (product, "allow_bf16_reduced_precision_reduction", (False, False)),
        (matmul, "fp32_precision", "tf32"),
    ):
        before = getattr(owner, name)
        setattr(owner, name, other)
        setattr(owner, name, before)
    with backends.flags(fp32_precision="ieee"):
        pass
    torch.compile(torch.sin, backend="eager")(torch.ones(1))


@pytest.mark.one_process
def test_the_notebook_reads_its_own_while_workers_compute(pair: Session, gate: Any) -> None:
    begun = threading.Event()

    def set_and_wait() -> list[Any]:
        backends: Any = torch.backends
        torch.use_deterministic_algorithms(True, warn_only=True)
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)
        backends.mkldnn.matmul.fp32_precision = "bf16"
        begun.set()
        gate.wait(20)
        found = parts()
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        return found

    before = parts()
    assert before[:4] == [0, False, True, True]
    found = pair.call_packed(set_and_wait)
    assert begun.wait(20)
    try:
        assert parts() == before
        assert torch.get_float32_matmul_precision() == "highest"
        put_back_all()
        assert parts() == before
        torch.backends.mkldnn.fp32_precision = "none of torch's"
    finally:
        gate.set()
    theirs = [1, True, False, False, "none", "bf16"]
    assert found.debug_get_from_all() == [theirs] * 2
    pair.sync_all()
    assert parts() == before
    assert pair.call_packed(parts).debug_get_from_all() == [theirs] * 2
    pair.shutdown()
    assert parts() == before


def one_sets(others: str) -> str:
    """Worker 0 sets a switch, and the others end, go on or set another value."""
    rank = current_worker().rank
    if rank == 0 or others == "differ":
        MATMUL("high" if rank == 0 else "medium")
    if others == "meet":
        ccl.barrier()
    return torch.get_float32_matmul_precision()


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("others", "why"),
    [
        ("end", "worker [123] has ended this command without that"),
        ("differ", "(sets torch.set_float32_matmul_precision to '(high|medium)'|has ended)"),
        ("meet", "worker [123] waits for worker 0 in barrier"),
    ],
)
def test_a_worker_that_sets_one_alone_is_told(sess: Session, others: str, why: str) -> None:
    with pytest.raises(WorkerError, match=f"(?s){why}.*all workers alike.*engine processes"):
        sess.call_packed(one_sets, others).debug_get_from_all()
    assert sess.call_packed(seen).debug_get_from_all() == [USUAL] * 4


def fail_within(ranks: list[int]) -> str:
    """Some workers leave a context by an exception."""
    with contextlib.suppress(KeyError), sdpa_kernel(SDPBackend.MATH):
        if current_worker().rank in ranks:
            raise KeyError
    return str(torch.backends.cuda.flash_sdp_enabled())


@pytest.mark.one_process
@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3], [3, 1]])
def test_contexts_end_with_an_exception(sess: Session, ranks: list[int]) -> None:
    assert sess.call_packed(fail_within, ranks).debug_get_from_all() == ["True"] * 4


def export() -> tuple[int, ...]:
    """Export what torch traces with other kernels."""
    x = torch.ones(1, 2, 3)
    exported = torch.export.export(torch.nn.Conv1d(2, 2, 1), (x,))
    return tuple(exported.module()(x).shape)


def compile_within() -> float:
    """Compile what chooses kernels."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.ones(1, 1, 2, 4)
    return float(torch.compile(attend, backend="aot_eager")(x).sum())


@pytest.mark.one_process
def test_workers_trace_what_chooses_kernels(sess: Session) -> None:
    assert sess.call_packed(export).debug_get_from_all() == [(1, 2, 3)] * 4
    assert sess.call_packed(compile_within).debug_get_from_all() == [8.0] * 4
    assert sess.call_packed(seen).debug_get_from_all() == [USUAL] * 4


@pytest.mark.one_process
def test_others_compile_while_one_exports(pair: Session) -> None:
    inside, seen_there = threading.Event(), threading.Event()

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert torch.compiler.is_exporting()
            seen_there.wait(20)
            return x + 1

    def work() -> bool:
        if current_worker().rank == 0:
            torch.export.export(Model(), (torch.ones(1),))
            return True
        assert inside.wait(20)
        function = torch.sin
        ignored = torch.compile(function, backend="eager") is function
        seen_there.set()
        return ignored or torch.compiler.is_exporting()

    assert pair.call_packed(work).debug_get_from_all() == [True, False]


def fail_alone() -> None:
    """One worker's program fails in a context, and the others wait for it."""
    with sdpa_kernel(SDPBackend.MATH):
        if current_worker().rank == 1:
            raise KeyError("a fault of one")
        ccl.barrier()


@pytest.mark.one_process
def test_a_failure_within_a_context_is_the_one_that_is_told(sess: Session) -> None:
    with pytest.raises(WorkerError, match="a fault of one"):
        sess.call_packed(fail_alone).debug_get_from_all()
    with contextlib.suppress(WorkerError):
        sess.sync_all()
    assert sess.call_packed(seen).debug_get_from_all() == [USUAL] * 4
    assert seen() == USUAL


SCRIPT = """
import torch
torch.use_deterministic_algorithms(True)
torch.backends.mkldnn.enabled = False
assert torch.are_deterministic_algorithms_enabled() and not torch.backends.mkldnn.enabled
"""


def test_a_script_leaves_none_behind(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    full, source = read_script(str(path))
    before = sess.call_packed(seen).debug_get_from_all()
    sess.call_packed(run_script, full, source, [], "script.py").debug_get_from_all()
    assert sess.call_packed(seen).debug_get_from_all() == before


@pytest.mark.one_process
def test_each_session_has_values_of_its_own(
    sess: Session, make: Callable[..., Session], gate: Any
) -> None:
    other = make(2)
    sess.call_packed(MATMUL, "high")
    sess.sync_all()
    late = make(1)
    for one, value in ((other, "highest"), (sess, "high"), (late, "highest"), (sess, "high")):
        found = one.call_packed(torch.get_float32_matmul_precision).debug_get_from_all()
        assert set(found) == {value}
    sess.call_packed(gate.wait, 20)
    time.sleep(0.1)
    assert torch.get_float32_matmul_precision() == "highest"  # while workers compute
    with pytest.raises(WorkerError, match="a worker of another session computes in this process"):
        other.call_packed(seen).debug_get_from_all()
    other.call_packed(seen)
    MATMUL("medium")
    MATMUL("highest")
    gate.set()
    sess.sync_all()
    with pytest.raises(WorkerError):
        other.sync_all()
    assert other.call_packed(seen).debug_get_from_all() == [USUAL] * 2
    sess.shutdown()
    assert seen() == USUAL


@pytest.mark.one_process
def test_an_interrupt_ends_the_wait(sess: Session) -> None:
    def wait() -> None:
        if current_worker().rank == 0:
            MATMUL("high")
        while True:
            time.sleep(0.01)

    sess.call_packed(wait)
    time.sleep(0.1)
    assert sess.interrupt() == []
    assert sess.call_packed(seen).debug_get_from_all() == [USUAL] * 4


@contextlib.contextmanager
def precision(value: str) -> Iterator[None]:
    """A context of the user's own."""
    before = torch.get_float32_matmul_precision()
    MATMUL(value)
    try:
        yield
    finally:
        MATMUL(before)


def by_hand() -> None:
    """Put some back without a context."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    try:
        torch.use_deterministic_algorithms(False)
        time.sleep(20)
    finally:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = False
        torch.backends.cudnn.benchmark = False


def tear(how: str) -> None:
    """Be interrupted in contexts, which worker 0 may begin to leave before; some set for good."""
    MATMUL("high")
    with (
        contextlib.suppress(BaseException if how == "swallowed" else KeyError),
        sdpa_kernel(SDPBackend.MATH),
        precision("medium"),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        if how == "by hand":
            by_hand()
        if how != "end" or current_worker().rank:
            time.sleep(20)


@pytest.mark.one_process
@pytest.mark.parametrize("how", ["end", "within", "swallowed", "by hand"])
def test_an_interrupt_puts_back_what_contexts_have_set(pair: Session, how: str) -> None:
    pair.call_packed(tear, how)
    time.sleep(0.1)
    assert pair.interrupt() == []
    after = [how == "by hand", "high", *USUAL[2:]]
    assert pair.call_packed(seen).debug_get_from_all() == [after] * 2
    pair.sync_all()
    assert seen() == USUAL


@pytest.mark.one_process
def test_interrupts_at_any_moment_of_contexts(pair: Session) -> None:
    def loop() -> None:
        while True:
            with sdpa_kernel(SDPBackend.MATH):
                ccl.barrier()

    for number in range(12):
        pair.call_packed(loop)
        time.sleep(0.01 + 0.0007 * number)
        pair.interrupt()
        assert pair.call_packed(seen).debug_get_from_all() == [USUAL] * 2
        pair.sync_all()
        assert seen() == USUAL


@pytest.mark.one_process
def test_a_script_that_is_interrupted_leaves_none_behind(pair: Session, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT + "import time\n"
        "torch.backends.cudnn.benchmark = True\n"
        "with torch.backends.cudnn.flags(benchmark=False):\n"
        "    time.sleep(20)\n"
    )
    full, source = read_script(str(path))
    pair.call_packed(run_script, full, source, [], "script.py")
    time.sleep(0.2)
    assert pair.interrupt() == []
    assert pair.call_packed(seen).debug_get_from_all() == [USUAL] * 2


@pytest.mark.one_process
def test_an_interrupt_of_a_trace_puts_back_its_kernels(pair: Session) -> None:
    inside = threading.Event()

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.backends.cuda.enable_flash_sdp(False)
            inside.set()
            time.sleep(20)
            torch.backends.cuda.enable_flash_sdp(True)
            return x + 1

    pair.call_packed(lambda: torch.export.export(Model(), (torch.ones(1),)))
    assert inside.wait(20)
    assert pair.interrupt() == []
    assert pair.call_packed(seen).debug_get_from_all() == [USUAL] * 2
    pair.shutdown()
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.one_process
def test_what_a_context_has_set_that_a_call_leaves_open_stays(pair: Session) -> None:
    kept: dict[int, contextlib.ExitStack] = {}

    def begin() -> None:
        kept[current_worker().rank] = contextlib.ExitStack()
        kept[current_worker().rank].enter_context(precision("high"))

    def fail() -> None:
        raise KeyError("of the user's own")

    pair.call_packed(begin)
    with pytest.raises(WorkerError, match="of the user's own"):
        pair.call_packed(fail).debug_get_from_all()
    found = pair.call_packed(torch.get_float32_matmul_precision).debug_get_from_all()
    assert found == ["high"] * 2
    pair.call_packed(lambda: kept[current_worker().rank].close())
    assert pair.call_packed(seen).debug_get_from_all() == [USUAL] * 2


def test_all_that_torch_has_are_in_the_table() -> None:
    """Every setter of ``torch.backends`` leads to a switch, or is the thread's own."""
    for module in (torch.backends.cudnn, torch.backends.mkldnn):
        for prop in vars(type(module)).values():
            if isinstance(prop, torch.backends.ContextProp):
                name = getattr(prop.setter, "__name__", "")
                assert name in {s.setter for s in switches.SWITCHES} or name == "inner"

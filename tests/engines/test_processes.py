"""Workers in processes of their own: what they carry, how they die, and that nothing is left."""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discolab import DiscoError, ProcessSession, WorkerError, WorkerInterrupted, current_worker
from discolab.engines import forkserver, remote_session
from discolab.runtime.services import Service
from tests.selection import slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def pair() -> Iterator[ProcessSession]:
    session = ProcessSession(2, devices="cpu", timeout=20)
    yield session
    session.shutdown(cancel=True)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: list[int], within: float = 5) -> bool:
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(alive(pid) for pid in pids)


def spin() -> None:
    while True:
        pass


class Looking(Service):
    """A service to which something is due all the time."""

    looks = 0

    def next_look(self) -> float | None:
        return 0.0

    def look(self) -> None:
        self.looks += 1


def test_a_service_that_a_session_brings_along_is_asked_when_something_is_due() -> None:
    service = Looking()

    class Session(ProcessSession):
        def _begin(self) -> None:
            self._connections.services["looking"] = service
            super()._begin()

    with Session(2, devices="cpu", timeout=20) as session:
        deadline = time.monotonic() + 20
        while not service.looks and time.monotonic() < deadline:
            session.sync_all()
    assert service.looks


# -- what is carried -----------------------------------------------------------------------


def test_each_worker_but_0_has_a_process_of_its_own(pair: ProcessSession) -> None:
    pids = pair.call_packed(os.getpid).debug_get_from_all()
    assert pids[0] == os.getpid()
    assert pids[1] == pair.processes()[1] != pids[0]


def test_functions_and_classes_of_a_program_arrive_with_what_they_hold(
    pair: ProcessSession,
) -> None:
    class Scale(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.tensor(by))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    factor = 3.0
    net = pair.call_packed(lambda: Scale(factor))
    values = pair.call_packed(net, torch.ones(2)).debug_get_from_all()
    assert [v.tolist() for v in values] == [[3, 3], [3, 3]]
    fetched = net.debug_get_from_remote(1)
    assert fetched(torch.ones(1)).item() == 3


@pytest.mark.parametrize("size", [0, 1, 5_000, 100_000, 3_000_000])
def test_tensors_and_arrays_of_any_size_go_there_and_back(pair: ProcessSession, size: int) -> None:
    tensor, array = torch.arange(size, dtype=torch.float64), np.arange(size, dtype=np.int16)
    there = pair.call_packed(lambda t, a: (t * 2, a + 1, t[:3].tolist()), tensor, array)
    for doubled, raised, first in there.debug_get_from_all():
        assert torch.equal(doubled, tensor * 2)
        assert np.array_equal(raised, array + 1)
        assert first == tensor[:3].tolist()


def test_a_fetched_tensor_is_the_callers_own(pair: ProcessSession) -> None:
    ref = pair.call_packed(torch.zeros, 1_000_000)
    first = ref.debug_get_from_remote(1)
    first += 1
    kept = [ref.debug_get_from_remote(1) for _ in range(3)]
    pair.call_packed(lambda t: t.add_(5), ref)
    again = ref.debug_get_from_remote(1)
    assert [float(t.sum()) / 1e6 for t in (first, *kept, again)] == [1, 0, 0, 0, 5]
    del first, kept  # their memory is written to again
    for number in range(6):
        pair.call_packed(lambda t, n: t.fill_(n), ref, number)
        found = ref.debug_get_from_remote(1)
        assert float(found.sum()) == number * 1e6
    assert float(again.sum()) == 5e6


def test_what_cannot_be_sent_is_an_error_here_and_nothing_ran(pair: ProcessSession) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"can't be sent to another process.*lock"):
        pair.call_packed(lambda: lock)
    executed = pair.call_packed(lambda: current_worker().executed).debug_get_from_all()
    assert executed[0] == executed[1]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_fetch(pair: ProcessSession) -> None:
    ref = pair.call_packed(threading.Lock)
    with pytest.raises(WorkerError, match=r"worker 1 failed in fetching a value.*lock"):
        ref.debug_get_from_remote(1)
    assert pair.call_packed(lambda x: type(x).__name__, ref).debug_get_from_remote(1) == "lock"


def test_an_argument_that_cannot_be_unpickled_fails_its_call_only(pair: ProcessSession) -> None:
    def raise_there() -> Any:
        raise ValueError("not on this machine")

    class Shy:
        def __reduce__(self) -> Any:
            return raise_there, ()

    from discolab import Pickled

    shy = Shy()
    shy.__class__.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    ref = pair.call_packed(type, Pickled(shy))
    with pytest.raises(WorkerError, match="ValueError: not on this machine"):
        ref.debug_get_from_remote(1)
    assert pair.call_packed(int, 1).debug_get_from_all() == [1, 1]


def test_an_exception_that_cannot_be_pickled_is_told_all_the_same(pair: ProcessSession) -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} is not {b}")
            self.lock = threading.Lock()

    def fail() -> None:
        raise Odd(1, 2)

    with pytest.raises(WorkerError, match="Odd: 1 is not 2") as info:
        pair.call_packed(fail).debug_get_from_remote(1)
    assert "in fail" in "".join(info.value.__notes__)


def test_modules_from_a_folder_that_was_added_later_are_found(
    pair: ProcessSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_later.py").write_text("def answer(): return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import module_of_later  # type: ignore[import-not-found]

    assert pair.call_packed(module_of_later.answer).debug_get_from_all() == [42, 42]


@pytest.mark.parametrize("asked", ["_folder", "_portable_folder"])
def test_workers_follow_the_notebook_to_its_folder_and_stay_where_it_is_deleted(
    pair: ProcessSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(remote_session, "_folder", getattr(remote_session, asked))
    there = tmp_path / "deleted"
    there.mkdir()
    with contextlib.chdir(there):
        assert pair.call_packed(os.getcwd).debug_get_from_all() == [str(there), str(there)]
        there.rmdir()
        assert pair.call_packed(len, "ab").debug_get_from_all() == [2, 2]
    here = os.getcwd()
    assert pair.call_packed(os.getcwd).debug_get_from_all() == [here, here]


# -- output --------------------------------------------------------------------------------


def test_output_of_python_of_c_and_of_forked_children_is_shown(
    pair: ProcessSession, capfd: pytest.CaptureFixture[str]
) -> None:
    def talk() -> None:
        print("from Python", current_worker().rank)
        print("an error", file=sys.stderr)
        if current_worker().rank:
            time.sleep(0.3)  # or it comes into the middle of our line
            os.write(1, b"from C\n")
            subprocess.run(["echo", "from a program"], check=True)
            pid = os.fork()
            if pid == 0:
                print("from a child", flush=True)
                os._exit(0)
            os.waitpid(pid, 0)

    pair.call_packed(talk).debug_get_from_all()
    out, err = capfd.readouterr()
    for line in ("from Python 0", "from Python 1", "from C", "from a program", "from a child"):
        assert out.count(line) == 1, (line, out)
    assert err.count("an error") == 2


# -- deaths --------------------------------------------------------------------------------


def test_a_call_is_named_by_its_own_file_though_another_has_the_same_text(
    pair: ProcessSession,
) -> None:
    for file in ("/first.py", "/second.py"):
        code = compile("ref = sess.call_packed(int, 'no number')", file, "exec")
        exec(code, names := {"sess": pair})
        with pytest.raises(WorkerError, match=f"called at {file}:1"):
            names["ref"].debug_get_from_remote(1)


@pytest.mark.parametrize("way", ["kill", "exit", "crash"])
def test_a_worker_that_dies_is_named_with_its_last_command_and_output(
    pair: ProcessSession, way: str
) -> None:
    def die() -> None:
        if current_worker().rank == 1:
            print("last words")
            if way == "exit":
                os._exit(3)
            if way == "crash":
                ctypes.string_at(0)
            os.kill(os.getpid(), signal.SIGKILL)

    ref = pair.call_packed(die)
    start = time.monotonic()
    with pytest.raises(DiscoError) as info:
        ref.debug_get_from_all()
    assert time.monotonic() - start < 8
    text = str(info.value)
    how = {"kill": "was killed by SIGKILL", "exit": "exited with status 3"}
    assert how.get(way, "was killed by SIGSEGV") in text
    assert f"worker 1 (pid {pair.processes()[1]})" in text
    assert f"call of '{die.__qualname__}' (called at {__file__}:" in text
    assert "last words" in text
    assert "%disco_restart" in text
    assert [status.state for status in pair.status()] == ["idle", "dead"]
    with pytest.raises(DiscoError, match="worker 1"):
        pair.sync_all()
    assert pair.shutdown() == []


def test_the_call_that_ended_a_worker_is_named_not_the_one_before(pair: ProcessSession) -> None:
    def the_end() -> None:
        if current_worker().worker_id == 1:
            os._exit(3)

    pair.call_packed(abs, 1)
    with pytest.raises(DiscoError, match=r"while it ran call of '.*the_end'"):
        pair.call_packed(the_end).debug_get_from_all()


def test_a_death_while_nobody_waits_is_told_by_the_next_wait(pair: ProcessSession) -> None:
    pair.sync_all()
    os.kill(pair.processes()[1], signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(DiscoError, match=r"worker 1 .* was killed by SIGKILL"):
        pair.sync_all()


USES: dict[str, Callable[[ProcessSession, Any], object]] = {
    "call": lambda session, _: session.call_packed(int, 1),
    "call without a result": lambda session, ref: session.call_without_result(int, ref),
    "function by name": lambda session, _: session.get_global_func("runtime.disco.worker_id")(),
    "operator": lambda _, ref: ref + 1,
    "fetch": lambda _, ref: ref.debug_get_from_remote(0),
    "sync": lambda session, _: session.sync_worker_0(),
    "copy": lambda session, ref: session.copy_from_worker_0(torch.zeros(2), ref),
    "set": lambda _, ref: ref.debug_copy_from(0, torch.ones(2)),
}


@pytest.mark.parametrize("use", USES)
def test_a_death_is_told_by_whatever_comes_next_also_if_it_is_for_worker_0(
    pair: ProcessSession, use: str
) -> None:
    ref = pair.call_packed(torch.zeros, 2)
    pair.sync_all()
    os.kill(pair.processes()[1], signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(DiscoError, match=r"worker 1 .* was killed by SIGKILL"):
        USES[use](pair, ref)
    # calls are for all workers; what those have that live can be had
    with pytest.raises(DiscoError, match=r"worker 1 .* was killed by SIGKILL"):
        pair.call_packed(int, 1)
    assert ref.debug_get_from_remote(0).tolist() == [0, 0]
    pair.sync_worker_0()
    with pytest.raises(DiscoError, match=r"worker 1 .* was killed by SIGKILL"):
        ref.debug_get_from_remote(1)


def test_a_loop_over_worker_0_sees_a_death_within_a_moment(pair: ProcessSession) -> None:
    x = pair.call_packed(torch.zeros, 2)
    threading.Timer(0.2, os.kill, (pair.processes()[1], signal.SIGKILL)).start()
    began = time.monotonic()

    def go_on() -> None:
        nonlocal x
        while time.monotonic() < began + 20:
            x = x + 1
            x.debug_get_from_remote(0)

    with pytest.raises(DiscoError, match=r"worker 1 .* was killed by SIGKILL"):
        go_on()
    assert time.monotonic() - began < 5


def test_a_frozen_worker_is_told_after_its_heartbeat_and_may_come_back() -> None:
    with ProcessSession(2, devices="cpu", heartbeat=3) as session:
        pid = session.processes()[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            calls = [session.call_packed(int, number) for number in range(2)]
            words = r"worker 1 .*no sign of life.*SIGSTOP.* while it ran .* or the call after it\."
            with pytest.raises(DiscoError, match=words):
                session.sync_all()
            del calls
            assert time.monotonic() - start < 6
            status = session.status()[1]
            assert "no sign of life" in status.detail
            assert status.seconds > 2  # it is so since it was heard last
        finally:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while "no sign" in session.status()[1].detail and time.monotonic() < deadline:
            time.sleep(0.05)
        assert session.call_packed(int, 1).debug_get_from_all() == [1, 1]


def test_a_frozen_worker_does_not_hold_up_the_shutdown() -> None:
    session = ProcessSession(2, devices="cpu")
    pid = session.processes()[1]
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    assert session.shutdown(cancel=True) == []
    assert time.monotonic() - start < 5
    assert gone([pid])


def test_a_worker_that_could_not_begin_is_told_and_none_is_left() -> None:
    before = children()
    with pytest.raises(DiscoError, match=r"worker 1 could not start: .*there is no such place"):
        Broken(3, devices="cpu")
    assert gone(list(children() - before - {forkserver.the_fork_server().process.pid}))


class Broken(ProcessSession):
    """Gives a worker a device that there is not."""

    def _start_process(self, of: Any, rank: int, settings: dict[str, Any]) -> None:
        if rank == 1:
            settings["device"] = "there is no such place"
        super()._start_process(of, rank, settings)


# -- interrupts ------------------------------------------------------------------------------


def test_work_that_has_swallowed_everything_is_ended_by_a_shutdown(pair: ProcessSession) -> None:
    def never() -> None:
        while True:
            try:
                spin()
            except WorkerInterrupted:
                pass

    pid = pair.processes()[1]
    pair.call_packed(lambda: never() if current_worker().rank else None)
    time.sleep(0.1)
    start = time.monotonic()
    assert pair.shutdown(cancel=True) == []
    assert time.monotonic() - start < 5
    assert gone([pid])


def test_a_call_that_python_cannot_end_is_ended_by_a_shutdown(pair: ProcessSession) -> None:
    def stuck() -> None:
        if current_worker().rank:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()

    pid = pair.processes()[1]
    pair.call_packed(stuck)
    time.sleep(0.1)
    assert pair.interrupt(0.2) == [1]
    assert pair.shutdown(cancel=True) == []
    assert gone([pid])


# -- nothing is left -----------------------------------------------------------------------


def children(pid: int = 0) -> set[int]:
    """All processes below this one."""
    found: set[int] = set()
    todo = [pid or os.getpid()]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            try:
                mine = {int(word) for word in task.read_text().split()}
            except OSError:
                continue
            todo += mine - found
            found |= mine
    return found


@pytest.mark.slow
def test_a_hundred_sessions_leave_nothing(how_many: Callable[..., int]) -> None:
    ProcessSession(2, devices="cpu").shutdown()
    gc.collect()
    born_of = forkserver.the_fork_server().process.pid
    files, threads, others = open_files(), threading.active_count(), children()
    born_of_files = open_files(born_of)
    for number in range(how_many(100)):
        session = ProcessSession(2 + number % 2, devices="cpu", timeout=20)
        assert session.call_packed(int, 1).debug_get_from_remote(1) == 1
        session.shutdown(cancel=bool(number % 3))
    del session
    gc.collect()
    left = children() - others - {born_of}
    assert gone(list(left)), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    deadline = time.monotonic() + 5  # the housekeeper of the last session
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= threads
    assert open_files() == files
    assert open_files(born_of) == born_of_files
    forkserver.end_fork_server()
    assert gone([born_of])


def open_files(pid: int = 0) -> int:
    return len(os.listdir(f"/proc/{pid or os.getpid()}/fd"))


def test_a_dropped_session_ends_its_processes_when_they_are_done(tmp_path: Path) -> None:
    session = ProcessSession(2, devices="cpu")
    pid, note = session.processes()[1], tmp_path / "note"

    def late() -> None:
        if current_worker().rank:
            time.sleep(0.3)
            note.write_text("done")

    session.call_packed(late)
    del session
    gc.collect()
    assert gone([pid])
    assert note.read_text() == "done"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # cut in two
def test_ctrl_c_during_a_start_leaves_the_next_ones_whole() -> None:
    ProcessSession(2, devices="cpu").shutdown()

    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        for turn in range(8):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.003 * turn)
                session = ProcessSession(3, devices="cpu", timeout=20)
                signal.setitimer(signal.ITIMER_REAL, 0)
                session.shutdown(cancel=True)
            except KeyboardInterrupt:
                pass
            with ProcessSession(3, devices="cpu", timeout=20) as session:
                pids = session.call_packed(os.getpid).debug_get_from_all()
                assert session.processes() == {1: pids[1], 2: pids[2]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_cannot_touch_the_session_of_its_parent(pair: ProcessSession) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pair.call_packed(int).debug_get_from_all()
        except DiscoError as exc:
            code = 0 if f"belongs to process {os.getppid()}" in str(exc) else 2
            pair.shutdown()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert pair.call_packed(int, 4).debug_get_from_all() == [4, 4]


def test_who_is_frozen_is_named_in_a_fresh_session_too() -> None:
    with ProcessSession(4, devices="cpu", heartbeat=2) as session:
        pid = session.processes()[3]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DiscoError, match=r"worker 3 .*no sign of life.*SIGSTOP"):
                session.sync_all()
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a program that prints the ids of its workers' processes first."""
    started: list[subprocess.Popen[str]] = []
    head = """
        import os, signal, sys, time
        from discolab import ProcessSession
        session = ProcessSession(3, devices="cpu")
        print(*session.processes().values(), flush=True)
    """

    def start(body: str) -> subprocess.Popen[str]:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        command = [sys.executable, str(file)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_workers_take_modules_from_where_the_program_does_not_from_the_folder_it_runs_in(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "random.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(folder)
    process = program("print(session.call_packed(os.getcwd).debug_get_from_all())")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out.splitlines()[1:] == [str([str(folder)] * 3)]


BUSY = "session.call_packed(lambda: [0 for _ in iter(int, 1)])"


@pytest.mark.parametrize("busy", [slow(""), BUSY])
def test_a_controller_that_is_killed_leaves_no_process(program: Any, busy: str) -> None:
    process = program(f"{busy}\ntime.sleep(100)")
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    below = children(process.pid)
    time.sleep(0.2)
    process.kill()
    assert gone([*pids, *below])


def test_a_killed_controller_takes_its_workers_along_though_a_child_holds_their_connections(
    program: Any,
) -> None:
    process = program(
        """
        child = os.fork()
        if child == 0:  # as a DataLoader's worker, which sees after 5 s that its parent is gone
            time.sleep(100)
            os._exit(0)
        print(child, flush=True)
        time.sleep(100)
        """
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    child = int(process.stdout.readline())
    try:
        below = children(process.pid) - {child}
        assert below > set(pids)
        process.kill()
        assert gone([*below], within=2)
        assert alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("busy", [slow(""), BUSY])
def test_a_program_that_ends_without_a_shutdown_ends_promptly(program: Any, busy: str) -> None:
    process = program(busy)
    pids = [int(word) for word in process.stdout.readline().split()]
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert err == ""
    assert gone(pids)


def test_ctrl_c_in_a_terminal_interrupts_the_work_and_ends_no_worker(program: Any) -> None:
    process = program(
        """
        session.call_packed(lambda: [0 for _ in iter(int, 1)])
        try:
            session.sync_all()
        except KeyboardInterrupt:
            print(session.call_packed(int, 7).debug_get_from_all(), flush=True)
        session.shutdown()
        """
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert out == "[7, 7, 7]\n", err
    assert gone(pids)


def test_a_fork_server_that_is_about_to_end_is_not_asked_for_workers() -> None:
    """It closes its line when its minute is over, and then takes a while to end."""
    ProcessSession(2, devices="cpu").shutdown()
    ending = forkserver.the_fork_server()
    whole = ending._socket
    ending._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    whole.close()
    assert ending.process.poll() is None
    with ProcessSession(2, devices="cpu", timeout=20) as session:
        assert session.call_packed(int, 3).debug_get_from_all() == [3, 3]
    assert forkserver.the_fork_server() is not ending


def test_to_look_which_workers_have_ended_waits_for_none(pair: ProcessSession) -> None:
    began = time.monotonic()
    for _ in range(10):
        assert pair._children.look() == {}
    assert time.monotonic() - began < 0.3
    os.kill(pair.processes()[1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not pair._children.codes and time.monotonic() < deadline:
        pair._children.look()
    assert pair._children.codes == {1: -signal.SIGKILL}


def test_workers_follow_to_a_folder_and_a_path_that_change_at_once(tmp_path: Path) -> None:
    folder, path = os.getcwd(), list(sys.path)
    with ProcessSession(2, devices="cpu", timeout=20) as session:
        try:
            os.chdir(tmp_path)
            sys.path.append(str(tmp_path))
            assert session.call_packed(os.getcwd).debug_get_from_all() == [str(tmp_path)] * 2
            assert str(tmp_path) in session.call_packed(lambda: sys.path).debug_get_from_remote(1)
            session.restart_worker(1)
            assert session.call_packed(os.getcwd).debug_get_from_all() == [str(tmp_path)] * 2
        finally:
            os.chdir(folder)
            sys.path[:] = path

"""Workers as Ray actors, on a cluster of our own and on one that was there."""

import ctypes
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import ArgumentError, DiscoError, Session, WorkerError, current_worker, make_session
from discolab.engines import ENGINES, ray_cluster
from discolab.engines.heartbeat import process_state
from discolab.engines.ray_actors import Slot, _fate, gpu_places, seen_here
from discolab.engines.ray_cluster import in_short

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Session]:
    """A cluster of our own, held by a session without actors."""
    with make_session(1, "ray", devices="cpu", timeout=20) as session:
        yield session


@pytest.fixture(scope="module")
def shared(cluster: Session) -> Iterator[Any]:
    """A session for tests that leave it as it was."""
    with make_session(3, "ray", devices="cpu", timeout=20, heartbeat=1) as session:
        yield session


@pytest.fixture
def start(cluster: Session) -> Iterator[Callable[..., Any]]:
    """Start sessions on the cluster; they are shut down after the test."""
    made: list[Session] = []

    def start_one(num_workers: int, **options: Any) -> Session:
        made.append(
            make_session(num_workers, "ray", **{"devices": "cpu", "timeout": 20, **options})
        )
        return made[-1]

    yield start_one
    for session in made:
        session.shutdown(cancel=True)
    made.clear()


def groups() -> int:
    """How many placement groups there are."""
    table = ray.util.placement_group_table()
    return sum(group["state"] != "REMOVED" for group in table.values())


def eventually(fact: Callable[[], bool], within: float = 10) -> bool:
    """Whether that is so, or soon is."""
    deadline = time.monotonic() + within
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.02)
    return fact()


@pytest.mark.slow
def test_workers_are_the_main_threads_of_actors(shared: Any) -> None:
    def tell() -> Any:
        worker = current_worker()
        assert worker.link is not None
        return {
            "rank": worker.rank,
            "local": worker.local_worker_id,
            "pid": os.getpid(),
            "host": worker.link.host,
            "main": threading.current_thread() is threading.main_thread(),
            "actor": ray.get_runtime_context().get_actor_id() is not None,
        }

    told = shared.call_packed(tell).debug_get_from_all()
    assert [(t["rank"], t["local"]) for t in told] == [(0, 0), (1, 1), (2, 2)]
    assert told[0]["pid"] == os.getpid()
    assert {rank: told[rank]["pid"] for rank in (1, 2)} == shared.processes()
    assert [t["main"] for t in told[1:]] == [t["actor"] for t in told[1:]] == [True, True]
    assert {t["host"] for t in told} == {"127.0.0.1"}
    assert len(set(shared.hosts)) == 1


@pytest.mark.slow
def test_an_actor_s_process_is_as_this_one(shared: Any) -> None:
    def facts() -> Any:
        names = {"PYTHONBREAKPOINT", "DISCOLAB_HOME", "PATH"} & {*os.environ}
        found = {name: os.environ[name] for name in names}
        return os.getcwd(), sys.argv, found, set(sys.path), os.readlink("/proc/self/fd/0")

    here, *others = shared.call_packed(facts).debug_get_from_all()
    for there in others:
        assert there[:3] == here[:3]
        assert there[3] >= here[3]
        assert there[4] == os.devnull


@pytest.mark.slow
def test_output_of_python_and_of_c(shared: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        print("printed by", current_worker().rank)
        sys.stdout.flush()
        if current_worker().rank:
            os.write(1, b"written by C\n")

    shared.call_packed(say)
    shared.sync_all()
    told = ""

    def all_told() -> bool:
        nonlocal told
        told += capsys.readouterr().out
        return told.count("printed by") == 3 and told.count("written by C") == 2

    assert eventually(all_told), told


@pytest.mark.slow
def test_data_interrupts_and_failures(shared: Any) -> None:
    data = torch.arange(3 << 20, dtype=torch.uint8)
    assert all(torch.equal(copy, data) for copy in shared.fetch(shared.call_packed(abs, data)))
    shared.call_packed(time.sleep, 30)
    time.sleep(0.1)
    assert shared.interrupt(timeout=5) == []
    shared.call_packed(lambda: 1 / (2 - current_worker().rank))
    with pytest.raises(WorkerError, match=r"worker 2 failed .* ZeroDivisionError"):
        shared.sync_all()
    shared.sync_all()


@pytest.mark.slow
def test_a_stopped_worker_is_told_and_may_come_back(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = shared.processes()[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        words = rf"worker 1 \(pid {pid} on .*, a Ray actor\) has given no sign .* \(SIGSTOP\)"
        # it is found stopped as soon as Ray answers, silent before
        silent = words.removesuffix(r" .* \(SIGSTOP\)")
        with pytest.raises(DiscoError, match=silent):
            shared.sync_worker(1)
        assert eventually(lambda: "SIGSTOP" in shared.status()[1].detail, 30)
        # of another machine that machine is asked
        states: set[str] = set()  # each is told once
        assert eventually(
            lambda: states.add(shared._actors._state_elsewhere(1, pid)) or "T" in states, 30
        )
        for facts in shared._actors.facts.values():
            monkeypatch.setitem(facts, "machine", "there")
        with pytest.raises(DiscoError, match=words):
            shared.sync_worker(1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: process_state(pid) != "T")
    time.sleep(0.2)
    shared.sync_all()


@pytest.mark.slow
def test_actors_that_die_are_named(
    start: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    session = start(4)

    def crash() -> None:
        print("the last words of", current_worker().rank)
        if current_worker().rank == 3:
            ctypes.string_at(0)
        time.sleep(60)

    actor = session._actors._by_rank[1]
    session.call_packed(crash)
    with pytest.raises(DiscoError, match=r"worker 3 \(pid .* was killed or has crashed") as told:
        session.sync_all()
    assert "crash' (called at" in str(told.value)
    assert "its last output:\n" in str(told.value)
    assert "Fatal Python error: Segmentation fault" in capsys.readouterr().out
    assert eventually(
        lambda: all(session._connections.last_output[rank].lines() for rank in (1, 2))
    )
    began = time.monotonic()
    os.kill(session.processes()[2], signal.SIGKILL)
    assert eventually(lambda: 2 in session._connections.lost, 2)
    ray.kill(actor.handle)
    assert eventually(lambda: 1 in session._connections.lost, 2)
    assert time.monotonic() - began < 8
    with pytest.raises(DiscoError, match=r"%disco_restart") as told:
        session.sync_all()
    text = str(told.value)
    assert "worker 1 (pid" in text
    assert "was ended by ray.kill while it ran call of 'test_actors_that_die" in text
    assert "    the last words of 2" in text
    session.shutdown(cancel=True)


@pytest.mark.slow
def test_a_dropped_session_ends_its_actors(start: Callable[..., Any]) -> None:
    before = groups()
    session: Any = make_session(2, "ray", devices="cpu", timeout=20)
    pids = [*session.processes().values()]
    assert groups() == before + 1
    session.call_without_result(abs, 1)
    del session
    gc.collect()
    assert eventually(lambda: not any(map(process_state, pids)))
    assert eventually(lambda: groups() == before)


@pytest.mark.slow
def test_starting_can_be_interrupted(start: Callable[..., Any]) -> None:
    before = groups()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        start(2)
    assert eventually(lambda: groups() == before)


@pytest.mark.slow
def test_starting_and_stopping_leaves_nothing(start: Callable[..., Any]) -> None:
    def facts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    start(2).shutdown()
    before, held, pids = facts(), groups(), []
    for _ in range(1):
        session = start(2)
        pids += session.processes().values()
        session.sync_all()
        session.shutdown()
    assert eventually(lambda: facts() <= before and not any(map(process_state, pids)))
    assert groups() == held


@pytest.mark.slow
def test_no_room_is_told(start: Callable[..., Any]) -> None:
    has, before = int(ray.cluster_resources()["CPU"]), groups()
    said: list[str] = []
    with pytest.raises(
        DiscoError, match=rf"room for {has + 1} workers .* of {has} CPU free"
    ) as told:
        start(has + 2, progress=said.append)
    assert "fewer workers" in str(told.value)
    with pytest.raises(
        DiscoError, match=r"2 workers that take 1 CPU and 8 GPU each: .* 0 GPU free"
    ):
        start(3, num_gpus=8)
    with pytest.raises(DiscoError, match="in another Ray cluster"):
        start(2, address="192.0.2.7:6379")
    assert groups() == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_cpus": -1}, "num_cpus is how much"),
        ({"num_gpus": "all"}, "num_gpus is how much"),
        ({"num_gpus": 1.5}, "whole number"),
        ({"num_cpus": 0, "num_gpus": 0}, "each worker takes a slot"),
        ({"port": -1}, "port is a number"),
        ({"host": 3}, "host is a name"),
        ({"address": 6379}, "address is that of a Ray cluster"),
        ({"num_groups": 2}, "2 equal groups"),
        ({"devices": ["cpu"]}, "devices lists 1 devices for 3 workers"),
        ({"devices": "tpu"}, "tpu"),
        ({"heartbeat": 0}, "heartbeat is a number"),
        ({"start_timeout": -1}, "seconds"),
    ],
)
def test_bad_arguments(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        make_session(3, "ray", **options)


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ArgumentError, match=r"needs the package ray: pip install 'discolab\[ray\]'"
    ):
        make_session(2, "ray")


def test_the_engine_says_what_it_takes() -> None:
    taken = inspect.signature(ENGINES["ray"]).parameters
    assert {"num_workers", "num_groups", "devices", "address", "num_gpus", "port"} <= {*taken}


def test_which_gpu_is_whose() -> None:
    assert seen_here(None, 2) == ["0", "1"]
    assert seen_here("3, GPU-a", 9) == ["3", "GPU-a"]
    facts = [
        {"machine": "a", "gpus": ["2"]},
        {"machine": "a", "gpus": ["1"]},
        {"machine": "b", "gpus": ["10"]},
        {"machine": "b", "gpus": ["9"]},
    ]
    own = seen_here(None, 4)
    assert gpu_places(facts, "a", own) == [
        ("0,1,2,3", "cuda:2"), ("0,1,2,3", "cuda:1"), ("9,10", "cuda:1"), ("9,10", "cuda:0"),
    ]  # fmt: skip
    assert gpu_places(facts, "c", own)[:2] == [("1,2", "cuda:1"), ("1,2", "cuda:0")]
    assert str(Slot(1, 0.5)) == "1 CPU and 0.5 GPU"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_what_a_start_that_failed_leaves_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes with a file of a folder that Ray names after this process; no others."""
    programs = {}
    starter = 1 << 30  # no process has this number: this one may have a Ray that is well
    monkeypatch.setattr(ray_cluster.os, "getpid", lambda: starter)
    for number in (starter, 1):
        folder = tmp_path / f"session_2026-01-01_10-00-00_123456_{number}"
        folder.mkdir()
        with open(folder / "agent.log", "w", encoding="ascii") as log:
            program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=log)
        programs[number] = folder, program
    try:
        ray_cluster._end_what_is_left()
        folder, program = programs[starter]
        assert program.wait(5) == -signal.SIGKILL
        assert not folder.exists()
        folder, program = programs[1]
        assert program.poll() is None
        assert folder.exists()
    finally:
        for _, program in programs.values():
            program.kill()
            program.wait()
            program.stdin.close()  # type: ignore[union-attr]


def test_what_ray_says_in_words() -> None:
    died = RuntimeError(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n"
        "The actor is dead because its worker process has died. Worker exit type: X. "
        "Some common causes include: (1) …"
    )
    assert in_short(died) == (
        "The actor is dead because its worker process has died. Worker exit type: X."
    )
    assert _fate(died).startswith("has died; Ray says: ")
    assert _fate(None) == "has ended"
    node = RuntimeError("The actor died because its node has died. Node Id: 12\n\tterminated: …")
    assert _fate(node).startswith("is lost, its node has died; Ray says: The actor died because")
    low = RuntimeError("Task was killed due to the node running low on memory.")
    assert _fate(low).startswith("was ended by Ray, its node runs low on memory: Task was killed")
    assert len(in_short(RuntimeError("because " * 100))) == 400


@pytest.mark.slow
def test_a_cluster_of_our_own_ends_with_the_last_session(run_python: Any) -> None:
    done = run_python(
        """
        import os, signal, threading
        from discolab import DiscoError, make_session
        try:
            make_session(2, "ray", address="127.0.0.1:1")
        except DiscoError as exc:
            print(exc)
        def start():
            first.append(make_session(2, "ray", devices="cpu", timeout=20))
        first, before = [], (signal.getsignal(15), dict(os.environ))
        thread = threading.Thread(target=start)  # Ray does not end with it
        thread.start()
        thread.join()
        second = make_session(1, "ray", devices="cpu", timeout=20)
        import ray
        folder = os.path.dirname(os.path.dirname(ray.nodes()[0]["RayletSocketName"]))
        print(os.path.exists(folder))
        first.pop().shutdown()
        print(ray.is_initialized())
        second.shutdown()
        print(ray.is_initialized(), os.path.exists(folder))
        print((signal.getsignal(15), dict(os.environ)) == before)
        print([t.name for t in threading.enumerate() if t.name.startswith("discolab")])
        third = make_session(2, "ray", devices="cpu", timeout=20)
        print(third.call_packed(abs, 5).debug_get_from_all())
        """
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "there is no Ray cluster at 127.0.0.1:1: Connection refused"
    assert lines[1:] == ["True", "True", "False False", "True", "[]", "[5, 5]"], done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_a_cluster_that_was_there_stays(run_python: Any) -> None:
    done = run_python(
        """
        import logging, os, signal
        import ray
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
        from discolab import DiscoError, make_session
        said = []
        try:
            make_session(4, "ray", devices="cpu", start_timeout=2, progress=said.append)
        except DiscoError as exc:
            print(exc)
        print(said[-1])
        session = make_session(2, "ray", devices="cpu", address="auto", timeout=20)
        print(session.call_packed(abs, 5).debug_get_from_all())
        print(session._transport.endpoint.startswith(f"tcp://{ray.util.get_node_ip_address()}:"))
        session.shutdown()
        print(ray.is_initialized())
        session = make_session(2, "ray", devices="cpu", address="auto", timeout=20)
        print(*session.processes().values(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    needed = (
        "Ray has no room for 3 workers that take 1 CPU each: the cluster has 1 node with 2 of 2"
    )
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[0].startswith(needed)
    assert "CPU free; waited 2 s (start_timeout=). Ask for fewer workers" in lines[0]
    assert lines[1].startswith(f"waiting: {needed}")
    assert lines[2:5] == ["[5, 5]", "True", "True"], done.stderr
    assert eventually(lambda: not process_state(int(lines[5])))

"""The steps of a soak: what each does to a session, and what must come of it.

`World` is the session together with a model of what it holds. A step is a method of it whose name
and arguments can be written as JSON; what steps there are and with which arguments is drawn by
`draw`. A step that speaks of a value that is not there does nothing, so that any steps may be taken
from a story. Anything else than what the model says raises, which is a fault.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from discolab import (
    DiscoError,
    DRef,
    Session,
    SessionError,
    WaitTimeoutError,
    WorkerError,
    make_session,
)
from discolab.debugger import debugger_of
from discolab.loader.loading import workers_of
from tests.ccl import program_checks
from tests.ccl.program_oracle import foretell
from tests.ccl.random_programs import FAULTS, clean_program, faulty_program
from tests.debugger.conftest import load
from tests.debugger.random_programs import make_program

from . import work

WORKERS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "sockets": {"nodes": "local:2"},
    "ray": {"start_timeout": 280},
}
NAMES = "abcdefgh"
RPC_COUNTS = ("calls_running", "calls_waiting", "values_owned", "references_held")
PATIENCE = 30.0  # seconds; what takes longer hangs

Story = list[dict[str, Any]]


class Fault(AssertionError):
    """Something else came out than must."""


def expect(found: Any, wanted: Any, what: str) -> None:
    """Compare what came with what must come."""
    if isinstance(wanted, torch.Tensor):
        good = isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    else:
        good = found == wanted
    if not good:
        raise Fault(f"{what}: {found!r:.300} where {wanted!r:.300} must be")


class World:
    """A session and what it must hold: `refs` and `values` (for each worker) by name."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.folder = tempfile.mkdtemp(prefix="discolab-soak-")
        self.refs: dict[str, DRef] = {}
        self.values: dict[str, list[torch.Tensor]] = {}
        self.axes: dict[str, list[list[int]]] = {}
        self.session: Session = self._start(1)

    def _start(self, groups: int, respawn: bool = False) -> Session:
        options = OPTIONS.get(self.engine, {})
        if respawn and self.engine != "threads":
            options = {**options, "respawn": True}
        self.session = made = make_session(
            WORKERS, self.engine, devices="cpu", num_groups=groups, timeout=PATIENCE, **options
        )
        made.init_ccl("auto")
        self._forget()
        self.pids = made.call_packed(work.pid).debug_get_from_all()
        gc.collect()
        made.sync_all()
        self.registers = made.statistics().live_registers
        self.stepped = False
        return made

    def _forget(self) -> None:
        self.refs.clear()
        self.values.clear()
        self.axes = {"world": [list(range(WORKERS))]}

    def close(self) -> None:
        """End the session, and check what is left in it."""
        self.round_ends()
        self.session.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def settle(self) -> None:
        """Wait for the workers; what was interrupted, and that nobody asked for, may be told."""
        for _ in range(2):
            try:
                self.session.sync_all()
                return
            except (WorkerError, SessionError) as exc:
                told = exc
        raise Fault(f"a failure is told twice: {told}")

    # -- values --------------------------------------------------------------------------------

    def make(self, name: str, seed: int, size: int) -> None:
        self.refs[name] = self.session.call_packed(work.make, seed, size)
        self.values[name] = [work.values(seed, rank, size) for rank in range(WORKERS)]

    def combine(self, name: str, a: str, b: str, how: str) -> None:
        if not self._same_size(a, b):
            return
        self.refs[name] = self.session.call_packed(work.combine, how, self.refs[a], self.refs[b])
        pairs = zip(self.values[a], self.values[b], strict=True)
        self.values[name] = [(x + y if how == "add" else x * y) % work.MODULUS for x, y in pairs]

    def change(self, a: str, by: int) -> None:
        if a in self.refs:
            self.session.call_packed(work.change, self.refs[a], by)
            self.values[a] = [(x + by) % work.MODULUS for x in self.values[a]]

    def drop(self, a: str) -> None:
        self.refs.pop(a, None)
        self.values.pop(a, None)

    def check(self, a: str, rank: int) -> None:
        if a not in self.refs:
            return
        if rank >= 0:
            found = self.refs[a].debug_get_from_remote(rank)
            expect(found, self.values[a][rank], f"{a} of worker {rank}")
            return
        for place, found in enumerate(self.refs[a].debug_get_from_all()):
            expect(found, self.values[a][place], f"{a} of worker {place}")

    def reduce(self, name: str, a: str, how: str, axis: str) -> None:
        groups = self.axes.get(axis)
        if a not in self.refs or groups is None:
            return
        self.refs[name] = self.session.call_packed(work.reduce, self.refs[a], how, axis)
        made: list[Any] = [None] * WORKERS
        for ranks in groups:
            parts = [self.values[a][rank] for rank in ranks]
            if how == "sum":
                whole = torch.stack(parts).sum(0) % work.MODULUS
            elif how == "gather":
                whole = torch.cat(parts)
            else:
                whole = parts[0]
            for rank in ranks:
                made[rank] = whole
        self.values[name] = made

    def _same_size(self, a: str, b: str) -> bool:
        there = a in self.refs and b in self.refs
        return there and self.values[a][0].shape == self.values[b][0].shape

    def push(self, seed: int) -> None:
        value = work.values(seed, 0, 5)
        self.session.push({"pushed": value})
        for found in self.session.pull("pushed"):
            expect(found, value, "a pushed value")

    def threads(self, seeds: list[int]) -> None:
        """Several threads of the controller, each with values of its own."""
        errors: list[BaseException] = []

        def run(seed: int) -> None:
            rng = random.Random(seed)
            mine = World.__new__(World)
            mine.session, mine.refs, mine.values = self.session, {}, {}
            mine.axes = {"world": self.axes["world"]}
            try:
                for _ in range(20):
                    kind = rng.choice(["make", "combine", "change", "check", "check", "drop"])
                    getattr(mine, kind)(**ARGUMENTS[kind](rng))
            except BaseException as exc:
                errors.append(exc)

        running = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        if errors:
            raise errors[0]

    # -- programs --------------------------------------------------------------------------------

    def program(self, seed: int, fault: str) -> None:
        """A random program of collectives, see tests/ccl."""
        sess = self.session
        if not fault:
            made = clean_program(seed, WORKERS, sess.num_groups)
            outcome = foretell(made)
            got = program_checks.run(sess, made, queued=seed % 3 == 0, watchdog=PATIENCE)
        else:
            case = faulty_program(seed, WORKERS, sess.num_groups, fault)
            outcome = case.outcome
            got = program_checks.run(sess, case.program, queued=seed % 3 == 0, watchdog=PATIENCE)
        program_checks.check_results(got, outcome)
        sess.interrupt(PATIENCE)  # what was sent and not received goes

    def step_through(self, seed: int, commands: int) -> None:
        """A random program, stepped through and run freely: it gives the same."""
        sess, rng = self.session, random.Random(seed)
        run = Stepped(seed)
        self.stepped = True
        free = sess.call_packed(run).debug_get_from_all()
        debugger = debugger_of(sess)
        try:
            stop = debugger.run(run, file=run.file)
            for _ in range(commands):
                if stop.finished:
                    break
                stop = rng.choice([debugger.step, debugger.next, debugger.out])()
            if not stop.finished:
                stop = debugger.continue_()
            expect(stop.finished, True, "the end of a stepped program")
            expect(debugger.program.result().debug_get_from_all(), free, "a stepped program")
        finally:
            if debugger.is_active:
                debugger.abort()
            debugger.clear()

    def rpc(self, seed: int, to: int) -> None:
        a = work.values(seed, 0, 7)
        twice = (a + a) % work.MODULUS
        expect(self.session.rpc.rpc_sync(to, work.combine, ("add", a, a)), twice, "rpc_sync")
        reference = self.session.rpc.remote(to, work.combine, ("add", a, a))
        expect(reference.to_here(), twice, "to_here")
        for rank, found in enumerate(
            self.session.call_packed(work.ring, seed, 3).debug_get_from_all()
        ):
            mine = work.values(seed, rank, 3)
            expect(found, (mine + mine) % work.MODULUS, f"a ring of calls at worker {rank}")
        try:
            self.session.rpc.rpc_sync(to, work.fail, ([to],))
        except WorkerError as exc:
            expect("as it should" in str(exc), True, "what an rpc raised")
        else:
            raise Fault("an rpc that must raise did not")

    # -- files -----------------------------------------------------------------------------------

    def save_and_load(self, a: str) -> None:
        if a not in self.refs:
            return
        path = self._path("checkpoint")
        axes = len(workers_of(self.session).sizes)  # each worker has a part of its own
        self.session.save(path, {"x": self.refs[a]}, {"x": ["shard(0)"] * axes})
        for found in self.session.load(path)["x"].debug_get_from_all():
            expect(found, torch.cat(self.values[a]), f"{a} saved and loaded")

    def snapshot(self, a: str) -> None:
        if a not in self.refs:
            return
        path = self._path("snapshot")
        self.session.push({"kept": 1})
        self.session["kept"] = self.refs[a]
        self.session.snapshot(path, {a: self.refs[a]})
        self.session.push({"kept": 2})
        back = self.session.restore(path)
        for rank, found in enumerate(self.session.pull("kept")):
            expect(found, self.values[a][rank], f"{a} restored as a variable")
        for rank, found in enumerate(back[a].debug_get_from_all()):
            expect(found, self.values[a][rank], f"{a} restored")

    # -- what goes wrong -------------------------------------------------------------------------

    def fail(self, ranks: list[int], asked: bool) -> None:
        """A function that raises on some workers; its result is asked for or dropped."""
        ref = self.session.call_packed(work.fail, ranks)
        try:
            if asked:
                ref.debug_get_from_all()
            else:
                del ref
                gc.collect()
                self.session.sync_all()
        except WorkerError as exc:
            expect(exc.ranks, ranks, "the workers that failed")
        else:
            raise Fault(f"that workers {ranks} raised was never told")
        self.session.sync_all()

    def interrupt(self, what: str, delay: float) -> None:
        """Workers that are busy, or wait for each other, and are interrupted."""
        self.settle()
        ref = self._block(what)
        time.sleep(delay)
        expect(self.session.interrupt(PATIENCE), [], "workers that did not stop")
        with contextlib.suppress(WorkerError, SessionError):
            ref.debug_get_from_all()
            raise Fault("what was interrupted has a result")
        del ref
        self.settle()

    def time_out(self, what: str, seconds: float) -> None:
        self.settle()
        ref = self._block(what)
        try:
            ref.debug_get_from_all(timeout=seconds)
        except WaitTimeoutError:
            pass
        else:
            raise Fault("a wait that must time out did not")
        expect(self.session.interrupt(PATIENCE), [], "workers that did not stop")
        del ref
        self.settle()

    def ctrl_c(self, what: str, delay: float) -> None:
        """SIGINT to this process, while it waits or while it calls."""
        self.settle()
        sent = threading.Event()
        if what == "snapshots":  # one that must stay whole
            self.session.push({"kept": 1})
            self.session.snapshot(self._path("interrupted"), names=["kept"])

        def press() -> None:
            sent.wait(delay)
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        try:
            thread.start()
            if what == "calls":
                self._call_until(sent.is_set)
            elif what == "snapshots":
                self._snapshots_until(sent.is_set)
            else:
                self._block(what).debug_get_from_all()
            time.sleep(5)  # it was sent and comes at any moment
            raise Fault("Ctrl-C was lost")
        except KeyboardInterrupt as exc:
            frames = [frame.name for frame in traceback.extract_tb(exc.__traceback__)]
        thread.join()
        if what in work.BLOCKING and "debug_get_from_all" not in frames:
            # it came between the call and the fetch, where nobody knows that it is about the call
            self.session.interrupt(PATIENCE)
        self.settle()
        if what == "snapshots":
            self.session.restore(self._path("interrupted"))
            expect(self.session.pull("kept"), [1] * WORKERS, "a variable restored after Ctrl-C")

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _snapshots_until(self, over: Callable[[], bool]) -> None:
        while not over():
            self.session.snapshot(self._path("interrupted"), names=["kept"])
            self.session.restore(self._path("interrupted"))

    def _call_until(self, over: Callable[[], bool]) -> None:
        while not over():
            a = self.session.call_packed(work.make, 3, 4)
            b = self.session.call_packed(work.combine, "mul", a, a)
            b.debug_get_from_remote(WORKERS - 1)

    def _block(self, what: str) -> DRef:
        function, argument = work.BLOCKING[what]
        return self.session.call_packed(function, argument)

    def kill(self, rank: int) -> None:
        """Kill a worker's process; another one takes its place, by itself or on request."""
        if self.engine == "threads":
            return
        self.settle()
        restarts = self.session.restarts_made
        os.kill(self.pids[rank], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.session.sync_all()
            except DiscoError as exc:
                expect(f"worker {rank}" in str(exc), True, f"that the error names {rank}: {exc}")
                break
            if time.monotonic() > deadline:
                raise Fault(f"the death of worker {rank} was never told")
        if not getattr(self.session, "respawn", False):
            self.session.restart_worker(rank)
        while self.session.restarts_made == restarts:
            if time.monotonic() > deadline + PATIENCE:
                raise Fault(f"worker {rank} was not replaced")
            time.sleep(0.002)
        self._is_another(rank)

    def restart(self, rank: int, busy: bool) -> None:
        """Start a worker afresh that lives; it may be computing."""
        if rank == 0 and self.engine != "threads":
            return
        self.settle()
        if busy:
            self.session.call_without_result(work.busy_at, rank)
        self.session.restart_worker(rank)
        self._is_another(rank)

    def _is_another(self, rank: int) -> None:
        """The others hold what they held; that one holds the same or says that it was lost."""
        for name, ref in self.refs.items():
            for place in range(WORKERS):
                try:
                    found = ref.debug_get_from_remote(place)
                except WorkerError as exc:
                    lost = place == rank and "was lost with it" in str(exc)
                    expect(lost, True, f"that {name} of worker {place} was lost: {exc}")
                else:
                    expect(found, self.values[name][place], f"{name} of worker {place}")
        self.refs.clear()
        self.values.clear()
        self.settle()
        self.pids = self.session.call_packed(work.pid).debug_get_from_all()

    # -- sessions --------------------------------------------------------------------------------

    def mesh(self, dp: int) -> None:
        tp = WORKERS // dp
        self.session.mesh(dp=dp, tp=tp)
        grid = torch.arange(WORKERS).view(dp, tp)
        world = self.axes["world"]
        self.axes = {"world": world, "dp": grid.t().tolist(), "tp": grid.tolist()}

    def new_session(self, groups: int, cancel: bool, respawn: bool) -> None:
        self.session.shutdown(cancel=cancel)
        self._start(groups, respawn)

    def round_ends(self) -> None:
        """All values are right, and once they are dropped no register is left."""
        for name in list(self.refs):
            self.check(name, -1)
        self.refs.clear()
        self.values.clear()
        self.session.call_without_result(_clear_variables)
        gc.collect()
        deadline = time.monotonic() + PATIENCE
        while True:
            self.session.sync_all()
            left = self.session.statistics().live_registers
            calls = {name: sum(info[name] for info in self._rpc_counts()) for name in RPC_COUNTS}
            # the debugger keeps its last program's result
            if left <= self.registers + self.stepped and not any(calls.values()):
                return
            if time.monotonic() > deadline:
                raise Fault(f"{left} registers are left of {self.registers}, of rpc {calls}")
            gc.collect()
            self.session.call_without_result(_collect)

    def _rpc_counts(self) -> list[dict[str, int]]:
        return [self.session.rpc.debug_info(rank) for rank in range(-1, WORKERS)]


def _clear_variables() -> None:
    from discolab import current_worker

    for name in ("pushed", "kept"):
        current_worker().namespace.pop(name, None)


def _collect() -> None:
    gc.collect()


class Stepped:
    """Calls a program of tests/debugger."""

    def __init__(self, seed: int) -> None:
        self.file = f"random_{seed}.py"
        self.program = load(make_program(seed), self.file)

    def __call__(self) -> object:
        from discolab import current_worker

        worker = current_worker()
        return self.program(worker.rank, worker.world_size)


# -- what is drawn -----------------------------------------------------------------------------


def _name(rng: random.Random) -> str:
    return rng.choice(NAMES)


def _seed(rng: random.Random) -> int:
    return rng.randrange(10_000)


def _size(rng: random.Random) -> int:
    return rng.choice([1, 5, 5, 5, 1000, 1000, 200_000])


def _delay(rng: random.Random) -> float:
    return round(rng.choice([0.0, 0.0005, 0.002, 0.02, 0.1]) * rng.random(), 5)


def _blocking(rng: random.Random) -> str:
    return rng.choice(list(work.BLOCKING))


ARGUMENTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "make": lambda r: {"name": _name(r), "seed": _seed(r), "size": _size(r)},
    "combine": lambda r: {
        "name": _name(r), "a": _name(r), "b": _name(r), "how": r.choice(["add", "mul"]),
    },
    "change": lambda r: {"a": _name(r), "by": _seed(r)},
    "drop": lambda r: {"a": _name(r)},
    "check": lambda r: {"a": _name(r), "rank": r.randrange(-1, WORKERS)},
    "reduce": lambda r: {
        "name": _name(r), "a": _name(r), "how": r.choice(["sum", "gather", "broadcast"]),
        "axis": r.choice(["world", "dp", "tp"]),
    },
    "push": lambda r: {"seed": _seed(r)},
    "threads": lambda r: {"seeds": [_seed(r) for _ in range(r.randint(2, 5))]},
    "program": lambda r: {"seed": _seed(r), "fault": r.choice(["", "", *FAULTS])},
    "step_through": lambda r: {"seed": _seed(r), "commands": r.randrange(8)},
    "rpc": lambda r: {"seed": _seed(r), "to": r.randrange(WORKERS)},
    "save_and_load": lambda r: {"a": _name(r)},
    "snapshot": lambda r: {"a": _name(r)},
    "fail": lambda r: {
        "ranks": sorted(r.sample(range(WORKERS), r.randint(1, WORKERS))), "asked": r.random() < 0.5,
    },
    "interrupt": lambda r: {"what": _blocking(r), "delay": _delay(r)},
    "time_out": lambda r: {"what": _blocking(r), "seconds": _delay(r)},
    "ctrl_c": lambda r: {
        "what": r.choice(["calls", "snapshots", *work.BLOCKING]), "delay": _delay(r),
    },
    "kill": lambda r: {"rank": r.randrange(1, WORKERS)},
    "restart": lambda r: {"rank": r.randrange(WORKERS), "busy": r.random() < 0.5},
    "mesh": lambda r: {"dp": r.choice([1, 2, 4])},
    "new_session": lambda r: {
        "groups": r.choice([1, 2]), "cancel": r.random() < 0.5, "respawn": r.random() < 0.5,
    },
    "round_ends": lambda r: {},
}  # fmt: skip
WEIGHTS = {
    "make": 10, "combine": 10, "change": 6, "drop": 5, "check": 12, "reduce": 10, "push": 2,
    "threads": 3, "program": 5, "step_through": 1, "rpc": 3, "save_and_load": 2, "snapshot": 2,
    "fail": 4, "interrupt": 3, "time_out": 2, "ctrl_c": 4, "kill": 0.4, "restart": 0.4, "mesh": 1,
    "new_session": 0.5, "round_ends": 1.5,
}  # fmt: skip


def draw(seed: int) -> Iterator[dict[str, Any]]:
    """Steps without an end."""
    rng = random.Random(seed)
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        yield {"do": kind, **ARGUMENTS[kind](rng)}


def do(world: World, step: dict[str, Any]) -> None:
    """Take one step."""
    arguments = {key: value for key, value in step.items() if key != "do"}
    partial(getattr(world, step["do"]), **arguments)()

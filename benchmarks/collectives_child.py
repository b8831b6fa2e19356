"""One contestant of collectives.py, or one of its processes: does what its standard input says.

Reads one JSON object a line and answers each with one: ``prepare`` allocates the buffers of an
operation, fills them, runs it once and compares the result; ``time`` runs it so many times.
Ends when its input does. The main thread reads and answers; the members (4 workers, 4 threads,
or this process as one of 4) each have a thread that owns their buffers, so that memory is first
touched where it is used. Sizes are those of the largest tensor that a member holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from collectives_bytes import FLOAT, MEMBERS, ROW, touched_bytes

PATIENCE = 120  # seconds that Gloo and discolab may wait for a member

Bound = Callable[[], Any]  # one operation on the buffers it was bound to
Bind = Callable[[str, torch.Tensor, torch.Tensor], Bound]


def pattern(tensor: torch.Tensor, *, scale: int, offset: int, first_row: int = 0) -> None:
    """Fill with numbers that tell member and place, and whose sums float32 holds exactly."""
    rows = torch.arange(first_row, first_row + tensor.numel() // ROW) % 4093 * scale + offset
    columns = torch.arange(ROW) * (scale / ROW)
    torch.add(rows.float()[:, None], columns.float(), out=tensor.view(-1, ROW))


class Member:
    """The part of one rank: `source`, `out` and the operation bound to them."""

    def __init__(self, rank: int, bind: Bind, barrier: Bound) -> None:
        self.rank, self._bind, self._barrier = rank, bind, barrier
        self.source = self.out = torch.empty(0)
        self.run: Bound = lambda: None

    def prepare(self, op: str, size: int) -> str:
        """Allocate, touch, run once; what is wrong with the result, "" if nothing is."""
        self.source = self.out = torch.empty(0)
        numel = size // FLOAT
        part = numel // MEMBERS
        self.source = torch.empty(part if op == "all_gather" else numel)
        pattern(self.source, scale=1, offset=4096 * self.rank)
        self.out = self.source
        if op == "all_gather":
            self.out = torch.empty(numel).fill_(-1)
        elif op == "reduce_scatter":
            self.out = torch.empty(part).fill_(-1)
        self.run = self._bind(op, self.source, self.out)
        self._barrier()
        self.run()
        self._barrier()
        right = self._is_right(op)
        if op == "all_reduce":  # the sum of sums of sums would soon be infinite
            self.source.zero_()
        return "" if right else f"{op} of {size} bytes: wrong result on rank {self.rank}"

    def _is_right(self, op: str) -> bool:
        expected = torch.empty_like(self.out)
        offsets = 4096 * sum(range(MEMBERS))
        if op == "all_reduce":
            pattern(expected, scale=MEMBERS, offset=offsets)
        elif op == "reduce_scatter":
            first = self.rank * expected.numel() // ROW
            pattern(expected, scale=MEMBERS, offset=offsets, first_row=first)
        elif op == "broadcast":
            pattern(expected, scale=1, offset=0)
        else:
            for rank, piece in enumerate(expected.chunk(MEMBERS)):
                pattern(piece, scale=1, offset=4096 * rank)
        return torch.equal(self.out, expected)

    def time(self, count: int) -> float:
        """Seconds for `count` operations, from when all members are there."""
        run = self.run
        self._barrier()
        begin = time.perf_counter()
        for _ in itertools.repeat(None, count):
            run()
        return time.perf_counter() - begin


class Contestant:
    """Members and the threads that they live on."""

    version = str(torch.__version__)

    def __init__(self, members: list[Member]) -> None:
        self.members = members

    def each(self, do: Callable[[Member], Any]) -> list[Any]:
        """What `do` gives for each member, on the member's own thread."""
        return [do(member) for member in self.members]

    def prepare(self, op: str, size: int) -> None:
        """Make all buffers; raises if a result is wrong."""
        wrong = [text for text in self.each(lambda member: member.prepare(op, size)) if text]
        if wrong:
            raise RuntimeError("; ".join(wrong))

    def time(self, count: int) -> dict[str, float]:
        """Seconds of one operation: of the member that took longest."""
        return {"seconds": max(self.each(lambda member: member.time(count))) / count}


class Discolab(Contestant):
    """A threaded session with the backend `local`."""

    def __init__(self) -> None:
        from discolab import ThreadedSession, __version__, ccl, current_worker

        self.version = __version__

        def bind(op: str, source: torch.Tensor, out: torch.Tensor) -> Bound:
            return {
                "all_reduce": lambda: ccl.all_reduce_(source),
                "all_gather": lambda: ccl.all_gather(source, out=out),
                "reduce_scatter": lambda: ccl.reduce_scatter(source, out=out),
                "broadcast": lambda: ccl.broadcast_(source),
            }[op]

        super().__init__([Member(rank, bind, ccl.barrier) for rank in range(MEMBERS)])
        self._session = ThreadedSession(MEMBERS, devices="cpu", timeout=PATIENCE)
        self._session.init_ccl("local")
        self._current = current_worker

    def each(self, do: Callable[[Member], Any]) -> list[Any]:
        """As a command of the session."""

        def on_worker() -> Any:
            return do(self.members[self._current().worker_id])

        return self._session.call_packed(on_worker).debug_get_from_all()


class GlooProcess(Contestant):
    """This process as one rank of four, as torchrun would start it."""

    def __init__(self, rank: int, store: str) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, MEMBERS),
            rank=rank,
            world_size=MEMBERS,
            timeout=timedelta(seconds=PATIENCE),
        )

        def bind(op: str, source: torch.Tensor, out: torch.Tensor) -> Bound:
            return {
                "all_reduce": lambda: dist.all_reduce(source),
                "all_gather": lambda: dist.all_gather_into_tensor(out, source),
                "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, source),
                "broadcast": lambda: dist.broadcast(source, 0),
            }[op]

        super().__init__([Member(rank, bind, dist.barrier)])


class GlooThreads(Contestant):
    """Four threads of this process, each with a process group of its own over one store."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store = dist.HashStore()
        self._threads = [ThreadPoolExecutor(1) for _ in range(MEMBERS)]
        joining = [
            thread.submit(self._join, dist, rank) for rank, thread in enumerate(self._threads)
        ]
        super().__init__([joined.result(PATIENCE) for joined in joining])

    def _join(self, dist: Any, rank: int) -> Member:
        torch.set_num_threads(1)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=PATIENCE)
        group = dist.ProcessGroupGloo(self._store, rank, MEMBERS, options)

        def bind(op: str, source: torch.Tensor, out: torch.Tensor) -> Bound:
            return {
                "all_reduce": lambda: group.allreduce([source]).wait(),
                "all_gather": lambda: group._allgather_base(out, source).wait(),
                "reduce_scatter": lambda: group._reduce_scatter_base(out, source).wait(),
                "broadcast": lambda: group.broadcast([source]).wait(),
            }[op]

        return Member(rank, bind, lambda: group.barrier().wait())

    def each(self, do: Callable[[Member], Any]) -> list[Any]:
        """On their threads."""
        pairs = zip(self._threads, self.members, strict=True)
        started = [thread.submit(do, member) for thread, member in pairs]
        return [job.result() for job in started]


Pieces = list[tuple[torch.Tensor, torch.Tensor]]  # halves of memory, a pair for each thread


class Copies:
    """No collective: how long plain copies take to move the bytes that the operation must.

    One half of the operation's memory is copied to the other: by one thread, by all of torch's
    threads, and by one thread of Python for each core with a slice of its own. For an operation
    that reads and writes each byte in place, also: memory negated in place, which is faster than
    a copy where the processor fetches what it overwrites. The best counts.
    """

    version = str(torch.__version__)

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._threads = [ThreadPoolExecutor(1) for _ in range(cores)]
        self._whole: Pieces = []
        self._slices: Pieces = []
        self._moved = self._memory = 0

    def prepare(self, op: str, size: int) -> None:
        """Allocate and touch, each slice on its own thread."""
        self._whole, self._slices = [], []
        self._moved, self._memory = touched_bytes(op, size)
        part = max(1, self._memory // 2 // FLOAT // self._cores)
        halves = torch.empty(2, self._cores, part)
        made = [t.submit(halves[:, i].fill_, 1.0) for i, t in enumerate(self._threads)]
        for job in made:
            job.result()
        self._whole = [(halves[0].view(-1), halves[1].view(-1))]
        self._slices = [(halves[0, i], halves[1, i]) for i in range(self._cores)]

    def time(self, count: int) -> dict[str, float]:
        """Seconds to move the bytes of one operation: in the best form, and by copies alone."""
        forms = [(_copy, self._whole, 1)]
        if self._cores > 1:
            forms += [(_copy, self._whole, self._cores), (_copy, self._slices, 1)]
        if self._moved == 2 * self._memory:  # each byte read and written
            forms += [(_negate, self._whole, self._cores), (_negate, self._slices, 1)]
        turns = max(1, count // len(forms))
        copies, others = [], []
        for step, pieces, threads in forms:
            start = threading.Barrier(len(pieces))
            jobs = [
                thread.submit(_repeat, step, piece, threads, turns, start)
                for thread, piece in zip(self._threads, pieces, strict=False)
            ]
            taken = max(job.result() for job in jobs) / turns / self._memory * self._moved
            if step is _copy:
                copies.append(taken)
            else:
                others.append(taken / 2)  # it moves twice the bytes
        return {"seconds": min(copies + others), "copies": min(copies)}


def _copy(first: torch.Tensor, second: torch.Tensor) -> None:
    """Read one, write the other."""
    first.copy_(second)


def _negate(first: torch.Tensor, second: torch.Tensor) -> None:
    """Read and write both."""
    first.neg_()
    second.neg_()


def _repeat(
    step: Callable[[torch.Tensor, torch.Tensor], None],
    piece: tuple[torch.Tensor, torch.Tensor],
    threads: int,
    turns: int,
    start: threading.Barrier,
) -> float:
    """Seconds of so many steps, from when all threads are there; one step before warms up."""
    torch.set_num_threads(threads)
    step(*piece)
    start.wait(PATIENCE)
    begin = time.perf_counter()
    for _ in itertools.repeat(None, turns):
        step(*piece)
    return time.perf_counter() - begin


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("side", choices=("discolab", "gloo-process", "gloo-threads", "bound"))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.add_argument("--cores", type=int, default=1)
    args = parser.parse_args()
    make: dict[str, Callable[[], Contestant | Copies]] = {
        "discolab": Discolab,
        "gloo-process": lambda: GlooProcess(args.rank, args.store),
        "gloo-threads": GlooThreads,
        "bound": lambda: Copies(args.cores),
    }
    contestant = make[args.side]()
    print(json.dumps({"version": contestant.version}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if order["do"] == "prepare":
                contestant.prepare(order["op"], order["size"])
            else:
                answer |= contestant.time(order["count"])
        except Exception as exc:
            answer["error"] = f"{type(exc).__name__}: {exc}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

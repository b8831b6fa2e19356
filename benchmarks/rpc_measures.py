"""What rpc.py measures, for any `Caller`, and the functions that are called.

Imported by the child that measures and by the workers of every side: some figures are taken on a
worker, which calls another one. No state but `_held`, set once by the thread that is asked first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from engines_sides import BIG, make_big
from rounds_child import Clock, time_calls

WORKERS = 4
FROM, TO = 1, 2  # the worker that calls, and the one that is called
BATCH = 2000  # calls sent without waiting between
MANY = 10_000  # calls in flight at once
SMALL = 256  # elements of float32: 1 KB
WORTH_HIDING = 1e-3  # seconds; of a shorter send there is nothing to overlap

_held: list[torch.Tensor] = []


# -- what is called ----------------------------------------------------------------------------


def noop() -> None:
    """Nothing."""


def plus_one(number: int) -> int:
    """An answer that belongs to its question."""
    return number + 1


def count(value: Any) -> int:
    """How many elements a tensor or an array has; it need not be read for that."""
    return len(value)


def total(value: Any) -> float:
    """The sum of a tensor or an array: every element is read."""
    return float(torch.as_tensor(value).sum())


def give(way: str) -> Any:
    """The big value, which was made before the first time taken."""
    if not _held:
        _held.append(make_big())
    return _held[0].numpy() if way == "numpy" else _held[0]


# -- who calls ---------------------------------------------------------------------------------


class Caller:
    """How the calling thread calls worker `rank` with one runtime."""

    ways: Sequence[str] = ("tensor",)  # the types as which values may travel, the best one last

    def send(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call without waiting; what it returns is given to `wait_all`."""
        raise NotImplementedError

    def lend(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """As `send`, with arguments that are left alone until it is done."""
        return self.send(rank, function, *args)

    def wait_all(self, sent: list[Any]) -> list[Any]:
        """The answers."""
        raise NotImplementedError

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call and wait."""
        raise NotImplementedError

    def refer(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call and leave the result there, then fetch it."""
        raise NotImplementedError


# -- figures -----------------------------------------------------------------------------------


def noop_calls(caller: Caller, calls: int, seconds: float) -> dict[str, float]:
    """Round trip of a no-op."""
    return time_calls(lambda: caller.call(TO, noop), calls, seconds)


def small_calls(caller: Caller, calls: int, seconds: float) -> dict[str, float]:
    """Round trip with a tensor of 1 KB as argument."""
    small = as_way(torch.ones(SMALL), caller.ways[-1])
    if caller.call(TO, total, small) != SMALL:
        raise ValueError("the tensor that arrived is not the one that was sent")
    return time_calls(lambda: caller.call(TO, count, small), calls, seconds)


def to_all(caller: Caller, calls: int, seconds: float) -> dict[str, float]:
    """A no-op on each worker at once, and wait for all."""

    def act() -> None:
        caller.wait_all([caller.send(rank, noop) for rank in range(WORKERS)])

    return time_calls(act, calls, seconds)


def references(caller: Caller, calls: int, seconds: float) -> dict[str, float]:
    """A result that is left there and then fetched."""
    if caller.refer(TO, plus_one, 1) != 2:
        raise ValueError("the fetched value is wrong")
    return time_calls(lambda: caller.refer(TO, plus_one, 1), calls, seconds)


def pipelined(caller: Caller, calls: int, seconds: float) -> dict[str, float]:
    """Microseconds for each of many no-ops that are sent without waiting between."""

    def batch() -> None:
        caller.wait_all([caller.send(TO, noop) for _ in range(BATCH)])

    batch()
    taken = timed({"batch": batch}, seconds, least=3, most=30)["batch"]
    return {"each_us": statistics.median(taken) / BATCH * 1e6}


def many(caller: Caller, calls: int, seconds: float) -> dict[str, float]:
    """Seconds of 10,000 calls in flight at once; each must have its own answer."""
    begin = Clock()
    answers = caller.wait_all([caller.send(TO, plus_one, number) for number in range(MANY)])
    taken = Clock() - begin
    if list(answers) != list(range(1, MANY + 1)):
        raise ValueError("answers are wrong, missing, or in the wrong order")
    return {"seconds": taken}


def big_argument(caller: Caller, calls: int, seconds: float) -> dict[str, Any]:
    """Seconds of a call with 64 MB, and of one that also reads them there, by type.

    The tensor is written anew before each call, so that nothing of the last one can serve again.
    """
    return {way: _big_argument(caller, way, seconds) for way in caller.ways}


def _big_argument(caller: Caller, way: str, seconds: float) -> dict[str, float]:
    source = torch.ones(BIG)
    value = as_way(source, way)
    turn = 0

    def fill() -> None:
        nonlocal turn
        turn = turn % 7 + 1
        source.fill_(turn)

    def read() -> None:
        if caller.call(TO, total, value) != BIG * turn:  # exact: BIG is a power of two
            raise ValueError("the tensor that arrived is not the one that was sent")

    acts = {"call_s": lambda: caller.call(TO, count, value), "call_sum_s": read}
    return medians(timed(acts, seconds, least=5, most=40, before=fill))


def big_result(caller: Caller, calls: int, seconds: float) -> dict[str, Any]:
    """Seconds of a call that returns 64 MB, and with reading them here, by type."""
    return {way: _big_result(caller, way, seconds) for way in caller.ways}


def _big_result(caller: Caller, way: str, seconds: float) -> dict[str, float]:
    wanted = float(make_big().sum())

    def read() -> None:
        if total(caller.call(TO, give, way)) != wanted:
            raise ValueError("the result is not the one that was returned")

    acts = {"call_s": lambda: caller.call(TO, give, way), "call_sum_s": read}
    return medians(timed(acts, seconds, least=5, most=40))


def overlap(caller: Caller, calls: int, seconds: float) -> dict[str, Any]:
    """Seconds of a send of 64 MB alone, of a computation alone, and of both at once, by type.

    The computation is a loop of small products on one thread that takes about as long as the send.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {way: _overlap(caller, way, seconds) for way in caller.ways}
        return {way: times for way, times in found.items() if times is not None}
    finally:
        torch.set_num_threads(threads)


def _overlap(caller: Caller, way: str, seconds: float) -> dict[str, float] | None:
    value = as_way(torch.ones(BIG), way)
    factor = torch.rand(256, 256)
    out = torch.empty_like(factor)

    def send() -> Any:
        return caller.lend(TO, count, value)

    def alone() -> None:
        caller.wait_all([send()])

    def product() -> None:
        torch.mm(factor, factor, out=out)

    first = medians(timed({"send_s": alone, "product_s": product}, seconds / 4, 10, 200))
    if first["send_s"] < WORTH_HIDING:
        return None
    times = max(1, round(first["send_s"] / first["product_s"]))

    def compute() -> None:
        for _ in range(times):
            product()

    def both() -> None:
        sent = send()
        compute()
        caller.wait_all([sent])

    acts = {"send_s": alone, "compute_s": compute, "both_s": both}
    return medians(timed(acts, seconds, least=5, most=40))


def as_way(tensor: torch.Tensor, way: str) -> Any:
    """The tensor as the type that shall travel; the memory is the same."""
    return tensor.numpy() if way == "numpy" else tensor


def timed(
    acts: dict[str, Callable[[], Any]],
    seconds: float,
    least: int,
    most: int,
    before: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each of `least` to `most` rounds in which all `acts` take turns.

    One round before counts as warm-up. What an act returns is dropped outside the time taken.
    """
    taken: dict[str, list[float]] = {name: [] for name in acts}
    end, rounds = Clock() + seconds, -1
    while rounds < most and (rounds < least or Clock() < end):
        for name, act in acts.items():
            if before is not None:
                before()
            begin = Clock()
            result = act()
            taken[name].append(Clock() - begin)
            del result
        rounds += 1
    return {name: times[1:] for name, times in taken.items()}


def medians(taken: dict[str, list[float]]) -> dict[str, float]:
    """The middle of each."""
    return {name: statistics.median(times) for name, times in taken.items()}


Measure = Callable[[Caller, int, float], dict[str, Any]]

# From the controller, and from worker `FROM`. The arguments: timed calls at most, seconds about.
FIGURES: dict[str, Measure] = {
    "noop": noop_calls,
    "small": small_calls,
    "all": to_all,
    "remote": references,
    "pipelined": pipelined,
    "many": many,
    "argument": big_argument,
    "result": big_result,
    "overlap": overlap,
}
THERE: dict[str, Measure] = {
    "noop": noop_calls,
    "pipelined": pipelined,
    "argument": big_argument,
}

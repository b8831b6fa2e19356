"""What the tests of rpc have workers do: imported by them by name."""

import dataclasses
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from discolab import current_worker, current_worker_or_none, rpc
from discolab.runtime.functions import register_func

KEPT: dict[str, Any] = {}
"""What a function was told to keep, by name; on threads all ranks see the same one."""

ALIVE: dict[str, list[int]] = {}
"""Of each tag an entry for each object `Counted` in this process; one step makes or takes one."""

SEEN: dict[str, list[Any]] = {}
"""What has happened in this process, by tag."""

_lock = threading.Lock()


def eventually(ready: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until `ready()`, looking often."""
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while not ready():
        assert time.monotonic() < deadline, f"not so after {seconds} s: {ready()!r}"
        time.sleep(pause)
        pause = min(0.02, pause * 2)


def called(scenario: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a test's scenario in a callee."""
    return scenario(rpc, *args)


# -- plain functions ---------------------------------------------------------------------------


def my_rank() -> int:
    """The rank of who runs this; -1: the controller."""
    worker = current_worker_or_none()
    return -1 if worker is None else worker.rank


def pid() -> int:
    """Of the process."""
    return os.getpid()


def add(a: Any, b: Any = 10, *more: Any, factor: Any = 1) -> Any:
    """A sum."""
    return (a + b + sum(more)) * factor


@register_func("tests.rpc.double", override=True)
def double(x: Any) -> Any:
    """Twice x."""
    return 2 * x


def same(x: Any) -> Any:
    """It."""
    return x


def thread_name() -> str:
    """Of the thread that runs this."""
    return threading.current_thread().name


def call_on(to: Any, fn: Any, *args: Any) -> Any:
    """Call from here."""
    return rpc.rpc_sync(to, fn, args)


def bounce(ranks: list[int], depth: int) -> list[int]:
    """Who was asked: this one, and on through `ranks`, in turn, `depth` times."""
    if depth == 0:
        return [my_rank()]
    to, *others = ranks
    return [my_rank(), *rpc.rpc_sync(to, bounce, ([*others, to], depth - 1))]


def fibonacci(n: int) -> int:
    """By calls to all workers, two at once at each level."""
    if n < 2:
        return n
    to = (my_rank() + 1) % 4
    other = rpc.rpc_async(to, fibonacci, (n - 1,))
    return int(rpc.rpc_sync((to + 1) % 4, fibonacci, (n - 2,)) + other.wait())


def await_file(path: str, seconds: float = 30) -> bool:
    """Wait for a file in a loop of Python code."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def touch(path: str) -> None:
    """Make a file."""
    with open(path, "w", encoding="ascii"):
        pass


def spin(path: str = "") -> None:
    """Loop for ever; the file tells that it has begun."""
    if path:
        touch(path)
    while True:
        pass


def sleep(seconds: float, path: str = "") -> float:
    """Sleep; the file tells that it has begun."""
    if path:
        touch(path)
    time.sleep(seconds)
    return seconds


def say_and_await(began: str, over: str) -> bool:
    """The one file tells that it has begun; the other one ends it."""
    touch(began)
    return await_file(over, 1000)


def die(path: str = "") -> None:
    """End this process, once the file is there."""
    if path:
        await_file(path)
    os._exit(3)


# -- errors --------------------------------------------------------------------------------------


class OddError(Exception):
    """Its constructor takes what its args don't hold."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


class HoldsLockError(RuntimeError):
    """Can't be pickled."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class MeanError(Exception):
    """Can't even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


def fail(kind: str) -> Any:
    """Raise."""
    made: dict[str, Callable[[], BaseException]] = {
        "value": lambda: ValueError("it is bad", 7),
        "key": lambda: KeyError("name"),
        "odd": lambda: OddError(7, why="odd"),
        "lock": HoldsLockError,
        "mean": MeanError,
        "exit": lambda: SystemExit(3),
        "interrupt": KeyboardInterrupt,
        "stop": lambda: StopIteration(5),
        "local": _local_error,
        "group": lambda: ExceptionGroup("both", [ValueError("a"), KeyError("b")]),
        "generator": GeneratorExit,
    }
    raise made[kind]()


def fail_from() -> None:
    """Raise for a reason."""
    try:
        fail("value")
    except ValueError as error:
        raise LookupError("because of it") from error


class _Text(str):
    def _run(self, *_: Any) -> Any:
        note("texts", (my_rank(), threading.current_thread().name))
        raise SystemExit(3)

    __str__ = __format__ = splitlines = _run


class RunsCode(KeyError):
    """An exception whose text is made by code that ends a process, except on its own thread."""

    def __init__(self, text: Any, *, where: str) -> None:
        super().__init__(text)
        self.text = text
        self.where = where

    def __str__(self) -> str:
        if threading.current_thread().name != self.where:
            note("texts", (my_rank(), threading.current_thread().name))
            raise SystemExit(3)
        return _Text("made at the callee")

    __repr__ = __copy__ = __str__

    def __format__(self, _: str) -> str:
        return str(self)

    def __reduce_ex__(self, _: Any) -> Any:
        raise SystemExit(4)


def fail_with_code() -> None:
    """Raise such an exception."""
    raise RunsCode("text", where=threading.current_thread().name)


def _local_error() -> Exception:
    class LocalError(ValueError):
        """Of a function."""

    return LocalError("it is local")


def fails_on(to: Any, kind: str) -> None:
    """Have another one raise, and let it through."""
    rpc.rpc_sync(to, fail, (kind,))


def unsendable(kind: str) -> Any:
    """What can't go to another process."""
    made: dict[str, Callable[[], Any]] = {
        "lock": threading.Lock,
        "generator": lambda: (n for n in range(3)),
    }
    return {"it": [made[kind]()]}


def nested(depth: int) -> list[Any]:
    """A list in a list in a list …"""
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


# -- futures -------------------------------------------------------------------------------------


@rpc.async_execution
def later(name: str) -> torch.futures.Future[Any]:
    """Answered by `fulfil`."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    with _lock:
        KEPT.setdefault(name, []).append(future)
    return future


def promised(name: str) -> int:
    """How many wait for `fulfil`."""
    return len(KEPT.get(name, ()))


def fulfil(name: str, value: Any, count: int | None = None) -> None:
    """Answer all calls of `later` of that name."""
    with _lock:
        futures = KEPT.pop(name)
    for n, future in enumerate(futures):
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value if count is None else (value, n))


@rpc.async_execution
def add_elsewhere(to: Any, a: Any, b: Any, and_then: Any) -> Any:
    """Ask another one, and add to what it says."""
    return rpc.rpc_async(to, add, (a, b)).then(lambda done: done.value() + and_then)


@rpc.async_execution
def no_future() -> int:
    """Wrong: an async function returns a Future."""
    return 3


@rpc.async_execution
def raises_at_once() -> Any:
    """Raises before there is a future."""
    raise ValueError("at once")


# -- streams -------------------------------------------------------------------------------------


def note(tag: str, what: Any) -> None:
    """Keep what has happened."""
    SEEN.setdefault(tag, []).append(what)


def seen(tag: str) -> list[Any]:
    """What was noted."""
    return list(SEEN.get(tag, ()))


def numbers(count: int, tag: str = "") -> Iterator[int]:
    """0 .. count - 1; how far it is, and its end, are noted."""
    try:
        for n in range(count):
            if tag:
                note(tag, n)
            yield n
    finally:
        if tag:
            note(tag, "closed")


def numbers_then_fail(count: int) -> Iterator[int]:
    """An error in the middle."""
    yield from range(count)
    raise ValueError("in the middle")


def numbers_then_hang(count: int, tag: str) -> Iterator[int]:
    """One item never comes."""
    try:
        yield from range(count)
        while True:
            time.sleep(0.01)
    finally:
        note(tag, "closed")


def numbers_then_die(count: int) -> Iterator[int]:
    """The process ends in the middle."""
    yield from range(count)
    time.sleep(0.2)
    os._exit(3)


def tensors(count: int) -> Iterator[torch.Tensor]:
    """Of growing size."""
    for n in range(count):
        yield torch.full((n,), float(n))


def stream_of(to: Any, count: int) -> Iterator[int]:
    """A stream of a stream."""
    for item in rpc.stream(to, numbers, (count,)):
        yield 2 * item


def locks(count: int) -> Iterator[Any]:
    """What can't be sent, after what can."""
    yield from range(count)
    yield threading.Lock()


# -- references ----------------------------------------------------------------------------------


class Counted:
    """Counted while it lives; can't be copied."""

    def __init__(self, tag: str, number: int = 0) -> None:
        self.tag, self.number = tag, number
        ALIVE.setdefault(tag, []).append(1)
        weakref.finalize(self, _gone, tag)

    def __reduce__(self) -> Any:
        raise TypeError("a Counted is never copied")

    def get(self) -> int:
        """Its number."""
        return self.number


def _gone(tag: str) -> None:
    ALIVE[tag].pop()


def counted(tag: str, number: int = 0, seconds: float = 0) -> Counted:
    """Make one."""
    if seconds:
        time.sleep(seconds)
    return Counted(tag, number)


def counted_then_fail(tag: str) -> Counted:
    """Make one, and fail."""
    made = Counted(tag)
    raise ValueError(f"after {made.tag}")


def alive(tag: str) -> int:
    """How many there are in this process."""
    return len(ALIVE.get(tag, ()))


def keep(name: str, value: Any) -> None:
    """Keep a value here."""
    KEPT[name] = value


def kept(name: str) -> Any:
    """What is kept."""
    return KEPT[name]


def await_kept(name: str) -> Any:
    """What is kept, once it is there."""
    eventually(lambda: name in KEPT)
    return KEPT[name]


def drop(name: str) -> None:
    """Keep it no more."""
    KEPT.pop(name, None)


def slow_keep(seconds: float, name: str, value: Any) -> None:
    """Keep it after a while."""
    time.sleep(seconds)
    KEPT[name] = value


def number_of(ref: Any) -> int:
    """Ask the owner of a `Counted`."""
    return int(ref.rpc_sync().get())


def kept_number(name: str) -> int:
    """Of the `Counted` that is referred to by what is kept."""
    return number_of(KEPT[name])


def take(ref: Any) -> Any:
    """Fetch a value by its reference."""
    return ref.to_here()


def make_ref(to: Any, fn: Any, *args: Any) -> Any:
    """A reference to what someone else has."""
    return rpc.remote(to, fn, args)


def own(value: Any) -> Any:
    """A reference to a value here."""
    return rpc.RRef(value)


def own_counted(tag: str) -> Any:
    """A reference to a `Counted` here."""
    return rpc.RRef(Counted(tag))


def pass_on(ref: Any, ranks: list[int], name: str) -> None:
    """Send it on through `ranks`, keeping nothing; the last one keeps it as `name`."""
    if not ranks:
        KEPT[name] = ref
        return
    rpc.rpc_sync(ranks[0], pass_on, (ref, ranks[1:], name))


def pass_on_at_once(ref: Any, ranks: list[int], name: str) -> None:
    """As `pass_on`, without waiting."""
    if not ranks:
        KEPT[name] = ref
        return
    rpc.rpc_async(ranks[0], pass_on_at_once, (ref, ranks[1:], name))


@dataclasses.dataclass
class Parcel:
    """Something that holds a reference."""

    name: str
    ref: Any
    more: list[Any] = dataclasses.field(default_factory=list)


def open_parcel(parcel: Parcel) -> list[Any]:
    """The values of what it holds."""
    return [parcel.ref.to_here(), *(ref.to_here() for ref in parcel.more)]


def sum_of(refs: Any) -> Any:
    """Of a dict of lists of references."""
    return sum(ref.to_here() for group in refs.values() for ref in group)


class Account:
    """Something with a state."""

    def __init__(self, money: int = 0) -> None:
        self.money = money
        self.rank = my_rank()

    def pay(self, money: int, times: int = 1) -> int:
        """Add to it."""
        self.money += money * times
        return self.money

    def who(self) -> tuple[int, int]:
        """Where it is, and where this runs."""
        return self.rank, my_rank()

    def fail(self) -> None:
        """Raise."""
        raise KeyError("no money")


def is_same(ref: Any, name: str) -> bool:
    """Whether a reference that has come home is to the very object that is kept."""
    return ref.is_owner() and ref.local_value() is KEPT[name]


def facts(ref: Any) -> tuple[Any, ...]:
    """What a reference says of itself here."""
    return ref.owner().id, ref.owner().name, ref.owner_name(), ref.is_owner()


def is_confirmed(ref: Any) -> bool:
    """Whether a reference that this was given is known to its owner."""
    return bool(ref.confirmed_by_owner())


def local_value_error(ref: Any) -> str:
    """What is said to who asks for a value that is elsewhere."""
    try:
        ref.local_value()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- tensors -------------------------------------------------------------------------------------


def describe(x: torch.Tensor) -> tuple[Any, ...]:
    """What is to be the same there."""
    return x.dtype, tuple(x.shape), x.requires_grad, type(x).__name__, x.is_leaf


def data_ptr(x: torch.Tensor) -> int:
    """Where it lies."""
    return int(x.data_ptr())


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether writing to one is seen in the other."""
    before = b.flatten()[0].item()
    a.fill_(before + 1)
    return bool(b.flatten()[0].item() == before + 1)


def fill(x: torch.Tensor, value: float) -> torch.Tensor:
    """In place."""
    return x.fill_(value)


def slow_sum(path: str, x: torch.Tensor) -> tuple[float, float, float]:
    """Its least, its greatest and their place in the middle, once the file is there."""
    await_file(path)
    return float(x.min()), float(x.max()), float(x[len(x) // 2])


def extremes(x: torch.Tensor) -> tuple[float, float]:
    """The least and the greatest."""
    return float(x.min()), float(x.max())


def make_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wait_then_add(path: str, x: Any, y: Any) -> Any:
    """A sum, once the file is there."""
    assert await_file(path)
    return x + y


@functools.lru_cache(maxsize=1)
def weight() -> torch.nn.Parameter:
    """One for each process."""
    return torch.nn.Parameter(torch.ones(3))


def rank_times(x: Any) -> Any:
    """For a DRef whose values differ."""
    return (current_worker().rank + 1) * x


def call_module(net: Any, x: torch.Tensor) -> torch.Tensor:
    """What it gives."""
    found: torch.Tensor = net(x).detach()
    return found

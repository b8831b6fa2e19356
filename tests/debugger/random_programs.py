"""Sharded programs made at random: branches, loops, exceptions, generators, functions, collectives.

`make_program(seed)` gives the source of a function ``program(rank, world)`` that returns a list. It
has collectives only where all workers come by, in one order, so that it never hangs: in the
*uniform* parts, whose conditions depend on `u` alone, which is the same on all workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_HEAD = """\
import torch
from discolab import ccl


class Guard:
    def __init__(self, out):
        self.out = out

    def __enter__(self):
        self.out.append("in")
        return self

    def __exit__(self, kind, error, trace):
        self.out.append(("out", kind and kind.__name__))
        return kind is KeyError


def total(value):
    found = ccl.all_reduce(torch.tensor([float(value)]))
    return int(found.item()) % 97


def fall(n):
    if n <= 0:
        return 1
    below = fall(n - 1)
    return (below * 3 + n) % 97


def numbers(n, out):
    try:
        for i in range(n):
            got = yield i * 2
            if got is not None:
                out.append(got)
    finally:
        out.append("generator ends")


"""


class _Maker:
    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.lines: list[str] = []
        self.functions = 0
        self.loops = 0

    def put(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def number(self) -> str:
        return self.choose.choice(
            ["a", "b", "u", "rank", "a + b", "b * 3 + rank", "a - u", str(self.choose.randrange(9))]
        )

    def same(self) -> str:
        """A number that is the same on all workers."""
        return self.choose.choice(["u", "u * 5 + 1", "u + 2", str(self.choose.randint(0, 9))])

    def block(self, depth: int, uniform: bool, size: int) -> None:
        for _ in range(self.choose.randint(1, size)):
            self.statement(depth, uniform)

    def statement(self, depth: int, uniform: bool) -> None:
        makers: list[Callable[[int, bool], None]] = [self.assign, self.note, self.assign]
        if uniform:
            makers += [self.meet, self.meet, self.change]
        if depth < 5:
            makers += [self.branch, self.loop, self.trying, self.function, self.generator]
            makers += [self.guarded, self.part_ways, self.whiling]
        self.choose.choice(makers)(depth, uniform)

    def assign(self, depth: int, uniform: bool) -> None:
        name = self.choose.choice("ab")
        self.put(depth, f"{name} = ({self.number()} + {self.number()}) % 97")

    def change(self, depth: int, uniform: bool) -> None:
        self.put(depth, f"u = ({self.same()} + 3) % 97")

    def note(self, depth: int, uniform: bool) -> None:
        value = self.choose.choice(
            [self.number(), f"[x + {self.number()} for x in range(3)]", f"fall({self.same()} % 4)"]
        )
        self.put(depth, f"out.append({value})")

    def meet(self, depth: int, uniform: bool) -> None:
        self.put(
            depth, self.choose.choice(["u = total(a)", "a = total(b + rank)", "ccl.barrier()"])
        )

    def branch(self, depth: int, uniform: bool) -> None:
        self.put(depth, f"if ({self.same()}) % 2 == {self.choose.randint(0, 1)}:")
        self.block(depth + 1, uniform, 3)
        if self.choose.random() < 0.6:
            self.put(depth, "else:")
            self.block(depth + 1, uniform, 3)

    def part_ways(self, depth: int, uniform: bool) -> None:
        kind = self.choose.choice(["if rank % 2 == 0:", "if a % 3 == rank % 3:", "if rank == 1:"])
        self.put(depth, kind)
        self.block(depth + 1, False, 3)
        if self.choose.random() < 0.7:
            self.put(depth, "else:")
            self.block(depth + 1, False, 2)

    def loop(self, depth: int, uniform: bool) -> None:
        same = uniform and self.choose.random() < 0.6
        count = self.choose.randint(1, 3) if same else "rank + 1"
        self.loops += 1
        self.put(depth, f"for i{self.loops} in range({count}):")
        if not same and self.choose.random() < 0.4:
            self.put(depth + 1, "if a % 5 == rank:")
            self.put(depth + 2, self.choose.choice(["continue", "break"]))
        self.block(depth + 1, same, 2)

    def whiling(self, depth: int, uniform: bool) -> None:
        self.loops += 1
        name = f"w{self.loops}"
        self.put(depth, f"{name} = {self.choose.randint(1, 3)}")
        self.put(depth, f"while {name} > 0:")
        self.put(depth + 1, f"{name} -= 1")
        self.block(depth + 1, uniform, 2)

    def trying(self, depth: int, uniform: bool) -> None:
        self.put(depth, "try:")
        self.block(depth + 1, False, 2)
        if self.choose.random() < 0.7:
            self.put(depth + 1, self.choose.choice(["if rank == 0:", "if a % 2:", "if True:"]))
            self.put(depth + 2, self.choose.choice(["raise ValueError(a)", "{}['no']", "1 // 0"]))
        self.put(depth, "except (ValueError, KeyError, ZeroDivisionError) as exc:")
        self.put(depth + 1, "out.append(type(exc).__name__)")
        if self.choose.random() < 0.5:
            self.put(depth, "finally:")
            self.block(depth + 1, False, 2)

    def guarded(self, depth: int, uniform: bool) -> None:
        self.put(depth, "with Guard(out):")
        self.block(depth + 1, uniform, 2)
        if not uniform and self.choose.random() < 0.5:
            self.put(depth + 1, "raise KeyError('left')")

    def function(self, depth: int, uniform: bool) -> None:
        self.functions += 1
        name = f"inner{self.functions}"
        self.put(depth, f"def {name}(a, b, u):")
        self.block(depth + 1, uniform, 3)
        self.put(depth + 1, "return (a + b) % 97")
        self.put(depth, f"a = {name}(a, {self.number()}, u)")

    def generator(self, depth: int, uniform: bool) -> None:
        self.loops += 1
        count = self.choose.choice(["3", "rank + 1"])
        self.put(depth, f"for i{self.loops} in numbers({count}, out):")
        self.put(depth + 1, f"a = (a + i{self.loops}) % 97")
        if self.choose.random() < 0.3:
            self.put(depth + 1, "if a % 2 == 0:")
            self.put(depth + 2, "break")


def make_program(seed: int) -> str:
    """The source of one program."""
    maker = _Maker(seed)
    maker.put(0, "def program(rank, world):")
    maker.put(1, "out, a, b, u = [], rank + 1, 7, 3")
    for _ in range(4):
        maker.statement(1, True)
    maker.put(1, "out.append((a, b, u))")
    maker.put(1, "out.append(total(a))")
    maker.put(1, "return out")
    return _HEAD + "\n".join(maker.lines) + "\n"

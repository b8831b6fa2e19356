"""One call of one collective by one worker: what it asks for, and how far it has come.

A `Call` is made by the worker that calls. It is written by that worker and, once its collective
is under way, by whoever executes it; each attribute has one writer at a time. Others may read
it at any moment: it is the entry of the ledger.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection
from operator import attrgetter
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch

from ..runtime.errors import ArgumentError
from ..runtime.restart import forget_when_replaced
from ..runtime.worker import Worker, current_worker
from .groups import Group

Site = tuple[CodeType | str, int]  # code object or file name, and line
Kind = tuple[torch.dtype, tuple[int, ...] | None]

WAITING, DONE, FAILED = "waiting", "done", "failed"
# what wraps torch's deprecated functions; the last one since Python 3.14
_DEPRECATED = ("typing_extensions", "warnings", "_py_warnings")
_NOT_THE_USERS = (__name__.partition(".")[0] + ".", "torch.", "contextlib", *_DEPRECATED)
_CALL_PACKED = Worker._call_packed.__code__
_OF_SCRIPT = " of the script in call "
P2P = ("send", "recv")


class Signature(NamedTuple):
    """What all members of one collective must agree on; for send and recv: what goes where."""

    op: str
    reduction: str | None = None
    root: int | None = None
    kinds: tuple[Kind, ...] = ()
    device: str | None = None
    any_shape: bool = False  # it is enough that as many elements stand opposite each other

    def agrees(self, other: Signature) -> bool:
        """Whether both can be calls of one collective."""
        if self == other:
            return True
        return (self.any_shape or other.any_shape) and self.counted() == other.counted()

    def counted(self) -> Signature:
        """With the numbers of elements in place of the shapes."""
        kinds = tuple([(dtype, count(shape)) for dtype, shape in self.kinds])
        return self._replace(kinds=kinds, any_shape=True)

    def takes(self, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Whether a message of this kind can be received with it."""
        return self.agrees(self._replace(kinds=((dtype, shape),)))

    def __str__(self) -> str:
        reduction = f"({self.reduction})" if self.reduction else ""
        root = f" with root worker {self.root}" if self.root is not None else ""
        on = f" on {self.device}" if self.device not in (None, "cpu") else ""
        return f"{self.op}{reduction}{self.of}{root}{on}"

    @property
    def of(self) -> str:
        """`` of float32[4, 4]``, "" without a tensor."""
        if not self.kinds:
            return ""
        first = kind(*self.kinds[0])
        if len(self.kinds) == 1:
            return f" of {first}"
        if len(self.kinds) <= 3 or len(set(self.kinds)) > 1:
            names = [kind(*one) for one in self.kinds[:3]]
            more = f" and {len(self.kinds) - 3} more" if len(self.kinds) > 3 else ""
            return f" of {', '.join(names)}{more}"
        return f" of {len(self.kinds)} x {first}"


class Call:
    """What every method of a backend gets.

    Attributes
    ----------
    name
        As the user wrote it: ``"all_reduce"``.
    worker, rank
        The worker that calls.
    group
        The members; `worker` is one of them. For send and recv: all workers.
    signature
        What the members must agree on.
    on_gpu
        Whether its tensors are on a GPU or another accelerator.
    timeout
        Seconds to wait for the others, None for no limit.
    site
        Where the user's code called.
    patient
        Whether the user gave this call a timeout: then it does not wait for ever.
    asynchronous
        Whether the worker may go on before it is over.
    ordinal
        Of the command in which it was made (`Worker.executed`).
    number
        Among the collectives of this group in this command, from 0; -1 until it has joined.
    state
        ``"waiting"``, ``"done"`` or ``"failed"``.
    began, ended
        Seconds on the monotonic clock; ended is 0.0 while it waits.
    due
        When `timeout` is over, on the worker's own clock, which stands while a program is paused.
    watch
        Is given each call that a worker of this process makes, on its thread; None: nobody is.
    """

    watch: ClassVar[Callable[[Call], None] | None] = None

    __slots__ = (
        "asynchronous",
        "began",
        "due",
        "ended",
        "group",
        "name",
        "number",
        "on_gpu",
        "ordinal",
        "patient",
        "rank",
        "signature",
        "site",
        "state",
        "timeout",
        "worker",
    )

    def __init__(
        self,
        name: str,
        worker: Worker,
        group: Group,
        signature: Signature,
        site: Site | None,
        timeout: float | None = None,
        asynchronous: bool = False,
        ordinal: int | None = None,
    ) -> None:
        self.name, self.worker, self.group, self.signature = name, worker, group, signature
        self.site, self.timeout, self.asynchronous = site, timeout, asynchronous
        self.rank, self.on_gpu = worker.worker_id, signature.device not in (None, "cpu")
        self.ordinal = worker.executed if ordinal is None else ordinal
        self.number = -1
        self.patient = False
        self.state, self.began, self.ended = WAITING, time.monotonic(), 0.0
        self.due = math.inf

    @property
    def title(self) -> str:
        """``all_reduce #1 of float32[4] in workers 0-3``."""
        signature = self.signature
        return f"{signature.op} #{self.number + 1}{signature.of} in {self.group}"

    @property
    def direct(self) -> bool:
        """Whether the session itself made it, and not a program that runs on the worker."""
        current = self.worker.current
        return current is not None and self.site is current[-1]

    def close(self, state: str) -> None:
        """Say how it ended; the first word stays."""
        if self.state is WAITING:
            self.ended = time.monotonic()
            self.state = state

    def __str__(self) -> str:
        return f"{self.signature} in {self.group}"


def call_site(worker: Worker) -> Site | None:
    """Where the user's code is: the nearest frame outside of discolab and torch.

    Without one, where the session's call was made.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL_PACKED:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    command = worker.current
    return command[-1] if command is not None else None


def of_script(worker: Worker, tag: str) -> str:
    """A tag as the message queue has it, or a key as the store: a script has its own.

    So it is with torchrun. A message that nobody received would be the next script's first one.
    """
    return tag if worker.program is None else f"{tag}{_OF_SCRIPT}{worker.executed}"


def shown_tag(tag: str) -> str:
    """The tag that was given to `of_script`."""
    return tag.partition(_OF_SCRIPT)[0]


def reception_title(call: Call, sender: int | None, tag: str) -> str:
    """``recv of float32[4] from worker 1 with tag 2``."""
    whom = "any worker" if sender is None else f"worker {sender}"
    shown = shown_tag(tag)
    with_tag = f" with tag {shown}" if shown else ""
    return f"recv of {call.signature.of.removeprefix(' of ')} from {whom}{with_tag}"


def kind(dtype: torch.dtype, shape: Collection[int] | None) -> str:
    """``float32[4, 4]``; without a shape ``float32``."""
    name = str(dtype).removeprefix("torch.")
    return name if shape is None else f"{name}{list(shape)}"


def count(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The shape of as many elements in a row."""
    return None if shape is None else (math.prod(shape),)


kind_of: Callable[[torch.Tensor], Kind] = attrgetter("dtype", "shape")


class CallCounts:
    """Numbers the collectives that one worker calls: from 0 in each group, in each command."""

    __slots__ = ("_counts", "_ordinal")

    def __init__(self) -> None:
        self._ordinal = -1
        self._counts: dict[tuple[tuple[int, ...], str], int] = {}

    def number(self, call: Call) -> int:
        """The number of a call that joins now; the same on all members of its group."""
        if self._ordinal != call.ordinal:
            self._ordinal, self._counts = call.ordinal, {}
        group = call.group.ranks, call.group.tag
        number = self._counts.get(group, 0)
        self._counts[group] = number + 1
        return number


# How long a worker's collectives wait for the others when a call does not say it: maps ranks to
# seconds, in `Worker.shared`; each worker writes its own entry.
_TIMEOUTS = "discolab.ccl.timeout"
forget_when_replaced(_TIMEOUTS)
_NONE: dict[int, float | None] = {}


def set_timeout(seconds: float | None) -> None:
    """Set the calling worker's deadline for collectives and receptions without ``timeout=``.

    Parameters
    ----------
    seconds
        Above 0; None, as at the start, for no limit. What can be seen to be hopeless is told
        at once anyway; a deadline is for members that run and do not come.

    Raises
    ------
    ArgumentError
    """
    worker = current_worker()
    worker.shared.setdefault(_TIMEOUTS, {})[worker.worker_id] = _check_timeout(
        "set_timeout", seconds
    )


def timeout_of(name: str, worker: Worker, given: Any) -> float | None:
    """The deadline of one call: `given`, or the worker's own.

    Raises
    ------
    ArgumentError
        If `given` is neither None nor a number above 0.
    """
    if given is not None:
        return _check_timeout(name, given)
    defaults: dict[int, float | None] = worker.shared.get(_TIMEOUTS, _NONE)
    return defaults.get(worker.worker_id)


def _check_timeout(name: str, value: Any) -> float | None:
    """`value`, if it is None or seconds above 0.

    Raises
    ------
    ArgumentError
    """
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value > 0:
        raise ArgumentError(f"{name}: timeout must be seconds above 0, or None; got {value!r}")
    return float(value)

"""A started operation as torch sees it: its `Work` around one of discolab's. No other state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ...runtime.errors import DiscoError
from ..work import Work

_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_NOT_NEEDED = nullcontext()


def _unseen() -> AbstractContextManager[Any]:
    """Within it modes of the thread do not see what discolab does to the tensors.

    Gloo moves data in C++, where no mode looks; a mode may count operators, or change them.
    """
    if not (_modes() or _function_modes()):
        return _NOT_NEEDED
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    return stack


class DistWork(dist.Work):
    """What a collective of torch.distributed gives with ``async_op=True``.

    Parameters
    ----------
    work
        The operation.
    tensors
        What `result` and the future hold: the outputs.
    """

    def __init__(self, work: Work, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work, self.tensors = work, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is over; True, or raises what went wrong."""
        with _unseen():
            self._work.wait(seconds(timeout))
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`: operations here are ordered by the worker's stream."""
        self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that holds the outputs; it waits when it is asked for them.

        torch's C++ code waits for a future where no interrupt comes through and no deadlock is
        seen. So for it, and where the caller can't be told, the waiting is done here.
        """
        future = WorkFuture(self)
        if "get_future" not in sys._getframe(1).f_code.co_names:
            future.complete()
        return future

    def is_completed(self) -> bool:
        """Whether it is over; never waits."""
        return self._work.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work.done() and self.exception() is None

    def exception(self) -> Any:
        """What went wrong, None if nothing has."""
        if not self._work.done():
            return None
        try:
            self.wait()
        except DiscoError as exc:
            return exc
        return None

    def result(self) -> list[torch.Tensor]:
        """The outputs, after waiting."""
        self.wait()
        return self.tensors


class WorkFuture(torch.futures.Future[list[torch.Tensor]]):
    """The outputs of a `DistWork`; used on its worker's thread, as that is."""

    def __init__(self, work: DistWork) -> None:
        devices = {tensor.device for tensor in work.tensors if not tensor.is_cpu}
        super().__init__(devices=sorted(devices, key=str))
        self._of = work

    def complete(self) -> None:
        """Wait for the work, as `DistWork.wait` does; from then on torch's own future holds all."""
        if not super().done():
            self._of.wait()
            self.set_result(self._of.tensors)

    def done(self) -> bool:
        """Whether the work is over; never waits."""
        return super().done() or self._of.is_completed()

    def wait(self) -> list[torch.Tensor]:
        """The outputs, after waiting."""
        self.complete()
        return super().wait()

    def value(self) -> list[torch.Tensor]:
        """The outputs of what is over."""
        if self.done():
            self.complete()
        return super().value()

    def then(self, callback: Callable[..., Any]) -> Any:
        """Wait, then call back on this worker's thread; its result in another future."""
        self.complete()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Wait, then call back on this worker's thread."""
        self.complete()
        super().add_done_callback(callback)


def completed(future: Any) -> Any:
    """What torch's C++ code is given to wait for."""
    if isinstance(future, WorkFuture):
        future.complete()
    return future


class ReceptionWork(DistWork):
    """A receive: it also knows the sender's rank."""

    def __init__(
        self, work: Work, tensor: torch.Tensor, peer: int | None, ranks: Sequence[int]
    ) -> None:
        super().__init__(work, [tensor])
        self._peer, self._ranks = peer, ranks

    def source_rank(self) -> int:
        """Whose tensor it was: the rank within the group."""
        self.wait()
        return self._ranks.index(getattr(self._work, "sender", self._peer))

    _source_rank = source_rank


def seconds(timeout: timedelta | float | None) -> float | None:
    """A time limit as discolab has it; None for torch's "not set", which is 0 or below."""
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return number if number is not None and number > 0 else None

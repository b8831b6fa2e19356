"""A process group as one worker has it: its ranks and names, and the way to discolab's backend.

torch asks for these by the names of its C++ class. Without backends of torch's own inside, what
torch's class answers from them is answered here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...runtime.errors import ArgumentError, SessionError
from ...runtime.failures import name_ranks
from ...runtime.worker import Worker
from .. import checks
from ..backend import Backend
from ..call import Call, Kind
from ..choose import backend_of
from ..groups import Group
from ..work import Work
from .arguments import listed
from .works import DistWork, seconds

NAME = "discolab"
_LONGEST = timedelta(minutes=30)  # torch's own default, which means: nobody has set one

# C++ code behind it calls any of several names and forms of each method
_ProcessGroup: Any = dist.ProcessGroup


class Member(_ProcessGroup):  # type: ignore[misc] # Any, see above
    """Some workers of a session, for one of them.

    Parameters
    ----------
    worker
        The member that this object is for.
    ranks
        Ranks among all workers, in the order of the ranks within the group.
    tag
        Tells groups of the same workers apart; the same on all members.
    timeout
        torch's limit for each operation; half an hour or more means none, for a group that can't
        complete is found without.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    options = None

    def __init__(
        self, worker: Worker, ranks: Sequence[int], tag: str, timeout: timedelta | None
    ) -> None:
        self._ranks = tuple(ranks)
        self._place = self._ranks.index(worker.worker_id)
        super().__init__(self._place, len(self._ranks))
        self._worker = worker
        self._group = Group(self._ranks, tag)
        # backends list the members by rank; a group of torch's may have another order
        self._sorted = self._group.ranks == self._ranks
        self._order = [self._ranks.index(rank) for rank in self._group.ranks]
        self._timeout = timeout
        self._name = self._desc = ""
        self._together: tuple[int, list[Work]] = (-1, [])  # of which command, what was started
        self.registered = False
        self.begun: Any = None  # keeps an operation while torch's dispatcher has it

    # -- what it is --------------------------------------------------------------------------

    def getRank(self) -> int:  # noqa: N802 - the name that torch calls
        """This worker's rank within the group."""
        return self._place

    def getSize(self) -> int:  # noqa: N802 - the name that torch calls
        """How many members there are."""
        return len(self._ranks)

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch calls
        """``"discolab"``, whatever does the work."""
        return NAME

    rank, size, name = getRank, getSize, getBackendName

    def setGroupName(self, name: str) -> None:  # noqa: N802 - the name that torch calls
        """Take the name under which torch registers it."""
        self._name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - the name that torch calls
        """Take a description."""
        self._desc = desc

    def getGroupName(self) -> str:  # noqa: N802 - the name that torch calls
        """The name under which torch has registered it."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - the name that torch calls
        """What `setGroupDesc` was given."""
        return self._desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors it moves; none before torch has registered it."""
        if not self.registered:
            return []
        mine = self._worker.device.type
        kinds = (mine,) if self._backend.name == "nccl" else ("cpu", mine)
        return [torch.device(kind) for kind in dict.fromkeys(kinds)]

    def _get_backend(self, device: Any) -> Member:
        """Itself: there is one for all devices."""
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """That it has no memory of its own."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit for operations that come with none."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Let go of the connection, if no other group of these workers has it."""
        backend_of(self._worker).forget(self._worker, self._group)

    abort = shutdown

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: discolab counts by itself."""

    def __repr__(self) -> str:
        return f"<process group of {self._group}, rank {self._place} of {len(self._ranks)}>"

    # -- the way to the backend ----------------------------------------------------------------

    @property
    def _backend(self) -> Backend:
        return backend_of(self._worker)

    def _call(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        opts: Any,
        *,
        reduction: str | None = None,
        root: int | None = None,
        op: str = "",
        kinds: tuple[Kind, ...] | None = None,
        asynchronous: bool | None = None,
    ) -> Call:
        limit = seconds(getattr(opts, "timeout", None))
        if limit is None and self._timeout is not None and self._timeout < _LONGEST:
            limit = seconds(self._timeout)
        if asynchronous is None:
            asynchronous = bool(getattr(opts, "asyncOp", True))
        return checks.make_call(
            name, self._worker, self._group, tensors, reduction=reduction, root=root,
            timeout=limit, async_op=asynchronous, op=op, kinds=kinds, any_shape=True,
        )  # fmt: skip

    def _check_thread(self, name: str) -> None:
        """Refuse another worker's thread: the group was kept where workers share it.

        Raises
        ------
        SessionError
        """
        if threading.get_ident() == self._worker.thread_id:
            return
        worker = checks.calling_worker(name)
        raise SessionError(
            f"{name}: this process group is the one of worker {self._worker.worker_id} of "
            f"{name_ranks(range(self._worker.num_workers))}, and worker {worker.worker_id} uses "
            "it. Workers share the global variables of modules: keep a process group in a "
            "variable of the cell or of an object, not in a module or a default argument"
        )

    def _member(self, name: str, place: int) -> int:
        """Which worker has this rank within the group.

        Raises
        ------
        ArgumentError
        """
        if not 0 <= place < len(self._ranks):
            role = {"send": "destination", "recv": "source"}.get(name, "root")
            raise ArgumentError(
                f"{name}: the {role} is rank {place} of the process group of "
                f"{name_ranks(self._ranks)}, whose ranks are 0 to {len(self._ranks) - 1}"
            )
        return self._ranks[place]

    def _begun(self, work: Work, tensors: Any) -> DistWork:
        self._note(work)
        return DistWork(work, listed(tensors))

    def _note(self, work: Work) -> None:
        """Add it to what `_end_coalescing` gives as one, if that was begun in this command."""
        ordinal, works = self._together
        if ordinal == self._worker.executed:
            works.append(work)

    def _by_rank(self, parts: Sequence[Any]) -> Sequence[Any]:
        """One part for each member, in the backend's order instead of the group's."""
        if len(parts) != len(self._ranks):
            raise ArgumentError(
                f"a list of {len(parts)} tensors for a process group of {len(self._ranks)} "
                "workers; give one for each member"
            )
        return parts if self._sorted else [parts[place] for place in self._order]

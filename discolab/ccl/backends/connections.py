"""The process groups of one backend: made when first needed, shared, and closed in time.

A `Connection` has the process groups of some workers, one for each. Groups of the same ranks share
it, whatever their tags: the parts of a step are started on all members in one order, and a
collective is begun when all of its members have come, so neither can wait for the other. A
connection lasts until

- a member leaves the backend, because it ends or changes to another one,
- an interrupt or an error leaves it in an unknown state,
- all groups that have used it are forgotten (`torch.distributed.destroy_process_group`), or
- it is the least recently used of more than `MOST`, or in the way of a new one for want of files;

and, in each case, until the steps that use it are over. Closing one joins threads of the library,
so no worker does it. `lock` guards all but `_left`; it is held while
process groups are made, so only conductors and other threads in the background take it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...runtime.errors import SessionError
from ...runtime.interruptible import TICK
from ...runtime.worker import Worker
from ..groups import Group
from . import background

ProcessGroup = Any  # of the library, one member's

MOST = 32  # connections of one session
SPARE_FILES = 32  # that the program may want to open meanwhile
CLOSING_SECONDS = 1.0  # that other sessions may take to close theirs


class Connection:
    """The process groups of some workers, by their ranks in ascending order.

    `uses` counts the steps that are under way with it. Once it is not `kept`, the last of those
    closes it; one that is `broken` is not closed in good order.
    """

    __slots__ = ("broken", "kept", "members", "ranks", "tags", "uses")

    def __init__(self, ranks: tuple[int, ...], members: list[ProcessGroup]) -> None:
        self.ranks, self.members = ranks, members
        self.tags: set[str] = set()
        self.uses, self.kept, self.broken = 0, True, False


class Connections:
    """What a backend has made.

    Parameters
    ----------
    files
        How many file descriptors the process groups of so many members need.
    close
        Ends process groups that are idle in good order; may wait.
    abort
        Ends what process groups do; never waits.
    """

    def __init__(
        self,
        files: Callable[[int], int],
        close: Callable[[list[ProcessGroup]], None],
        abort: Callable[[list[ProcessGroup]], None],
    ) -> None:
        self.lock = threading.Lock()
        self._files, self._close, self._abort = files, close, abort
        self._kept: dict[tuple[int, ...], Connection] = {}  # the least recently used first
        self._left: set[int] = set()
        self._cut = 0

    def __len__(self) -> int:
        return len(self._kept)

    # -- on workers ----------------------------------------------------------------------------

    def admit(self, worker: Worker) -> None:
        """A worker begins to use the backend."""
        self._left.discard(worker.worker_id)

    def dismiss(self, worker: Worker) -> None:
        """A worker uses the backend no more: close what it is a member of."""
        self._left.add(worker.worker_id)
        self._in_background(worker, self._drop_left)

    def forget(self, worker: Worker, group: Group) -> None:
        """A group will not be used again: close its connection, unless another group has it."""
        self._in_background(worker, self._drop_tag, group)

    def _in_background(self, worker: Worker, do: Callable[..., None], *args: Any) -> None:
        if not self._kept and not self.lock.locked():  # as in most sessions: nothing to do
            return
        try:
            with worker.sheltered():
                background.begin(do, *args)
        except SessionError:
            pass  # the process ends, and they with it

    # -- on conductors -------------------------------------------------------------------------

    @contextmanager
    def lease(
        self, group: Group, cut: int, make: Callable[[], list[ProcessGroup]]
    ) -> Iterator[list[ProcessGroup]]:
        """The process groups of a group's members, for one step; they stay open meanwhile.

        Parameters
        ----------
        cut
            The last interrupt of its workers (`Worker.resumed_at`); older ones are not used.
        make
            Makes them if there are none; called under the lock.

        Raises
        ------
        OSError
            If there are too few file descriptors left for new ones.
        """
        with self.lock:
            if cut > self._cut:
                self._cut = cut
                self._free(self._discard(list(self._kept.values()), broken=True))
            held = self._kept.pop(group.ranks, None)
            if held is None:
                self._make_room(len(group))
                held = Connection(group.ranks, make())
            self._kept[group.ranks] = held  # at the end: the last one used
            held.tags.add(group.tag)
            held.uses += 1
        try:
            yield held.members
        finally:
            with self.lock:
                held.uses -= 1
                if not self._left.isdisjoint(held.ranks):
                    self._discard([held])
                over = held.uses == 0 and not held.kept
            if over:
                self._free([held])

    def drop(self, group: Group, ordinal: int) -> None:
        """A collective of that command has left its group's connection in an unknown state."""
        with self.lock:
            held = self._kept.get(group.ranks)
            if held is None or ordinal < self._cut:  # that one is newer
                return
            unused = self._discard([held], broken=True)
        self._free(unused)

    # -- under the lock ------------------------------------------------------------------------

    def _discard(self, some: Sequence[Connection], broken: bool = False) -> list[Connection]:
        """Keep these no more; those that nobody uses, to be freed now."""
        for held in some:
            if self._kept.get(held.ranks) is held:
                del self._kept[held.ranks]
            if broken and not held.broken:
                held.broken = True
                self._abort(held.members)
            held.kept = False
        return [held for held in some if held.uses == 0]

    def _free(self, some: Iterable[Connection]) -> None:
        """Close what nobody has or can get any more; needs no lock."""
        for held in some:
            if not held.broken:
                self._close(held.members)
            # The last references: each one's end joins its threads. Side by side that takes a
            # tenth of the time.
            pop, count = held.members.pop, len(held.members)
            threads = [threading.Thread(target=pop, daemon=True) for _ in range(count)]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                held.members.clear()  # should no thread be had

    def _make_room(self, count: int) -> None:
        """Close those longest unused, so that one with `count` members can be made."""
        while len(self._kept) >= MOST and self._close_oldest():
            pass
        need = self._files(count) + SPARE_FILES
        patience = time.monotonic() + CLOSING_SECONDS
        while need > SPARE_FILES and (left := _files_left()) is not None and left[0] < need:
            if self._close_oldest():
                continue
            if time.monotonic() > patience:
                raise OSError(
                    f"to connect {count} workers takes {need} file descriptors ({SPARE_FILES} of "
                    f"them to spare), and {max(0, left[0])} are left of this process's {left[1]} "
                    "(ulimit -n): raise that limit, or use init_ccl('local'), which needs none"
                )
            time.sleep(TICK)

    def _close_oldest(self) -> bool:
        idle = next((held for held in self._kept.values() if held.uses == 0), None)
        if idle is None:
            return False
        self._free(self._discard([idle]))
        return True

    # -- in the background ---------------------------------------------------------------------

    def _drop_left(self) -> None:
        self._drop_if(lambda held: not self._left.isdisjoint(held.ranks))

    def _drop_tag(self, group: Group) -> None:
        def last(held: Connection) -> bool:
            if held.ranks == group.ranks:
                held.tags.discard(group.tag)
            return not held.tags

        self._drop_if(last)

    def _drop_if(self, over: Callable[[Connection], bool]) -> None:
        with self.lock:
            unused = self._discard([held for held in self._kept.values() if over(held)])
        self._free(unused)


def _files_left() -> tuple[int, int] | None:
    """How many files this process may still open, and its limit; None where nobody tells."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        return limit - len(os.listdir("/dev/fd")), limit
    except (ImportError, OSError):
        return None

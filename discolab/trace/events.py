"""What was recorded: one `Event` for each command, collective, span and mark of one worker.

Records only. All times are nanoseconds on one clock, the controller's `time.perf_counter_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

COMMAND, COLLECTIVE, SPAN, MARK, CPU, GPU = "command", "collective", "span", "mark", "cpu", "gpu"
RUNNING, WAITING, DONE, FAILED, STOPPED = "running", "waiting", "done", "failed", "stopped"
INTERNAL = "discolab's own"  # the detail of such a command
NOW = -1  # the number of the command that runs: it gets its own when it ends


class Event(NamedTuple):
    """One thing that a worker did.

    Attributes
    ----------
    seq
        Its number on its worker, rising; -1 for the command that runs now.
    kind
        ``command``, ``collective``, ``span``, ``mark``; ``cpu`` or ``gpu`` from torch's profiler.
    name
        ``Cell In[3]``, ``train_step``, ``all_reduce``, or as the user calls it.
    begin, end
        End is 0 while it goes on, and `begin` for a mark.
    state
        ``running``, ``waiting`` (a collective that is not over), ``done``, ``failed``, ``stopped``.
    site
        Where the user's code is: ``Cell In[3], line 4``.
    ordinal
        Of the command to which it belongs: the same number on all workers.
    depth
        How many spans are around a span.
    number
        Of a collective, among those of its group in its command; -1: it has met nobody.
    group
        The members of a collective.
    detail
        Of a collective, what it moves: ``float32[4, 4], sum``; of a span on a thread that the
        worker has started, the name of the thread; of a command that discolab sends for itself, as
        to draw a value, `INTERNAL`.
    size
        Bytes of what this member gives.
    tag
        Groups of one membership and different tags count apart.
    asynchronous
        Whether the worker went on before the collective was over.
    """

    seq: int
    kind: str
    name: str
    begin: int
    end: int
    state: str
    site: str = ""
    ordinal: int = -1
    depth: int = 0
    number: int = -1
    group: tuple[int, ...] = ()
    detail: str = ""
    size: int = 0
    tag: str = ""
    asynchronous: bool = False

    def until(self, now: int) -> int:
        """Its end; `now` while it goes on, but never before its begin."""
        return self.end or max(now, self.begin)

    @property
    def is_call(self) -> bool:
        """Whether it is a command that the user gave: a cell, or a call."""
        return self.kind == COMMAND and self.detail != INTERNAL


def event_of(values: Iterable[Any], shift: int) -> Event:
    """An event as it came from a worker whose clock is `shift` ahead of ours."""
    event = Event._make(values)
    if not shift and not event.group:  # nearly all are so
        return event
    end = event.end - shift if event.end else 0
    return event._replace(begin=event.begin - shift, end=end, group=tuple(event.group))

"""What a process still has when its sessions have ended: threads, descriptors, memory, children."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import threading
import time

GRACE = 10.0  # seconds
_MOST_GROWTH = 64 << 20  # bytes


def threads() -> set[str]:
    """The names of discolab's threads."""
    return {t.name for t in threading.enumerate() if t.name.startswith("discolab-")}


def descriptors() -> dict[int, str]:
    """What each open descriptor is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # the listing's own
    return found


def shared_memory() -> set[str]:
    """Files in /dev/shm that are ours."""
    uid = os.getuid()
    return {e.name for e in os.scandir("/dev/shm") if e.stat(follow_symlinks=False).st_uid == uid}


def children() -> dict[int, str]:
    """The processes below this one, with their states and names."""
    parents: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    comm, _, rest = file.read().rpartition(")")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            parents[int(name)] = int(parent), f"{comm.partition('(')[2]} ({state})"
    found: dict[int, str] = {}
    todo = [os.getpid()]
    while todo:
        above = todo.pop()
        for pid, (parent, what) in parents.items():
            if parent == above:
                found[pid] = what
                todo.append(pid)
    return found


def memory() -> int:
    """The bytes that this process has in memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Before:
    """What there is before the first session that counts, to compare with at the end."""

    def __init__(self) -> None:
        self.threads, self.children = threads(), children()
        self.descriptors, self.shared_memory = descriptors(), shared_memory()
        self.not_ours = 0  # how many more descriptors somebody else has left open since

    def left(self) -> list[str]:
        """What is there now and was not then, after a while in which it may go."""
        deadline = time.monotonic() + GRACE
        while (found := self._left()) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        found = [f"thread {name}" for name in sorted(threads() - self.threads)]
        new = {pid: what for pid, what in children().items() if pid not in self.children}
        found += [f"process {pid}: {what}" for pid, what in new.items()]
        now = descriptors()
        allowed = len(self.descriptors) + self.not_ours
        if len(now) > allowed:
            others = {fd: what for fd, what in now.items() if self.descriptors.get(fd) != what}
            found.append(f"{len(now)} descriptors instead of {allowed}, these are new: {others}")
        # other programs of the same user may have some: ours are gone when they were made by us
        mine = {n for n in shared_memory() - self.shared_memory if "discolab" in n or "torch" in n}
        return found + [f"/dev/shm/{name}" for name in sorted(mine)]


def growth(samples: list[int]) -> int:
    """By how many bytes memory still grows: the last third beside the second; 0: it does not."""
    third = len(samples) // 3
    if third < 3:
        return 0
    middle, last = samples[third : 2 * third], samples[-third:]
    more = int(statistics.median(last) - statistics.median(middle))
    return more if more > _MOST_GROWTH else 0

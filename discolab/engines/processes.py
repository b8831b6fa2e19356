"""Workers as processes of this machine, each with its own GIL and device; worker 0 stays here.

Their line is a pair of sockets that nobody else can connect to (remote/local_lines.py), and a
zygote forks them (remote/zygote.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.errors import DiscoError
from ..transport.local import HAVE_LOCAL, socket_pair
from .placement import check_world, place_workers
from .remote.black_box import BlackBox, new_box
from .remote.local_lines import LocalLines
from .remote.process_facts import how_it_ended, process_state, watch_process
from .remote.session import HEARTBEAT, START_TIMEOUT, Progress, RemoteSession
from .remote.zygote import Zygote, like_here


class ProcessSession(RemoteSession):
    """A session whose workers are processes of this machine, but for worker 0.

    Parameters
    ----------
    num_workers, num_groups, devices, timeout
        As for `ThreadedSession`.
    heartbeat
        Seconds without a sign of life after which a worker is taken for frozen.
    start_timeout
        Seconds that starting may take.
    progress
        Called with a line of text now and then while starting takes long.

    Raises
    ------
    ArgumentError
        If the numbers do not fit or a device is not there.
    DiscoError
        If a worker could not start; none is left running then.

    Examples
    --------
    >>> with ProcessSession(2) as sess:
    ...     ranks = sess.call_packed(sess.get_global_func("runtime.disco.worker_id"))
    ...     ranks.debug_get_from_all()
    [0, 1]
    """

    engine = "processes"

    def __init__(
        self,
        num_workers: int,
        num_groups: int = 1,
        devices: Any = None,
        *,
        timeout: float | None = None,
        heartbeat: float = HEARTBEAT,
        start_timeout: float = START_TIMEOUT,
        progress: Progress | None = None,
    ) -> None:
        num_workers, num_groups = check_world(num_workers, num_groups)
        placed = place_workers(num_workers, devices)
        if not HAVE_LOCAL:
            raise DiscoError(
                "the engine 'processes' needs Linux; here use 'threads', or 'sockets' with a node "
                "on this machine"
            )
        self._lines = LocalLines()
        self._born_of: list[Zygote] = []
        self._pids: dict[int, int] = {}
        self._boxes: dict[int, BlackBox] = {}
        super().__init__(
            num_workers,
            num_groups,
            placed,
            self._lines,
            timeout=timeout,
            heartbeat=heartbeat,
            start_timeout=start_timeout,
            progress=progress,
        )
        self._begin()

    def _start_processes(self) -> None:
        if self.num_workers == 1:
            return
        zygote = self._ready_zygote()
        self._born_of.append(zygote)
        common = {
            "num_workers": self.num_workers,
            "num_groups": self.num_groups,
            "threads": max(1, torch.get_num_threads() // self.num_workers),
            "heartbeat": self.heartbeat,
            **like_here(),
        }
        for rank in range(1, self.num_workers):
            own = {"rank": rank, "local_rank": rank, "device": str(self._devices[rank])}
            self._start_process(zygote, rank, common | own)

    def _start_process(self, zygote: Zygote, rank: int, settings: dict[str, Any]) -> None:
        (cmd, their_cmd), (ctl, their_ctl) = socket_pair(), socket_pair()
        text, their_text = os.pipe()
        self._boxes[rank], box = new_box()
        try:
            theirs = [their_cmd.fileno(), their_ctl.fileno(), box, their_text]
            self._pids[rank] = pid = zygote.fork(settings, theirs, self._start_timeout)
            self._lines.add(rank, cmd, ctl, text, watch_process(pid))
        finally:
            their_cmd.close()
            their_ctl.close()
            os.close(box)
            os.close(their_text)
            if rank not in self._lines:  # a Ctrl-C may come right after it took them over
                cmd.close()
                ctl.close()
                os.close(text)

    def _end_process(self, rank: int) -> None:
        for zygote in self._born_of:
            if rank in self._pids and zygote.usable:
                zygote.kill(self._pids[rank])

    def _ender(self) -> Callable[[], None]:
        pids, born_of = self._pids, self._born_of

        def end() -> None:
            for zygote in born_of:
                for pid in pids.values():
                    with contextlib.suppress(DiscoError):  # it ends too, and they with it
                        if zygote.usable:
                            zygote.kill(pid)

        return end

    def _why_ended(self, rank: int) -> str:
        pid = self._pids.get(rank)
        self._exchange.channels[rank].knows_done(self._boxes[rank].done())
        self._exchange.put_out(rank, self._boxes[rank].read())
        code = None
        try:
            for zygote in self._born_of:
                code = zygote.status(pid) if pid is not None else None
        except DiscoError:  # it has ended too
            pass
        return f"(pid {pid}) {how_it_ended(code)}"

    def _frozen(self, rank: int, seconds: float) -> str:
        pid = self._pids.get(rank)
        state = process_state(pid)
        if state == "R":
            return ""  # it computes, in a call that holds Python's lock
        why = {"T": "it is stopped (SIGSTOP)", "t": "a debugger holds it"}.get(state, "")
        silent = f"(pid {pid}) has given no sign of life for {seconds:.0f} s"
        return f"{silent}: {why}" if why else silent

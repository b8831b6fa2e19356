"""Tells a client what happens: stops, going on, breakpoints of others, output, the session's end.

What the debugger's listeners hear is only that something has changed; this thread then looks how
things are and tells what is new. A program that stops and goes on faster than it looks is told of
as it is then.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..debugger.lockstep import PAUSED, RUNNING
from ..debugger.stops import Stop, WorkerAt
from ..runtime.services import probe
from ..runtime.worker import Worker
from .peer import Peer

_TICK = 0.25  # seconds until it is looked whether the session is there
_TO_PAUSE = 2.0  # seconds after a pause until it is said who does not stop, and why
_MOST = 10_000  # pieces of output that wait for a slow client

_REASONS = {
    "raised": "exception",
    "assert": "exception",
    "non-finite": "exception",
    "break": "breakpoint",
    "breakpoint()": "breakpoint",
    "entry": "entry",
    "step": "step",
    "pause": "pause",
}
"""Why a worker stands -> the protocol's word; the strongest first."""


class Teller:
    """See the module; `changed` and `output` are for any thread, the rest is its own."""

    def __init__(self, client: Peer) -> None:
        self._client = client
        self._debugger = client.debugger
        self._changed = threading.Event()
        self._leaving = False
        self._thread: threading.Thread | None = None
        self._output: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
        self._pieces: dict[tuple[int, str], str] = {}  # lines that have not ended
        self._stop: Any = None  # the program, its stop and who stands, as the client was told
        self._edits = self._debugger.edits
        before = self._debugger.stop
        self._ended: Any = self._debugger.lockstep if before and before.finished else None

    def start(self) -> None:
        """Begin; the client is told of a stop at which the workers stand already."""
        if self._thread is None and not self._leaving:
            self._thread = threading.Thread(target=self._run, name="discolab-dap-events")
            self._thread.daemon = True
            self._debugger.listeners.append(self.changed)
            self._changed.set()
            self._thread.start()

    def stop(self) -> None:
        """End, soon."""
        self._leaving = True
        if self._thread is not None:
            self._debugger.listeners.remove(self.changed)
            self._thread = None
        self._changed.set()

    def changed(self) -> None:
        """Something has happened; on any thread, also under the debugger's lock."""
        self._changed.set()

    def put_out(self, rank: int, category: str, text: str) -> None:
        """A worker has printed something."""
        if self._output.qsize() < _MOST:
            self._output.put((rank, category, text))
            self._changed.set()

    # -- on its own thread -----------------------------------------------------------------------

    def _run(self) -> None:
        client, debugger = self._client, self._debugger
        try:
            while not self._leaving:
                self._changed.wait(_TICK)
                self._changed.clear()
                if debugger.session.closed:
                    self._tell_output()
                    client.end("the session was shut down")
                    return
                self._tell_breakpoints()
                self._tell_output()
                self._tell_program()
                if debugger.edits != self._edits:
                    self._edits = debugger.edits
                    self._invalidate("variables")
        except OSError:  # it is gone; who reads from it sees that, too
            client.close()
        except Exception as exc:  # or the client would wait for events that never come
            client.end(f"the debugger can't be watched any more: {type(exc).__name__}: {exc}")

    def _tell_breakpoints(self) -> None:
        for reason, one in self._client.breakpoints.changes():
            self._client.tell("breakpoint", reason=reason, breakpoint=one)

    def _tell_output(self) -> None:
        """Whole lines: a `print` comes in pieces."""
        while not self._output.empty():
            rank, category, text = self._output.get()
            self._pieces[rank, category] = self._pieces.get((rank, category), "") + text
        for (rank, category), text in self._pieces.items():
            *lines, self._pieces[rank, category] = text.split("\n")
            if lines:
                told = "".join(f"worker {rank}: {line}\n" for line in lines)
                self._client.tell("output", category=category, output=told)

    def _tell_program(self) -> None:
        stop, program = self._debugger.stop, self._debugger.lockstep
        if stop is None:
            return
        standing = [worker.rank for worker in stop.workers if worker.state == PAUSED]
        running = [worker for worker in stop.workers if worker.state == RUNNING]
        settled = not running
        self._tell_who_does_not_pause([worker.rank for worker in running if not worker.stack])
        if standing and settled:
            key = program, stop.number, tuple(standing)
            if key != self._stop:
                first = self._stop is None or key[:2] != self._stop[:2]
                self._stop = key
                self._client.values.clear()
                self._client.tell("stopped", **self._stopped(stop), preserveFocusHint=not first)
            return
        if self._stop is not None:
            self._tell_going_on(standing)
        if stop.finished and self._ended is not program:
            self._ended = program
            for worker in stop.workers:
                if worker.error:
                    self._client.say(f"worker {worker.rank}: {worker.error}", "important")
            self._client.say(f"{stop.name} has ended")

    def _tell_who_does_not_pause(self, running: list[int]) -> None:
        """Say what keeps workers from a line, once, if they don't stop soon after a pause."""
        asked = self._client.paused
        if asked is None or (running and time.monotonic() < asked + _TO_PAUSE):
            return
        self._client.paused = None
        if not running:
            return
        doing = self._debugger.session.look(worked_out, ranks=running)
        for rank in running:
            why = doing.get(rank) or "it is in a call that is no Python of yours, or in a library"
            self._client.say(f"worker {rank} can't pause before it comes to a line: {why}")

    def _tell_going_on(self, standing: list[int]) -> None:
        _, _, before = self._stop
        self._stop = None
        self._client.values.clear()
        movers = [rank for rank in before if rank not in standing]
        for rank in movers if standing else movers[:1]:
            self._client.tell("continued", threadId=rank + 1, allThreadsContinued=not standing)

    def _stopped(self, stop: Stop) -> dict[str, Any]:
        lockstep = self._debugger.lockstep
        new = lockstep.stopped if lockstep is not None else ()
        worker = _most_to_say(stop, new, self._client.stepped)
        here = worker.stack[-1]
        hit = [
            one.number
            for one in self._debugger.all_breaks()
            if worker.reason == "break" and one.line == here.line and one.is_in(here.file)
        ]
        # where one place is, the client shows it
        reason = stop.reason.rpartition(" at ")[0] if len(stop.groups) == 1 else stop.reason
        text = "; ".join(filter(None, [worker.note, worker.error]))
        return {
            "reason": _REASONS.get(worker.reason, "pause") if worker.rank in new else "pause",
            "description": reason or stop.reason,
            "threadId": worker.rank + 1,
            "allThreadsStopped": True,
            **({"text": text} if text else {}),
            **({"hitBreakpointIds": hit} if hit else {}),
        }

    def _invalidate(self, *areas: str) -> None:
        if self._client.features.get("supportsInvalidatedEvent") is True:
            self._client.tell("invalidated", areas=list(areas))


@probe
def worked_out(worker: Worker) -> str:
    """What of the debugger's a worker works out, such as a condition; "" if nothing."""
    return worker.alone


def _most_to_say(stop: Stop, new: Sequence[int], stepped: int) -> WorkerAt:
    """The worker whose stop is the strongest news; else the one that was stepped, or is behind."""
    ranks = [rank for group in stop.groups for rank in group]
    strength = list(_REASONS).index

    def key(rank: int) -> tuple[bool, int, bool]:
        reason = stop.workers[rank].reason
        news = strength(reason) if reason in _REASONS else len(_REASONS)
        return rank not in new, news, rank != stepped

    return stop.workers[min(ranks, key=key)]

"""The nodes of one session, as the session sees them: who joins, what became of their workers.

The reader thread calls `hear`; `_lock` guards the roster and what is known of workers, which the
thread that starts the session reads. It knows no session, so that one that was dropped can be
collected.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from ...runtime.errors import DiscoError
from ..remote.exchange import Exchange
from ..remote.lines import Event
from ..remote.process_facts import how_it_ended
from ..remote.zmq_lines import ZmqLines
from .brood import Brood
from .machines import machine
from .roster import Party, Roster

_QUIET = 2.5  # seconds of silence of a node that says each second that it lives


class Gathering:
    """See the module.

    Parameters
    ----------
    first
        The first rank that is a node's; those before it are of this machine.
    wanted
        How many workers the nodes bring, all together.
    each
        How many a node brings that was not told a number.

    Attributes
    ----------
    brood
        The worker processes of this machine, by rank.
    """

    def __init__(
        self, lines: ZmqLines, exchange: Exchange, first: int, wanted: int, each: int
    ) -> None:
        self.lines, self.exchange = lines, exchange
        self.first = first
        self.brood = Brood()
        self._lock = threading.Lock()
        self._roster = Roster(wanted, first, each)
        self._told = 0  # how many refusals were told
        self._codes: dict[int, int] = {}  # how workers of nodes have ended
        self._said: dict[int, str] = {}  # what they have printed and not sent
        self._states: dict[int, str] = {}  # what their processes do: R, S, T
        self._heard: dict[bytes, float] = {}  # when each node was heard last
        self._left: dict[bytes, str] = {}  # nodes that have gone, and why
        lines.settled = self._is_settled
        lines.on_close = self.brood.forget
        exchange.on_join = self.hear

    # -- on the reader thread --------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """A node says something, or has gone."""
        node, message = event.data
        if message is None:
            self._lose(node, "has ended, or the connection to it was cut")
            return
        self._heard[node] = time.monotonic()
        if "hello" in message and isinstance(message["hello"], dict):
            if self.exchange.closing:
                return  # who comes now is for the next session at this address
            with self._lock:
                why = self._roster.join(node, message["hello"])
            self.lines.tell_node(node, {"refused": why} if why else {"taken": True})
            if why and self._roster.complete:
                self.tell_refusals()
        elif "beat" in message:
            self._states.update(_by_rank(message["beat"]))
        elif "ended" in message:
            self._said.update(_by_rank(message["said"]))
            for rank, code in _by_rank(message["ended"]).items():
                self._codes[rank] = code
                self.lines.end(rank)
        elif "leaving" in message:
            self._lose(node, str(message["leaving"]))

    def _lose(self, node: bytes, why: str) -> None:
        with self._lock:
            party = self._roster.leave(node)
        if party is not None:
            self._left.setdefault(node, why)
            for rank in party.ranks:
                self.lines.end(rank)

    def child_ended(self, fd: int) -> None:
        """A process of this machine has ended; `fd` says so."""
        self.lines.unwatch(fd)
        for rank in self.brood.look():
            if rank > 0:  # the others are nodes, of which their connection tells
                self.lines.end(rank)

    def _is_settled(self, rank: int) -> bool:
        """Whether it is known what became of a worker; `ZmqLines` asks when its line is broken."""
        if self.exchange.closing or rank in self._codes:
            return True
        if rank < self.first:
            self.brood.look()
            return rank in self.brood.codes
        party = self._roster.party_of(rank)
        return party is None or party.node in self._left

    # -- on any thread ---------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether all nodes are there."""
        return self._roster.complete

    def missing(self) -> tuple[int, str]:
        """How many workers are still to come, and who has joined."""
        with self._lock:
            return self._roster.missing(), self._roster.here()

    def refused(self) -> list[str]:
        """Who was refused, and why."""
        with self._lock:
            return list(self._roster.refused)

    def tell_refusals(self) -> None:
        """Say who was refused since it was said last, on this process's standard error."""
        with self._lock:
            told, self._told = self._told, len(self._roster.refused)
            news = self._roster.refused[told:]
        for refusal in news:
            sys.stderr.write(f"a node was refused: {refusal}\n")

    def parties(self) -> list[Party]:
        """All of them, in the order of their ranks."""
        with self._lock:
            return sorted(self._roster.parties.values(), key=lambda party: party.first)

    def welcome(
        self, common: dict[str, Any], devices: Sequence[str], threads: dict[str, int]
    ) -> None:
        """Have the nodes start their workers.

        Parameters
        ----------
        common
            Settings of all workers (remote/child.py).
        devices
            By rank.
        threads
            How many threads torch gets in each worker of a machine.
        """
        before: dict[str, int] = {machine(): self.first}
        for party in self.parties():
            there = before.get(party.machine, 0)
            before[party.machine] = there + party.workers
            each = {
                "threads": threads[party.machine],
                "host": party.address,
            }
            workers = [
                {"rank": rank, "local_rank": there + i, "device": devices[rank], **each}
                for i, rank in enumerate(party.ranks)
            ]
            self.lines.tell_node(party.node, {"welcome": {"common": common, "workers": workers}})

    def end(self) -> None:
        """End all that is left of workers and nodes; may be called again."""
        for party in self.parties():
            if party.node not in self._left:
                self.lines.tell_node(party.node, {"end": True})
        try:
            self.brood.end()
        except DiscoError as exc:
            sys.stderr.write(f"{exc}\n")

    # -- facts for people ------------------------------------------------------------------------

    def why_ended(self, rank: int) -> str:
        """What became of a worker whose line has ended; what it has not sent is shown first."""
        self.exchange.put_out(rank, self._said.get(rank) or self.brood.last_words(rank))
        party = self._roster.party_of(rank)
        pid = self.exchange.joined.get(rank)
        process = f"pid {pid}" if pid else "before it was ready"
        if party is None:
            return f"({process}) {self.brood.in_words(rank)}"
        if rank in self._codes:
            return f"({process} on {party.name}) {how_it_ended(self._codes[rank])}"
        if party.node in self._left:
            return f"({process}) is lost: its {party} {self._left[party.node]}"
        return f"({process} on {party.name}) is lost: its connection was cut"

    def frozen(self, rank: int, seconds: float) -> str:
        """Why a worker may have been silent so long; "" if that is no reason to worry."""
        party = self._roster.party_of(rank)
        pid = self.exchange.joined.get(rank)
        silent = f"has given no sign of life for {seconds:.0f} s"
        if time.monotonic() - self.lines.heard.get(rank, 0.0) < seconds / 2:
            return ""  # a long message is on its way
        if party is None:
            state, where = self.brood.states().get(rank, ""), f"(pid {pid})"
        else:
            state, where = self._states.get(rank, ""), f"(pid {pid} on {party.name})"
            quiet = time.monotonic() - self._heard.get(party.node, 0.0)
            if quiet > max(_QUIET, 0.8 * seconds):
                return (
                    f"{where} {silent}, nor has its {party}: that machine or the way to it is "
                    "down, or the node is stopped"
                )
        if state == "R":
            return ""  # it computes, in a call that holds Python's lock
        why = {"T": "it is stopped (SIGSTOP)", "t": "a debugger holds it"}.get(state, "")
        return f"{where} {silent}: {why}" if why else f"{where} {silent}"


def _by_rank(found: Any) -> dict[int, Any]:
    """JSON has no numbers for keys."""
    return {int(rank): value for rank, value in dict(found).items()}

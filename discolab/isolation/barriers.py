"""Barriers: what all workers of a session do at the same place of their program, or not at all."""

from __future__ import annotations

from ..runtime.worker import Worker


class Barrier:
    """What a worker waits for while the others have yet to do the same; ``str()`` says it."""

    def settled(self) -> bool:
        """Whether they have done it, and the worker has only to wake up."""
        raise NotImplementedError


def obstacle(worker: Worker, peer: Worker) -> str:
    """Why another worker can't come to do what this one waits for; "" while it may."""
    name, wait = f"worker {peer.worker_id}", peer.waiting_for
    if peer.executed > worker.executed:
        return f"{name} has ended this command without that"
    if hasattr(wait, "missing") and not wait.settled():
        for rank in wait.missing():
            other = peer.peers.get(rank)
            its = None if other is None else other.waiting_for
            if isinstance(its, Barrier) and not its.settled():
                return f"{name} waits for worker {rank} in {wait}"
    return ""

"""What all workers of a session do at the same place of their program: waits for the others."""

from __future__ import annotations

from ..runtime.worker import Worker


class Together:
    """What a worker waits for while the others have yet to do the same; ``str()`` says it."""


def obstacle(worker: Worker, peer: Worker) -> str:
    """Why another worker can't come to do what this one waits for; "" while it may."""
    name, wait = f"worker {peer.worker_id}", peer.waiting_for
    if peer.executed > worker.executed:
        return f"{name} has ended this command without that"
    if hasattr(wait, "missing") and not wait.settled():
        for rank in wait.missing():
            other = peer.peers.get(rank)
            if other is not None and isinstance(other.waiting_for, Together):
                return f"{name} waits for worker {rank} in {wait}"
    return ""

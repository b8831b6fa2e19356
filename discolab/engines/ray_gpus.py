"""Which GPUs the workers of a `RaySession` see, and which of them is whose; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def gpu_places(
    facts: Sequence[dict[str, Any]], here: str, seen_there: Sequence[str]
) -> list[tuple[str, str]]:
    """For each actor: which GPUs it sees (as CUDA_VISIBLE_DEVICES), and the device it computes on.

    Actors of one machine see all GPUs of theirs there, so that each has a device of its own name
    and they reach each other's; on the session's machine they see what its process sees.

    Parameters
    ----------
    facts
        Of each actor ``machine`` and ``gpus``, the numbers that Ray gives.
    here, seen_there
        The session's machine, and the GPUs that its process sees (`seen_here`).
    """
    found = []
    for fact in facts:
        there = [other for other in facts if other["machine"] == fact["machine"]]
        seen = sorted({gpu for other in there for gpu in other["gpus"]}, key=_number)
        if fact["machine"] == here:
            seen = list(seen_there) if set(seen) <= set(seen_there) else seen
        found.append((",".join(seen), f"cuda:{seen.index(fact['gpus'][0])}"))
    return found


def seen_here(visible: str | None, count: int) -> list[str]:
    """The GPUs that a process sees, as Ray names them, in the order of torch's indexes.

    Parameters
    ----------
    visible, count
        Its CUDA_VISIBLE_DEVICES, and how many torch sees.
    """
    if visible is None:
        return [str(number) for number in range(count)]
    return [name.strip() for name in visible.split(",") if name.strip()]


def _number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (1 << 30, name)

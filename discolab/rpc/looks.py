"""What is under way on a rank, asked from the controller."""

from __future__ import annotations

from .calls import PLAIN
from .here import place_here, rank_on
from .node import Node


def debug_info(node: Node, rank: int) -> dict[str, int]:
    """Counts of `rank`: calls, threads, values, references. The call that asks is not counted."""
    node.check_open()
    if node.is_here(rank):
        return node.debug_info(rank)
    call = node.start(PLAIN, rank_on(node), rank, _counts)
    found: dict[str, int] = call.wait_and_take()
    return found


def _counts() -> dict[str, int]:
    node, rank = place_here()
    found = node.debug_info(rank)
    found["calls_running"] -= 1
    return found

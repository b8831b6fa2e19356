"""What collectives.py measures: the operations, and the bytes that none can avoid. No state.

With n members and S bytes in the largest tensor of each:

============== ============================= =================== ==========
operation      tensors of a member           reads, writes       memory
============== ============================= =================== ==========
all_reduce     one of S, in place            n S read, n S write n S
all_gather     source of S/n, result of S    S read, n S written (n + 1) S
reduce_scatter source of S, result of S/n    n S read, S written (n + 1) S
broadcast      one of S, in place            S read, (n - 1) S   n S
============== ============================= =================== ==========

A copy of B bytes reads B and writes B, so a rate in bytes read and written is comparable.
"""

from __future__ import annotations

MEMBERS = 4
FLOAT = 4  # bytes of a float32
ROW = 64  # numbers in a row of the test pattern
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SMALLEST = FLOAT * ROW * MEMBERS  # a size is a multiple of this


def touched_bytes(op: str, size: int, members: int = MEMBERS) -> tuple[int, int]:
    """Bytes read and written at least, and bytes of memory that they are in."""
    n = members
    return {
        "all_reduce": (2 * n * size, n * size),
        "all_gather": ((n + 1) * size, (n + 1) * size),
        "reduce_scatter": ((n + 1) * size, (n + 1) * size),
        "broadcast": (n * size, n * size),
    }[op]

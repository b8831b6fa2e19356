"""Names the parameters or items that differ, where there are more than a record names.

Runs on the controller, in two rounds: digests of blocks, then the names in blocks that differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ...runtime.errors import DiscoError
from ...runtime.registers import OWN
from ..facts.guard import FAILURES
from ..facts.rest import FIRST, block_size, rest_blocks, rest_rows
from .answers import answers_of
from .compare import content_key, row_verdict

_MOST_ROWS = 500


def add_far_rows(
    session: Any, ref: Any, records: Mapping[int, dict[str, Any]], deadline: float
) -> None:
    """Add to each record's ``brief`` what differs after it; as they were if that is not known.

    Only where all records are of the same number of tensors and all digests are known, but differ.
    """
    kinds = {(record.get("kind"), record.get("more")) for record in records.values()}
    keys = {rank: content_key(record) for rank, record in records.items()}
    if len(kinds) != 1 or None in keys.values() or len(set(keys.values())) < 2:
        return
    first = next(iter(records.values()))
    count = int(first.get("more") or 0) - len(first.get("brief") or [])
    told = len(first.get("params") or first.get("items") or []) + len(first.get("brief") or [])
    if count <= 0 or told != FIRST:
        return
    try:
        blocks = _ask(session, deadline, records, (rest_blocks, ref, count))
        if blocks is None or len({len(found) for found in blocks.values()}) != 1:
            return
        odd: list[int] = []
        distinct: list[int] = []
        for place in range(len(next(iter(blocks.values())))):
            held = {rank: found[place] for rank, found in blocks.items()}
            if len(set(held.values())) > 1:
                unlike = row_verdict(held, session.num_groups).role == "warning"
                (odd if unlike else distinct).append(place)
        wanted = sorted((odd + distinct)[: max(_MOST_ROWS // block_size(count), 1)])
        rows = _ask(session, deadline, records, (rest_rows, ref, count, wanted)) if wanted else None
        if rows is None or len({tuple(row[0] for row in found) for found in rows.values()}) != 1:
            return
        for rank, found in rows.items():
            records[rank]["brief"] = [*records[rank]["brief"], *found]
    except (DiscoError, *FAILURES):
        return


def _ask(
    session: Any, deadline: float, records: Mapping[int, Any], call: tuple[Any, ...]
) -> dict[int, Any] | None:
    """What the workers of the records answer; None if one does not."""
    left = deadline - time.monotonic()
    if left <= 0:
        return None
    ref = session.call_packed(*call)
    ref.name = OWN
    answers = answers_of(ref, left)
    found = {rank: answers.get(rank) for rank in records}
    return found if all(isinstance(answer, list) for answer in found.values()) else None

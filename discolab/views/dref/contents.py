"""Compares the records of all workers: who holds the same content, who is the odd one out.

Pure. Classes are letters in rank order: the first worker's content is A. Only content that the
records can vouch for is compared: a digest, or a repr that is not cut. A verdict is a `Text`; one
that says a worker is odd is a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...layouts.join import ShardMap
from ..formats import format_ranks, format_workers
from ..parts import Text

#: Kinds of record that stand for a worker without a value, and what is said of it.
NO_VALUE = {
    "failure": "failed",
    "lost": "lost",
    "dead": "died",
    "pending": "still busy",
    "missing": "gave no answer",
}

_MOST_LETTERS = 16
_PASSING = {
    "device",
    "stats",
    "digest",
    "head",
    "error",
    "brief",
    "thumbnail",
    "histogram",
    "places",
    "training",
    "settings",
}


def content_key(record: Mapping[str, Any]) -> object:
    """Give something that is equal exactly if the contents are; None if that is not known."""
    kind = record.get("kind")
    if kind == "none":
        return ("none",)
    if kind == "tensor":
        digest = record.get("digest")
        return digest and (digest, record.get("dtype"), str(record.get("shape")))
    if kind == "module":
        digest = record.get("digest")
        return digest and (record.get("type"), digest)
    if kind in ("list", "tuple", "dict", "dataclass"):
        items = record.get("items")
        if not isinstance(items, list) or record.get("more"):
            digest = record.get("digest")
            return digest and (kind, record.get("type"), digest)
        children = [(item["key"], content_key(item["value"])) for item in items]
        return None if any(key is None for _, key in children) else (kind, tuple(children))
    if kind == "object" and "repr" in record:
        whole = not record.get("cut") or record.get("digest")
        return (whole and (record.get("type"), record["repr"], record.get("digest"))) or None
    return None


def structure_key(record: object) -> object:
    """Give something that is equal if the records say the same, device and values aside."""
    if isinstance(record, Mapping):
        return tuple(
            (key, structure_key(item)) for key, item in record.items() if key not in _PASSING
        )
    if isinstance(record, list | tuple):
        return tuple(map(structure_key, record))
    return repr(record)


def content_classes(records: Mapping[int, Mapping[str, Any]]) -> dict[int, str] | None:
    """Give each rank a class letter; None if some content is not known."""
    letters: dict[object, str] = {}
    classes: dict[int, str] = {}
    for rank in sorted(records):
        key = content_key(records[rank])
        if key is None:
            return None
        classes[rank] = letters.setdefault(key, _letter(len(letters)))
    return classes


def _letter(number: int) -> str:
    """Count A, B, … Z, AA, AB, …"""
    word = ""
    while number >= 0:
        number, place = divmod(number, 26)
        word, number = chr(ord("A") + place) + word, number - 1
    return word


def odd_ranks(classes: Mapping[int, str], ranks: Iterable[int]) -> list[int]:
    """List the ranks outside the largest class; of equally large ones the first stands."""
    known = [rank for rank in ranks if rank in classes]
    if not known:
        return []
    usual = Counter(classes[rank] for rank in known).most_common(1)[0][0]
    return [rank for rank in known if classes[rank] != usual]


def _sequence(classes: Mapping[int, str], num_workers: int, odd: Sequence[int]) -> str:
    letters = [classes.get(rank, "-") for rank in range(num_workers)]
    if num_workers > _MOST_LETTERS:
        return f"{len(set(classes.values()))} classes ({format_workers(odd)})"
    return f"{' '.join(letters)} ({format_workers(odd)})"


def plan_verdict(classes: Mapping[int, str], num_workers: int, plans: Sequence[ShardMap]) -> Text:
    """Say whether what must be equal by the placements is equal."""
    sets = [ranks for plan in plans for ranks in plan.replicas]
    odd = sorted(rank for ranks in sets for rank in odd_ranks(classes, ranks))
    if odd:
        return Text(f"replicas differ: {_sequence(classes, num_workers, odd)}", "warning")
    if any(plan.sharded for plan in plans):
        kinds = len(set(classes.values()))
        if all(len({classes[rank] for rank in plan.keys}) == len(plan.replicas) for plan in plans):
            return Text("shards distinct", "muted")
        if kinds == 1:
            return Text("all shards equal", "muted")
        return Text("some shards equal", "muted")
    if any(plan.partial for plan in plans):
        return Text("partial values, not yet reduced", "muted")
    if len(set(classes.values())) > 1:
        return Text(f"equal within each of {len(plans)} groups", "muted")
    return _equal(classes, num_workers)


def _equal(classes: Mapping[int, str], num_workers: int) -> Text:
    if len(classes) == num_workers:
        return Text("equal on all workers", "muted")
    return Text(f"equal on {format_workers(sorted(classes))}", "muted")


def free_verdict(classes: Mapping[int, str], num_workers: int, num_groups: int) -> Text:
    """Say how contents compare when no placements are known.

    Parameters
    ----------
    classes : mapping of rank to letter
    num_workers, num_groups : int
    """
    kinds = len(set(classes.values()))
    if kinds == 1:
        return _equal(classes, num_workers)
    if kinds == len(classes):
        return Text("all distinct", "muted")
    if num_groups > 1 and len(classes) == num_workers:
        groups = group_ranks(num_workers, num_groups)
        if not any(odd_ranks(classes, ranks) for ranks in groups):
            return Text(f"equal within each of {num_groups} groups", "muted")
    odd = odd_ranks(classes, sorted(classes))
    return Text(f"differ: {_sequence(classes, num_workers, odd)}", "warning")


def group_ranks(num_workers: int, num_groups: int) -> list[range]:
    """Cut the ranks in equal groups of neighbours."""
    size = max(num_workers // max(num_groups, 1), 1)
    return [range(start, start + size) for start in range(0, num_workers, size)]


def grouped(words: Mapping[int, str]) -> list[tuple[str, str]]:
    """Join ranks that say the same: (words, rank set), in order of first rank."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(words):
        groups.setdefault(words[rank], []).append(rank)
    return [(text, format_ranks(ranks)) for text, ranks in groups.items()]


def row_verdict(
    keys: Mapping[int, object],
    num_groups: int = 1,
    replicas: Sequence[Sequence[int]] | None = None,
) -> Text:
    """Say in a cell how the workers compare in one parameter or item.

    Parameters
    ----------
    keys : mapping of rank to object
        Equal if the contents are; None where that is not known.
    num_groups : int
    replicas : sequence of ranks, optional
        Which workers must agree. Without them, two or more that agree make the rest odd.
    """
    if len(keys) < 2 or any(key is None for key in keys.values()):
        return Text("")
    letters: dict[object, str] = {}
    classes = {rank: letters.setdefault(keys[rank], _letter(len(letters))) for rank in sorted(keys)}
    if len(letters) == 1:
        return Text("equal", "muted")
    if replicas is not None:
        odd = sorted(rank for ranks in replicas for rank in odd_ranks(classes, ranks))
    elif len(letters) < len(classes):
        odd = odd_ranks(classes, sorted(classes))
        groups = group_ranks(len(classes), num_groups)
        if num_groups > 1 and not any(odd_ranks(classes, ranks) for ranks in groups):
            return Text("equal in each group", "muted")
    else:
        odd = []
    if odd:
        return Text(f"≠ {_sequence(classes, max(classes) + 1, odd)}", "warning")
    return Text("distinct", "muted")

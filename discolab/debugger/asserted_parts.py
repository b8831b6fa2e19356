"""In which part of a container or a module the members of a failed `disco_assert` differ. Pure.

A part is a tensor, a number or the like, by the path to it, as ``['w']`` or ``0.weight``. A member
sends a text that has for each a digest and some words; from those of all follows what is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..runtime.failures import name_ranks
from ..views.dref.contents import content_key
from ..views.facts.describe import describe, text_digest
from ..views.formats import cut
from ..views.summary import summarize

_MOST = 2_000
_PATH, _WORDS = 80, 40  # characters


class Piece(NamedTuple):
    """A part: a digest of its content, and what it is in words."""

    key: str
    words: str


def parts_text(value: Any) -> str:
    """The parts of a value, for `where_differ`; short, as the tensors themselves are not in it."""
    found: dict[str, Piece] = {}
    for path, piece in _parts(describe(value, True), ""):
        found.setdefault(cut(path, _PATH), piece)
        if len(found) == _MOST:
            break
    return json.dumps(found)


def _parts(record: Mapping[str, Any], path: str) -> Iterator[tuple[str, Piece]]:
    kind, rows = record.get("kind"), record.get("params")
    brief = [(name, Piece(str(key), words)) for name, words, key in record.get("brief", ())]
    if isinstance(rows, list):
        for row in rows:
            shape = ", ".join(map(str, row["shape"]))
            yield row["name"], Piece(str(row.get("digest")), f"{row['dtype']}[{shape}]")
        yield from brief
    elif kind in ("list", "tuple", "dict", "dataclass") and isinstance(record.get("items"), list):
        for item in record["items"]:
            yield from _parts(item["value"], _at(path, kind, item["key"]))
        yield from ((_at(path, kind, name), piece) for name, piece in brief)
    if path and not brief and "items" not in record:
        yield path, Piece(text_digest(repr(content_key(record))), summarize(record, _WORDS))


def _at(path: str, kind: object, key: str) -> str:
    return f"{path}.{key}" if kind == "dataclass" else f"{path}[{key}]"


def where_differ(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """The first part that is not the same, and how many more; "" if none is known.

    Parameters
    ----------
    texts
        Of each member, from `parts_text`.
    ranks
        The members.
    """
    held = [{path: Piece(*piece) for path, piece in json.loads(text).items()} for text in texts]
    paths = dict.fromkeys(path for parts in held for path in parts)
    odd = [path for path in paths if len({parts[path].key if path in parts else None
                                          for parts in held}) > 1]  # fmt: skip
    if not odd:
        return "the order of the items differs" if len({*map(tuple, held)}) > 1 else ""
    first = odd[0]
    words = _folded(ranks, lambda n: held[n][first].words if first in held[n] else "")
    without = words.pop("", None)
    if without:
        text = f"{name_ranks(without)} {'has' if len(without) == 1 else 'have'} no {first}"
    elif len(words) > 1:
        text = f"they differ at {first}: " + ", ".join(
            f"{told} on {name_ranks(members)}" for told, members in words.items()
        )
    else:
        text = f"they differ at {first}, {next(iter(words))}"
    more = len(odd) - 1
    return text + (f"; and at {more} more place{'s' if more > 1 else ''}" if more else "")


def _folded(ranks: Sequence[int], words_of: Callable[[int], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for n, rank in enumerate(ranks):
        found.setdefault(words_of(n), []).append(rank)
    return found

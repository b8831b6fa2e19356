"""Draws what became of a worker that was restarted: what was restored and what is lost."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.restart import RestartedWorker, Shard
from .formats import cut
from .parts import Card, Column, Line, Part, Role, Row, Table, Text, without_empty_columns
from .pictures import picture_of

_MOST = 20  # registers of each kind
_LIMIT = 70  # characters of a cell


def restart_parts(result: RestartedWorker) -> Part:
    """The picture of a `RestartedWorker`."""
    try:
        return _card(result)
    except Exception as error:  # a view never raises
        return Text(f"worker {result.rank} was restarted; not drawn: {type(error).__name__}")


picture_of.register(RestartedWorker, restart_parts)


def _card(result: RestartedWorker) -> Part:
    head, _, rest = str(result).partition("; ")
    children: list[Part] = []
    shards = [*_rows(result.lost, "lost"), *_rows(result.restored, "restored")]
    if shards:
        heads = ("register", "name", "type", "made by", "", "how")
        children.append(without_empty_columns(Table(tuple(map(Column, heads)), tuple(shards))))
    for shown, every, what in (
        (result.lost[:_MOST], result.lost, "lost"),
        (result.restored[:_MOST], result.restored, "restored"),
    ):
        if len(every) > len(shown):
            children.append(Text(f"and {len(every) - len(shown):,} more {what}", "muted"))
    if result.lost:
        words = (
            "reading a lost one there says what it was: make it again, or assign it with "
            f"ref.debug_copy_from({result.rank}, value)"
        )
        children.append(Text(words, "muted"))
    if result.pushed:
        children.append(Text(f"variables pushed again: {_names(result.pushed)}"))
    if result.gone:
        children.append(Text(f"variables gone: {_names(result.gone)}", "warning"))
    children += [Text(remark, "warning") for remark in result.remarks]
    return Card(Line((Text(cut(head, 200), "title"), Text(f" · {rest}"))), tuple(children))


def _rows(shards: Sequence[Shard], state: str) -> list[Row]:
    role: Role = "warning" if state == "lost" else "good"
    return [
        Row(
            (
                Text(f"r{shard.reg_id}"),
                Text(cut(shard.name, _LIMIT)),
                Text(cut(shard.what, _LIMIT)),
                Text(cut(shard.made_by, _LIMIT), "muted"),
                Text(state, role),
                Text(cut(shard.how, _LIMIT), "muted"),
            )
        )
        for shard in shards[:_MOST]
    ]


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more

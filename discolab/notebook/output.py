"""What workers print and display, kept by rank and shown in the cell, labelled.

While installed, `sys.stdout` and `sys.stderr` are `WorkerStream`s around the kernel's own, and
the display publisher's `publish` and `clear_output` look first who calls. A worker's thread
(and a thread that its code started) writes into its worker's list; everybody else goes straight
through. What workers of other processes put out comes by the service ``output``, from a session's
reader thread. To append to a list is one step; `flush` runs on the thread that shows the output and
takes, under `_lock`, what is there, from lists that stay.

What several workers printed is merged into labelled lines (`merge`, `blocks`). Each worker's text
keeps its own order. Lines that all workers printed stand once, with the ranks in front; what stands
between them is given block by block in rank order, equal blocks once.

A `Screen` is the little of a terminal that progress bars need: carriage return and cursor up. tqdm
gives each bar of a process a row of its own and moves between them; with several workers in one
process each worker's text has such moves in it.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from typing import Any, TextIO, TypeVar

from ..runtime.failures import fold_ranks
from ..runtime.interrupts import plain_lock
from ..runtime.services import SERVICES, Service
from ..runtime.worker import Worker, current_worker_or_none
from ..views.formats import strip_addresses
from .config import Disco

UP = "\x1b[A"
# a new line, a return to its start, a control sequence (colours and the like), or plain text
_TOKEN = re.compile(r"\n|\r|\x1b\[[0-9;]*[A-Za-z]|[^\n\r\x1b]+|\x1b")


class Screen:
    """Rows of text with a cursor; `take` gives the rows and wipes them."""

    def __init__(self) -> None:
        self._rows = [""]
        self._row = 0
        self._start = False
        self._moved = False

    def write(self, text: str) -> None:
        """Print `text`; colours are left out."""
        for token in _TOKEN.findall(text):
            if token == "\n":
                self._row += 1
                self._start = False
                if self._row == len(self._rows):
                    self._rows.append("")
            elif token == "\r":
                self._start = True
            elif token == UP:
                self._row = max(0, self._row - 1)
                self._moved = True
            elif not token.startswith("\x1b"):
                self._rows[self._row] = token if self._start else self._rows[self._row] + token
                self._start = False

    def take_whole(self) -> list[str]:
        """The rows above the cursor, removed."""
        rows, self._rows = self._rows[: self._row], self._rows[self._row :]
        self._row = 0
        return rows

    def take(self) -> list[str]:
        """All rows, removed; blank ones that only made room for a bar are left out."""
        rows = self._rows[:-1] if not self._rows[-1].strip() else self._rows
        if self._moved:
            rows = [row for row in rows if row.strip()]
        self.__init__()  # type: ignore[misc]
        return rows


# -- labelled lines --------------------------------------------------------------------------------


T = TypeVar("T", bound=Hashable)

_MOST_ALIGNED = 4_000  # lines beyond which only whole texts are compared


def merge(items: Mapping[int, Sequence[T]]) -> list[tuple[tuple[int, ...], T]]:
    """Merge sequences by rank into ``(ranks, item)`` in the order to show them."""
    ranks = sorted(rank for rank in items if items[rank])
    if not ranks:
        return []
    merged: list[tuple[tuple[int, ...], T]] = []
    at = dict.fromkeys(ranks, 0)
    for anchor in [*_anchors([items[rank] for rank in ranks]), None]:
        ends = {
            rank: len(items[rank]) if anchor is None else anchor[i] for i, rank in enumerate(ranks)
        }
        merged += blocks({rank: items[rank][at[rank] : ends[rank]] for rank in ranks})
        if anchor is not None:
            merged.append((tuple(ranks), items[ranks[0]][anchor[0]]))
            at = {rank: ends[rank] + 1 for rank in ranks}
    return merged


def label(ranks: Sequence[int]) -> str:
    """``[0-3]``."""
    return f"[{fold_ranks(ranks).replace(' ', '')}]"


def blocks(parts: Mapping[int, Sequence[T]]) -> list[tuple[tuple[int, ...], T]]:
    """Blocks in rank order, those that are wholly equal once."""
    owners: dict[tuple[T, ...], list[int]] = {}
    for rank, part in parts.items():
        if part:
            owners.setdefault(tuple(part), []).append(rank)
    return [(tuple(ranks), item) for block, ranks in owners.items() for item in block]


def _anchors(sequences: Sequence[Sequence[T]]) -> list[tuple[int, ...]]:
    """Positions, one in each sequence, of items that all have in the same order."""
    first = sequences[0]
    if all(other == first for other in sequences[1:]):
        return [(i,) * len(sequences) for i in range(len(first))]
    if sum(map(len, sequences)) > _MOST_ALIGNED:
        return []
    common: dict[int, list[int]] = {i: [i] for i in range(len(first))}
    for other in sequences[1:]:
        found: dict[int, int] = {}
        matcher = SequenceMatcher(None, first, other, autojunk=False)
        for block in matcher.get_matching_blocks():
            found.update((block.a + k, block.b + k) for k in range(block.size))
        common = {i: [*where, found[i]] for i, where in common.items() if i in found}
    return [tuple(where) for where in common.values()]


# -- output by rank --------------------------------------------------------------------------------


# "order": lines that all printed once, the rest worker by worker; "engine": one block a worker;
# "type": stdout, then stderr, then displays. The words are those of ipyparallel.
GROUPINGS = ("order", "engine", "type")

# Workers of other processes are heard a moment after worker 0. Lines that belong together are shown
# together if live output waits for a pause, though not for long.
_PAUSE = 0.12  # seconds
_LONGEST_WAIT = 0.4  # seconds

_LONGEST_LINE = 100_000  # characters of a line that are shown

# one thing that a worker put out: ("stdout" | "stderr", text) or ("display", data, metadata);
# from another process also ("clear", ""): forget what came before
Item = tuple[Any, ...]


class WorkerStream:
    """Stands for `sys.stdout` or `sys.stderr`: a worker's text is kept, other text passed on."""

    def __init__(self, name: str, original: TextIO, capture: OutputCapture) -> None:
        self._name = name
        self.original = original
        self._capture = capture

    def write(self, text: str) -> int:
        """Write as a text stream does."""
        worker = current_worker_or_none()
        if worker is None:
            return self.original.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._capture.add(worker, (self._name, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the kernel's stream; a worker's text waits for its turn."""
        if current_worker_or_none() is None:
            self.original.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class WorkerOutput(Service):
    """What a session's workers in other processes put out, kept beside that of its worker 0.

    Once the capture is gone, `otherwise` has it.
    """

    def __init__(self, capture: OutputCapture, exchange: Any, otherwise: Service) -> None:
        self._capture = capture
        self._otherwise = otherwise
        self._key = id(exchange.workers_here()[0].shared)

    def receive(self, rank: int, value: Any) -> None:
        if not self._capture.installed:
            self._otherwise.receive(rank, value)
            return
        for item in value:
            if item[0] == "clear":
                self._capture.forget(self._key, rank)
            else:
                self._capture.keep(self._key, rank, item)


class OutputCapture:
    """Keeps the output of all workers and shows it when told to.

    Attributes
    ----------
    listeners
        Called with the session's key, the rank and what was put out, on any thread: be quick.
    """

    def __init__(self, shell: Any, config: Disco) -> None:
        self._shell = shell
        self._config = config
        self._lines_shown = self._lines_left_out = 0  # in this cell
        self._lock = plain_lock()
        self._kept: dict[int, dict[int, list[Item]]] = {}
        self._oldest, self._newest = (
            0.0,
            0.0,
        )  # when the first was kept that nobody has seen, the last
        self._grouping = "order"
        self._pictures: dict[int, Counter[int]] = {}  # so many came in this cell, by rank
        self.listeners: list[Callable[[int, int, Item], None]] = []
        self._publish: Any = None
        self._clear: Any = None
        self._service_before: Any = None

    # -- in place and out ----------------------------------------------------------------------

    def install(self) -> None:
        """Wrap the streams and the display publisher, unless they are already."""
        self.take_streams()
        publisher = self._shell.display_pub
        if self._publish is None:
            self._publish, self._clear = publisher.publish, publisher.clear_output
            publisher.publish, publisher.clear_output = self._on_publish, self._on_clear
            self._service_before = SERVICES.get("output", lambda _: Service())
            SERVICES["output"] = self._make_service

    @property
    def installed(self) -> bool:
        """Whether it is in place."""
        return self._publish is not None

    def _make_service(self, exchange: Any) -> Service:
        return WorkerOutput(self, exchange, self._service_before(exchange))

    def uninstall(self) -> None:
        """Put everything back; what others wrapped since is left alone."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, WorkerStream):
                setattr(sys, name, stream.original)
        if self._publish is not None:
            publisher = self._shell.display_pub
            publisher.publish, publisher.clear_output = self._publish, self._clear
            self._publish = self._clear = None
            SERVICES["output"] = self._service_before

    @contextmanager
    def during_cell(self, grouping: str = "order") -> Iterator[None]:
        """Show in a cell what workers put out while it waits; `grouping` is one of `GROUPINGS`."""
        self._grouping = grouping
        self._pictures = {}
        self._lines_shown = self._lines_left_out = 0
        self.take_streams()
        try:
            yield
        finally:
            self.flush()
            self._tell_left_out()
            self._grouping = "order"

    def take_streams(self) -> None:
        """Wrap also what ``%%capture`` or `redirect_stdout` put in place.

        They take that away themselves: until then workers that go on must not write into it
        unlabelled.
        """
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not isinstance(stream, WorkerStream):
                setattr(sys, name, WorkerStream(name, stream, self))

    def _on_publish(self, data: Any, metadata: Any = None, **more: Any) -> None:
        worker = current_worker_or_none()
        if worker is None:
            self._publish(data, metadata, **more)
        else:
            self.add(worker, ("display", dict(data), dict(metadata or {})))

    def _on_clear(self, wait: bool = False) -> None:
        worker = current_worker_or_none()
        if worker is None:
            self._clear(wait)
        else:
            self.forget(id(worker.shared), worker.worker_id)

    # -- keeping and showing -------------------------------------------------------------------

    def add(self, worker: Worker, item: Item) -> None:
        """Keep one thing that `worker`, of this process, put out."""
        self.keep(id(worker.shared), worker.worker_id, item)

    def keep(self, key: int, rank: int, item: Item) -> None:
        """Keep one thing; `key` tells sessions apart: the id of what their worker 0 shares."""
        if _is_picture(item):
            self._pictures.setdefault(key, Counter())[rank] += 1
        self._of(key).setdefault(rank, []).append(item)
        for listener in tuple(self.listeners):
            listener(key, rank, item)
        self._newest = time.monotonic()
        self._oldest = self._oldest or self._newest

    def settled(self) -> bool:
        """Whether what is kept may be shown now, rather than a moment later with more of it."""
        now = time.monotonic()
        return bool(self._oldest) and (
            now - self._newest >= _PAUSE or now - self._oldest >= _LONGEST_WAIT
        )

    def forget(self, key: int, rank: int) -> None:
        """Drop what a worker has put out and nobody has seen."""
        self._of(key)[rank] = []

    def _of(self, key: int) -> dict[int, list[Item]]:
        kept = self._kept.get(key)
        if kept is None:
            with self._lock:
                kept = self._kept.setdefault(key, {})
        return kept

    def flush(self, whole_lines: bool = False) -> None:
        """Show what was kept.

        With `whole_lines` text after the last newline stays, and pictures wait for those of the
        ranks below, so that they come in the order of ranks.
        """
        self._oldest = 0.0
        if not any(any(list(kept.values())) for kept in list(self._kept.values())):
            return
        with self._lock:
            for key, kept in self._kept.copy().items():
                taken = {}
                for rank in sorted(kept):
                    items = kept[rank]
                    count = len(items)
                    taken[rank] = items[:count]
                    del items[:count]
                    if whole_lines and not self._put_back_pictures(key, rank, taken[rank], items):
                        _put_back_tail(taken[rank], items)
                self._show({rank: _lines(items) for rank, items in taken.items()})

    def _put_back_pictures(self, key: int, rank: int, taken: list[Item], items: list[Item]) -> bool:
        """Leave for the next time what begins with a picture that ranks below have not had."""
        came = self._pictures.get(key, Counter())
        number = came[rank] - sum(map(_is_picture, [*taken, *items]))
        for at, item in enumerate(taken):
            number += _is_picture(item)
            if _is_picture(item) and any(came[below] < number for below in range(rank)):
                items[:0] = taken[at:]
                del taken[at:]
                return True
        return False

    def unfinished(self) -> str:
        """The lines that workers have begun and not ended, progress bars among them."""
        with self._lock:
            lines = {
                rank: [line for kind, line in _lines(items[-50:]) if kind != "display"][-1:]
                for kept in list(self._kept.values())
                for rank, items in list(kept.items())
            }
        return "\n".join(f"{label(ranks)} {line}" for ranks, line in merge(lines))

    def _show(self, lines: dict[int, list[tuple[str, Any]]]) -> None:
        pending: list[str] = []
        name = "stdout"
        for ranks, (kind, content) in _grouped(lines, self._grouping):
            if kind != name and pending:
                _write(name, pending)
            name = kind if kind != "display" else name
            if kind == "display":
                _write(name, pending)
                self._show_bundle(label(ranks), content)
            elif self._is_room():
                pending.append(f"{label(ranks)} {content}\n")
        _write(name, pending)

    def _is_room(self) -> bool:
        """Whether one more line is shown in this cell."""
        most = self._config.output_lines
        room = not most or self._lines_shown < most
        self._lines_shown += room
        self._lines_left_out += not room
        return bool(room)

    def _tell_left_out(self) -> None:
        """Say, once the cell has ended, how many lines were too many."""
        if self._lines_left_out:
            count = f"{self._lines_left_out:,} more line{'' if self._lines_left_out == 1 else 's'}"
            _write("stdout", [f"… {count} (%config Disco.output_lines = 0 shows all)\n"])
        self._lines_shown = self._lines_left_out = 0

    def _show_bundle(self, who: str, content: Any) -> None:
        data, metadata = content.data, content.metadata
        if set(data) == {"text/plain"}:
            _write("stdout", [f"{who} {line}\n" for line in str(data["text/plain"]).splitlines()])
            return
        _write("stdout", [f"{who}\n"])
        if self._publish is not None:
            self._publish(data, metadata)


def _grouped(
    lines: dict[int, list[tuple[str, Any]]], grouping: str
) -> list[tuple[tuple[int, ...], tuple[str, Any]]]:
    if grouping == "engine":
        return blocks(lines)
    if grouping == "type":
        kinds = ("stdout", "stderr", "display")
        by_kind = [{r: [x for x in own if x[0] == k] for r, own in lines.items()} for k in kinds]
        return [item for part in by_kind for item in merge(part)]
    return merge(lines)


def _is_picture(item: Item) -> bool:
    return item[0] == "display" and any(kind.startswith("image/") for kind in item[1])


class _Bundle:
    """A display by content, so that equal ones fold, wherever in memory the objects are."""

    def __init__(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        self.data, self.metadata = data, metadata
        self._key = strip_addresses(repr((data, metadata)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bundle) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _lines(items: list[Item]) -> list[tuple[str, Any]]:
    """Cut text into lines, as a terminal would show them in the end."""
    items = _shorten(items)
    found: list[tuple[str, Any]] = []
    screens = {"stdout": Screen(), "stderr": Screen()}
    moving = {item[0] for item in items if item[0] != "display" and UP in item[1]}
    for item in items:
        if item[0] == "display":
            for name, screen in screens.items():
                found += [(name, line) for line in screen.take()]
            found.append(("display", _Bundle(item[1], item[2])))
        else:
            name, text = item
            screens[name].write(text)
            if name not in moving:  # whole lines keep their place between the streams
                found += [(name, line) for line in screens[name].take_whole()]
    for name, screen in screens.items():
        found += [(name, line) for line in screen.take()]
    return found


def _shorten(items: list[Item]) -> list[Item]:
    """Leave the middle out of lines that are too long for a notebook.

    Their pieces come as separate items. What moves the cursor stays: it may be a progress bar.
    """
    if sum(len(item[1]) for item in items if item[0] != "display") <= _LONGEST_LINE:
        return items
    joined: list[Item] = []
    for kind, run in itertools.groupby(items, key=lambda item: item[0]):
        if kind == "display":
            joined += run
            continue
        text = "".join(item[1] for item in run)
        joined.append((kind, "".join(map(_shortened, text.splitlines(keepends=True)))))
    return joined


def _shortened(line: str) -> str:
    left_out = len(line) - _LONGEST_LINE
    if left_out <= 0 or "\x1b" in line:
        return line
    half = _LONGEST_LINE // 2
    return f"{line[:half]} … {left_out:,} characters … {line[-half:]}"


def _put_back_tail(taken: list[Item], items: list[Item]) -> None:
    """Leave what may still change for the next time: a line without its end, progress bars."""
    first = len(taken)
    while first > 0 and taken[first - 1][0] != "display":
        first -= 1
        name, text = taken[first]
        if UP in text:
            continue
        head, newline, tail = text.rpartition("\n")
        if newline:
            kept = ([(name, tail)] if tail else []) + taken[first + 1 :]
            taken[first:] = [(name, head + newline)]
            items[:0] = kept
            return
    items[:0] = taken[first:]
    del taken[first:]


def _write(name: str, pending: list[str]) -> None:
    if pending:
        stream = getattr(sys, name)
        stream.write("".join(pending))
        stream.flush()
        pending.clear()

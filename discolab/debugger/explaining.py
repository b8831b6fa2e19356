"""What went wrong last on a session, in a few lines, from what is recorded.

The sources: the failed calls that each worker keeps, the ledger and the board of collectives (by
the doctor), what the workers do now, where they stand in the debugger, and what their variables
were after each cell (`fingerprints`). All of them are read from beside the workers, so this works
while they hang. A line says what is known; what is inferred says "perhaps".
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ccl.board.rounds import MISSING, STOPPED, Round
from ..ccl.doctor import Diagnosis, Edge, doctor
from ..runtime.display import Pictured
from ..runtime.failures import Failure, fold, name_ranks
from ..runtime.frames import frame_of
from ..runtime.services import probe
from ..runtime.session import Session
from ..runtime.sources import is_cell, place
from ..runtime.status import WorkerStatus
from ..runtime.user_code import is_user_file
from ..runtime.worker import Worker
from ..views.parts import Line, Part, Role, Text, VStack
from .agent import STANDS
from .debugger import known_debugger
from .fingerprints import RANDOM, UNKNOWN, Entry, record_of
from .frames import user_frames
from .lockstep import PAUSED

_WITH_FRAMES = ("the cell", "the script")  # commands of which the frames are kept (post_mortem.py)
_MOST_LINES = 5
_PATIENCE = 2.0  # seconds in which workers of other processes must answer
_MOST_WORDS = 300  # characters of an error
_MOST_DIFFERENCES = 3
_MOST_NAMES = 3
_LATE = "WaitTimeoutError"
_SEEDS = {"manual_seed", "manual_seed_all", "seed"}  # called with the rank, each is to draw its own
_ACCOUNTED = ("CollectiveError", _LATE)  # whose text says what each member did
_SITE = re.compile(r", line \d+|:\d+")
_FAILED_THERE = {"assert": " failed ", "raised": " raised ", "non-finite": ": "}
_WHERE_THEY_STAND = "%disco_where shows the variables there, %disco_continue goes on"
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Fact:
    """One thing that is known.

    Attributes
    ----------
    text
        ``worker 1 raised ValueError: x``.
    place
        ``Cell In[3], line 4``; "" if it has none.
    sure
        Whether it was recorded; else it is inferred, and says "perhaps".
    """

    text: str
    place: str = ""
    sure: bool = True


@dataclass(frozen=True, repr=False)
class Explanation(Pictured):
    """What went wrong last; shows itself.

    Attributes
    ----------
    title
        Of the session.
    facts
        What failed, on whom, who waited for it, and since when the workers differ.
    advice
        What to look at next, "" if there is nothing.
    failed
        Whether anything has gone wrong.
    """

    title: str
    facts: tuple[Fact, ...]
    advice: str = ""
    failed: bool = True

    @property
    def part(self) -> Part:
        """How it is drawn."""
        return _drawn(self)


@probe
def recorded_on(worker: Worker) -> tuple[list[Failure], list[Entry], int, int, Any]:
    """A worker's failed calls, its fingerprints, the last cell that ended, and what runs now.

    Of what runs, the ordinal (-1: nothing runs) and the file and line at which it is.
    """
    kept = {failure.number: failure for _, failure in worker.failed_calls.copy()}
    failures = [replace(failure, exception=None) for failure in kept.values()]
    call, here = -1, None
    if worker.current is not None:
        call, stack = worker.executed, user_frames(frame_of(worker.thread_id))
        here = (stack[-1].f_code.co_filename, stack[-1].f_lineno) if stack else None
    return failures, *record_of(worker), call, here


def explain(session: Session) -> Explanation:
    """Say what went wrong last on a session, on whom, and since when the workers differ.

    Asks nothing of what the workers compute, so it can be called while they hang, on another thread
    or after Ctrl-C.

    Returns
    -------
    Explanation
        Shows itself.
    """
    found = doctor(session, n=4)
    told = {} if session.closed else session.look(recorded_on, timeout=_PATIENCE)
    failures = _last_failures(session, [f for kept, *_ in told.values() for f in kept])
    entries = {rank: entries for rank, (_, entries, *_) in sorted(told.items())}
    places = {rank: place(*here) for rank, (*_, here) in told.items() if here}
    running = {call for *_, call, _ in told.values()}
    failing, stands = _standing(session)
    deaths, hang = _deaths(session, found.workers), _hang(found, places)
    over = max((last for _, _, last, *_ in told.values()), default=-1)
    earlier = any(over > failure.call for failure in failures)
    stopped = earlier and all(failure.interrupted for failure in failures)
    failed_calls: list[Fact] = []
    if running & {failure.call for failure in failures}:  # some have failed, others go on or stand
        most = max(1, _MOST_LINES - len(deaths) - len(failing) - len(stands) - len(hang))
        failed_calls = _failure(failures, found)[:most]
    elif not (hang or failing or stands or stopped):
        failed_calls = _failure(failures, found)
        if failed_calls and earlier:  # other cells have ended since
            failed_calls[0] = replace(failed_calls[0], text=f"earlier: {failed_calls[0].text}")
    facts = [*deaths, *failing, *failed_calls, *stands, *hang]
    # who waits for one that stands in the debugger has not failed
    failed = bool(failing or failed_calls or deaths or found.deadlocks or (facts and not stands))
    if not session.closed:
        facts += _unheard(found.workers, told)
    values = _with_nan(entries) + _differences(entries)
    facts += values + _drawn_apart(entries)
    if not failed:
        facts.insert(0, Fact("nothing has failed"))
    advice = _WHERE_THEY_STAND if failing or stands else ""
    if failed and not earlier and not advice:
        advice = _advice(failures, found)
    return Explanation(found.title, tuple(facts[:_MOST_LINES]), advice, failed)


def _last_failures(session: Session, recorded: Sequence[Failure]) -> list[Failure]:
    """Of the last call that failed, one a worker; the workers' own record, or what was raised."""
    known = [*recorded, *session.last_failures]
    # what was queued behind a call that was stopped never began, and tells nothing
    begun = [failure for failure in known if failure.frames or not failure.interrupted] or known
    last = max((failure.call for failure in begun), default=-1)
    by_rank = {failure.rank: failure for failure in reversed(known) if failure.call == last}
    return [by_rank[rank] for rank in sorted(by_rank)]


# -- who is dead, or hangs ------------------------------------------------------------------------


def _deaths(session: Session, workers: Sequence[WorkerStatus]) -> list[Fact]:
    """How workers have died, and what they ran."""
    dead = [status.rank for status in workers if status.state == "dead"]
    return [Fact(session._deaths([rank]).splitlines()[0]) for rank in dead]


def _unheard(workers: Sequence[WorkerStatus], told: Mapping[int, Any]) -> list[Fact]:
    """Whose record is not told here, because they have not answered: nothing is known of it."""
    gone = ("dead", "ended")
    silent = [one.rank for one in workers if one.rank not in told and one.state not in gone]
    if not silent:
        return []
    verb = "has" if len(silent) == 1 else "have"
    words = f"{verb} not answered in {_PATIENCE:g} s: what is recorded there is not told"
    return [Fact(f"{name_ranks(silent)} {words}")]


def _standing(session: Session) -> tuple[list[Fact], list[Fact]]:
    """Who stands where in the debugger, and why: where something has failed, and elsewhere."""
    debugger = known_debugger(session)
    stop = debugger.stop if debugger is not None and debugger.is_paused else None
    groups: dict[tuple[str, str, str], list[int]] = {}
    for worker in stop.workers if stop is not None else ():
        if worker.state == PAUSED:
            here = place(worker.stack[-1].file, worker.stack[-1].line) if worker.stack else ""
            key = (worker.reason, worker.note[:_MOST_WORDS], here)
            groups.setdefault(key, []).append(worker.rank)
    failing, stands = [], []
    for (reason, note, site), ranks in groups.items():
        if reason in _FAILED_THERE:
            failing.append(Fact(f"{name_ranks(ranks)}{_FAILED_THERE[reason]}{note}", site))
            continue
        verb, why = "stands" if len(ranks) == 1 else "stand", note or reason
        text = f"{name_ranks(ranks)} {verb} in the debugger" + (f": {why}" if why else "")
        stands.append(Fact(text, site))
    return failing, stands


def _hang(found: Diagnosis, places: Mapping[int, str]) -> list[Fact]:
    """Who waits for whom now, and what those do that are waited for."""
    facts: list[Fact] = []
    edges: dict[Any, list[Edge]] = {}
    for edge in found.waits:
        if not edge.doing:
            edges.setdefault((edge.whom, edge.what, edge.site), []).append(edge)
    waited = {rank for edge in found.waits for rank in edge.whom}
    waiting = {edge.rank for edge in found.waits}
    busy: dict[tuple[str, str], list[WorkerStatus]] = {}
    for status in found.workers:
        if status.state in ("idle", "dead", "ended") or status.rank in waiting:
            continue
        if (edges and status.rank not in waited) or status.detail.startswith(STANDS):
            continue
        site = places.get(status.rank, "")
        doing = f"{status.state} {status.detail.removesuffix(f' at {site}')}".strip()
        busy.setdefault((doing, site), []).append(status)
    for (doing, site), alike in busy.items():
        verb = "is" if len(alike) == 1 else "are"
        seconds = min(status.seconds for status in alike)
        since = f", since {seconds:.0f} s" if seconds >= 1 else ""
        outside = ", outside any collective" if edges else ""
        ranks = name_ranks(status.rank for status in alike)
        facts.append(Fact(f"{ranks} {verb} {doing}{since}{outside}", site))
    for (whom, what, site), group in edges.items():
        ranks = name_ranks(edge.rank for edge in group)
        verb = "waits" if len(group) == 1 else "wait"
        facts.append(Fact(f"{ranks} {verb} for {name_ranks(whom)} in {what}", site))
    for cycle in found.deadlocks:
        facts.insert(0, Fact(f"{name_ranks(cycle)} wait for each other: none can go on"))
    return facts


# -- what failed ----------------------------------------------------------------------------------


def _failure(failures: Sequence[Failure], found: Diagnosis) -> list[Fact]:
    if not failures:
        return []
    stopped = [failure for failure in failures if failure.interrupted]
    causes = [f for f in failures if not f.victim and not f.interrupted]
    facts: list[Fact] = []
    together: dict[Any, list[Failure]] = {}  # where collectives don't fit all are told the same
    for number, group in enumerate(fold(causes)):
        key = group[0].headline if group[0].type_name in _ACCOUNTED else number
        together.setdefault(key, []).extend(group)
    for alike in together.values():
        facts += _cause(alike)
    victims = [f for f in failures if f.victim and not f.interrupted]
    late = [f.headline.partition(" waiting for ")[2] for f in causes if f.type_name == _LATE]
    given_up = [title.partition("\n")[0] for title in late if title]
    # of whom the account of one that gave up has told whether they had come
    victims = [f for f in victims if not any(title in f.headline for title in given_up)]
    for group in fold(victims):
        ranks = [failure.rank for failure in group]
        what = group[0].headline.splitlines()[0].removeprefix("CollectiveAborted: ")
        whom = f" for {name_ranks(f.rank for f in causes)}" if causes else ""
        what = what.partition(" can't complete")[0]
        facts.append(Fact(f"{name_ranks(ranks)} waited{whom} in {what}", _place_of(group[0])))
    if stopped:
        facts += _stopped(stopped, found)
    return facts


def _cause(group: Sequence[Failure]) -> list[Fact]:
    """What a failure is, in a line; of collectives that don't fit also what each member did."""
    first = group[0]
    ranks = name_ranks(failure.rank for failure in group)
    head, *more = first.headline.splitlines() or [first.type_name]
    head = head[:_MOST_WORDS]
    where = _place_of(first)
    accounts = [_account(line.strip()) for line in more if line.strip()][:4]
    if first.type_name == "CollectiveError":
        return [Fact(head.removeprefix("CollectiveError: "), where), *accounts]
    if first.type_name == _LATE and accounts:
        return [Fact(f"{ranks} {head.removeprefix(f'{_LATE}: ')}", where), *accounts]
    if _is_out_of_memory(first):
        return [Fact(f"{ranks} ran out of memory: {head}", where)]
    return [Fact(f"{ranks} raised {head}", where)]


def _account(line: str) -> Fact:
    """What a member did, and where: ``worker 2: called barrier at Cell In[3], line 4, in f``."""
    text, at, site = line.rpartition(" at ")
    if not at or not _SITE.search(site):
        return Fact(line)
    return Fact(text, site.removesuffix(", in <module>"))


def _is_out_of_memory(failure: Failure) -> bool:
    if failure.type_name in ("MemoryError", "OutOfMemoryError"):
        return True
    words = failure.message.lower()
    return failure.type_name == "RuntimeError" and any(text in words for text in _OUT_OF_MEMORY)


def _stopped(stopped: Sequence[Failure], found: Diagnosis) -> list[Fact]:
    """Where workers were when they were stopped, and who had not come to a collective."""
    rounds = [one for one in found.rounds if one.ordinal == stopped[0].call]
    last = next((one for one in reversed(rounds) if _with(one, STOPPED)), None)
    waiting = _with(last, STOPPED) if last is not None else []
    absent = _with(last, MISSING) if last is not None else []
    facts = []
    for group in _by_place([f for f in stopped if f.rank not in waiting]):
        ranks = [failure.rank for failure in group]
        outside = ", outside any collective" if set(ranks) <= set(absent) else ""
        verb = "was" if len(ranks) == 1 else "were"
        facts.append(Fact(f"{name_ranks(ranks)} {verb} stopped{outside}", _place_of(group[0])))
    if last is not None and waiting:
        entry = next(entry for entry in last.entries if entry.rank in waiting)
        verb = "waited" if absent else "were in"
        whom = f" for {name_ranks(absent)} in" if absent else ""
        facts.append(Fact(f"{name_ranks(waiting)} {verb}{whom} {entry.what}", entry.site))
    return facts


def _with(one: Round, state: str) -> list[int]:
    return [entry.rank for entry in one.entries if entry.state == state]


def _by_place(failures: Sequence[Failure]) -> list[list[Failure]]:
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        groups.setdefault(_place_of(failure), []).append(failure)
    return list(groups.values())


def _place_of(failure: Failure) -> str:
    """The innermost of the user's lines."""
    frames = [frame for frame in failure.frames if is_user_file(frame[0])] or failure.frames
    return place(frames[-1][0], frames[-1][1]) if frames else failure.call_site


# -- since when workers differ --------------------------------------------------------------------

Values = dict[int, dict[str, tuple[str, bool]]]


def _timeline(entries: Mapping[int, Sequence[Entry]]) -> list[tuple[str, Values]]:
    """After each cell what each worker's variables were: the file, and rank -> name -> print."""
    cells = {ordinal: file for line in entries.values() for ordinal, file, _ in line}
    now: Values = {rank: {} for rank in entries}
    at = dict.fromkeys(entries, 0)
    moments = []
    for ordinal, file in sorted(cells.items()):
        for rank, line in entries.items():
            while at[rank] < len(line) and line[at[rank]][0] <= ordinal:
                for name, found in line[at[rank]][2].items():
                    if found[0] == UNKNOWN:
                        now[rank].pop(name, None)
                    else:
                        now[rank][name] = found
                at[rank] += 1
        moments.append((file, {rank: dict(values) for rank, values in now.items()}))
    return moments


def _classes(values: Values, name: str) -> list[list[int]]:
    """The workers by what they hold under a name, the most first; [] if one has none."""
    found: dict[str, list[int]] = {}
    for rank, held in values.items():
        if name not in held:
            return []
        found.setdefault(held[name][0], []).append(rank)
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def _differences(entries: Mapping[int, Sequence[Entry]]) -> list[Fact]:
    """The variables that were equal on all workers once, and differ now: since which cell."""
    moments = _timeline(entries)
    if len(entries) < 2 or not moments:
        return []
    end = moments[-1][1]
    since: dict[tuple[int, bool, str], list[str]] = {}
    for name in sorted({name for values in end.values() for name in values}):
        if len(_classes(end, name)) < 2:
            continue
        counts = [len(_classes(values, name)) for _, values in moments]
        if 1 in counts:  # of what was never equal nobody knows whether it should be
            equal = len(counts) - 1 - counts[::-1].index(1)
            number = next(at for at in range(equal, len(counts)) if counts[at] > 1)
            how = _in_words(_classes(moments[number][1], name))
            since.setdefault((number, number == equal + 1, how), []).append(name)
    facts = []
    for (number, sure, how), names in sorted(since.items())[:_MOST_DIFFERENCES]:
        file = moments[number][0]
        words = f"{_name(names)}: {how}" + ("" if sure else ", perhaps before")
        facts.append(Fact(words, _place_in(file, names), sure))
    return facts


def _name(names: Sequence[str]) -> str:
    variables = sorted(name for name in names if name != RANDOM)
    shown = [*variables[:_MOST_NAMES], *([RANDOM] if RANDOM in names else [])]
    more = len(variables) - len(variables[:_MOST_NAMES])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _in_words(classes: Sequence[Sequence[int]]) -> str:
    if len(classes) == 2 and len(classes[0]) > len(classes[1]):
        return f"equal on all workers before, other on {name_ranks(classes[1])} since"
    return f"equal on all workers before, {len(classes)} different values since"


def _with_nan(entries: Mapping[int, Sequence[Entry]]) -> list[Fact]:
    """Since which cell some variable has held NaN, and on whom it did first."""
    first: tuple[str, dict[str, list[int]], int] | None = None
    for file, values in reversed(_timeline(entries)):
        odd: dict[str, list[int]] = {}
        for rank, held in values.items():
            for name in sorted(name for name, (_, has_nan) in held.items() if has_nan):
                odd.setdefault(name, []).append(rank)
        if not odd:
            break
        first = file, odd, len(values)
    if first is None:
        return []
    file, odd, count = first
    whose: dict[str, list[str]] = {}
    for name, ranks in odd.items():
        whom = "all workers" if len(ranks) == count else f"{name_ranks(ranks)} first"
        whose.setdefault(whom, []).append(name)
    return [
        Fact(f"{_name(names)}: NaN on {whom}", _place_in(file, names))
        for whom, names in list(whose.items())[:_MOST_DIFFERENCES]
    ]


def _drawn_apart(entries: Mapping[int, Sequence[Entry]]) -> list[Fact]:
    """Variables that were made with random numbers while the workers' random states differed."""
    moments = _timeline(entries)
    if len(entries) < 2:
        return []
    before: Values = {rank: {} for rank in entries}
    meant = False  # a cell has given each worker a seed of its own
    for file, values in moments:
        states = [values[rank].get(RANDOM) for rank in entries]
        own = _meant_to_differ(file)
        meant = len(set(states)) > 1 and (meant or bool(own & _SEEDS))
        drawn = all(before[rank].get(RANDOM) not in (None, values[rank].get(RANDOM))
                    for rank in entries)  # fmt: skip
        if drawn and len(set(states)) > 1:
            made = {name for held in values.values() for name in held} - {RANDOM}
            names = sorted(
                name
                for name in made
                if len(_classes(values, name)) == len(entries)
                and name not in own
                and any(before[rank].get(name) != values[rank].get(name) for rank in entries)
            )
            if names and not meant:
                words = (
                    f"{', '.join(names[:_MOST_NAMES])}: another value on each worker, perhaps made "
                    "with random numbers of its own: is torch.manual_seed(seed) missing?"
                )
                return [Fact(words, _place_in(file, names), sure=False)]
        before = values
    return []


def _meant_to_differ(file: str) -> set[str]:
    """The names that a cell makes of `rank`, and the functions that it calls with it."""
    found: set[str] = set()
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Call):
            continue
        inner = list(ast.walk(node))
        if not any(isinstance(one, ast.Name) and one.id == "rank" for one in inner):
            continue
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func).rpartition(".")[2])
        found |= {one.id for one in inner if isinstance(one, ast.Name) and _is_set(one)}
    return found


def _is_set(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _place_in(file: str, names: Sequence[str]) -> str:
    """The line of a cell that sets all of these, if there is just one; else the cell."""
    lines: dict[str, set[int]] = {name: set() for name in names if name != RANDOM}
    for node in ast.walk(_tree(file)):
        target: ast.AST = node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            target = node.value.func  # a method of it, as `x.add_(1)`
        elif not _is_set(node):
            continue
        while isinstance(target, ast.Attribute | ast.Subscript):
            target = target.value
        if isinstance(target, ast.Name) and target.id in lines:
            lines[target.id].add(target.lineno)
    found = list(lines.values())
    if found and all(len(one) == 1 and one == found[0] for one in found):
        return place(file, found[0].pop())
    return place(file, None).partition(", line")[0] if is_cell(file) else file


def _advice(failures: Sequence[Failure], found: Diagnosis) -> str:
    """What to look at next."""
    if any(status.state == "dead" for status in found.workers):
        return "%disco_restart -t RANK starts a new worker in its place"
    if found.waits or found.deadlocks:
        return "%disco_doctor shows the last collectives, Stop ends the workers' cell"
    causes = [f for f in failures if not f.victim and not f.interrupted]
    if not causes:
        return ""
    if any(failure.type_name == "CollectiveError" for failure in causes):
        return "%disco_doctor shows the last collectives of each worker"
    if causes[0].command not in _WITH_FRAMES:
        return ""
    return f"%disco_pm {causes[0].rank} shows the variables where it was raised"


def _drawn(found: Explanation) -> Part:
    """A numbered line for each fact, the first one loud if something has failed."""
    parts: list[Part] = [Line((Text("explain", "title"), Text(f" · {found.title}", "muted")))]
    for number, fact in enumerate(found.facts, 1):
        loud: Role = "error" if number == 1 and found.failed else "plain"
        spans = [Text(f"{number}. ", "muted"), Text(fact.text, loud if fact.sure else "muted")]
        if fact.place:
            spans += [Text(" · ", "muted"), Text(fact.place, "title")]
        parts.append(Line(tuple(spans)))
    if found.advice:
        parts.append(Text(found.advice, "muted"))
    return VStack(tuple(parts))

"""What went wrong last on a session, in a few lines, from what is recorded.

The sources: the failed calls that each worker keeps, the ledger and the board of collectives (by
the doctor), what the workers do now, where they stand in the debugger, and what their variables
were after each cell (`fingerprints`, `differing`). All of them are read from beside the workers, so
this works while they hang. A line says what is known; what is inferred says "perhaps".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ccl.board.rounds import MISSING, STOPPED, Entry, Round
from ..ccl.call import FAILED
from ..ccl.doctor import Diagnosis, Edge, doctor
from ..runtime.display import Pictured
from ..runtime.failures import CAUSED, Failure, fold, name_ranks
from ..runtime.interpreter_lock import copied
from ..runtime.services import probe
from ..runtime.session import Session
from ..runtime.sources import place
from ..runtime.status import WorkerStatus
from ..runtime.user_code import is_user_file
from ..runtime.worker import Worker
from ..views.parts import Line, Part, Role, Text, VStack
from .agent import STANDS
from .debugger import known_debugger
from .differing import Fact, Failing, Records, cell_of, differing
from .fingerprints import prints_now, record_of
from .frames import places_beside
from .lockstep import PAUSED

_WITH_FRAMES = ("the cell", "the script")  # commands of which the frames are kept (post_mortem.py)
_MOST_LINES = 5
_PATIENCE = 2.0  # seconds in which workers of other processes must answer
_MOST_WORDS = 300  # characters of an error
_MOST_CAUSES = 3  # errors that are told of one call
_MOST_FRAMES = 8  # of a stack
_LATE = "WaitTimeoutError"
_ABORTED = "CollectiveAborted"
_GONE = ("dead", "ended")
_FROZEN = "has given no sign of life"
_IN_THE_CELL = ("while it ran the cell", "while it ran the script")
_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")
_ACCOUNTED = ("CollectiveError", _LATE)  # whose text says what each member did
_SITE = re.compile(r", line \d+|:\d+")
_FAILED_THERE = {"assert": " failed ", "raised": " raised ", "non-finite": ": "}
_WHERE_THEY_STAND = "%disco_where shows the variables there, %disco_continue goes on"
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


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
def recorded_on(worker: Worker) -> tuple[Any, ...]:
    """A worker's failed calls, its fingerprints, its last cell, and what runs now.

    The last cell that ended, the call at which it was restarted (0: it was not), the ordinal of
    what runs (-1: nothing does), and ``(file, line)`` of the user's frames in it.
    """
    kept = {failure.number: failure for _, failure in copied(worker.failed_calls)}
    failures = [replace(failure, exception=None) for failure in kept.values()]
    call, stack = -1, []
    if worker.current is not None:
        call, stack = worker.executed, [(file, line) for file, line, _ in places_beside(worker)]
        del stack[1:-_MOST_FRAMES]
    return failures, *record_of(worker), worker.joined_at, call, stack


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
    if not session.closed and len(told) < len(found.workers):  # by now more is known of them
        found = replace(found, workers=tuple(session.status()))
    recorded = [failure for kept, *_ in told.values() for failure in kept]
    failures = _last_failures(session, recorded)
    stacks = {rank: stack for rank, (*_, stack) in told.items() if stack}
    running = {call for *_, call, _ in told.values()}
    ended = {rank for rank, (*_, call, _) in told.items() if call < 0}
    over = max((last for _, _, last, *_ in told.values()), default=-1)
    last = max(-1, over, *running, *(failure.call for failure in failures))
    failing, stands, spots, aborted = _standing(session, last)
    replaced = _replaced(failures, found.workers)
    cell = _cell(failures, stacks.values())
    deaths, hang = _deaths(session, found.workers, cell), _hang(found, stacks, ended)
    frozen, unheard = _unheard(found.workers, told, cell) if not session.closed else ([], [])
    broken = _not_compiled(session, failures)
    caught = [] if broken else _caught(found, max(over, -1, *running), failures)
    earlier = bool(replaced or broken) or any(over > failure.call for failure in failures)
    stopped = earlier and all(failure.interrupted for failure in failures)
    failed_calls: list[Fact] = []
    others = deaths + failing + stands + frozen + hang
    # some have failed, others go on or stand, in that call or an earlier one
    if any(0 <= call <= failure.call for call in running for failure in failures[:1]):
        failed_calls = _failure(failures, found)[: max(1, _MOST_LINES - len(others))]
    elif not (hang or failing or stands or stopped):
        failed_calls = _failure(failures, found)
        if failed_calls and earlier:  # other cells have ended since
            failed_calls[0] = replace(failed_calls[0], text=f"earlier: {failed_calls[0].text}")
    facts = [*broken, *caught, *deaths, *failing, *failed_calls, *stands, *frozen, *hang]
    # who waits for one that stands in the debugger has not failed
    wrong = failing or failed_calls or deaths or found.deadlocks
    failed = bool(broken or caught or wrong or (facts and not stands))
    facts += unheard
    if told and (wrong or not broken):
        if hang and not (failing or failed_calls):
            spots = list(stacks.values())
        shown = _Shown(failures if failed_calls or aborted >= 0 else [], spots, recorded, aborted)
        facts += _of_variables(session, told, shown)
    if not failed:
        facts.insert(0, Fact("nothing has failed"))
    advice = _WHERE_THEY_STAND if (failing or stands) and aborted < 0 else ""
    if failed and not earlier and not advice and aborted < 0:
        advice = _advice(failures, found)
    return Explanation(found.title, tuple(facts[:_MOST_LINES]), advice, failed)


@dataclass(frozen=True)
class _Shown:
    """What is explained: the failed calls, the places where workers stand for a failure, all
    failed calls that are recorded, and the call that was ended while they stood, or -1."""

    failures: Sequence[Failure]
    spots: Sequence[Sequence[tuple[str, int]]]
    recorded: Sequence[Failure]
    aborted: int


def _of_variables(session: Session, told: Mapping[int, Any], shown: _Shown) -> list[Fact]:
    """What is recorded of the variables, as far as it has to do with what failed."""
    ranks = sorted(told)
    records = Records(
        entries={rank: told[rank][1] for rank in ranks},
        last={rank: told[rank][2] for rank in ranks},
        joined={rank: told[rank][3] for rank in ranks},
    )

    def ask(names: Sequence[str]) -> dict[int, dict[str, Any] | None]:
        return session.look(prints_now, list(names), ranks=ranks, timeout=_PATIENCE)

    return differing(records, ask, _failing(told, shown))


def _failing(told: Mapping[int, Any], shown: _Shown) -> Failing | None:
    """Which calls and lines the explanation is of; None: nothing has failed."""
    causes = [failure for failure in shown.failures if not failure.victim] or shown.failures
    causes = [*(root for failure in causes if (root := _root(failure))), *causes]
    stacks = [[(file, line) for file, line, _ in f.frames] for f in causes] + list(shown.spots)
    stacks = [stack for stack in stacks if stack]
    if not stacks:
        return None
    call = max(shown.aborted, *(f.call for f in causes), *(told[r][4] for r in told if not causes))
    missing: dict[str, list[int]] = {}
    for failure in causes:
        name = _NOT_DEFINED.fullmatch(failure.message.partition(". ")[0])
        if failure.type_name == "NameError" and name:
            missing.setdefault(name[1], []).append(failure.rank)
    return Failing(
        call,
        stacks[0][0][0],
        tuple(dict.fromkeys(spot for stack in stacks for spot in stack if is_user_file(spot[0]))),
        apart=bool(causes) and len({failure.rank for failure in causes}) < len(told),
        missing=missing,
        before=tuple({f.call for f in shown.recorded if f.call < call and not f.interrupted}),
    )


def _last_failures(session: Session, recorded: Sequence[Failure]) -> list[Failure]:
    """Of the last call that failed, one a worker; the workers' own record, or what was raised."""
    known = [*recorded, *session.last_failures]
    # what was queued behind a call that was stopped never began, and tells nothing
    begun = [failure for failure in known if failure.frames or not failure.interrupted] or known
    last = max((failure.call for failure in begun), default=-1)
    by_rank = {failure.rank: failure for failure in reversed(known) if failure.call == last}
    return [by_rank[rank] for rank in sorted(by_rank)]


# -- who is dead, or hangs ------------------------------------------------------------------------


def _cell(failures: Sequence[Failure], stacks: Iterable[Sequence[tuple[str, int]]]) -> str:
    """The cell or script that runs, or that failed last; "" if that is not known."""
    files = [stack[0][0] for stack in stacks] + [f.frames[0][0] for f in failures if f.frames]
    return next((cell_of(file) for file in files if is_user_file(file)), "")


def _deaths(session: Session, workers: Sequence[WorkerStatus], cell: str) -> list[Fact]:
    """How workers have died, what they ran, and the last line that they have put out."""
    facts = []
    for rank in [status.rank for status in workers if status.state == "dead"]:
        text, _, output = session._deaths([rank]).partition("; its last output:\n")
        text = text.partition("\n")[0]
        lines = [line for line in output.splitlines() if line.startswith("    ")]
        more = f"; its last line of output: {_brief(lines[-1].strip())}" if lines else ""
        facts.append(Fact(text + more, cell if text.endswith(_IN_THE_CELL) else ""))
    return facts


def _replaced(failures: Sequence[Failure], workers: Sequence[WorkerStatus]) -> list[int]:
    """The workers of whose death a failure tells, and whose place another one has now."""
    lives = [one.rank for one in workers if one.state not in ("dead", "ended")]
    return [rank for rank in lives if any(_tells_death(f.message, rank) for f in failures)]


def _tells_death(message: str, rank: int) -> bool:
    return re.search(rf"^\s*worker {rank}: has died", message, re.MULTILINE) is not None


def _unheard(
    workers: Sequence[WorkerStatus], told: Mapping[int, Any], cell: str
) -> tuple[list[Fact], list[Fact]]:
    """Who does not run, as is known; and whose record is not told, as they have not answered."""
    silent = [one for one in workers if one.rank not in told and one.state not in _GONE]
    frozen = [one for one in silent if _FROZEN in one.detail]
    facts = [Fact(f"worker {one.rank} {one.detail}", cell) for one in frozen]
    ranks = [one.rank for one in silent if one not in frozen]
    if not ranks:
        return facts, []
    verb = "has" if len(ranks) == 1 else "have"
    words = f"{verb} not answered in {_PATIENCE:g} s: what is recorded there is not told"
    return facts, [Fact(f"{name_ranks(ranks)} {words}")]


def _standing(
    session: Session, last: int
) -> tuple[list[Fact], list[Fact], list[list[tuple[str, int]]], int]:
    """Who stands where in the debugger, and why: where something has failed, and elsewhere.

    And the stacks of the former, ``(file, line)`` from the outermost frame on. If none stands any
    more, since the `last` call was ended while they stood for a failure: that, and its ordinal.
    """
    debugger = known_debugger(session)
    stop, aborted = None, -1
    if debugger is not None and debugger.is_paused:
        stop = debugger.stop
    elif debugger is not None and debugger.aborted is not None and debugger.aborted[0] >= last:
        aborted, stop = debugger.aborted
    groups: dict[tuple[str, str, str], list[int]] = {}
    spots = []
    for worker in stop.workers if stop is not None else ():
        if worker.state == PAUSED:
            here = place(worker.stack[-1].file, worker.stack[-1].line) if worker.stack else ""
            note = _brief(worker.note)
            if worker.error:
                note += f"; its condition raised {_brief(worker.error)}"
            groups.setdefault((worker.reason, note, here), []).append(worker.rank)
            if worker.reason in _FAILED_THERE:
                spots.append([(spot.file, spot.line) for spot in worker.stack])
    failing, stands = [], []
    for (reason, note, site), ranks in groups.items():
        if reason in _FAILED_THERE:
            failing.append(Fact(f"{name_ranks(ranks)}{_FAILED_THERE[reason]}{note}", site))
            continue
        if aborted >= 0:
            continue
        verb, why = "stands" if len(ranks) == 1 else "stand", note or reason
        text = f"{name_ranks(ranks)} {verb} in the debugger" + (f": {why}" if why else "")
        stands.append(Fact(text, site))
    return failing, stands, spots, aborted if failing else -1


def _brief(words: str) -> str:
    """The first line, "…" behind it if that is not all."""
    head, more, _ = words.strip().partition("\n")
    return head[:_MOST_WORDS] + (" …" if more or len(head) > _MOST_WORDS else "")


def _hang(
    found: Diagnosis, stacks: Mapping[int, Sequence[tuple[str, int]]], ended: Collection[int]
) -> list[Fact]:
    """Who waits for whom now, and what those do that are waited for; nothing of who has ended."""
    facts: list[Fact] = []
    edges: dict[Any, list[Edge]] = {}
    for edge in found.waits:
        if not edge.doing and edge.rank not in ended:
            edges.setdefault((edge.whom, edge.what, edge.site), []).append(edge)
    waited = {rank for edge in found.waits for rank in edge.whom}
    waiting = {edge.rank for edge in found.waits}
    busy: dict[tuple[str, str], list[WorkerStatus]] = {}
    for status in found.workers:
        if status.state == "idle" or status.state in _GONE or status.rank in waiting:
            continue
        if (edges and status.rank not in waited) or status.detail.startswith(STANDS):
            continue
        if _FROZEN in status.detail or status.rank in ended:
            continue
        site = place(*stacks[status.rank][-1]) if status.rank in stacks else ""
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


def _not_compiled(session: Session, failures: Sequence[Failure]) -> list[Fact]:
    """The cell that never ran, if nothing has failed since."""
    broken = session.not_compiled
    if broken is None or any(failure.call >= broken.call for failure in failures):
        return []
    words = f"{broken.command} could not be compiled, nothing ran: {broken.headline}"
    return [Fact(words, _place_of(broken))]


def _failure(failures: Sequence[Failure], found: Diagnosis) -> list[Fact]:
    if not failures:
        return []
    stopped = [failure for failure in failures if failure.interrupted]
    causes = [f for f in failures if not f.victim and not f.interrupted]
    dead = {status.rank for status in found.workers if status.state == "dead"}
    replaced = _replaced(failures, found.workers)
    led = [root for f in failures if not f.interrupted and (root := _told_before(f))]
    together: dict[Any, list[Failure]] = {}
    for number, group in enumerate(fold([*led, *causes])):
        first = group[0]
        # where collectives don't fit all are told the same
        key: Any = first.headline if first.type_name in _ACCOUNTED else number
        if first.type_name not in _ACCOUNTED and not _is_out_of_memory(first):
            root = _root(first)
            key = first.type_name, _place_of(first), root and (root.type_name, _place_of(root))
        together.setdefault(key, []).extend(group)
    facts: list[Fact] = []
    groups = sorted(together.values(), key=lambda alike: _follows(alike[0]))
    most = _MOST_CAUSES if len(groups) > _MOST_CAUSES + 1 else len(groups)
    for alike in groups[:most]:
        facts += _cause(alike, dead, replaced)
    if groups[most:]:
        ranks = [failure.rank for alike in groups[most:] for failure in alike]
        words = f"{name_ranks(ranks)} raised {len(groups[most:])} other errors"
        facts.append(
            Fact(words, cell_of(groups[most][0].frames[0][0]) if groups[most][0].frames else "")
        )
    victims = [f for f in failures if f.victim and not f.interrupted]
    late = [f.headline.partition(" waiting for ")[2] for f in causes if f.type_name == _LATE]
    given_up = [title.partition("\n")[0] for title in late if title]
    # of whom the account of one that gave up has told whether they had come
    victims = [f for f in victims if not any(title in f.headline for title in given_up)]
    for group in fold(victims):
        ranks = [failure.rank for failure in group]
        what = group[0].headline.splitlines()[0].removeprefix("CollectiveAborted: ")
        whose = {f.rank for f in [*led, *causes]}.difference(ranks)
        whom = f" for {name_ranks(whose)}" if whose else ""
        what = what.partition(" can't complete")[0]
        facts.append(Fact(f"{name_ranks(ranks)} waited{whom} in {what}", _place_of(group[0])))
    if stopped:
        facts += _stopped(stopped, found, _cell(failures, []))
    return facts


def _caught(found: Diagnosis, call: int, failures: Sequence[Failure]) -> list[Fact]:
    """Collectives of the last cell that did not fit, where the cell has caught their errors."""
    if any(failure.call >= call for failure in failures):
        return []
    facts: list[Fact] = []
    for one in found.rounds:
        alike: dict[str, list[Entry]] = {}
        for entry in one.entries:
            if entry.state == FAILED:
                alike.setdefault(entry.what, []).append(entry)
        if one.ordinal == call and one.number is not None and len(alike) > 1:
            what = f"collective #{one.number} in {name_ranks(one.group)}: members disagree"
            sites = [group[0].site for group in alike.values()]
            facts.append(Fact(f"{what}, and the error was caught", sites[0]))
            facts += [
                Fact(f"{name_ranks(entry.rank for entry in group)}: called {words}", site)
                for (words, group), site in zip(alike.items(), sites, strict=True)
            ]
    return facts


def _root(failure: Failure) -> Failure | None:
    """The first of the errors that led to a failure, as a failure of its own; None: none did.

    What a library has met and handled, at no line of the user's, is not told.
    """
    for frames, details, relation in failure.earlier:
        users = any(is_user_file(file) for file, *_ in frames)
        if users or relation == CAUSED:
            # of a syntax error the place comes first
            text = "\n".join(details[-1:] if details[0].startswith(" ") else details)
            name, _, message = text.partition(": ")
            return replace(
                failure,
                type_name=name,
                message=message,
                frames=frames if users else failure.frames,
                details=details,
                earlier=(),
                victim=False,
            )
    return None


def _told_before(failure: Failure) -> Failure | None:
    """What led to a failure, where one of the two is a collective's, and so has facts of its own.

    As where one worker has left the others for a `finally`, and calls another collective there.
    """
    root = _root(failure)
    if root is None or root.type_name == _ABORTED:
        return None
    collective = failure.victim or failure.type_name in _ACCOUNTED
    return root if collective != (root.type_name in _ACCOUNTED) else None


def _follows(failure: Failure) -> bool:
    """Whether it was raised where the failure of another worker was handled."""
    root = _root(failure)
    return root is not None and root.type_name == _ABORTED


def _cause(group: Sequence[Failure], dead: Collection[int], replaced: Sequence[int]) -> list[Fact]:
    """What a failure is, in a line; of collectives that don't fit also what each member did."""
    first = group[0]
    ranks = name_ranks(failure.rank for failure in group)
    head, *more = first.headline.splitlines() or [first.type_name]
    where = _place_of(first)
    if first.type_name in _ACCOUNTED:
        lines = [line.strip() for line in more if line.strip()][:4]
        # of the dead it is told anyway how they died
        lines = [line for line in lines if not any(_tells_death(line, rank) for rank in dead)]
        accounts = [_account(line, where, replaced) for line in lines]
        if first.type_name == "CollectiveError":
            return [Fact(_brief(head.removeprefix("CollectiveError: ")), where), *accounts]
        if accounts:
            return [Fact(f"{ranks} {_brief(head.removeprefix(f'{_LATE}: '))}", where), *accounts]
    head = _brief(first.headline)
    if _is_out_of_memory(first):
        return [Fact(f"{ranks} ran out of memory: {head}", where)]
    if (root := _root(first)) is not None and _told_before(first) is None:
        where = _place_of(root)
    by_words: dict[str, list[int]] = {}
    for failure in group:
        by_words.setdefault(_with_root(failure), []).append(failure.rank)
    words = list(by_words)
    if len(words) < 3:
        return [Fact(f"{name_ranks(of)} raised {one}", where) for one, of in by_words.items()]
    own = "each with words of its own" if len(words) == len(group) else f"in {len(words)} wordings"
    return [Fact(f"{ranks} raised {first.type_name}, {own}: {_brief(first.message)}", where)]


def _with_root(failure: Failure) -> str:
    """``RuntimeError: no such key at Cell In[3], line 4, from KeyError: 'k'``."""
    head, root = _brief(failure.headline), _root(failure)
    if root is None or _told_before(failure) is not None:
        return head
    if head.endswith(f": {_brief(root.headline)}"):  # of a remote call, raised at another line
        return head
    caused = all(relation == CAUSED for *_, relation in failure.earlier)
    how = "from" if caused else "while handling"
    return f"{head} at {_place_of(failure)}, {how} {_brief(root.headline)}"


def _account(line: str, where: str, replaced: Sequence[int]) -> Fact:
    """What a member did, and where: ``worker 2: called barrier at Cell In[3], line 4, in f``.

    Of one that was at no place of its own, the cell or file of `where`, in which the others were.
    """
    text, at, site = line.rpartition(" at ")
    if at and _SITE.search(site):
        return Fact(text, site.removesuffix(", in <module>"))
    if any(_tells_death(line, rank) for rank in replaced):
        line += "; another worker has its place now"
    return Fact(line, _SITE.sub("", where))


def _is_out_of_memory(failure: Failure) -> bool:
    if failure.type_name in ("MemoryError", "OutOfMemoryError"):
        return True
    words = failure.message.lower()
    return failure.type_name == "RuntimeError" and any(text in words for text in _OUT_OF_MEMORY)


def _stopped(stopped: Sequence[Failure], found: Diagnosis, cell: str) -> list[Fact]:
    """Where workers were when they were stopped, and who had not come to a collective.

    One that was at no line of the user's, as where the cell was yet compiled, was in the `cell`.
    """
    rounds = [one for one in found.rounds if one.ordinal == stopped[0].call]
    rounds = [one for one in rounds if _with(one, STOPPED)]
    waiting = [rank for one in rounds for rank in _with(one, STOPPED)]
    absent = [rank for one in rounds for rank in _with(one, MISSING)]
    facts = []
    groups: dict[tuple[str, str], list[int]] = {}
    for failure in stopped:
        if failure.rank not in waiting:
            known = failure.call_site or any(is_user_file(file) for file, *_ in failure.frames)
            key = (_place_of(failure), "") if known else (cell, " (no line is known)")
            groups.setdefault(key, []).append(failure.rank)
    for (site, unknown), ranks in groups.items():
        outside = ", outside any collective" if set(ranks) <= set(absent) else ""
        verb = "was" if len(ranks) == 1 else "were"
        facts.append(Fact(f"{name_ranks(ranks)} {verb} stopped{outside}{unknown}", site))
    for one in sorted(rounds, key=lambda one: bool(_with(one, MISSING))):  # who is waited for first
        ranks, missing = _with(one, STOPPED), _with(one, MISSING)
        entry = next(entry for entry in one.entries if entry.state == STOPPED)
        verb = "waited" if missing else "was in" if len(ranks) == 1 else "were in"
        whom = f" for {name_ranks(missing)} in" if missing else ""
        facts.append(Fact(f"{name_ranks(ranks)} {verb}{whom} {entry.what}", entry.site))
    return facts


def _with(one: Round, state: str) -> list[int]:
    return [entry.rank for entry in one.entries if entry.state == state]


def _place_of(failure: Failure) -> str:
    """The innermost of the user's lines."""
    frames = [frame for frame in failure.frames if is_user_file(frame[0])] or failure.frames
    return place(frames[-1][0], frames[-1][1]) if frames else failure.call_site


# -- in words --------------------------------------------------------------------------------------


def _advice(failures: Sequence[Failure], found: Diagnosis) -> str:
    """What to look at next."""
    if any(status.state == "dead" for status in found.workers):
        return "%disco_restart -t RANK starts a new worker in its place"
    if found.waits or found.deadlocks:
        return "%disco_doctor shows the last collectives, Stop ends the workers' cell"
    causes = sorted((f for f in failures if not f.victim and not f.interrupted), key=_follows)
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

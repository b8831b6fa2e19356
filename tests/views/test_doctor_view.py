"""The doctor: what it finds in real sessions, and how that is drawn."""

import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.ccl.backends import local
from discolab.ccl.backends.gloo import GlooBackend
from discolab.ccl.board.rounds import Entry, Round
from discolab.ccl.doctor import Diagnosis, Edge, Parcel, doctor, forget
from discolab.engines import ThreadedSession
from discolab.runtime import (
    ArgumentError,
    CollectiveAborted,
    WorkerError,
    WorkerStatus,
    current_worker,
)
from discolab.runtime.interrupts import shield
from discolab.views import doctor_parts, render_html, render_text

DURATION = re.compile(r"\d+(\.\d+)?(e-\d+)? m?s\b")
PLACE = re.compile(r"\S*test_doctor_view\.py:\d+")


@pytest.fixture
def four() -> Iterator[ThreadedSession]:
    """Four workers in one group."""
    session = ThreadedSession(4, devices="cpu", timeout=20)
    session.name = "sess"
    yield session
    session.shutdown(cancel=True)


def rank() -> int:
    return current_worker().rank


def drawn(found: Diagnosis) -> list[str]:
    """The text without durations, lines and widths of columns."""
    text = PLACE.sub("FILE", DURATION.sub("TIME", repr(found)))
    return [re.sub(r" {2,}", "  ", line) for line in text.split("\n")]


def collectives(found: Diagnosis) -> list[str]:
    lines = drawn(found)
    first = lines.index("the last collectives, oldest first") + 2
    ends = [i for i, line in enumerate(lines) if i > first and not line.startswith(" ")]
    return [line.strip() for line in lines[first : ends[0] if ends else None]]


def fails(sess: ThreadedSession, func: Callable[[], Any]) -> None:
    with pytest.raises(WorkerError):
        sess.call_packed(func).debug_get_from_all()
    sess.sync_all()


def until_waiting(sess: ThreadedSession, count: int) -> None:
    deadline = time.monotonic() + 20
    while sum(status.state == "waiting" for status in sess.status()) < count:
        assert time.monotonic() < deadline, sess.status()
        time.sleep(0.005)


# -- real sessions ---------------------------------------------------------------------------


def test_nothing_yet(four: ThreadedSession) -> None:
    assert drawn(doctor(four)) == [
        "doctor · sess: 4 workers (threads)",
        "nobody waits; no collective to show",
    ]


def some() -> None:
    x = torch.ones(4)
    ccl.all_reduce(x, "max")
    ccl.all_gather(x, group=[rank() // 2 * 2, rank() // 2 * 2 + 1])
    if rank() == 0:
        for _ in range(2):
            ccl.send(x, 3, tag=7)
    ccl.barrier()


def test_all_is_well(four: ThreadedSession) -> None:
    four.call_packed(some)
    four.sync_all()
    assert drawn(doctor(four)) == [
        "doctor · sess: 4 workers (threads)",
        "nobody waits; the last collectives are done",
        "sent, not received",
        "  worker 0 → worker 3  float32[4] with tag 7, sent at FILE, in some  2 times",
        "the last collectives, oldest first",
        "  rank  #  collective  among  state  called at",
        "  [0-3]  1  all_reduce(max) of float32[4]  0-3  done  FILE, in some · TIME",
        "  [0,1]  1  all_gather of float32[4]  0,1  done  FILE, in some · TIME",
        "  0  send to worker 3 of float32[4]  done  FILE, in some · TIME",
        "  0  send to worker 3 of float32[4]  done  FILE, in some · TIME",
        "  [2,3]  1  all_gather of float32[4]  2,3  done  FILE, in some · TIME",
        "  [0-3]  2  barrier  0-3  done  FILE, in some · TIME",
    ]


def test_what_to_look_at(four: ThreadedSession) -> None:
    four.call_packed(some)
    four.sync_all()
    assert len(collectives(doctor(four, n=1))) == 1
    assert len(collectives(doctor(four, n=2))) == 4  # worker 0: its send; 1, 2, 3: all_gather
    assert [line[:5] for line in collectives(doctor(four, ranks="1"))] == [
        "[0-3]",
        "[0,1]",
        "[0-3]",
    ]
    only = doctor(four, group=[2, 3])
    assert [one.group for one in only.rounds] == [(2, 3)]
    assert len(doctor(four, group="world").rounds) == 4  # messages are among all
    four.mesh(dp=2, tp=2)
    assert [one.group for one in doctor(four, group="tp").rounds] == [(0, 1), (2, 3)]
    assert doctor(four, group="dp").rounds == ()
    assert doctor(four, ranks="dp=1,tp=0").workers[0].rank == 2
    for wrong in ({"n": 0}, {"n": True}, {"ranks": "9"}, {"group": "pp"}):
        with pytest.raises(ArgumentError):
            doctor(four, **wrong)
    with pytest.raises(ArgumentError, match="a session, got 'sess'"):
        doctor("sess")  # type: ignore[arg-type]
    forget(four)
    assert doctor(four).rounds == ()


def one_is_away() -> None:
    ccl.barrier()
    if rank() == 2:
        time.sleep(30)
    ccl.all_reduce(torch.ones(2))


def test_during_a_hang(four: ThreadedSession) -> None:
    four.call_packed(one_is_away)
    until_waiting(four, 4)
    deadline = time.monotonic() + 20
    while len((found := doctor(four)).waits) < 3:  # one may not have left the barrier yet
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    assert drawn(found) == [
        "doctor · sess: 4 workers (threads)",
        "workers 0,1,3 wait for worker 2",
        "now",
        "  rank  state  doing",
        "  [0,1,3]  waiting  for all_reduce #2 of float32[2] in workers 0-3 (missing: worker 2) in "
        "call of 'one_is_away' (called at FILE)",
        "  2  waiting  for time.sleep(30) in call of 'one_is_away' (called at FILE) at FILE",
        "who waits for whom",
        "  workers 0,1,3 → worker 2  in all_reduce #2 of float32[2] in workers 0-3 at FILE, in "
        "one_is_away · for TIME",
        "the last collectives, oldest first",
        "  rank  #  collective  among  state  called at",
        "  [0-3]  1  barrier  0-3  done  FILE, in one_is_away · TIME",
        "  [0,1,3]  2  all_reduce(sum) of float32[2]  0-3  waiting  FILE, in one_is_away "
        "· for TIME",
        "  2  2  has not called it  0-3  missing  ◀",
    ]
    assert {edge.rank: edge.whom for edge in found.waits} == {0: (2,), 1: (2,), 3: (2,)}
    assert [edge.rank for edge in doctor(four, ranks="0").waits] == [0]
    assert len(doctor(four, ranks="2").waits) == 3  # all that wait for it
    forget(four)  # what waits stays
    assert [line[:7] for line in collectives(doctor(four))] == ["[0,1,3]", "2  2  h"]
    assert four.interrupt() == []
    assert drawn(doctor(four))[1] == "nobody waits; a collective was stopped"
    assert [re.sub("  FILE.*", "", line) for line in collectives(doctor(four))] == [
        "[0,1,3]  2  all_reduce(sum) of float32[2]  0-3  stopped",
        "2  2  was stopped before it called  0-3  missing  ◀",
    ]


def another_shape() -> None:
    ccl.all_reduce(torch.ones(4 + (rank() == 1)))


def another_order() -> None:
    if rank() == 3:
        ccl.barrier()
    else:
        ccl.broadcast(torch.ones(3), 2)


def halves_disagree() -> None:
    ccl.all_reduce(torch.ones(2 + rank() // 2))


def one_returns_and_one_raises() -> None:
    if rank() == 2:
        raise ValueError("boom")
    if rank() != 0:
        ccl.all_reduce(torch.ones(4))


def everybody_receives() -> None:
    ccl.recv(torch.ones(4), (rank() - 1) % 4)


@pytest.mark.parametrize(
    ("func", "lines"),
    [
        (
            another_shape,
            [
                "[0,2,3]  1  all_reduce(sum) of float32[4]  0-3  failed",
                "1  1  all_reduce(sum) of float32[5]  0-3  failed  ◀ differs",
            ],
        ),
        (
            another_order,
            [
                "[0-2]  1  broadcast of float32[3] with root worker 2  0-3  failed",
                "3  1  barrier  0-3  failed  ◀ differs",
            ],
        ),
        (
            halves_disagree,
            [
                "[0,1]  1  all_reduce(sum) of float32[2]  0-3  failed  ◀ differs",
                "[2,3]  1  all_reduce(sum) of float32[3]  0-3  failed  ◀ differs",
            ],
        ),
        (
            one_returns_and_one_raises,
            [
                "0  1  finished without it  0-3  missing  ◀",
                "[1,3]  1  all_reduce(sum) of float32[4]  0-3  failed",
                "2  1  failed before it: ValueError: boom  0-3  missing  ◀",
            ],
        ),
        (
            everybody_receives,
            [f"{r}  recv from worker {(r - 1) % 4} of float32[4]  failed" for r in range(4)],
        ),
    ],
)
def test_after_a_failure(four: ThreadedSession, func: Callable[[], None], lines: list[str]) -> None:
    fails(four, func)
    found = doctor(four)
    assert [re.sub("  FILE.*", "", line) for line in collectives(found)] == lines
    assert drawn(found)[1] == "nobody waits; a collective has failed"
    assert found.failure.startswith("worker")
    assert func.__name__ in found.failure
    four.call_packed(some)  # usable, and the failure is not shown beside what it is not about
    four.sync_all()
    assert doctor(four, n=1).failure == ""


def test_a_failure_elsewhere_is_not_told(four: ThreadedSession) -> None:
    four.call_packed(some)
    fails(four, lambda: 1 / 0)
    assert doctor(four).failure == ""


def leaves_one_after_another() -> None:
    if rank() == 3:  # it learns that the others have left before it is interrupted itself
        with shield():
            threading.Event().wait(0.3)
            with pytest.raises(CollectiveAborted) as aborted:
                ccl.all_reduce(torch.ones(3))
        raise aborted.value
    ccl.all_reduce(torch.ones(3))


def test_a_stop_is_no_failure(four: ThreadedSession) -> None:
    four.call_packed(leaves_one_after_another)
    until_waiting(four, 3)
    assert four.interrupt(timeout=20) == []
    found = doctor(four)
    assert drawn(found)[1] == "nobody waits; a collective was stopped"
    assert found.failure == ""


def test_what_has_failed_is_not_stopped_by_a_later_stop(four: ThreadedSession) -> None:
    fails(four, lambda: ccl.all_reduce(torch.ones(1 + rank() // 3)))
    before = doctor(four)
    four.call_packed(time.sleep, 30)
    until_waiting(four, 4)
    assert drawn(doctor(four))[1] == "workers 0-3 wait outside any collective; " + (
        "a collective has failed"
    )
    assert four.interrupt(timeout=20) == []
    assert doctor(four).rounds == before.rounds


def cross() -> None:
    if rank() < 2:
        ccl.recv(torch.ones(4), 1 - rank())


def test_a_deadlock_is_named(four: ThreadedSession) -> None:
    """Caught in the act: between two looks of those that wait."""
    four.call_packed(cross)
    deadline = time.monotonic() + 20
    seen: list[Diagnosis] = []
    while not seen and time.monotonic() < deadline:
        found = doctor(four)
        if len(found.waits) == 2:
            seen.append(found)
    assert seen[0].deadlocks == ((0, 1),)
    assert drawn(seen[0])[1] == "deadlock: workers 0,1 wait for each other"
    with pytest.raises(WorkerError, match="deadlock"):
        four.sync_all()


def gives_up() -> None:
    if rank() in (1, 2):
        time.sleep(0.3)
    ccl.all_reduce(torch.ones(4), timeout=0.05 if rank() == 0 else None)


def test_who_came_too_late_is_marked(four: ThreadedSession) -> None:
    fails(four, gives_up)
    assert [re.sub("  FILE.*", "", line) for line in collectives(doctor(four))] == [
        "[0,3]  1  all_reduce(sum) of float32[4]  0-3  failed",
        "[1,2]  1  all_reduce(sum) of float32[4]  0-3  late  ◀",
    ]
    assert drawn(doctor(four))[1] == "nobody waits; a collective has failed"


def sums_once() -> None:
    ccl.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("backend", "place", "doing"),
    [
        ("gloo", "discolab.ccl.backends.gloo.GlooBackend._perform", "gloo is moving the data"),
        ("local", "discolab.ccl.backends.local.perform", "worker 3 is doing it for all"),
    ],
)
def test_while_it_is_being_done(
    four: ThreadedSession, monkeypatch: pytest.MonkeyPatch, backend: str, place: str, doing: str
) -> None:
    """All have come, so nobody waits for the one that came last."""
    begun, go_on = threading.Event(), threading.Event()
    perform = GlooBackend._perform if backend == "gloo" else local.perform

    def held_back(*args: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return perform(*args)

    four.init_ccl(backend)
    monkeypatch.setattr(place, held_back)
    four.call_packed(sums_once)
    assert begun.wait(20)
    until_waiting(four, 3)
    found = doctor(four)
    go_on.set()
    four.sync_all()
    title = "all_reduce #1 of float32[2] in workers 0-3"
    lines = [re.sub(r"worker \d is", "worker 3 is", line) for line in drawn(found)]
    assert lines[1] == f"all of {title} have come; {doing}"
    edges = [line for line in lines if " → " in line]
    assert edges
    for line in edges:
        assert f" → {doing}  in {title} at FILE" in line
    assert {edge.whom for edge in found.waits} == {()}


def from_anybody() -> None:
    if rank() == 1:
        ccl.recv(torch.ones(4), timeout=20)
    else:
        time.sleep(30)


def handle() -> None:
    if rank() == 0:
        work = ccl.all_reduce(torch.ones(2), async_op=True)
        time.sleep(30)
        work.wait()
    else:
        time.sleep(30)


def test_any_sender_and_a_handle(four: ThreadedSession) -> None:
    four.call_packed(from_anybody)
    until_waiting(four, 4)
    assert drawn(doctor(four))[1] == "worker 1 waits for any of workers 0,2,3"
    four.interrupt()
    four.call_packed(handle)
    until_waiting(four, 4)
    assert doctor(four, n=1).waits == ()
    assert [e.state for e in doctor(four, n=1).rounds[-1].entries] == ["started"] + ["missing"] * 3
    four.interrupt()


def test_of_a_closed_session(four: ThreadedSession) -> None:
    four.call_packed(some)
    four.sync_all()
    four.shutdown()
    found = drawn(doctor(four))
    assert found[0] == "doctor · sess: 4 workers (threads), shut down"
    assert found[-1].startswith("  [0-3]  2  barrier")


# -- drawing ---------------------------------------------------------------------------------


def status(worker: int, state: str = "idle", detail: str = "") -> WorkerStatus:
    return WorkerStatus(worker, "cpu", state, detail, 1.0, 0)


def diagnosis(**more: Any) -> Diagnosis:
    nothing: dict[str, Any] = {"waits": (), "deadlocks": (), "messages": (), "rounds": ()}
    facts = {"title": "s", "workers": (status(0),), **nothing, "failure": "", "unseen": ()}
    return Diagnosis(**(facts | more))


def test_workers_in_other_processes() -> None:
    found = diagnosis(unseen=(1, 2, 3))
    assert drawn(found)[-1] == "workers 1-3: in another process, not seen from here"


def test_dead_workers_are_the_news() -> None:
    found = diagnosis(workers=(status(0), status(1, "dead")))
    assert drawn(found)[1] == "worker 1 died: %disco_restart starts new ones"


EVERYTHING = diagnosis(
    workers=(status(0, "waiting", "for <it>"), status(1, "running", "the cell")),
    waits=(Edge(0, (1,), False, "barrier #1 in workers 0-1", "f.py:3", 2.0),),
    messages=(Parcel(0, 1, "float32[2]", "", "<f>.py:1"),),
    rounds=(
        Round(
            0,
            1,
            (0, 1),
            "tag",
            (
                Entry(0, "barrier & more", "waiting", False, "f.py:3", 2.0),
                Entry(1, "has <not> called it", "missing", True),
            ),
        ),
    ),
    failure="worker 1 failed: <boom>\n  in two lines",
    unseen=(2,),
)


def test_html_says_what_text_says() -> None:
    part = doctor_parts(EVERYTHING)
    html = render_html(part)
    assert "<boom>" not in html
    body = unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html))
    for word in re.findall(r"[^\s\[\]]+", render_text(part)):
        assert word in body, word
    assert EVERYTHING._repr_mimebundle_()["text/html"] == html
    assert html.count('class="e"') >= 3  # who is waited for, missing, and its mark


def test_who_is_missing_stands_at_its_collective() -> None:
    """Rows of several collectives that read the same are not joined, neighbours or not."""
    rounds = [
        Round(ordinal, 1, (0, 1), "", entries)
        for ordinal, missing in enumerate((1, 0, 1))
        for called in [Entry(1 - missing, "barrier", "failed", False, f"f.py:{ordinal}", 1.0)]
        for absent in [Entry(missing, "finished without it", "missing", True)]
        for entries in [(called, absent) if missing else (absent, called)]
    ]
    found = diagnosis(rounds=tuple(rounds))
    calls = [line.split()[0] for line in collectives(found)]
    assert calls == ["0", "1", "0", "1", "0", "1"]
    html = unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", render_html(doctor_parts(found))))
    assert html.count("finished without it") == 3
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, file=io.StringIO())
    console.print(found)
    assert console.file.getvalue().count("finished without it") == 3


def test_durations_end_their_lines() -> None:
    """So that they move nothing when they change."""
    for line in repr(EVERYTHING).split("\n"):
        assert not DURATION.search(line) or DURATION.search(line[-9:]), line

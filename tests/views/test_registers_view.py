"""The table of live registers: what is told of each, what is new, what leaks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from discolab import Session, current_worker
from discolab.runtime.registers import OWN
from discolab.views import render_html, render_text
from discolab.views.registers.facts import fact_of
from discolab.views.registers.registers_view import registers_parts
from discolab.views.registers.table import Held, RegisterTable, chosen, groups_of, leaks_of

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


class Holders:
    """Says for each DRef what a test wants."""

    def __init__(self) -> None:
        self.of: dict[int, Held] = {}

    def __call__(self) -> Holders:
        return self

    def get(self, key: int, default: Held) -> Held:
        return self.of.get(key, default)

    def say(self, ref: Any, *places: str, named: bool = True) -> None:
        self.of[id(ref)] = Held(places, named)


def text_of(table: RegisterTable) -> str:
    rows = chosen(table.rows, "id")
    for row in rows:
        row.made_by = re.sub(r".*test_registers_view\.py:\d+", "here", row.made_by)
    return render_text(registers_parts("registers", rows, table.rows))


def of_rank(value: Any) -> torch.Tensor:
    rank = current_worker().rank
    if rank == value:
        raise ValueError("not this one")
    return torch.zeros(2 + rank)


class Stuck:
    """Workers are in it until it is over."""

    def __init__(self, gate: Any) -> None:
        self.gate = gate

    def __call__(self) -> torch.Tensor:
        self.gate.wait(20)
        return torch.ones(5)


class Rude:
    """What no view may ask anything."""

    def __repr__(self) -> str:
        raise RuntimeError("do not ask")

    __str__ = __len__ = __bool__ = __repr__  # type: ignore[assignment]


@pytest.mark.one_process
def test_a_row_tells_what_is_there(pair: Session) -> None:
    holders = Holders()
    table = RegisterTable(pair, holders)
    x = pair.call_packed(torch.zeros, 4, 4)
    x.placements = [Shard(0), Replicate()]
    y = pair.call_packed(of_rank, 9)
    bad = pair.call_packed(of_rank, 1)
    holders.say(x, "x", "acts[3]")
    holders.say(y, "Out[5]", named=False)
    pair.peek(bad)
    table.look_well()
    row = table.get(x.reg_id)
    assert row is not None
    assert (row.type, row.layout, row.nbytes, row.total) == (
        "float32[4, 4]",
        "Shard(0), Replicate()",
        (64, 64),
        128,
    )
    assert row.ref is x
    assert row.age < 10
    assert text_of(table).splitlines() == [
        "registers · 3 live registers · 156 B · 1 poisoned",
        "  register  name    type                     layout                     bytes  total"
        "  age  made by  held by     state",
        "        r1  x       float32[4, 4]            Shard(0), Replicate()  64 B each  128 B"
        "  0 s  here     x, acts[3]  ok",
        "        r2  Out[5]  float32[2] | float32[3]                         8 B, 12 B   20 B"
        "  0 s  here                 ok",
        "        r3  -       float32[2]                                       8 B, 0 B    8 B"
        "  0 s  here     not found   poisoned on 1: ValueError: not this one",
    ]


@pytest.mark.one_process
def test_without_a_notebook_nobody_says_who_holds_what(pair: Session) -> None:
    table = RegisterTable(pair)
    x = pair.call_packed(int, 3)
    pair.sync_all()
    table.look_well()
    assert "held by" not in text_of(table)
    assert leaks_of(table.rows) == []
    assert text_of(table).startswith("registers · 1 live register · 0 B\n")
    assert "int 3" in text_of(table)
    del x


@pytest.mark.one_process
def test_an_id_that_is_given_out_again_is_another_register(pair: Session) -> None:
    table = RegisterTable(pair)
    x = pair.call_packed(torch.zeros, 2)
    pair.sync_all()
    table.look_well()
    (before,) = table.rows
    reg_id = x.reg_id
    del x
    y = pair.call_packed(torch.zeros, 3)
    assert y.reg_id == reg_id
    pair.sync_all()
    table.look_well()
    (after,) = table.rows
    assert (before.type, after.type) == ("float32[2]", "float32[3]")
    assert before is not after
    del y
    table.look_well()
    assert text_of(table) == "registers · no live registers"


@pytest.mark.one_process
def test_a_reused_id_does_not_show_the_old_value_while_workers_are_busy(
    pair: Session, gate: Any
) -> None:
    table = RegisterTable(pair)
    x = pair.call_packed(torch.zeros, 2)
    pair.sync_all()
    table.look_well()
    slow = pair.call_packed(Stuck(gate))
    del x
    y = pair.call_packed(torch.zeros, 3)
    began = time.monotonic()
    table.look_well(0.2)
    assert time.monotonic() - began < 5
    row = table.get(y.reg_id)
    assert row is not None
    assert (row.type, row.state) == ("", "pending")
    assert "2 pending" in text_of(table)
    another = RegisterTable(pair)  # which has never seen the old one
    another.look_well(0.2)
    assert [row.state for row in another.rows] == ["pending", "pending"]
    gate.set()
    pair.sync_all()
    table.look_well()
    assert [(row.type, row.state) for row in table.rows] == [
        (("float32[5]"), "ok") if row.reg_id == slow.reg_id else ("float32[3]", "ok")
        for row in table.rows
    ]


@pytest.mark.one_process
def test_nothing_new_is_no_work_and_what_changes_is_seen(pair: Session) -> None:
    table = RegisterTable(pair)
    items = pair.call_packed(list)
    number = pair.call_packed(int, 1)
    pair.sync_all()
    table.look_well()
    assert table.look() is False
    version = table.version
    assert table.look() is False
    assert table.version == version
    pair.call_without_result(list.append, items, torch.zeros(8))  # the same object, larger
    pair.sync_all()
    while table.look():
        pass
    row = table.get(items.reg_id)
    assert row is not None
    assert (row.type, row.nbytes) == ("list of 1", (32, 32))
    assert table.version > version
    number.debug_copy_from(1, 5)  # a value set past all calls
    while table.look():
        pass
    changed = table.get(number.reg_id)
    assert changed is not None
    assert changed.type == "int 1 | int 5"


@pytest.mark.one_process
def test_all_are_looked_at_again_however_many_calls_come(pair: Session) -> None:
    table = RegisterTable(pair)
    lists = [pair.call_packed(list) for _ in range(200)]
    pair.sync_all()
    table.look_well()
    for ref in lists:
        pair.call_without_result(list.append, ref, 1)
    for _ in range(20):
        pair.call_without_result(int)
        pair.sync_all()
        table.look()
    assert {row.type for row in table.rows} == {"list of 1"}


@pytest.mark.conformance
def test_workers_of_other_processes_tell_the_same(make: Callable[..., Session]) -> None:
    sess = make(2)
    table = RegisterTable(sess)
    x = sess.call_packed(torch.zeros, 16)
    bad = sess.call_packed(of_rank, 1)
    many = [sess.call_packed(torch.zeros, n + 1) for n in range(600)]  # more than one look takes
    sess.peek(bad)
    table.look_well(10)
    first, second = table.get(x.reg_id), table.get(bad.reg_id)
    assert first is not None
    assert second is not None
    assert (first.type, first.nbytes, first.state) == ("float32[16]", (64, 64), "ok")
    assert second.state == "poisoned on 1"
    assert sum(row.total for row in table.rows) == 128 + 8 + 2 * sum(4 * n for n in range(1, 601))
    del many
    table.look_well(10)
    assert len(table) == 2


@pytest.mark.one_process
def test_order_and_filter(pair: Session) -> None:
    table = RegisterTable(pair)
    refs = [pair.call_packed(torch.zeros, n) for n in (2, 9, 4)]
    for ref, name in zip(refs, ("beta", "Alpha", None), strict=True):
        ref.name = name
    pair.sync_all()
    table.look_well()

    def order(sort: str, text: str = "", backwards: bool = False) -> list[int]:
        rows = chosen(table.rows, sort, text, backwards=backwards)
        return [[ref.reg_id for ref in refs].index(row.reg_id) for row in rows]

    assert order("bytes") == [1, 2, 0]
    assert order("bytes", backwards=True) == [0, 2, 1]
    assert order("age") == order("id") == order("site") == [0, 1, 2]
    assert order("name") == [1, 0, 2]  # without a name last
    assert order("type") == [0, 2, 1]
    assert order("id", "float32 ALPHA") == [1]
    assert order("id", "nothing like it") == []


@pytest.mark.one_process
def test_what_leaks_has_no_name_or_grows_with_each_cell(pair: Session) -> None:
    holders = Holders()
    table = RegisterTable(pair, holders)
    book = pair.track_registers()
    kept: list[Any] = []

    def grow() -> None:
        kept.append(pair.call_packed(torch.zeros, 4))
        holders.say(kept[-1], f"kept[{len(kept) - 1}]")

    for cell in (3, 4):
        book.cell = cell
        grow()
    once = pair.call_packed(torch.zeros, 100)
    holders.say(once, "once")
    result = pair.call_packed(torch.zeros, 2)
    holders.say(result, "Out[4]", named=False)
    lost = pair.call_packed(torch.zeros, 1)
    pair.sync_all()
    table.look_well()
    assert {row.reg_id for row in leaks_of(table.rows)} == {result.reg_id, lost.reg_id}
    book.cell = 6
    grow()
    pair.sync_all()
    table.look_well()
    suspects = leaks_of(table.rows)
    assert once.reg_id not in {row.reg_id for row in suspects}
    first = groups_of(suspects)[0]
    assert (first.count, first.nbytes, first.unnamed, first.grows) == (3, 96, 0, True)
    assert first.by_cell == ((3, 1), (4, 1), (6, 1))
    text = render_text(registers_parts("r", suspects, table.rows, groups_of(suspects)))
    assert "5 may be leaks" in text
    assert "+1 in [3], +1 in [4], +1 in [6]  grows with each cell" in text
    assert "no name leads to it" in text
    del kept[0]
    table.look_well()
    assert len(leaks_of(table.rows)) == 2  # what is let go does not grow


@pytest.mark.one_process
def test_no_leaks(pair: Session) -> None:
    assert "nothing leaks" in render_text(registers_parts("r", [], [], []))


@pytest.mark.one_process
def test_fifty_rows_and_how_many_more(pair: Session) -> None:
    table = RegisterTable(pair)
    refs = [pair.call_packed(torch.zeros, 256) for _ in range(53)]
    pair.sync_all()
    table.look_well()
    lines = text_of(table).splitlines()
    assert lines[0] == "registers · 53 live registers · 106 KiB"
    assert len(lines) == 1 + 1 + 50 + 1
    assert lines[-1] == "and 3 more, 6 KiB"
    del refs


@pytest.mark.one_process
def test_what_was_not_read_yet_is_no_fact(pair: Session) -> None:
    table = RegisterTable(pair)
    refs = [pair.call_packed(torch.ones, 256) for _ in range(600)]
    pair.sync_all()
    assert table.look()
    states = [row.state for row in table.rows]
    assert (states.count("ok"), states.count("reading…")) == (250, 350)
    words = text_of(table).splitlines()[0]
    assert "600 live registers · at least 500 KiB · 350 reading…" in words
    while table.look():
        pass
    assert "600 live registers · 1.172 MiB" in text_of(table).splitlines()[0]
    del refs


def test_hostile_names_and_values(pair: Session) -> None:
    holders = Holders()
    table = RegisterTable(pair, holders)
    x = pair.call_packed(Rude)
    x.name = HOSTILE
    x.placements = [SimpleNamespace(dim=HOSTILE), HOSTILE, Rude()]
    failed = pair.call_packed(exec, f"raise ValueError({HOSTILE!r})")
    holders.say(failed, HOSTILE * 100)
    pair.peek(failed)
    table.look_well()
    part = registers_parts("registers", table.rows, table.rows)
    for drawn in (render_text(part), render_html(part)):
        assert "could not be drawn" not in drawn
        assert "\x1b" not in drawn
        assert "\u202e" not in drawn
        assert "Rude" in drawn
    assert "<script>" not in render_html(part)


@pytest.mark.one_process
def test_what_discolab_makes_for_itself_is_left_out(pair: Session) -> None:
    table = RegisterTable(pair)
    x = pair.call_packed(int, 1)
    x.name = OWN
    table.look_well()
    assert len(table) == 0


@pytest.mark.one_process
def test_a_session_that_was_shut_down_has_none(pair: Session) -> None:
    table = RegisterTable(pair)
    x = pair.call_packed(int, 1)
    table.look_well()
    assert len(table) == 1
    pair.shutdown()
    assert table.look() is False
    assert len(table) == 0
    del x


def test_facts() -> None:
    loop: list[Any] = [torch.zeros(2)]
    loop.append(loop)
    assert fact_of(loop) == ("list of 2", 8 * 3, "")  # as deep as it looks
    assert fact_of(torch.nn.Linear(2, 2)) == ("Linear", 24, "")
    assert fact_of(torch.nn.Parameter(torch.zeros(3))) == ("float32[3]", 12, "")
    assert fact_of(torch.zeros(10**6, device="meta")) == ("float32[1000000]", 0, "")
    assert fact_of(torch.eye(3).to_sparse()) == ("float32[3, 3]", 12, "")
    assert fact_of(torch.zeros(2, 2).numpy()) == ("ndarray float32[2, 2]", 16, "")
    assert fact_of(Rude()) == ("Rude", 0, "")
    assert fact_of(fact_of) == ("function fact_of", 0, "")
    assert fact_of("x" * 10**6) == ("str of 1000000", 0, "")
    assert fact_of(3.5) == ("float 3.5", 0, "")

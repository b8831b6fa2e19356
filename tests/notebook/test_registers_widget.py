"""``%disco_registers``: who holds what in a notebook, as a table and as a live one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from discolab import DRef, ThreadedSession
from discolab.notebook.holders import holders_of
from discolab.views.registers.table import Held

from .conftest import Kernel
from .front_end import Comm

NOBODY = Held(("not found",), False)
SIX = """
import torch
refs = [sess.call_packed(torch.zeros, n + 1) for n in range(6)]
sess.sync_all()
"""


# -- who holds what


@pytest.fixture
def refs() -> Iterator[list[DRef]]:
    with ThreadedSession(1, devices="cpu", timeout=20) as session:
        yield [session.call_packed(int, n) for n in range(6)]


class Mine(dict[str, Any]):
    """A container that must not be asked."""

    def __iter__(self) -> Any:
        raise RuntimeError("do not ask")

    items = values = keys = __iter__  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("do not ask")


def held(refs: list[DRef], **names: Any) -> list[Held]:
    found = holders_of(SimpleNamespace(user_ns=names, user_ns_hidden={"exit": 1}))
    return [found.get(id(ref), NOBODY) for ref in refs]


def test_names_and_containers_of_the_notebook(refs: list[DRef]) -> None:
    a, b, c, d, e, _ = refs
    mine = Mine(k=d)
    found = held(refs, x=a, y=a, acts=[b, {"deep": (c,)}], mine=mine, q=deque([e]))
    assert found == [
        Held(("x", "y"), True),
        Held(("acts[0]",), True),
        Held(("acts[1]['deep'][0]",), True),
        Held(("mine['k']",), True),
        Held(("q[0]",), True),
        NOBODY,
    ]


def test_results_are_no_names(refs: list[DRef]) -> None:
    a, b, *_ = refs
    found = held(refs, _oh={5: a, 6: b}, Out={5: a}, _=b, _5=a, x=b)
    assert found[:2] == [Held(("Out[5]",), False), Held(("x", "Out[6]", "_"), True)]


def test_many_holders_are_counted(refs: list[DRef]) -> None:
    found = held(refs, a=refs[0], b=refs[0], c=refs[0], d=refs[0], e=refs[0])
    assert found[0].places == ("a", "b", "c", "2 more")


def test_what_holds_itself_and_what_is_large(refs: list[DRef]) -> None:
    loop: list[Any] = [refs[0]]
    loop.append(loop)
    found = held(refs, loop=loop, big=list(range(10**6)), after=refs[1])
    assert found[0].places == ("loop[0]",)
    assert found[1].places == ("after",)  # names themselves are always looked at


def test_objects_of_the_notebooks_own_classes(refs: list[DRef]) -> None:
    kind = type("Trainer", (), {"__module__": "__main__"})
    trainer = kind()
    trainer.weight = refs[0]
    assert held(refs, trainer=trainer)[0].places == ("trainer.weight",)


# -- the magic


def test_the_table(nb: Kernel) -> None:
    nb.ok(SIX + "\nnamed = refs.pop()")
    nb.ok("sess.call_packed(torch.ones, 100)")
    nb.run("def broken():\n    raise ValueError('<b>no</b>')\nbad = sess.call_packed(broken)")
    result = nb.ok("%disco_registers")
    assert result.text.startswith("registers of sess · 8 live registers · ")
    lines = {line.split()[0]: line for line in result.text.splitlines()[2:]}
    assert "poisoned: ValueError: <b>no</b>" in next(v for v in lines.values() if " bad " in v)
    assert any("refs[2]" in line and "float32[3]" in line for line in lines.values())
    assert any("Out[" in line and "float32[100]" in line for line in lines.values())
    assert "<b>no" not in result.data[-1]["text/html"]
    assert "&lt;b&gt;no" in result.data[-1]["text/html"]
    for words in ("Cell In[", ", line 2", "named"):
        assert words in result.text


def test_its_options(nb: Kernel) -> None:
    nb.ok(SIX)
    text = nb.ok("%disco_registers --sort id --filter 'float32[3] refs'").text
    assert "1 of them match" in text
    assert "refs[2]" in text
    assert "refs[1]" not in text
    assert "invalid choice: 'size'" in nb.fails("%disco_registers --sort size").stderr
    assert "there is no session 'other'" in nb.fails("%disco_registers -s other").stderr
    assert nb.complete("%disco_registers --sort ") == [
        "age", "bytes", "id", "name", "site", "type",
    ]  # fmt: skip
    rows = nb.ok(
        "import discolab.notebook\n"
        "found = discolab.notebook.disco_registers(sort='bytes', filter='refs')\n"
        "[(row.name, row.type, row.total, row.state) for row in found.rows][0]"
    )
    assert rows.text == "('refs[5]', 'float32[6]', 96, 'ok')"


def test_leaks(nb: Kernel) -> None:
    nb.ok("import torch\nkept = []\nfine = sess.call_packed(torch.zeros, 9)")
    nb.ok("def grow():\n    kept.append(sess.call_packed(torch.zeros, 4))")
    for _ in range(3):
        nb.ok("grow()")
    nb.ok("sess.call_packed(torch.zeros, 7)")
    nb.ok("del fine; sess.sync_all()")
    text = nb.ok("%disco_registers --leaks").text
    assert "4 may be leaks" in text
    assert "grows with each cell" in text
    assert "no name leads to it" in text
    assert "float32[9]" not in text
    nb.ok("kept.clear(); _ = None")


def test_a_cell_on_the_workers_is_told_by_its_number(nb: Kernel) -> None:
    number = nb.ok("%%disco\ny = torch.ones(rank + 1)\ny").outputs[-1]["execution_count"]
    line = nb.ok("%disco_registers --filter Out").text.splitlines()[-1]
    assert f"Cell In[{number}]" in line
    assert "float32[1] | float32[2] | float32[3] | float32[4]" in line


# -- live


class Table(Comm):
    """The widget as its script has it: a window of rows."""

    kernel: Kernel
    asked = 40  # rows

    @property
    def last(self) -> dict[str, Any]:
        return self.frames[-1]

    @property
    def rows(self) -> list[list[Any]]:
        """id, moment, words, problem, named, kind of the rows in sight."""
        _, rows = self.last["windows"].get("w", (0, []))
        return list(rows)

    def names(self) -> list[str]:
        return [row[2][1] for row in self.rows]

    def press(self, name: str, row: list[Any]) -> None:
        self.command(name, id=row[0], made=row[1])

    def after(self, code: str) -> None:
        """Run a cell, and then have a frame sent: those that came meanwhile were not read here."""
        self.kernel.ok(code)
        self.asked += 1
        self.command("window", view="w", start=0, count=self.asked)

    def shows(self, ready: Callable[[], bool]) -> None:
        self.until(lambda: bool(self.frames) and ready())


@pytest.fixture
def table(nb: Kernel) -> Iterator[Table]:
    nb.ok(SIX)
    made = Table(nb, nb.ok("%disco_registers --sort id --filter refs", watched=True))
    made.kernel = nb
    made.say("open")
    made.command("window", view="w", start=0, count=40)
    made.shows(lambda: len(made.rows) == 6)
    yield made
    made.say("close")
    made.listen(0.1)
    nb.ok("refs = None")


def test_a_window_of_many_rows(nb: Kernel, table: Table) -> None:
    table.after("refs += [sess.call_packed(int, n) for n in range(3000)]; sess.sync_all()")
    table.shows(lambda: table.last["count"] == 3006)
    assert len(table.rows) == table.asked
    table.command("window", view="w", start=2990, count=30)
    table.shows(lambda: table.last["windows"]["w"][0] == 2990)
    table.shows(lambda: [row[2][2] for row in table.rows][-1] == "int 2999")
    assert len(table.rows) == 16
    table.command("window", view="w", start=-5, count=10**9)  # whatever it asks for
    table.shows(lambda: table.last["windows"]["w"][0] == 0)
    assert len(table.rows) == 200


def test_sorting_and_filtering_are_done_here(table: Table) -> None:
    table.command("sort", by="bytes", backwards=False)
    table.shows(lambda: table.last["sort"] == "bytes")
    assert table.names() == [f"refs[{n}]" for n in (5, 4, 3, 2, 1, 0)]
    table.command("sort", by="bytes", backwards=True)
    table.shows(lambda: table.last["backwards"])
    assert table.names() == [f"refs[{n}]" for n in range(6)]
    table.command("filter", text="float32[3]")
    table.shows(lambda: table.last["count"] == 1)
    assert table.names() == ["refs[2]"]
    table.command("sort", by="nonsense")
    table.until(lambda: bool(table.said))
    assert "a table is sorted by one of" in table.said[-1]["text"]


def test_what_is_the_same_is_not_sent_again(nb: Kernel, table: Table) -> None:
    table.listen(0.5)
    seen = len(table.frames)
    table.listen(0.6)
    assert len(table.frames) == seen
    table.after("refs.append(sess.call_packed(int, 77)); sess.sync_all()")
    table.shows(lambda: "refs[6]" in table.names())
    table.after("other = refs.pop()")  # no call: it has another name, that is all
    table.shows(lambda: table.last["count"] == 6)
    nb.ok("del other")


def test_it_answers_while_the_workers_and_the_notebook_are_busy(nb: Kernel, table: Table) -> None:
    busy = "import time\nrefs.append(sess.call_packed(time.sleep, 20))\ntime.sleep(2)"
    nb.client.execute(busy)
    table.shows(lambda: len(table.rows) == 7)
    assert table.rows[-1][2][8] == "pending"
    table.command("sort", by="id", backwards=True)
    table.shows(lambda: table.last["backwards"])
    table.press("free", table.rows[-1])
    table.shows(lambda: table.last["count"] == 6)
    assert table.said[-1]["type"] == "freed"
    table.press("open", table.rows[0])
    table.until(lambda: any(one["type"] == "opened" for one in table.said))
    nb.ok("sess.interrupt()")


def test_a_value_is_freed(nb: Kernel, table: Table) -> None:
    row = table.rows[2]
    table.press("free", row)
    table.shows(lambda: table.last["count"] == 5)
    assert row[2][1] not in table.names()
    error = nb.fails("refs[2] + 1")
    assert error.error["ename"] == "ArgumentError"
    assert f"register {row[0]}, was freed on all workers" in error.error["evalue"]
    assert nb.ok("(refs[3] + 1).debug_get_from_remote(0).tolist()").text == "[1.0, 1.0, 1.0, 1.0]"
    assert nb.ok("refs[2]").text == f"<DRef r{row[0]}, freed>"
    table.press("free", row)  # a second tab
    table.until(lambda: any(one["type"] == "error" for one in table.said))
    assert table.said[-1]["text"] == f"r{row[0]} is gone: nothing holds it any more"


def test_a_button_does_not_mean_a_later_register_of_that_id(nb: Kernel, table: Table) -> None:
    row = table.rows[5]
    nb.ok("refs.pop(); refs.append(sess.call_packed(int, 1)); refs[-1].reg_id")
    assert nb.ok("refs[-1].reg_id").text == str(row[0])
    table.after("pass")
    table.shows(lambda: table.rows[-1][2][2] == "int 1")
    table.press("free", row)
    table.until(lambda: bool(table.said))
    assert "is gone" in table.said[-1]["text"]
    assert nb.ok("refs[-1].debug_get_from_remote(0)").text == "1"


def test_a_row_is_opened(table: Table) -> None:
    table.press("open", table.rows[2])
    table.until(lambda: bool(table.said))
    assert table.said[-1]["type"] == "opened"
    assert "float32[3]" in table.said[-1]["html"]


def test_leaks_live(nb: Kernel, table: Table) -> None:
    table.command("filter", text="")
    table.command("leaks", on=True)
    table.shows(lambda: table.last["leaks"] and not table.last["text"])
    assert not any(name.startswith("refs") for name in table.names())
    # nothing leads to a cycle
    table.after("lost = [refs.pop()]\nlost.append(lost)\nlost = None")
    table.shows(lambda: any(row[2][1] == "-" for row in table.rows))
    assert any("no name leads to it" in group[3] for group in table.last["groups"])
    table.after("import gc; gc.collect()")
    table.shows(lambda: not any(row[2][1] == "-" for row in table.rows))


def test_after_a_restart_it_shows_the_new_session(nb: Kernel, table: Table) -> None:
    table.after("%disco_restart")
    table.shows(lambda: table.last["all"] == 0)
    table.after("refs = [sess.call_packed(int, 5)]; sess.sync_all()")
    table.shows(lambda: table.names() == ["refs[0]"])
    table.after("%disco_shutdown")
    table.shows(lambda: table.last["totals"] == "shut down")


def test_a_saved_notebook_shows_the_last_of_it(nb: Kernel, table: Table) -> None:
    result = nb.ok("refs.append(sess.call_packed(torch.zeros, 1234)); sess.sync_all()")
    assert any("float32[1234]" in shown["text/plain"] for shown in result.updates)
    assert not nb.ok("pass").updates  # nothing is new
    nb.client.execute("import time\ntime.sleep(1)\nrefs.pop()\ntime.sleep(1)")
    table.listen(1.5)
    table.say("close")  # the page is closed while a cell runs
    table.until(lambda: bool(table.displays))
    assert "float32[1234]" not in table.displays[-1]["text/plain"]


def test_a_cell_that_is_run_again_is_told_by_each_of_its_numbers(nb: Kernel) -> None:
    nb.ok("import discolab, torch\nagain = []")
    text = "again.append(sess.call_packed(torch.zeros, 5))"
    numbers = []
    for _ in range(3):
        nb.ok(text)
        number = nb.ok("print(get_ipython().displayhook.prompt_count)").stdout
        numbers.append(int(number) - 1)
    made = nb.ok(
        "found = discolab.notebook.disco_registers(sort='age', filter='again')\n"
        "[row.made_by for row in found.rows]"
    )
    assert made.text == str([f"Cell In[{number}], line 1" for number in numbers])


def test_words_that_are_none_are_refused(nb: Kernel) -> None:
    error = nb.fails("discolab.notebook.disco_registers(filter=None)")
    assert "filter is text" in error.error["evalue"]
    assert not nb.ok("import gc; _ = gc.collect()").stderr


def test_what_workers_do_after_a_cell_is_in_the_saved_notebook(nb: Kernel, table: Table) -> None:
    nb.ok("refs.append(sess.call_packed(lambda: __import__('time').sleep(0.5) or 'at last'))")
    table.until(lambda: any("str of 7" in shown["text/plain"] for shown in table.displays))

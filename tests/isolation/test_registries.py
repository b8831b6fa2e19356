"""What workers register with modules of Python is each worker's own."""

import copyreg
import csv
import io
import sqlite3
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

from discolab import Session, ThreadedSession, ccl, current_worker


@pytest.fixture
def four() -> Iterator[Session]:
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        yield sess


def test_each_worker_registers_a_dialect(four: Session) -> None:
    def program() -> Any:
        rank = current_worker().rank
        csv.register_dialect("mine", delimiter=";|,:"[rank])
        csv.register_dialect("based", "mine", lineterminator="!")
        ccl.barrier()
        text = io.StringIO()
        csv.writer(text, "based").writerow([1, 2])
        rows = list(csv.DictReader(["a;b|c,d:e", "1;2|3,4:5"], dialect="mine"))
        names = set(csv.list_dialects())
        csv.unregister_dialect("mine")
        return text.getvalue(), next(iter(rows[0])), csv.get_dialect("based").delimiter, names

    for rank, values in enumerate(four.call_packed(program).debug_get_from_all()):
        sign = ";|,:"[rank]
        assert values[:3] == (f"1{sign}2!", "a;b|c,d:e".split(sign)[0], sign)
        assert values[3] >= {"excel", "mine", "based"}
    assert "based" not in csv.list_dialects()


def test_each_worker_registers_an_adapter(four: Session) -> None:
    def program() -> Any:
        rank = current_worker().rank
        if rank < 3:
            sqlite3.register_adapter(complex, lambda value: value.real + rank)
            sqlite3.register_adapter(str, lambda value: f"{value}{rank}")
            sqlite3.register_converter("mine", lambda value: value.decode() + str(rank))
        ccl.barrier()
        connection = sqlite3.connect(":memory:", detect_types=sqlite3.PARSE_DECLTYPES)
        connection.execute("create table t (x mine, y real)")
        found: list[Any] = [connection.execute("select ?", ("s",)).fetchone()[0]]
        connection.execute("insert into t values (1, 2)")
        for command, values in (("select ?", (1j,)), ("select x from t", ())):
            try:
                found.append(connection.execute(command, values).fetchone()[0])
            except sqlite3.ProgrammingError as exc:
                found.append("engine='processes'" in str(exc))
        connection.close()
        return found

    values = four.call_packed(program).debug_get_from_all()
    assert values == [
        *([f"s{rank}", float(rank), f"1{rank}"] for rank in range(3)),
        ["s", False, True],
    ]


def test_each_worker_registers_a_reduction(four: Session) -> None:
    import pickle

    def program() -> Any:
        rank = current_worker().rank
        if rank < 3:
            copyreg.pickle(Fraction, lambda value: (int, (rank,)))  # type: ignore[arg-type]
        ccl.barrier()
        return pickle.loads(pickle.dumps(Fraction(1, 2)))

    assert four.call_packed(program).debug_get_from_all() == [0, 1, 2, Fraction(1, 2)]


def test_what_workers_registered_ends_with_them() -> None:
    def program() -> None:
        sqlite3.register_adapter(complex, lambda value: 1)
        sqlite3.register_converter("mine", bytes)
        copyreg.pickle(Fraction, lambda value: (int, ()))  # type: ignore[arg-type]

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        sess.call_packed(program).debug_get_from_all()
    assert (complex, sqlite3.PrepareProtocol) not in sqlite3.adapters  # type: ignore[attr-defined]
    assert "MINE" not in sqlite3.converters  # type: ignore[attr-defined]
    assert Fraction not in copyreg.dispatch_table

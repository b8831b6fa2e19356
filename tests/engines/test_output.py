"""What workers put out, on its way: joined, in whole lines, however much it is."""

import threading
import time

import pytest

from discolab.engines.output import LastOutput, OutputBuffer, PrintedOutput


def test_texts_of_one_stream_are_joined_and_other_things_stay_between() -> None:
    firsts: list[None] = []
    buffer = OutputBuffer(lambda: firsts.append(None))
    for item in (
        ("stdout", "a"),
        ("stdout", "b"),
        ("stderr", "c"),
        ("display", {"d": 1}, None),
        ("display", {"e": 1}, None),
        ("stdout", "f"),
    ):
        buffer.add(item)
    assert buffer.take() == [
        ("stdout", "ab"),
        ("stderr", "c"),
        ("display", {"d": 1}, None),
        ("display", {"e": 1}, None),
        ("stdout", "f"),
    ]
    assert buffer.take() == []
    assert len(firsts) == 1


def test_the_beginning_of_a_line_waits_for_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    printed = PrintedOutput()
    printed.receive(1, [("stdout", "one\ntw")])
    printed.receive(2, [("stdout", "three\n")])
    assert capsys.readouterr().out == "one\nthree\n"
    due = printed.next_look()
    assert due is not None
    printed.look()
    assert capsys.readouterr().out == ""
    printed.receive(1, [("stdout", "o\nfo")])
    assert capsys.readouterr().out == "two\n"
    printed.close()
    assert capsys.readouterr().out == "fo"
    assert printed.next_look() is None


def test_a_line_of_30_mb_takes_no_longer_than_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    printed, last = PrintedOutput(), LastOutput()
    piece = "x" * 20_000
    began = time.monotonic()
    for _ in range(1_500):
        printed.receive(1, [("stdout", piece)])
        last.add(piece)
    printed.close()
    assert time.monotonic() - began < 2  # 15 s where each piece is joined to all before it
    assert len(capsys.readouterr().out) == 30_000_000
    assert [len(line) for line in last.lines()] == [500]


def test_a_session_may_close_while_output_still_comes(capsys: pytest.CaptureFixture[str]) -> None:
    printed, failures = PrintedOutput(), []
    over = threading.Event()

    def receive() -> None:
        try:
            for number in range(20_000):
                printed.receive(number % 100, [("stdout", "x")])
        except RuntimeError as exc:
            failures.append(exc)
        over.set()

    thread = threading.Thread(target=receive)
    thread.start()
    while not over.is_set():
        printed.close()  # "dictionary changed size during iteration"
    thread.join()
    printed.close()
    assert not failures
    assert capsys.readouterr().out.count("x") > 19_000


def test_of_a_crash_the_last_lines_are_kept_as_a_terminal_shows_them() -> None:
    last = LastOutput()
    last.add("\n".join(str(n) for n in range(100)) + "\n10 %\r20 %\n\nend")
    assert last.lines()[-3:] == ["99", "20 %", "end"]
    assert len(last.lines()) == 60

"""What all widgets have in common: live while somebody looks, static for who comes later."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .conftest import Kernel
from .front_end import Comm

COUNTER = """
import itertools, threading, time
from discolab.notebook.widgets.base import LiveWidget, source
from discolab.notebook.widgets.pump import pump
from discolab.runtime.errors import DiscoError
from discolab.views import Text

class Counter(LiveWidget):
    _esm, _css = source("common.js"), source("common.css")
    def __init__(self):
        super().__init__()
        self.count, self.step, self.asked = 0, 1, 0
    def snapshot(self):
        self.asked += 1
        self.count += self.step
        return {"count": self.count}
    def static(self):
        return Text(f"counted to {'some' if self.step else self.count}")
    def command(self, name, content):
        if name == "halt":
            self.step = 0
        elif name == "slow":
            time.sleep(1)
        elif name == "broken":
            1 / 0
        else:
            super().command(name, content)
"""


@pytest.fixture(scope="module")
def kernel(lab_kernel: Kernel) -> Kernel:
    lab_kernel.ok(COUNTER)
    return lab_kernel


@pytest.fixture
def counter(kernel: Kernel) -> Iterator[Comm]:
    result = kernel.ok("counter = Counter(); counter", watched=True)
    yield Comm(kernel, result)
    kernel.ok("counter.close()")


def test_a_document_without_a_reader_gets_the_static_picture(kernel: Kernel) -> None:
    result = kernel.ok("Counter()")
    assert [sorted(data) for data in result.data] == [["text/html", "text/plain"]]
    assert result.text == "counted to some"
    assert kernel.ok("pump.running").text == "False"


def test_a_reader_gets_both(kernel: Kernel) -> None:
    result = kernel.ok("Counter()", watched=True)
    static, live = result.data
    assert "counted to some" in static["text/html"]
    assert live["text/plain"] == ""
    assert '<div class="dl-static-' in static["text/html"]  # by which the live one finds it


def test_frames_come_while_it_is_open_and_a_cell_runs(kernel: Kernel, counter: Comm) -> None:
    counter.say("open")
    counter.until(lambda: len(counter.frames) > 2)
    kernel.client.execute("time.sleep(1.5)")
    counter.listen(0.3)
    before = len(counter.frames)
    counter.listen(1.0)
    assert len(counter.frames) - before >= 5
    counts = [frame["count"] for frame in counter.frames]
    assert counts == sorted(set(counts))


def test_nothing_is_done_once_it_is_closed(kernel: Kernel, counter: Comm) -> None:
    counter.say("open")
    counter.until(lambda: bool(counter.frames))
    counter.say("open", viewer="another tab")
    counter.say("close")
    counter.listen(0.3)
    seen = len(counter.frames)
    counter.until(lambda: len(counter.frames) > seen)  # the other tab still looks
    counter.say("close", viewer="another tab")
    counter.listen(0.5)
    assert kernel.ok("pump.running").text == "False"
    asked = kernel.ok("asked = counter.asked; asked").text
    time.sleep(0.4)
    assert kernel.ok("counter.asked").text == asked


def test_what_is_the_same_is_not_sent_again(kernel: Kernel, counter: Comm) -> None:
    counter.say("open")
    counter.command("halt")
    counter.listen(0.5)
    seen = len(counter.frames)
    counter.listen(0.5)
    assert len(counter.frames) == seen
    counter.say("close")
    counter.until(lambda: bool(counter.displays))  # what a saved notebook will show
    assert counter.displays[-1]["text/plain"] == f"counted to {counter.frames[-1]['count']}"


def test_a_button_is_heard_while_a_slow_one_works(kernel: Kernel, counter: Comm) -> None:
    counter.say("open")
    counter.command("slow")
    counter.listen(0.2)
    before = len(counter.frames)
    counter.listen(0.5)
    assert len(counter.frames) > before
    counter.command("halt")
    counter.listen(1.5)
    seen = len(counter.frames)
    counter.listen(0.3)
    assert len(counter.frames) == seen
    counter.say("close")


def test_what_can_not_be_done_is_said(kernel: Kernel, counter: Comm) -> None:
    counter.say("open")
    counter.command("fly")
    counter.until(lambda: bool(counter.said))
    assert counter.said[-1] == {"type": "error", "text": "unknown command 'fly'"}
    counter.command("broken")
    counter.until(lambda: len(counter.said) > 1)
    assert "ZeroDivisionError" in counter.said[-1]["text"]
    counter.command("halt")  # the thread for buttons has outlived that
    counter.say("close")


def test_the_last_word_of_a_cell_is_shown(kernel: Kernel, counter: Comm) -> None:
    counter.say("open")
    counter.until(lambda: bool(counter.frames))
    kernel.client.execute("counter.step = 0; counter.count = 4711")
    counter.until(lambda: counter.frames[-1]["count"] == 4711)
    counter.say("close")

"""The table of devices: words for states, and what GPUs tell."""

from __future__ import annotations

from typing import Any

from discolab.views import render_html, render_text
from discolab.views.devices_view import devices_parts


def row(rank: int, **more: Any) -> dict[str, Any]:
    """A worker with a GPU of its own, in a process of its own."""
    memory = {"used": 2**30, "reserved": 2**31, "peak": 3 * 2**30, "total": 139 * 2**30}
    return {
        "rank": rank, "device": f"cuda:{rank}", "device_name": "", "host": "here",
        "pid": 100 + rank, "state": "idle", "seconds": None, "doing": "", "queued": 0,
        "waits_for": (), "any_of": False, "held_up": (), "cpu": 0.5, "rss": 2**28,
        "memory": memory, "gpu": {"utilisation": 93, "temperature": 61},
    } | more  # fmt: skip


def test_of_a_gpu_memory_load_and_warmth_are_told() -> None:
    text = render_text(devices_parts("s", [row(0)]))
    assert "1 GiB, reserved 2 GiB, peak 3 GiB, of 139 GiB" in text
    assert "93 %, 61 °C" in text
    assert "RSS" not in text


def test_a_worker_waits_in_words_not_in_colour_alone() -> None:
    waiting = row(0, state="waiting", seconds=75.0, doing="in recv", waits_for=(1, 2), any_of=True)
    text = render_text(devices_parts("s", [waiting, row(1, held_up=(3,))]))
    assert "◔ waiting  1 min  for any of workers 1,2 in recv" in text
    assert "worker 3 waits for it" in text


def test_the_dead_are_named_first_with_the_reason() -> None:
    dead = row(1, state="dead", doing="(pid 7) was killed by SIGKILL", memory=None, gpu=None)
    lines = render_text(devices_parts("s", [row(0), dead])).splitlines()
    assert lines[1:3] == [
        "worker 1 (pid 7) was killed by SIGKILL",
        "%disco_restart starts new workers",
    ]


def test_the_last_minute_is_drawn_and_a_hostile_name_escaped() -> None:
    past = [None] * 30 + [0.1] * 29 + [0.9]
    part = devices_parts("<b>", [row(0)], {0: past}, notice="<i>")
    html = render_html(part)
    assert "last minute: 10 % to 90 %" in html
    assert "<b>" not in html
    assert "<i>" not in html.replace("<i style", "")

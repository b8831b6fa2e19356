"""``%disco_devices``: what each worker does and uses, as a table and live."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Kernel
from .front_end import Comm

STRAGGLER = """%%disco -a
import time
if rank == 2:
    time.sleep(60)
ccl.all_reduce(torch.ones(4))"""


@pytest.fixture
def devices(nb: Kernel) -> Comm:
    comm = Comm(nb, nb.ok("devices = lab.disco_devices(); devices", watched=True))
    comm.say("open")
    return comm


@pytest.fixture(scope="module", autouse=True)
def the_lab(lab_kernel: Kernel) -> None:
    lab_kernel.ok("import json, os, time; from discolab import notebook as lab")


def rows(nb: Kernel) -> list[dict[str, Any]]:
    found = nb.ok("print(json.dumps(lab.disco_devices().rows))").stdout
    return list(json.loads(found))


def states(comm: Comm) -> list[str]:
    return [row["state"] for row in comm.frames[-1]["rows"]] if comm.frames else []


def test_idle_workers_are_one_line_of_text(nb: Kernel) -> None:
    result = nb.ok("%disco_devices")
    assert [sorted(data) for data in result.data] == [["text/html", "text/plain"]]
    head, columns, line, shared = result.text.splitlines()
    assert head == "devices · sess: 4 workers (threads)"
    assert columns.split() == ["rank", "device", "state", "CPU"]
    assert line.split()[:5] == ["[0-3]", "cpu", "○", "idle", "0"]
    assert shared.startswith("workers 0-3 are threads of process ")


def test_who_waits_for_whom_is_told_on_both_sides(nb: Kernel) -> None:
    nb.ok(STRAGGLER)
    nb.ok("while len(lab.disco_doctor().waits) < 3: time.sleep(0.02)")
    found = rows(nb)
    assert [row["state"] for row in found] == ["waiting"] * 4
    assert [row["waits_for"] for row in found] == [[2], [2], [], [2]]
    assert found[2]["held_up"] == [0, 1, 3]
    assert "all_reduce #1 of float32[4] in workers 0-3 at Cell In[" in found[0]["doing"]
    assert "time.sleep" in found[2]["doing"]
    text = nb.ok("%disco_devices").text
    assert "for worker 2 in all_reduce #1" in text
    assert "workers 0,1,3 wait for it" in text
    nb.ok("sess.interrupt()")


def test_a_worker_that_computes_is_seen_on_its_processor(nb: Kernel) -> None:
    nb.ok("%%disco -a\nwhile rank == 1: pass")
    row = rows(nb)[1]
    nb.ok("sess.interrupt()")
    assert row["state"] == "running"
    assert row["cpu"] > 0.2
    assert row["rss"] > 2**20
    assert row["memory"] is row["gpu"] is None


def test_it_is_live_while_cells_run(nb: Kernel, devices: Comm) -> None:
    devices.until(lambda: states(devices) == ["idle"] * 4)
    nb.client.execute("%%disco\nimport time; time.sleep(1.2)")
    devices.until(lambda: states(devices) == ["waiting"] * 4, 3)
    devices.until(lambda: states(devices) == ["idle"] * 4, 3)
    nb.client.execute("sess.call_packed(time.sleep, 0.6); time.sleep(1.5)")
    devices.until(lambda: states(devices) == ["waiting"] * 4, 3)
    devices.until(lambda: states(devices) == ["idle"] * 4, 3)
    assert any(value is not None for value in devices.frames[-1]["rows"][0]["cores"])
    devices.say("close")


def test_the_line_about_long_work_is_shown_beside_it(nb: Kernel, devices: Comm) -> None:
    devices.until(lambda: bool(devices.frames))
    result = nb.ok("lab.disco('import time; time.sleep(0.6)', progress_after=0.1)", watched=True)
    shown = [data["text/html"] for data in [*result.data, *result.updates] if "text/html" in data]
    assert any("workers 0-3 waiting for time.sleep(0.6)" in html for html in shown)
    devices.say("close")


def test_the_last_state_is_in_the_saved_notebook(nb: Kernel, devices: Comm) -> None:
    devices.until(lambda: bool(devices.frames))
    nb.client.execute("%%disco -a\nimport time; time.sleep(60)")
    devices.until(lambda: any("waiting" in shown["text/plain"] for shown in devices.displays), 5)
    devices.say("close")
    nb.ok("sess.interrupt()")


def test_it_follows_a_session_that_is_restarted(nb: Kernel, devices: Comm) -> None:
    devices.until(lambda: bool(devices.frames))
    nb.client.execute("%disco_shutdown")
    devices.until(lambda: states(devices) == ["ended"] * 4)
    assert "shut down: %disco_restart" in devices.frames[-1]["notice"]
    nb.client.execute("%disco_restart")
    devices.until(lambda: states(devices) == ["idle"] * 4)
    assert not devices.frames[-1]["notice"]
    devices.say("close")


def test_of_a_worker_that_has_died_one_reads_why(lab_kernel: Kernel) -> None:
    lab_kernel.ok("%disco_session 2 --engine processes --devices cpu --name lost")
    comm = Comm(lab_kernel, lab_kernel.ok("%disco_devices -s lost", watched=True))
    comm.say("open")
    comm.until(lambda: states(comm) == ["idle", "idle"])
    assert not comm.frames[-1]["shared"]
    assert comm.frames[-1]["rows"][1]["memory"]
    lab_kernel.client.execute("os.kill(lost.processes()[1], 9)")
    comm.until(lambda: states(comm)[1:] == ["dead"])
    assert "SIGKILL" in comm.frames[-1]["dead"][0]
    comm.say("close")
    comm.until(lambda: bool(comm.displays))
    assert "worker 1 (pid " in comm.displays[-1]["text/plain"]
    lab_kernel.ok("%disco_shutdown lost")


def test_a_session_that_is_not_there_is_named(nb: Kernel) -> None:
    error = nb.fails("%disco_devices -s nobody").stderr
    assert error.startswith("UsageError: there is no session 'nobody' (running: ")


def test_without_a_session_it_says_how_to_start_one(bare_kernel: Kernel) -> None:
    bare_kernel.ok("%load_ext discolab")
    for magic in ("%disco_devices", "%disco_timeline"):
        assert "start one with %disco_session" in bare_kernel.fails(magic).stderr

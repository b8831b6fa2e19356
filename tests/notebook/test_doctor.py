"""``%disco_doctor`` in a kernel: during a hang, after stop, after a failure, and with nothing."""

from __future__ import annotations

from typing import Any

HINT = "%disco_doctor shows the last collectives of each worker"
STUCK = "%%disco -a\nimport time\nif rank == 2:\n    time.sleep(60)\nccl.all_reduce(torch.ones(4))"
UNTIL_STUCK = (
    "import time\n"
    "while any(status.state != 'waiting' for status in sess.status()):\n"
    "    time.sleep(0.01)\n"
)


def test_cells_are_named_by_the_number_in_front_of_them(nb: Any) -> None:
    number = nb.ok("%disco_doctor").outputs[-1]["execution_count"]
    assert f"Cell In[{number + 1}], line 2" in nb.fails("%%disco\n1 / 0").traceback


def test_without_a_session(bare_kernel: Any) -> None:
    bare_kernel.ok("%load_ext discolab")
    error = bare_kernel.fails("%disco_doctor").stderr
    assert "no session is running: start one with %disco_session 4" in error
    assert "Traceback" not in error
    bare_kernel.ok("%disco_session 2 --devices cpu")
    assert "nobody waits; no collective to show" in bare_kernel.ok("%disco_doctor").text
    bare_kernel.ok("%disco_shutdown")
    assert "was shut down" in bare_kernel.fails("%disco_doctor").stderr
    bare_kernel.ok("%unload_ext discolab")


def test_during_a_hang_and_after_its_interrupt(nb: Any) -> None:
    nb.ok(STUCK)
    result = nb.ok(UNTIL_STUCK + "%disco_doctor")
    assert result.seconds < 20
    assert "workers 0,1,3 wait for worker 2" in result.text
    assert "workers 0,1,3 → worker 2" in result.text
    assert "for time.sleep(60) in the cell" in result.text
    assert ", line 5 · for " in result.text
    assert "<table" in result.data[-1]["text/html"]
    stopped = nb.ok("sess.interrupt()\n%disco_doctor")
    assert stopped.text.split("\n")[1] == "nobody waits; a collective was stopped"
    assert stopped.stderr == ""  # who interrupts knows it
    assert nb.ok("%%disco\nprint(int(ccl.all_reduce(torch.tensor(1))))").stdout == "[0-3] 4\n"


def test_after_stop(nb: Any) -> None:
    nb.fails(STUCK.replace(" -a", ""), interrupt_after=1)
    text = nb.ok("%disco_doctor").text
    assert "was stopped before it called" in text
    assert "wait for" not in text


def test_after_a_failure_with_a_hint(nb: Any) -> None:
    result = nb.fails("%%disco\nccl.all_gather(torch.ones(2 + rank // 3))")
    assert result.traceback.endswith("\n" + HINT)
    assert result.traceback.count(HINT) == 1
    assert HINT not in result.error["evalue"]
    text = nb.ok("%disco_doctor").text
    assert "float32[3]" in text
    assert "◀ differs" in text
    assert "the last failure" in text
    nb.ok("import torch")  # and from an ordinary cell
    nb.ok(
        "def shapes():\n    import discolab as d\n"
        "    d.ccl.all_reduce(torch.ones(1 + d.current_worker().rank))"
    )
    assert nb.fails("sess.call_packed(shapes).debug_get_from_all()").traceback.endswith(HINT)


def test_no_hint_where_a_collective_is_not_the_cause(nb: Any) -> None:
    assert HINT not in nb.fails("%%disco\n1 / 0").traceback
    result = nb.fails("%%disco\nif rank == 1:\n    raise ValueError('boom')\nccl.barrier()")
    assert "ended because of it" in result.traceback
    assert HINT not in result.traceback
    assert "failed before it: ValueError: boom" in nb.ok("%disco_doctor").text


def test_hint_for_a_cell_in_the_background(nb: Any) -> None:
    nb.ok("run = get_ipython().run_cell_magic('disco', '-a', 'ccl.barrier() if rank else None')")
    result = nb.ok("import time\nwhile not run.ready():\n    time.sleep(0.01)")
    assert result.stderr.startswith("in the background: workers 1-3 failed in the cell")
    assert result.stderr.endswith(f"\n{HINT}\n")


def test_options(nb: Any) -> None:
    nb.ok("%disco_mesh dp=2,tp=2")
    nb.ok("%%disco\nfor axis in ('tp', 'dp'):\n    ccl.barrier(group=axis)\nccl.barrier()")
    assert nb.ok("%disco_doctor").text.count("barrier") == 5
    assert nb.ok("%disco_doctor -n 1").text.count("barrier") == 1
    assert nb.ok("%disco_doctor -t 0 -n 3").text.count("barrier") == 3
    assert nb.ok("%disco_doctor --group tp").text.count("barrier") == 2
    assert nb.ok("%disco_doctor --group world -s sess").text.count("barrier") == 1
    assert nb.ok("%disco_doctor --group 1,3 --clear").text.count("barrier") == 1
    assert "no collective to show" in nb.ok("%disco_doctor").text
    assert "1 or more" in nb.fails("%disco_doctor -n 0").stderr
    assert "out of range" in nb.fails("%disco_doctor -t 9").stderr
    assert "did you mean --group" in nb.fails("%disco_doctor --gruop tp").stderr


def test_help_and_completion(nb: Any) -> None:
    result = nb.ok("%disco_doctor --help")
    assert "works during a hang" in result.stdout
    assert "--clear" in result.stdout
    assert "never waits" in nb.ok("%disco_status --help").stdout
    result = nb.ok("%%disco --help\nprint('not run')")
    assert "--targets" in result.stdout
    assert "not run" not in result.stdout
    assert "%disco_doctor" in nb.complete("%disco_d")
    assert set(nb.complete("%disco_doctor --")) >= {"--group", "--clear", "--targets"}
    assert nb.complete("%disco_doctor --group ") == ["world"]
    nb.ok("%disco_mesh dp=2,tp=2")
    assert nb.complete("%disco_doctor --group t") == ["tp"]
    assert nb.complete("%disco_doctor -t tp=") == ["tp=0", "tp=1"]
    nb.ok("from discolab.notebook import disco_doctor")
    assert nb.ok("disco_doctor(2)").text.startswith("doctor · sess: 4 workers (threads)")

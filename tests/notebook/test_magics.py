"""The magics and their options, and what is said when something is wrong with them."""

from __future__ import annotations

import re
from typing import Any


def test_without_a_session_the_way_to_start_one_is_told(bare_kernel: Any) -> None:
    nb = bare_kernel
    nb.ok("%load_ext discolab")
    for code in ("%%disco\n1", "%disco 1", "%disco_pull x", "%disco_restart"):
        assert "%disco_session 4" in nb.fails(code).stderr
    assert "%disco_session 4" in nb.ok("%disco_status").stdout
    assert "%disco_session 4" in nb.fails("%disco_session").stderr


def test_a_session_says_what_it_bound(nb: Any) -> None:
    result = nb.ok("%disco_session 2 --devices cpu --name 'pair'")
    assert result.stdout == (
        "pair: workers 0-1 on cpu (threads, local collectives); names in %%disco: "
        "rank, world_size, device, worker, ccl, torch, dist, rpc, disco_assert\n"
    )
    assert nb.ok("pair.num_workers").text == "2"
    result = nb.ok("%disco_session 2 --devices cpu --ccl gloo --name pair")
    assert result.stdout.startswith("pair: workers 0-1 on cpu (threads, gloo collectives); names")


def test_a_session_says_what_it_throws_away(nb: Any) -> None:
    first = "replaced the session of"
    nb.ok("%disco_session 2 --devices cpu --name pair")
    assert first not in nb.ok("%disco_session 2 --devices cpu --name pair").stdout
    nb.ok("%disco -s pair x = rank; _own = 1")
    assert first not in nb.ok("%disco_session 2 --devices cpu --name other").stdout
    lines = nb.ok("%disco_session 3 --devices cpu --name pair").stdout.splitlines()
    assert lines[0] == f"{first} 2 workers (threads); 1 variable is gone: x"
    nb.ok("%disco -s pair -t 0 a = b = c = d = e = 1\n")
    nb.ok("%disco -s pair -t 2 f, g, h, i, j = range(5)")
    lines = nb.ok("%disco_session 2 --engine processes --devices cpu --name pair").stdout
    assert "10 variables are gone: a, b, c, d, e, f, g, h, …" in lines.splitlines()[0]
    nb.ok("%disco -s pair x = rank")
    lines = nb.ok("%disco_restart pair --engine threads").stdout.splitlines()
    assert lines[0] == f"{first} 2 workers (processes); 1 variable is gone: x"


def test_session_options(nb: Any) -> None:
    nb.ok("%disco_session -n 4 --groups 2 --engine threads --ccl local --devices cpu,cpu,cpu,cpu")
    assert nb.ok("sess.num_groups").text == "2"


def test_bad_session_options_leave_the_session_alone(nb: Any) -> None:
    nb.ok("%%disco\nkept = 5")
    for line, word in {
        "0": "how many workers",
        "-n -3": "positive integer",
        "4 --groups 3": "divisible",
        "4 --engine rocket": "threads",
        "4 --devices cpu,cpu": "4 workers",
        "4 --devices nonsense": "nonsense",
        "4 --devices cuda:99": "cuda:99",
        "4 --ccl carrier-pigeon": "local",
        "4 --name 1x": "Python name",
        "four": "invalid int value",
        "4 --enginee threads": "did you mean --engine?",
    }.items():
        assert word in nb.fails(f"%disco_session {line}").stderr, line
    assert nb.ok("%%disco\nkept").text == "DRef kept: 5 on all 4 workers"


def test_unknown_options_name_those_near(nb: Any) -> None:
    assert "did you mean --targets" in nb.fails("%%disco --tragets 0\n1").stderr
    assert "--timeout" in nb.fails("%%disco --wait 3\n1").stderr
    assert "lines below" in nb.fails("%%disco x = 1\n1").stderr


def test_targets(nb: Any) -> None:
    assert nb.ok("%%disco -t 1,3\nprint(rank)").stdout == "[1] 1\n[3] 3\n"
    assert nb.ok("%%disco -t 1-2\nprint(rank)").stdout == "[1] 1\n[2] 2\n"
    assert nb.ok("%%disco -t 1-2  # some of them\nprint(rank)").stdout == "[1] 1\n[2] 2\n"
    assert nb.ok("%%disco --targets 0:4:2\nprint('even')").stdout == "[0,2] even\n"
    assert "out of range" in nb.fails("%%disco -t 4\n1").stderr
    assert "is no rank" in nb.fails("%%disco -t one\n1").stderr


def test_push_pull_in_and_out(nb: Any) -> None:
    nb.ok("import torch, numpy as np\na = torch.zeros(2)\nb = np.ones(2)\nc = {'lr': 0.1}")
    nb.ok("%disco_push a b c")
    nb.ok("%%disco\na += rank; d = float(c['lr'] * rank + b.sum())")
    assert nb.ok("a").text == "tensor([0., 0.])"
    assert nb.ok("%disco_pull a d\nd").text == "[2.0, 2.1, 2.2, 2.3]"
    assert nb.ok("%disco_pull -t 3 a\na").text == "tensor([3., 3.])"
    nb.ok("k = 7")
    nb.ok("%%disco -i k -o z\nz = k + rank")
    assert nb.ok("z.debug_get_from_all()").text == "[7, 8, 9, 10]"
    nb.ok("%disco_push -t 2 k")
    assert "no variable named nope" in nb.fails("%disco_push nope").stderr
    assert "no variable named 'nope'" in nb.fails("%disco_pull nope").stderr
    weird = nb.fails("weird = [object()]\n%disco_push k,weird").stderr
    assert "weird can't be sent" in weird
    assert "Pickled" in weird
    nb.ok("%%disco -o a -o d,z\n1")
    assert "no worker has a variable named 'nope'" in nb.fails("%%disco -o nope\n1").stderr


def test_the_line_form(nb: Any) -> None:
    assert nb.ok("%disco -t 0 print('one line')").stdout == "[0] one line\n"
    assert nb.ok("%disco rank * 0 + 5").text == "DRef: 5 on all 4 workers"


def test_local_runs_it_here_too(nb: Any) -> None:
    nb.ok("%%disco --local\nboth = 11")
    assert nb.ok("both").text == "11"
    assert nb.ok("%disco both").text == "DRef both: 11 on all 4 workers"


def test_noblock_gives_a_handle(nb: Any) -> None:
    nb.ok("run = get_ipython().run_cell_magic('disco', '-a', 'import time; time.sleep(1); rank')")
    assert nb.ok("run.ready()").text == "False"
    assert nb.ok("run.get().debug_get_from_all()").text == "[0, 1, 2, 3]"
    assert nb.ok("run").text == "<cell on workers 0-3: done; .get() waits for it>"


def test_a_failure_in_the_background_is_told_by_the_next_cell(nb: Any) -> None:
    nb.ok("get_ipython().run_cell_magic('disco', '-a', 'import time; time.sleep(0.5); 1 / 0')")
    assert nb.ok("1").stderr == ""
    told = nb.ok("import time; time.sleep(1)").stderr
    assert "in the background: workers 0-3 failed in the cell: ZeroDivisionError" in told
    assert nb.ok("3").stderr == ""


def test_timeout_says_what_workers_do_and_the_session_goes_on(nb: Any) -> None:
    result = nb.fails("%%disco --timeout 0.3\nimport time\ntime.sleep(30)")
    assert result.error["ename"] == "WaitTimeoutError"
    assert "gave up after 0.3 s" in result.traceback
    assert "worker 2: waiting for time.sleep(30)" in result.traceback
    assert "discolab/" not in result.traceback
    assert nb.ok("sess.interrupt()").text == "[]"
    assert nb.ok("%%disco\n1").text == "DRef: 1 on all 4 workers"


def test_status(nb: Any) -> None:
    lines = nb.ok("%disco_status").stdout.splitlines()
    assert lines[0].startswith("sess: <ThreadedSession: 4 workers on cpu>")
    assert [line.split()[:3] for line in lines[2:6]] == [[str(r), "cpu", "idle"] for r in range(4)]


def test_restart_and_shutdown(nb: Any) -> None:
    nb.ok("%%disco\nx = 1")
    nb.ok("old = sess['x']")
    assert "workers 0-3" in nb.ok("%disco_restart").stdout
    assert "closed session" in nb.ok("old").text
    assert nb.fails("sess.call_packed(abs, old)").error["ename"] == "ForeignDRefError"
    assert nb.ok("%disco_shutdown").stdout == "sess: shut down\n"
    assert "%disco_restart" in nb.fails("%%disco\n1").stderr
    assert "shut down" in nb.ok("%disco_status").stdout
    nb.ok("%disco_shutdown")
    nb.ok("%disco_restart")
    assert nb.ok("%disco world_size").text == "DRef world_size: 4 on all 4 workers"


def test_two_sessions_by_name(nb: Any) -> None:
    nb.ok("%disco_session 2 --devices cpu --name other")
    assert nb.ok("%%disco -s sess\nworld_size").text == "DRef world_size: 4 on all 4 workers"
    assert nb.ok("%%disco -s other\nworld_size").text == "DRef world_size: 2 on all 2 workers"
    assert "running: " in nb.fails("%%disco -s third\n1").stderr
    nb.ok("%disco_shutdown other")


def test_help_of_a_magic(nb: Any) -> None:
    result = nb.ok("print(get_ipython().find_cell_magic('disco').__doc__)")
    assert "--targets" in result.stdout
    assert "Run a cell" in result.stdout


def test_completion_of_worker_names_attributes_and_options(nb: Any) -> None:
    nb.ok("%%disco\nworker_only_tensor = torch.ones(2)")
    assert "worker_only_tensor" in nb.complete("%%disco\ny = worker_onl")
    assert "worker_only_tensor.requires_grad_" in nb.complete("%%disco\nworker_only_tensor.requ")
    assert "worker_only_tensor" in nb.complete("%disco worker_onl")
    assert "--targets" in nb.complete("%%disco --tar")
    assert "--devices" in nb.complete("%disco_session 4 --dev")
    assert "worker_only_tensor" not in nb.complete("y = worker_onl")
    assert set(nb.complete("%disco_session 4 --de")) == {"--devices"}
    assert nb.complete("%disco_session 4 --ccl g") == ["gloo"]
    assert nb.complete("%disco_restart se") == ["sess"]
    assert "worker_only_tensor" in nb.complete("%disco_pull worker_o")
    nb.ok("only_here = 1")
    assert nb.complete("%disco_push only_h") == ["only_here"]


def test_show_and_debug_stand_for_magics_of_their_own(nb: Any) -> None:
    shown, told = (nb.ok(magic).stdout for magic in ("%disco_show status", "%disco_status"))
    assert re.sub(r"[0-9]", "N", shown) == re.sub(r"[0-9]", "N", told)  # one may see a free queued
    assert nb.ok("%disco_show doctor -n 3").text == nb.ok("%disco_doctor -n 3").text
    told = nb.fails("%disco_show").stderr
    assert "what? One of: registers, devices, timeline, status, doctor, whos" in told
    assert "did you mean registers?" in nb.fails("%disco_show regs").stderr
    assert "did you mean step?" in nb.fails("%disco_debug stepp").stderr
    assert "takes no cell" in nb.fails("%%disco_debug step\n1").stderr
    assert "unrecognized arguments: --bogus" in nb.fails("%disco_show registers --bogus").stderr
    nb.ok("%%disco --step\na = 1\nb = a + rank\nb")
    nb.ok("%disco_debug next")
    assert "a + 5" in nb.ok("%disco_debug eval a + 5").text
    nb.ok("%disco_debug set a = 10 -r 2")
    assert nb.ok("%disco_debug continue").text.startswith("DRef b")
    assert nb.ok("_.debug_get_from_all()").text == "[1, 2, 12, 4]"
    nb.ok("word = 'b'")
    assert nb.ok("%disco_show whos $word").text.startswith("sess · 1 variable on 4 workers")


def test_completion_of_show_and_debug(nb: Any) -> None:
    assert nb.complete("%disco_show re") == ["registers"]
    assert {"step", "where", "compare"} <= set(nb.complete("%disco_debug "))
    assert "--leaks" in nb.complete("%disco_show registers --le")
    assert "--ranks" in nb.complete("%disco_debug step --ra")
    assert "%disco_step" in nb.complete("%disco_s")


def test_help_begins_with_a_usage_line_and_has_two_examples(nb: Any) -> None:
    told = nb.ok(
        "from discolab.notebook.magic import MAGICS\n"
        "for name in MAGICS:\n"
        "    text = get_ipython().find_line_magic(name).__doc__\n"
        "    first, *rest = text.splitlines()\n"
        "    at = rest.index('Examples:')\n"
        "    examples = [line for line in rest[at + 1 : rest.index('', at)] if line[:2] == '  ']\n"
        "    known = {name, MAGICS[name].name}\n"
        "    if first.lstrip('%').split()[0] not in known or len(examples) < 2:\n"
        "        print(name, first, examples)"
    )
    assert told.stdout == ""
    assert nb.ok("%disco_show registers --help").stdout.startswith("%disco_registers [--sort")


def test_whos(nb: Any) -> None:
    nb.ok(
        "%%disco\nimport math\nw = torch.ones(4, 2)\nr = rank\nif rank == 2: odd = 'x'\n"
        "large = torch.zeros(2**21)\ndef f(): ..."
    )
    lines = nb.ok("%disco_whos").text.splitlines()
    assert lines[0] == "sess · 4 variables on 4 workers"
    cells = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert cells["w"] == "float32[4, 2] 32 B ✓ equal"
    assert cells["r"] == "int 4 different 0 | 1 | 2 | 3"
    assert cells["odd"] == "str on 2 only 'x'"
    assert cells["large"] == "float32[2097152] 8 MiB not compared"
    assert cells["functions:"] == "f"
    assert cells["modules:"] == "math"
    assert "✓ equal" in nb.ok("%disco_whos large --stats").text
    assert "<table" in nb.ok("%disco_whos").data[-1]["text/html"]


def test_configuration(nb: Any) -> None:
    told = nb.ok("%config Disco").stdout
    for name in ("engine", "timeout", "heartbeat", "statistics_limit", "output_lines"):
        assert f"Disco.{name}" in told
    try:
        nb.ok("%config Disco.engine = 'processes'\n%config Disco.timeout = 33")
        nb.ok("%config Disco.heartbeat = 7\n%config Disco.statistics_limit = 16")
        nb.ok("%disco_session 2 --devices cpu")
        asked = nb.ok("(sess.engine, sess.timeout, sess.heartbeat)").text
        assert asked == "('processes', 33.0, 7.0)"
        assert "contents not compared" in nb.ok("%disco torch.zeros(5)").text
        nb.ok("%disco_session 2 --devices cpu --engine threads --timeout 5 --statistics-limit 99")
        assert nb.ok("(sess.engine, sess.timeout)").text == "('threads', 5.0)"
        assert "not compared" not in nb.ok("%disco torch.zeros(5)").text
        nb.ok("%config Disco.output_lines = 3")
        lines = nb.ok("%%disco\nfor i in range(9): print(i)").stdout.splitlines()
        assert lines[:3] == ["[0-1] 0", "[0-1] 1", "[0-1] 2"]
        assert lines[3:] == ["… 6 more lines (%config Disco.output_lines = 0 shows all)"]
        assert "not the str 'rocket'" in nb.ok("%config Disco.engine = 'rocket'").stderr
    finally:
        nb.ok("%config Disco.engine = 'threads'\n%config Disco.timeout = None")
        nb.ok("%config Disco.heartbeat = 10\n%config Disco.output_lines = 20000")
        nb.ok("%config Disco.statistics_limit = 4194304")


def test_unload_takes_everything_away(bare_kernel: Any) -> None:
    nb = bare_kernel
    nb.ok("%reload_ext discolab")
    nb.ok("%disco_session 2 --devices cpu")
    assert nb.ok("%unload_ext discolab").stdout == "sess: shut down with the extension\n"
    result = nb.ok(
        "import sys, threading, time\n"
        "time.sleep(0.6)\n"
        "print(type(sys.stdout).__name__, sess.closed, sys.getswitchinterval())\n"
        "print([t.name for t in threading.enumerate() if t.name.startswith('discolab')])"
    )
    assert result.stdout.splitlines() == ["OutStream True 0.005", "[]"]
    nb.ok("%load_ext discolab\n%disco_session 2 --devices cpu")
    assert nb.ok("%disco 5").text == "DRef: 5 on all 2 workers"

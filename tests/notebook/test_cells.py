"""``%%disco`` cells in a real kernel: what is printed, displayed, returned, and told of errors."""

from __future__ import annotations

from typing import Any


def test_hello_from_each_rank_in_rank_order(nb: Any) -> None:
    result = nb.ok("%%disco\nprint('hello from', rank, 'of', world_size)")
    assert result.stdout.splitlines() == [f"[{r}] hello from {r} of 4" for r in range(4)]


def test_equal_output_is_one_line_and_order_is_kept(nb: Any) -> None:
    result = nb.ok("%%disco\nprint('begin')\nprint('r', rank % 2)\nprint('end')")
    lines = result.stdout.splitlines()
    assert lines == ["[0-3] begin", "[0,2] r 0", "[1,3] r 1", "[0-3] end"]


def test_stderr_stays_stderr(nb: Any) -> None:
    result = nb.ok("%%disco\nimport sys\nprint('oops', file=sys.stderr)")
    assert result.stderr == "[0-3] oops\n"
    assert result.stdout == ""


def test_output_of_a_thread_that_a_cell_starts_is_labelled(nb: Any) -> None:
    code = "import threading\nt = threading.Thread(target=print, args=('child', rank))"
    result = nb.ok(f"%%disco\n{code}\nt.start(); t.join()")
    assert result.stdout.splitlines() == [f"[{r}] child {r}" for r in range(4)]


def test_a_progress_bar_leaves_its_last_state(nb: Any) -> None:
    result = nb.ok("%%disco\nfor i in range(5): print(f'\\rstep {i}', end='')")
    assert result.stdout == "[0-3] step 4\n"


def test_rich_display_from_workers(nb: Any) -> None:
    code = "from IPython.display import display, HTML\ndisplay(HTML(f'<b>{rank // 2}</b>'))"
    result = nb.ok(f"%%disco\n{code}")
    assert [d["text/html"] for d in result.data] == ["<b>0</b>", "<b>1</b>"]
    assert result.stdout.splitlines() == ["[0-1]", "[2-3]"]


def test_plain_display_is_labelled_text(nb: Any) -> None:
    result = nb.ok("%%disco\nfrom IPython.display import display\ndisplay(rank)")
    assert result.stdout.splitlines() == [f"[{r}] {r}" for r in range(4)]


def test_the_last_expression_is_shown_as_a_view(nb: Any) -> None:
    result = nb.ok("%%disco\nx = torch.arange(4.) + rank\nx")
    assert result.text.startswith(
        "DRef x · float32[4] on 4 workers · 4 different values: "
        "shards of a larger tensor, or partial sums?"
    )
    assert "<table" in result.data[-1]["text/html"]
    assert "<script" not in result.data[-1]["text/html"]


def test_equal_values_are_said_to_be_equal(nb: Any) -> None:
    assert "equal on all workers" in nb.ok("%%disco\ntorch.ones(3)").text
    assert nb.ok("%%disco\n1 + 1").text == "DRef: 2 on all 4 workers"


def test_a_semicolon_or_none_shows_nothing(nb: Any) -> None:
    assert nb.ok("%%disco\n1;  # quiet").outputs == []
    assert nb.ok("%%disco\nNone").outputs == []
    assert nb.ok("%%disco\n# nothing").outputs == []


def test_names_that_every_cell_has(nb: Any) -> None:
    code = "rank, world_size, str(device), worker.rank, ccl.__name__, torch.__name__, RANK"
    result = nb.ok(f"%%disco\nprint({code}, WORLD_SIZE, LOCAL_RANK)")
    assert result.stdout.splitlines()[2] == ("[2] 2 4 cpu 2 discolab.ccl torch 2 4 2")


def test_definitions_last_from_cell_to_cell(nb: Any) -> None:
    nb.ok("%%disco\ndef double(v):\n    return v * two\ntwo = 2")
    assert nb.ok("%%disco\ndouble(21)").text == "DRef: 42 on all 4 workers"


def test_an_error_on_one_rank_points_at_its_line(nb: Any) -> None:
    result = nb.fails("%%disco\nx = 1\nif rank == 2:\n    raise ValueError('bad thing')")
    assert result.error["ename"] == "WorkerError"
    assert result.error["evalue"] == "worker 2 failed in the cell: ValueError: bad thing"
    assert "----> " in result.traceback
    assert "4     raise ValueError('bad thing')" in result.traceback
    assert "Cell In[" in result.traceback
    assert "line 4" in result.traceback
    assert "discolab/" not in result.traceback
    assert nb.ok("%%disco\nx").text == "DRef x: 1 on all 4 workers"


def test_the_same_error_on_all_ranks_is_told_once(nb: Any) -> None:
    result = nb.fails("%%disco\ndef f():\n    return 1 / 0\nf()")
    assert result.error["evalue"] == (
        "workers 0-3 failed in the cell: ZeroDivisionError: division by zero"
    )
    assert result.traceback.count("ZeroDivisionError") == 1
    assert "line 4" in result.traceback
    assert "line 3, in f" in result.traceback


def test_sys_exit_ends_the_cell_only(nb: Any) -> None:
    result = nb.fails("%%disco\nimport sys\nsys.exit(3)")
    assert "SystemExit: 3" in result.error["evalue"]
    assert nb.ok("%%disco\nrank * 0").text == "DRef: 0 on all 4 workers"


def test_a_value_that_raises_keyboard_interrupt_is_no_stop(nb: Any) -> None:
    nb.ok(
        "%%disco\nclass Odd(dict):\n"
        "    def __repr__(self): raise KeyboardInterrupt\n"
        "    def __len__(self): raise KeyboardInterrupt\n"
        "class Mean:\n"
        "    def __repr__(self): raise KeyboardInterrupt\n"
        "odd, mean = Odd(), Mean()"
    )
    for code in ("%%disco\nmean", "%%disco\n[mean, 1]", "sess['odd']", "%disco_whos"):
        nb.ok(code)
        nb.ok("sess.sync_all()")
    assert nb.ok("sess['mean']").text.endswith(
        "<Mean: repr raised KeyboardInterrupt> on all 4 workers · contents not compared"
    )


def test_a_value_that_can_not_be_shown(nb: Any) -> None:
    code = "class Bad:\n    def __repr__(self): raise RuntimeError('no repr')\nBad()"
    result = nb.ok(f"%%disco\n{code}")
    assert "RuntimeError" in result.text
    assert "no repr" in result.text


def test_a_syntax_error_is_told_before_anything_runs(nb: Any) -> None:
    result = nb.fails("%%disco\nprint('never')\n1 +")
    assert "line 3" in result.traceback
    assert "SyntaxError: invalid syntax" in result.traceback
    assert result.stdout == ""


def test_input_has_a_clear_word(nb: Any) -> None:
    assert "%disco_push" in nb.fails("%%disco\ninput('name? ')").error["evalue"]


def test_shell_commands_work_and_magics_are_sent_outside(nb: Any) -> None:
    assert nb.ok("%%disco -t 0\nout = !echo seen\nprint(out)").stdout == "[0] ['seen']\n"
    assert "%timeit inside a %%disco cell" in nb.fails("%%disco\n%timeit 1").stderr
    assert "%%time inside a %%disco cell" in nb.fails("%%disco\n%%time\n1").stderr
    assert "Wall time" in nb.ok("%%time\n%%disco\n1").stdout


def test_warnings_name_the_cell(nb: Any) -> None:
    result = nb.ok("%%disco\nimport warnings\nwarnings.warn('careful')")
    assert result.stderr.startswith("[0-3] Cell In[")
    assert ":3: UserWarning: careful" in result.stderr


def test_the_same_seed_gives_the_same_numbers_on_every_worker(nb: Any) -> None:
    code = "torch.manual_seed(3)\nw = torch.nn.Linear(4, 4).weight\nw"
    assert "equal on all workers" in nb.ok(f"%%disco\n{code}").text


def test_a_worker_that_can_not_be_stopped_is_named_and_restart_helps(nb: Any) -> None:
    code = "import threading\nlock = threading.Lock()\nlock.acquire()\nif rank == 1: lock.acquire()"
    result = nb.fails(f"%%disco\n{code}", interrupt_after=0.5)
    assert "worker 1 did not stop" in result.stderr
    assert "%disco_restart" in result.stderr
    status = nb.ok("%disco_status").stdout.splitlines()[3]
    assert "line 5" in status
    assert "Cell In[" in status
    restarted = nb.ok("%disco_restart")
    assert "left behind" in restarted.stdout
    assert restarted.seconds < 4
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"


def test_use_from_a_second_thread(nb: Any) -> None:
    code = (
        "import threading\nip = get_ipython()\ngot = []\n"
        "def go(i):\n"
        "    for _ in range(20):\n"
        "        ref = ip.run_cell_magic('disco', '', f'{i} + rank')\n"
        "        got.append(ref.debug_get_from_all() == [i, i + 1, i + 2, i + 3])\n"
        "ts = [threading.Thread(target=go, args=(10 * i,)) for i in range(3)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]; print(len(got), all(got))"
    )
    assert nb.ok(code).stdout.strip() == "60 True"


def test_workers_that_print_outside_of_a_cell_are_labelled(nb: Any) -> None:
    result = nb.ok("sess.call_packed(print, 'plain'); sess.sync_all()")
    assert result.stdout == "[0-3] plain\n"


def test_capture_takes_the_output_of_workers(nb: Any) -> None:
    nb.ok("%%capture cap\n%disco print('inside', rank)")
    taken = nb.ok("print(cap.stdout, end='')").stdout.splitlines()
    assert sorted(taken) == [f"[{rank}] inside {rank}" for rank in range(4)]
    assert nb.ok("%%disco\nprint('seen')").stdout == "[0-3] seen\n"


def test_what_a_cell_in_the_background_prints_is_labelled_under_capture(nb: Any) -> None:
    for number in range(5):
        nb.ok(f"%%capture cap\n%%disco -a\nprint('first {number}')\nimport time; time.sleep(0.3)\n"
              f"print('last {number}')")  # fmt: skip
        nb.ok("%disco 1")  # behind it
        text = nb.ok("print(cap.stdout, end='')").stdout
        assert all(line.startswith("[") for line in text.splitlines()), text


def test_large_output_is_kept_whole(nb: Any) -> None:
    result = nb.ok("%%disco\nfor i in range(3000): print(rank, i)")
    lines = result.stdout.splitlines()
    assert len(lines) == 12000
    assert lines[:2] == ["[0] 0 0", "[0] 0 1"]
    assert lines[-1] == "[3] 3 2999"


def test_output_beyond_what_anybody_reads_is_cut(nb: Any) -> None:
    lines = nb.ok("%%disco\nfor i in range(10_000): print(rank, i)").stdout.splitlines()
    assert len(lines) == 20_001
    assert lines[-1] == "… 20,000 more lines (%config Disco.output_lines = 0 shows all)"
    result = nb.ok("%%disco\nif rank == 1: print('a' + 'x' * 30_000_000 + 'b', end='')")
    assert result.seconds < 10
    line = result.stdout
    assert line.startswith("[1] axxx")
    assert " … 29,900,002 characters … x" in line
    assert line.endswith("xxxb\n")
    assert len(line) < 101_000


def test_output_can_be_grouped_otherwise(nb: Any) -> None:
    code = "import sys\nprint('a', rank // 2)\nprint('all', file=sys.stderr)\nprint('b')"
    by_engine = nb.ok(f"%%disco --group-outputs engine\n{code}").stdout.splitlines()
    assert by_engine == ["[0-1] a 0", "[0-1] b", "[2-3] a 1", "[2-3] b"]
    by_type = nb.ok(f"%%disco --group-outputs type\n{code}")
    assert by_type.stdout.splitlines() == ["[0-1] a 0", "[2-3] a 1", "[0-3] b"]
    assert by_type.outputs[-1]["name"] == "stderr"
    assert "invalid choice" in nb.fails("%%disco --group-outputs x\n1").stderr


def test_an_error_that_was_shown_is_not_told_again_by_a_sync(nb: Any) -> None:
    nb.fails("%%disco\n1 / 0")
    assert nb.ok("sess.sync_all()").outputs == []


def test_somebody_who_watches_sees_output_and_progress_while_it_runs(nb: Any) -> None:
    code = "import time\nprint('first')\ntime.sleep(1.5)\nprint('second')"
    result = nb.ok(f"%%disco --progress-after 0.5\n{code}", watched=True)
    kinds = ["text" if "text" in o else "data" for o in result.outputs]
    assert kinds[:2] == ["text", "data"]
    assert kinds[-1] == "text"
    shown = result.data[0]["text/html"]
    assert "workers 0-3 waiting for time.sleep(1.5) in the cell" in shown
    assert nb.ok(f"%%disco --progress-after -1\n{code}", watched=True).data == []
    quiet = nb.ok(f"%%disco --progress-after 0.5\n{code}")  # nobody watches
    assert quiet.stdout == "[0-3] first\n[0-3] second\n"
    assert len(quiet.outputs) == 1


def test_what_led_to_an_error_is_shown(nb: Any) -> None:
    code = "try:\n    {}['key']\nexcept KeyError as e:\n    raise RuntimeError('outer') from e"
    shown = nb.fails(f"%%disco\n{code}").traceback
    assert "KeyError: 'key'" in shown
    assert "line 3" in shown
    assert "was the cause of:" in shown
    assert shown.index("KeyError") < shown.index("RuntimeError: outer")
    group = "e = ExceptionGroup('several', [ValueError('one')]); e.add_note('a note'); raise e"
    shown = nb.fails(f"%%disco\n{group}").traceback
    assert "ValueError: one" in shown
    assert "a note" in shown


def test_hostile_exceptions_and_long_messages(nb: Any) -> None:
    frozen = (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass E(Exception):\n    a: int"
    )
    assert "E" in nb.fails(f"%%disco\n{frozen}\nraise E(1)").error["evalue"]
    long = nb.fails("%%disco\nraise ValueError('x' * 5_000_000)")
    assert " characters … " in long.traceback
    assert len(long.traceback) < 20_000
    deep = nb.fails("%%disco\ndef f(): f()\nf()").traceback
    assert "RecursionError" in deep
    assert len(deep.splitlines()) < 30
    assert nb.ok("%disco 1").text == "DRef: 1 on all 4 workers"


def test_a_slow_repr_does_not_hold_up_the_next_cell(nb: Any) -> None:
    code = "class Slow:\n    def __repr__(self):\n        while True: pass\nSlow()"
    assert "still busy" in nb.ok(f"%%disco\n{code}").text
    result = nb.ok("%disco 1")
    assert result.text == "DRef: 1 on all 4 workers"
    assert result.seconds < 3


def test_unfinished_lines_and_progress_bars_come_whole(nb: Any) -> None:
    code = (
        "import time\nfor i in range(4):\n    print(i, end=' ', flush=True)\n    time.sleep(0.25)"
    )
    live = nb.ok(f"%%disco --stream\n{code}\nprint('done')")
    assert live.stdout == "[0-3] 0 1 2 3 done\n"
    bar = (  # what tqdm writes when it gives the ranks rows of their own
        "import sys, time\nfor i in range(4):\n"
        "    print('\\n' * rank + f'\\r{i + 1}/4' + '\\x1b[A' * rank, end='', file=sys.stderr)\n"
        "    time.sleep(0.1)\nprint(file=sys.stderr)"
    )
    assert nb.ok(f"%%disco\n{bar}").stderr == "[0-3] 4/4\n"
    live_lines = nb.ok(f"%%disco --stream\n{bar}").stderr.splitlines()
    assert all(line.endswith("] 4/4") for line in live_lines), live_lines
    assert len(live_lines) <= 4  # one for each worker, if they end apart


def test_tqdm_gives_one_bar_a_worker(nb: Any) -> None:
    code = "from tqdm import tqdm\nfor i in tqdm(range(7), desc=f'r{rank}', ncols=40): pass"
    lines = nb.ok(f"%%disco\n{code}").stderr.splitlines()
    assert [line[:13] for line in lines] == [f"[{r}] r{r}: 100%|" for r in range(4)]
    here = nb.ok("from tqdm import tqdm\nfor i in tqdm(range(3), ncols=40): pass").stderr
    assert "100%" in here


def test_an_error_of_ours_in_an_ordinary_cell_shows_the_users_lines(nb: Any) -> None:
    nb.ok("def ask(ref):\n    return ref.debug_get_from_remote(9)")
    result = nb.fails("ask(sess['rank'])")
    assert result.error["ename"] == "ArgumentError"
    assert "---->   1 ask(sess['rank'])" in result.traceback
    assert "line 2, in ask" in result.traceback
    assert result.traceback.endswith(f"ArgumentError: {result.error['evalue']}")
    assert "discolab/" not in result.traceback

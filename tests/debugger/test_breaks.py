"""Breakpoints as they are typed: which are understood, what is said of the others."""

import linecache
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from discolab.debugger.breaks import Break, BreakTable, break_of, find_file, parse_break
from discolab.runtime import sources
from discolab.runtime.errors import ArgumentError
from discolab.runtime.user_code import is_user_file
from tests.debugger.scripted import Program

SOURCE = """\
# a comment
def f(x):
    \"\"\"What it does.\"\"\"
    global y

    y = [
        x,
        1]
    return y


z = f(1)
# the end
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def cell() -> str:
    return Program(SOURCE, file="Cell In[7]").file


@pytest.fixture
def notebook_cell() -> Iterator[str]:
    """An ordinary cell as ipykernel names it."""
    file = "/tmp/ipykernel_1/2033.py"
    Program(SOURCE, file=file)

    def namer(name: str) -> str | None:
        return "Cell In[8]" if name == file else None

    sources.namers.append(namer)
    yield file
    sources.namers.remove(namer)


# -- what is understood --------------------------------------------------------------------------


def test_a_line_is_one_of_the_present_file(cell: str) -> None:
    assert parse_break("6", cell) == Break(0, cell, 6)
    assert parse_break(" 6  if x == 1 ", cell) == Break(0, cell, 6, "x == 1")
    assert parse_break("6 if(x)", cell).condition == "(x)"


def test_a_condition_may_hold_colons_and_ifs(cell: str) -> None:
    for condition in ("x[1:2] == {1: 2}", "1 if x else 0", "(y := x) > 1", "{1:3 if x else 4}"):
        assert parse_break(f"6 if {condition}", cell).condition == condition
        assert parse_break(f"{cell}:6 if {condition}").condition == condition


def test_a_file_is_given_by_its_path_or_the_end_of_one(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_break(f"{script}:9", "Cell In[7]").file == script
    monkeypatch.chdir(Path(script).parent)
    assert parse_break("model.py:9 if x", "Cell In[7]") == Break(0, script, 9, "x")
    monkeypatch.syspath_prepend(Path(script).parent.parent)
    monkeypatch.chdir("/")
    assert parse_break(f"{Path(script).parent.name}/model.py:9").file == script


def test_modules_are_found_by_the_end_of_their_path() -> None:
    file = torch.nn.Linear.forward.__code__.co_filename
    line = max(n for *_, n in torch.nn.Linear.forward.__code__.co_lines() if n)
    for name in ("torch/nn/modules/linear.py", "nn/modules/linear.py", file):
        found = parse_break(f"{name}:{line}")
        assert (found.file, found.line) == (file, line)


def test_cells_are_named_as_they_are_shown(cell: str, notebook_cell: str) -> None:
    assert parse_break("Cell In[7]:6").file == cell
    assert parse_break("Cell In[7], line 6 if x").file == cell
    assert parse_break("Cell In[8]:6").file == notebook_cell
    assert str(parse_break("Cell In[8]:6 if x")) == "Cell In[8], line 6 if x"


def test_lines_of_inner_functions_and_of_long_statements_have_code(cell: str) -> None:
    for line in (2, 6, 7, 9, 12):
        assert parse_break(str(line), cell).line == line


def test_it_reads_as_it_is_typed(script: str) -> None:
    assert str(Break(1, script, 9)) == f"{script}:9"
    assert str(Break(1, script, 9, "x > 1", (0, 1, 3))) == f"{script}:9 if x > 1 on workers 0-1, 3"


# -- what is not ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "can't read the breakpoint ''"),
        ("here", "write LINE, FILE:LINE or a function"),
        ("6 x == 1", "can't read the breakpoint '6 x == 1'"),
        ("-3", "can't read the breakpoint"),
        ("0", r"Cell In\[7\] has no line 0: its lines are 1 to 13"),
        ("14", r"Cell In\[7\] has no line 14: its lines are 1 to 13"),
        ("1", r"no code is on line 1 of Cell In\[7\] \(# a comment\): the next .* is 2"),
        ("3", r"no code is on line 3 .*\"\"\"What it does.*the next line with code is 6"),
        ("5", r"no code is on line 5 .*\(an empty line\): the next line with code is 6"),
        ("13", r"\(# the end\): the last line with code is 12"),
        ("6 if", "has no condition after its 'if'"),
        ("6 if x =", "the condition 'x =' can't be compiled: invalid syntax"),
        ("6 if x = 1", "the condition 'x = 1' can't be compiled: .*; to compare write =="),
        ("6 if return", "the condition 'return' can't be compiled"),
        ("6 if x\0", "can't be compiled"),
        ("nothing_of_that_name.py:3", "no source file 'nothing_of_that_name.py' is known here"),
        ("Cell In[99999]:3", r"no source file 'Cell In\[99999\]' is known here"),
        ("__init__.py:1", "is the end of several paths: .*write more of it"),
    ],
)
def test_what_is_wrong_is_named(cell: str, text: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        parse_break(text, cell)


def test_a_line_alone_needs_a_file() -> None:
    with pytest.raises(ArgumentError, match=r"is in which file.*FILE:6"):
        parse_break("6 if x")


def test_a_file_that_can_not_be_compiled_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = (\n")
    with pytest.raises(ArgumentError, match=r"broken\.py can't be compiled: .*never closed"):
        parse_break(f"{path}:1")
    path = tmp_path / "empty.py"
    path.write_text("")
    with pytest.raises(ArgumentError, match=r"empty\.py (can't be read|.*no line of it has any)"):
        parse_break(f"{path}:1")  # to Python 3.13 and later an empty file has a line
    path = tmp_path / "comment.py"
    path.write_text("#\n#\n")
    with pytest.raises(ArgumentError, match="no line of it has any"):
        parse_break(f"{path}:2")


def test_a_file_that_has_changed_is_read_anew(script: str) -> None:
    with pytest.raises(ArgumentError, match="no code is on line 1"):
        parse_break(f"{script}:1")
    Path(script).write_text("x = 1\n")
    assert parse_break(f"{script}:1").line == 1


def test_of_a_cell_that_was_run_twice_the_later_counts(
    cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Program(SOURCE, file="Cell In[7].2").file
    monkeypatch.setattr(sources, "namers", [lambda file: file.partition(".")[0]])
    assert find_file("Cell In[7]") == again
    assert find_file(again) == again
    linecache.cache.pop(again)


# -- on a worker ---------------------------------------------------------------------------------


def test_a_break_point_comes_back_from_a_line() -> None:
    for one in (Break(3, "a.py", 4, "x", (1, 2), ">= 3", "at {i}"), Break(1, "b.py", 2)):
        assert break_of(one.packed()) == one
        ranks = list(one.ranks) if one.ranks else None
        assert break_of([*one.packed()[:4], ranks, one.hits, one.log]) == one


def test_a_table_gives_the_break_points_of_a_code_object() -> None:
    code = compile(SOURCE, "/home/u/project/model.py", "exec")
    inner = next(const for const in code.co_consts if hasattr(const, "co_lines"))
    table = BreakTable()
    breaks = [Break(1, "/home/u/project/model.py", 9), Break(2, "project/model.py", 9, "x")]
    table.replace([one.packed() for one in (*breaks, Break(3, "other/model.py", 9))])
    assert table.of(inner) == {9: tuple(breaks)}
    assert table.of(code) == {}
    assert [one.number for one in table] == [1, 2, 3]


def test_the_version_changes_with_the_break_points_alone() -> None:
    table = BreakTable()
    one = Break(1, "a.py", 1)
    table.replace([])
    assert table.version == 0
    table.replace([one.packed()])
    table.replace([list(one.packed())])
    assert table.version == 1
    table.replace([])
    assert table.version == 2


def test_an_installed_file_may_be_elsewhere_on_another_host() -> None:
    one = Break(1, "/opt/a/site-packages/lib/x.py", 1)
    assert one.is_in("/usr/lib/python3/dist-packages/lib/x.py")
    assert not one.is_in("/usr/lib/python3/dist-packages/lib/y.py")
    assert not Break(1, "/home/a/x.py", 1).is_in("/home/b/x.py")


def test_a_break_point_of_a_cell_holds_in_its_code(notebook_cell: str) -> None:
    assert Break(1, "Cell In[8]", 6).is_in(notebook_cell)
    assert Break(1, notebook_cell, 6).is_in(notebook_cell)
    assert not Break(1, "Cell In[9]", 6).is_in(notebook_cell)


# -- whose code it is ----------------------------------------------------------------------------


def test_cells_scripts_and_own_modules_are_the_users(script: str, notebook_cell: str) -> None:
    for file in (script, notebook_cell, "Cell In[3]", "Cell In[3].2", __file__):
        assert is_user_file(file)


def test_libraries_generated_code_and_discolab_are_not() -> None:
    frozen = "<frozen importlib._bootstrap>"
    for file in (linecache.__file__, torch.__file__, pytest.__file__, sources.__file__, frozen):
        assert not is_user_file(file)
    for file in ("<string>", "<eval_with_key>.0", "<__array_function__ internals>"):
        assert not is_user_file(file)
    assert is_user_file(sys.modules[__name__].__file__ or "")

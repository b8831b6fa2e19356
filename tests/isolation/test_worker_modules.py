"""Modules beside a script are each worker's own, as in processes of torchrun."""

import decimal
import gc
import importlib
import json
import locale
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from discolab import Session, ThreadedSession, WorkerError, current_worker
from discolab.isolation import worker_modules
from discolab.notebook.script import read_script, run_script


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))


def run(sess: Session, folder: Path, text: str) -> list[Any]:
    """What a script leaves in `result` on each worker."""
    end = "pathlib.Path(f'{__file__}.{os.environ[\"RANK\"]}').write_text(json.dumps(result))"
    write(folder, train=f"{text}\nimport json, pathlib, os\n{end}\n")
    full, source = read_script(str(folder / "train.py"))
    done = sess.call_packed(run_script, full, source, [], "train.py").debug_get_from_all()
    return [json.loads((folder / f"train.py.{r}").read_text()) for r in range(len(done))]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules, of which Python forgets all in the end."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(
        tmp_path,
        dl_state="""
        import os, pickle, torch, torch.distributed as dist
        from dl_tools import names
        RANK, counter = int(os.environ["RANK"]), 0
        torch.manual_seed(1)
        dist.barrier()  # a module may call collectives while it is imported
        class Item:
            rank = None
        def count():
            global counter
            counter += 1 + RANK
            return counter
        """,
        dl_tools__in__names="from . import table\nregister = table.update",
        dl_tools__in__table="entries = {}\nupdate = entries.update",
        dl_tools__in____init__="",
        dl_plain__in__deep="import dl_state\nvalue = dl_state.RANK",
    )
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("dl_")]:
        del sys.modules[name]


def test_each_worker_has_modules_of_its_own(make: Callable[..., Session], project: Path) -> None:
    sess = make(4)
    text = """
import pickle, torch, torch.distributed as dist
import dl_state, dl_tools.names, dl_plain.deep
from dl_tools import table
from dl_state import Item, count
draw = torch.rand(1).item()
Item.rank = dist.get_rank()
dl_tools.names.register(who=dist.get_rank())
count()
dist.barrier()
result = [dl_state.RANK, dl_state.counter, Item.rank, table.entries, dl_plain.deep.value, draw,
          type(pickle.loads(pickle.dumps(Item()))) is Item]
"""
    results = run(sess, project, text)
    draw = results[0][5]
    assert results == [[r, 1 + r, r, {"who": r}, r, draw, True] for r in range(4)]
    assert not [name for name in sys.modules if name.startswith("dl_")]
    assert str(project) not in sys.path
    write(project, dl_state="RANK = 'changed'")
    assert run(sess, project, "import dl_state\nresult = dl_state.RANK") == ["changed"] * 4


def test_what_the_notebook_has_imported_stays_its_own(project: Path) -> None:
    write(project, dl_shared="counter = 0", dl_late="import sys\nvalue = sys.argv[0]")
    sys.path.insert(0, str(project))
    try:
        module: Any = importlib.import_module("dl_shared")
        module.counter = 7
        with ThreadedSession(4, devices="cpu", timeout=60) as sess:
            text = "import dl_shared, dl_late, sys\nsys.path.append('/nowhere')\n"
            assert run(sess, project, text + "result = dl_shared.counter") == [0] * 4
            assert importlib.import_module("dl_shared") is module
            assert "/nowhere" not in sys.path
            assert module.counter == 7
            # the script's names are the worker's afterwards, with the modules that it has imported
            assert sess.call_packed(lambda: eval_here("dl_late.value")).debug_get_from_all() == (
                ["train.py"] * 4
            )
    finally:
        sys.modules.pop("dl_shared", None)


def eval_here(text: str) -> Any:
    from discolab import current_worker

    return eval(text, current_worker().namespace)


def test_a_module_that_fails_does_so_on_each_worker(project: Path) -> None:
    write(project, dl_bad="import os\nif os.environ['RANK'] != '0': raise ValueError('not here')")
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        with pytest.raises(WorkerError, match="not here"):
            run(sess, project, "import dl_bad\nresult = 1")
        text = "try: import dl_bad; result = 1\nexcept ValueError: result = 2"
        assert run(sess, project, text) == [1, 2, 2, 2]


def test_children_have_the_modules_of_their_worker(project: Path) -> None:
    text = """
import dl_state, multiprocessing, torch
dl_state.counter = 10 * dl_state.RANK
def ask(i):
    import dl_state as again
    return dl_state.counter + i, again.counter
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return dl_state.counter + i
fork = multiprocessing.get_context("fork")
with fork.Pool(1) as pool:
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=fork)
    result = [pool.map(ask, [1]), [b.tolist() for b in loader]]
"""
    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        assert run(sess, project, text) == [
            [[[10 * r + 1, 10 * r]], [[10 * r], [10 * r + 1]]] for r in range(2)
        ]


def test_a_script_leaves_the_interpreter_as_it_was(project: Path) -> None:
    text = """
import decimal, gc, locale, socket, sys, tempfile
decimal.DefaultContext.prec, decimal.DefaultContext.rounding = 5, decimal.ROUND_UP
sys.setrecursionlimit(5000), sys.set_int_max_str_digits(9000), sys.setswitchinterval(0.01)
gc.disable(), gc.set_threshold(1, 2, 3), socket.setdefaulttimeout(3)
tempfile.tempdir = "/nowhere"
locale.setlocale(locale.LC_ALL, "C")
result = gc.isenabled()
"""

    def settings() -> list[Any]:
        return [
            sys.getrecursionlimit(),
            str(decimal.DefaultContext),
            sys.get_int_max_str_digits(),
            sys.getswitchinterval(),
            gc.isenabled(),
            gc.get_threshold(),
            socket.getdefaulttimeout(),
            tempfile.tempdir,
            locale.setlocale(locale.LC_ALL),
        ]

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        before = settings()
        assert run(sess, project, text) == [False] * 2
        assert settings() == before


def test_modules_of_a_package_are_executed_once_in_their_order(
    make: Callable[..., Session], project: Path
) -> None:
    write(
        project,
        dl_hack__in____init__="from . import table\nfrom . import more\nlog = table.log",
        dl_hack__in__table="log = ['table']",
        dl_hack__in__more="from .table import log\nlog.append('more')",
    )
    text = "import dl_hack.table\nresult = dl_hack.table.log"
    assert run(make(4), project, text) == [["table", "more"]] * 4


def test_a_module_that_replaces_itself_is_one_for_all(
    make: Callable[..., Session], project: Path
) -> None:
    write(
        project,
        dl_lazy__in__itself="""
        import sys, time
        class Lazy:
            answer = 42
        time.sleep(0.1)  # the other workers find it half made
        sys.modules[__name__] = Lazy()
        """,
        dl_lazy__in____init__="",
    )
    text = "import dl_lazy.itself\nresult = dl_lazy.itself.answer"
    sess = make(4)
    for _ in range(2):
        assert run(sess, project, text) == [42] * 4
    assert not [name for name in sys.modules if name.startswith("dl_lazy")]


def test_scripts_that_overlap_begin_with_fresh_modules(
    make: Callable[..., Session], project: Path
) -> None:
    text = "import dl_state, time, os\nif os.environ['RANK'] == '1': time.sleep(0.2)\n"
    sess = make(2)
    write(project, train=f"{text}dl_state.counter += 1\nlast = dl_state.counter\n")
    full, source = read_script(str(project / "train.py"))
    for _ in range(2):  # queued: worker 0 begins the second while worker 1 runs the first
        sess.call_packed(run_script, full, source, [], "train.py")
    last = sess.call_packed(lambda: current_worker().namespace["last"])
    assert last.debug_get_from_all() == [1, 1]


@pytest.mark.one_process
def test_threads_of_a_module_may_import_while_it_is_made(sess: Session, project: Path) -> None:
    write(
        project,
        dl_pool="""
        import concurrent.futures, dl_tools
        def ask():
            import dl_tools
            return dl_tools.__name__
        with concurrent.futures.ThreadPoolExecutor() as pool:
            name = pool.submit(ask).result(timeout=10)
        """,
    )
    assert run(sess, project, "import dl_pool\nresult = dl_pool.name") == ["dl_tools"] * 4


def test_the_path_does_not_grow(make: Callable[..., Session], project: Path) -> None:
    sys.path.append(str(project))
    sess, before = make(2), list(sys.path)
    for _ in range(3):
        run(sess, project, "result = 1")
    assert sys.path == before


def test_each_worker_looks_in_folders_of_its_own(
    make: Callable[..., Session], project: Path
) -> None:
    """A script may add another folder on each rank, with modules of the same names."""
    for rank in range(4):
        project.joinpath(str(rank)).mkdir()
        write(
            project / str(rank),
            dl_config=f"""
            value = 10 + {rank}
            def later():
                import dl_more
                return dl_more.value
            """,
            dl_more=f"value = 20 + {rank}",
            dl_kit__in__part=f"value = 30 + {rank}",
            dl_kit__in____init__="from . import part",
        )
    sess = make(4)
    text = """
import sys, torch.distributed as dist
rank = dist.get_rank()
dist.barrier()
sys.path.insert(0, f"{sys.path[0]}/{rank}")
dist.barrier()
import dl_config
from dl_kit import part
import dl_kit.part
result = [dl_config.value, dl_config.later(), part.value, dl_kit.part.value, sys.path[0][-1]]
dist.barrier()
sys.path.remove(sys.path[0])
try: import dl_nowhere
except ModuleNotFoundError: result.append("none")
"""
    write(project / "3", dl_nowhere="")
    assert run(sess, project, text) == [
        [10 + r, 20 + r, 30 + r, 30 + r, str(r), "none"] for r in range(4)
    ]
    assert not [name for name in sys.modules if name.startswith("dl_")]


def test_a_folder_that_a_script_adds_has_modules_of_its_own(project: Path) -> None:
    """Though the notebook has imported the same module, or another one of that name."""
    write(project, dl_count="value = 0", train="")
    folder = project / "other"
    folder.mkdir()
    write(folder, dl_count="value = 5", dl_same="value = 0")
    sys.path[:0] = [str(project)]
    count: Any = importlib.import_module("dl_count")
    sys.path.append(str(folder))
    same: Any = importlib.import_module("dl_same")
    sys.path.remove(str(folder))
    same.value = count.value = 7
    try:
        with ThreadedSession(4, devices="cpu", timeout=60) as sess:
            write(folder.parent, train="")
            scripts = project / "scripts"
            scripts.mkdir()
            text = f"""
import sys, torch.distributed as dist
sys.path.insert(0, {str(folder)!r})
import dl_count, dl_same
dl_same.value += dist.get_rank()
dist.barrier()
result = [dl_count.value, dl_same.value]
"""
            assert run(sess, scripts, text) == [[5, rank] for rank in range(4)]
        assert (count.value, same.value) == (7, 7)
        assert sys.modules["dl_count"] is count
        assert sys.modules["dl_same"] is same
    finally:
        sys.modules.pop("dl_count", None)
        sys.modules.pop("dl_same", None)


def test_each_worker_loads_a_hub_folder_of_its_own(project: Path) -> None:
    """Whose modules have the same names; in cells and in scripts."""
    for rank in range(4):
        folder = project / f"hub{rank}"
        folder.mkdir()
        write(
            folder,
            hubconf="from dl_models.net import Net\ndef net(): return Net()",
            dl_models__in____init__="",
            dl_models__in__deep=f"scale = {rank} + 1",
            dl_models__in__net="""
            import torch
            class Net(torch.nn.Module):
                def forward(self, x):
                    from . import deep
                    return x * deep.scale
            """,
        )

    def program() -> list[Any]:
        import pickle

        import torch
        import torch.distributed as dist

        path = list(sys.path)
        dist.barrier()
        load = torch.hub.load
        net = load(str(project / f"hub{current_worker().rank}"), "net", source="local")
        dist.barrier()
        again = pickle.loads(pickle.dumps(net))
        return [int(net(torch.ones(()))), type(again) is type(net), sys.path == path]

    text = f"""
import pathlib, sys, torch, torch.distributed as dist
dist.barrier()
net = torch.hub.load(f"{project}/hub{{dist.get_rank()}}", "net", source="local")
dist.barrier()
result = [int(net(torch.ones(()))), True, True]
"""
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        for _ in range(3):
            found = sess.call_packed(program).debug_get_from_all()
            assert found == [[rank + 1, True, True] for rank in range(4)]
        assert run(sess, project, text) == [[rank + 1, True, True] for rank in range(4)]
        write(project, dl_models="name = 'the notebook'")
        assert sess.call_packed(program).debug_get_from_all() == found
        sys.path.insert(0, str(project))
        importlib.invalidate_caches()
        assert importlib.import_module("dl_models").name == "the notebook"
        assert sess.call_packed(program).debug_get_from_all() == found
    assert sys.modules.pop("dl_models").name == "the notebook"
    assert not [name for name in sys.modules if name.startswith("dl_")]


@pytest.fixture
def notebooks(project: Path) -> Iterator[Any]:
    """A module `dl_both` that the notebook has imported; `project` / "other" has another one."""
    project.joinpath("other").mkdir()
    write(project, dl_both="where = 'notebook'")
    write(project / "other", dl_both="where = 'other'")
    sys.path.insert(0, str(project))
    importlib.invalidate_caches()
    yield importlib.import_module("dl_both")
    sys.modules.pop("dl_both", None)


def test_workers_that_reach_an_import_together_keep_their_modules(
    project: Path, notebooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds what it has imported again, though all took the notebook's place at once."""
    is_source = worker_modules._is_source

    def slowly(spec: Any) -> bool:
        time.sleep(0.1)  # so that all have looked before the first goes on
        return is_source(spec)

    monkeypatch.setattr(worker_modules, "_is_source", slowly)
    scripts = project / "scripts"
    scripts.mkdir()
    text = f"""
import sys, torch.distributed as dist
sys.path.insert(0, {str(project / "other")!r})
dist.barrier()
import dl_both
dl_both.rank = dist.get_rank()
dist.barrier()
import dl_both
result = [dl_both.where, getattr(dl_both, "rank", None)]
"""
    with ThreadedSession(4, devices="cpu", timeout=60) as sess:
        assert run(sess, scripts, text) == [["other", rank] for rank in range(4)]
    assert not hasattr(notebooks, "rank")


def test_a_hub_folder_leaves_what_cells_have_imported(project: Path, notebooks: Any) -> None:
    """As Python does, which looks in sys.modules first."""
    write(project / "other", hubconf="import dl_both\ndef where(): return dl_both.where")

    def look() -> str:
        module: Any = importlib.import_module("dl_both")
        return str(module.where)

    def load() -> Any:
        import torch

        return torch.hub.load(str(project / "other"), "where", source="local")

    notebooks.where = "set"
    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        for function in (look, load, look):
            assert sess.call_packed(function).debug_get_from_all() == ["set"] * 2
    assert sys.modules["dl_both"] is notebooks


def test_an_import_in_a_loop_looks_in_no_folder(
    project: Path, notebooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that import what they need, as those of libraries do, stay as fast."""
    find, asked = PathFinder.find_spec, []

    def find_spec(name: str, *more: Any) -> Any:
        asked.append(name)
        return find(name, *more)

    monkeypatch.setattr(PathFinder, "find_spec", find_spec)
    scripts = project / "scripts"
    scripts.mkdir()
    text = """
import sys
for _ in range(50):
    import dl_both
sys.path.append("/nowhere")
import dl_both
result = dl_both.where
"""
    with ThreadedSession(1, devices="cpu", timeout=60) as sess:
        assert run(sess, scripts, text) == ["notebook"]
    assert asked.count("dl_both") == 2  # by where it looks


def cell(sess: Session, text: str) -> list[Any]:
    """What workers find in `result` after a cell."""
    return list(sess.call_packed(run_cell, dedent(text)).debug_get_from_all())


def run_cell(text: str) -> Any:
    names = current_worker().namespace
    exec(compile(text, "<cell>", "exec"), names)
    return names["result"]


@pytest.fixture
def by_rank(project: Path) -> Path:
    """Folders 0 to 3 with modules of the same names."""
    for rank in range(4):
        project.joinpath(str(rank)).mkdir()
        write(
            project / str(rank),
            dl_config=f"import os\nrank, value = int(os.environ['RANK']), 10 + {rank}",
            dl_kit__in__part=f"import dl_config\nvalue = [dl_config.value, 20 + {rank}]",
            dl_kit__in____init__="",
        )
    return project


ADD = """
import sys, torch.distributed as dist
rank = dist.get_rank()
dist.barrier()
sys.path.insert(0, f"{folder}/{rank}")
dist.barrier()
"""


def test_each_worker_looks_in_folders_that_its_cells_add(
    make: Callable[..., Session], by_rank: Path
) -> None:
    sess, path = make(4, timeout=60), list(sys.path)
    text = "import dl_config, dl_kit.part\nresult = [dl_config.rank, dl_kit.part.value]"
    expected = [[rank, [10 + rank, 20 + rank]] for rank in range(4)]
    add = f"folder = {str(by_rank)!r}\n{ADD}"
    assert cell(sess, add + text) == expected
    assert cell(sess, f"dl_config.rank += 100\n{text}") == [[100 + r, v] for r, v in expected]
    assert sys.path == path
    if isinstance(sess, ThreadedSession):  # a process has one module of a name
        # a script begins anew, and leaves cells what they have imported
        assert run(sess, by_rank, f"{text}\ndl_config.rank = -1") == expected
    assert cell(sess, text) == [[100 + r, v] for r, v in expected]
    assert cell(sess, "sys.path[0] = './nowhere'\nresult = sys.path[0]") == ["./nowhere"] * 4


def test_cells_of_workers_do_not_find_what_the_notebook_has_imported(
    make: Callable[..., Session], by_rank: Path
) -> None:
    """Where they have added a folder with a module of that name, as in processes."""
    write(by_rank, dl_config="value = 'notebook'", dl_kit__in__part="value = 'notebook'")
    write(by_rank, dl_kit__in____init__="")
    sys.path.insert(0, str(by_rank))
    importlib.invalidate_caches()
    mine: Any = importlib.import_module("dl_config")
    importlib.import_module("dl_kit.part")
    text = f"""
import torch.distributed as dist
if dist.get_rank() == 0:
    import dl_config  # it stays: Python looks for it once
folder = {str(by_rank)!r}
{ADD}
import dl_kit.part, dl_config
result = [dl_config.value, dl_kit.part.value]
"""
    values = ["notebook", 11, 12, 13]
    assert cell(make(4, timeout=60), text) == [[v, [v, 20 + r]] for r, v in enumerate(values)]
    assert importlib.import_module("dl_kit.part").value == "notebook"
    assert importlib.import_module("dl_config").value == mine.value == "notebook"


def test_a_module_is_reloaded_for_who_asks(
    make: Callable[..., Session], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was imported before its folder, the notebook's, was added in a cell."""
    monkeypatch.chdir(project)
    sys.path.insert(0, "")
    write(project, dl_mine="value = 1", dl_ours="value = 1")
    importlib.invalidate_caches()
    mine: Any = importlib.import_module("dl_mine")
    sess = make(2, timeout=60)
    assert cell(sess, "import dl_ours\nresult = dl_ours.value") == [1, 1]
    add = f"import importlib, sys\nsys.path.insert(0, {str(project)!r})\nimport dl_mine\n"
    values = "result = dl_mine.value, dl_ours.value"
    assert cell(sess, add + values) == [(1, 1)] * 2
    write(project, dl_mine="value = 22", dl_ours="value = 22")
    assert importlib.reload(mine) is mine
    assert mine.value == 22
    assert cell(sess, values) == [(1, 1)] * 2
    again = "importlib.reload(dl_ours)\nimportlib.reload(dl_mine)\n"
    assert cell(sess, again + values) == [(22, 22)] * 2


@pytest.fixture
def beside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook's own folder, in which its kernel was started."""
    monkeypatch.chdir(project)
    sys.path.insert(0, "")
    write(
        project,
        dl_kit__in____init__="import torch.distributed as dist\ndist.barrier()\nfrom . import more",
        dl_kit__in__more="import os\nrank = int(os.environ['RANK'])",
        dl_kit__in__deep="from . import more\nfound = [more.rank]",
    )
    return project


@pytest.mark.conformance
def test_modules_of_the_notebooks_folder_are_each_workers_own(
    make: Callable[..., Session], beside: Path
) -> None:
    """Those that workers import first, as in processes: they keep ranks, groups, caches."""
    sess = make(4, timeout=60)
    text = """
import pickle, dl_kit.deep, dl_state
from dl_state import Item, count
Item.rank = dl_state.RANK
result = [count(), dl_state.counter, Item.rank, dl_kit.deep.found, dl_kit.more.rank,
          type(pickle.loads(pickle.dumps(Item()))) is Item, dl_state.draw]
"""
    write(
        beside,
        dl_state="""
        import os, torch
        RANK, counter = int(os.environ["RANK"]), 0
        torch.manual_seed(RANK)
        draw = torch.rand(1).item()
        class Item:
            rank = None
        def count():
            global counter
            counter += 1 + RANK
            return counter
        """,
    )
    expected = [[1 + r, 1 + r, r, [r], r, True] for r in range(4)]
    found = cell(sess, text)
    assert [values[:-1] for values in found] == expected
    assert len({values[-1] for values in found}) == 4
    assert [values[0] for values in cell(sess, text)] == [2 * (1 + r) for r in range(4)]
    scripts = beside / "scripts"
    scripts.mkdir()
    assert [values[:-1] for values in run(sess, scripts, text)] == expected
    assert cell(sess, "import dl_state\nresult = dl_state.counter") == [
        2 * (1 + r) for r in range(4)
    ]
    if isinstance(sess, ThreadedSession):
        sess.shutdown()
        assert not [name for name in sys.modules if name.startswith("dl_")]


@pytest.mark.one_process
def test_what_the_notebook_has_imported_from_its_folder_is_one_for_all(
    sess: Session, beside: Path
) -> None:
    """Workers know objects of its classes; what the notebook imports later is its own."""
    write(beside, dl_before="class Item: pass", dl_after="class Item: pass\nvalue = 0")
    before: Any = importlib.import_module("dl_before")
    text = "import dl_before, dl_after\ndl_after.value += 1\nresult = dl_before.Item"
    assert cell(sess, text) == [before.Item] * 4
    after: Any = importlib.import_module("dl_after")
    assert after.value == 0
    assert cell(sess, "import dl_after\nresult = dl_after.value, dl_after.Item")[0][0] == 1
    classes = {after.Item, *(item for _, item in cell(sess, "result = 0, dl_after.Item"))}
    assert len(classes) == 5
    sess.shutdown()
    assert vars(sys.modules["dl_after"]) is vars(after)


def test_a_relative_folder_of_a_worker_is_its_own(
    make: Callable[..., Session], by_rank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(by_rank)
    text = "folder = '.'\n" + ADD + "import dl_config\nresult = dl_config.value"
    assert cell(make(4, timeout=60), text) == [10, 11, 12, 13]


def test_cells_follow_the_path_of_the_notebook(make: Callable[..., Session], project: Path) -> None:
    """Behind the folders that they have added, whatever the engine."""
    sess = make(2, timeout=60)
    assert cell(sess, "import sys\nsys.path.insert(0, '/of-worker')\nresult = 0") == [0, 0]
    sys.path.append(str(project))
    sys.path.insert(0, "/front")
    result = "result = [p for p in sys.path if p in ('/front', '/of-worker')], sys.path[-1]"
    assert cell(sess, result) == [(["/front", "/of-worker"], str(project))] * 2
    assert "/of-worker" not in sys.path
    sys.path.remove("/front")
    assert cell(sess, result) == [(["/of-worker"], str(project))] * 2
    assert cell(sess, "import dl_tools.table as t\nresult = t.entries") == [{}] * 2


def test_a_script_has_modules_of_its_own_in_a_package_that_the_notebook_has(
    make: Callable[..., Session], project: Path
) -> None:
    scripts = project / "scripts"
    scripts.mkdir()
    write(project, dl_kit__in____init__="", dl_kit__in__part="value = 1", dl_kit__in__other="")
    write(scripts, dl_kit__in____init__="", dl_kit__in__part="value = 2", dl_kit__in__more="")
    sys.path.insert(0, str(project))
    importlib.invalidate_caches()
    part: Any = importlib.import_module("dl_kit.part")
    assert importlib.import_module("dl_kit.other").__name__ == "dl_kit.other"
    text = """
import importlib
result = []
import dl_kit.part
result.append(dl_kit.part.value)
from dl_kit.part import value
result += [value, importlib.import_module("dl_kit.more").__name__]
try: import dl_kit.other
except ModuleNotFoundError: result.append("none")
"""
    assert run(make(2), scripts, text) == [[2, 2, "dl_kit.more", "none"]] * 2
    assert importlib.import_module("dl_kit.part") is part


def test_a_script_may_have_a_module_named_as_a_library(project: Path) -> None:
    """Which the notebook, or a library, has imported before."""
    mine: Any = importlib.import_module("yaml")
    write(project, yaml="value = 5")
    text = "import yaml\nresult = yaml.value"
    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        assert run(sess, project, text) == [5, 5]
        assert importlib.import_module("yaml") is mine
    assert mine.safe_load("[1]") == [1]


@pytest.mark.conformance
def test_a_script_begins_without_what_cells_have_imported(
    make: Callable[..., Session], project: Path
) -> None:
    """From its folder, from others, and of the name of what it finds in another folder."""
    for folder in ("added", "here", "later"):
        (project / folder).mkdir()
    write(
        project / "added", dl_added="count = 0", dl_kit__in____init__="", dl_kit__in__part="n = 0"
    )
    write(project / "here", dl_name="count = 'of cells'")
    write(project / "later", dl_name="count = 0", dl_late="count = 0")
    write(project, dl_count="count = 0")
    sys.path[:0] = [str(project / "here"), str(project)]
    sess = make(2)
    text = f"""
import sys
sys.path.append({str(project / "added")!r})
import dl_count, dl_added, dl_name, dl_kit.part
result = dl_count.count = dl_added.count = dl_kit.part.n = 7
"""
    cell(sess, text)
    text = f"""
import sys
sys.path.insert(0, {str(project / "later")!r})
import dl_count, dl_added, dl_late, dl_name
from dl_kit import part
modules = dl_count, dl_added, dl_late, dl_name
result = [*(module.count for module in modules), part.n]
for module in modules:
    module.count = 5
part.n = 5
"""
    for _ in range(2):
        assert run(sess, project, text) == [[0, 0, 0, 0, 0]] * 2
    write(project, dl_count="count = 'changed'")
    assert run(sess, project, text) == [["changed", 0, 0, 0, 0]] * 2
    text = """
import dl_count, dl_added, dl_name, dl_kit.part
result = [dl_count.count, dl_added.count, dl_name.count, dl_kit.part.n]
try: import dl_late
except ModuleNotFoundError: result.append("gone")
"""
    assert cell(sess, text) == [[7, 7, "of cells", 7, "gone"]] * 2

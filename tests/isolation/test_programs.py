"""A script finds on each worker what it finds in a process of torchrun."""

import ast
import builtins
import gc
import inspect
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discolab import Session, ThreadedSession, WorkerError, current_worker
from discolab.notebook.script import read_script, run_script

SCRIPT = Path(__file__).parent / "script_facts.py"
# of torchrun's agent, which discolab has none of; its store and error file are not there
OF_THE_AGENT = {
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE",
}


@pytest.fixture(scope="module")
def at_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--standalone", "script_facts.py", str(folder), "--steps", "2"]
    subprocess.run(command, check=True, capture_output=True, cwd=SCRIPT.parent, timeout=100)
    return facts_in(folder)


def facts_in(folder: Path) -> list[dict[str, Any]]:
    assert sorted(path.name for path in folder.glob("*.end")) == [f"{r}.end" for r in range(4)]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def run(sess: Session, path: Path, *args: str) -> None:
    full, source = read_script(str(path))
    sess.call_packed(run_script, full, source, list(args), path.name).debug_get_from_all()


@pytest.mark.conformance
def test_a_script_finds_what_torchrun_gives(
    make: Callable[..., Session],
    at_torchrun: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    sess = make(4)
    sess.sync_all()
    monkeypatch.chdir(SCRIPT.parent)  # as %cd does, after the workers were started
    run(sess, SCRIPT, str(tmp_path), "--steps", "2")
    for found, wanted in zip(facts_in(tmp_path), at_torchrun, strict=True):
        theirs, ours = wanted["environment"], found["environment"]
        assert ours.keys() == theirs.keys() - OF_THE_AGENT
        same = ours.keys() - {"TORCHELASTIC_RUN_ID"}
        if sess.engine not in ("sockets", "ray"):  # where workers count as several machines
            assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
        assert {**found, "environment": ""} == {**wanted, "environment": ""}


@pytest.mark.one_process
def test_each_worker_has_its_own_command_line(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "argv.py"
    path.write_text("import sys\nsys.argv.append(str(len(sys.argv)))\nseen = list(sys.argv)\n")
    full, source = read_script(str(path))

    def run_own() -> list[str]:
        worker = current_worker()
        run_script(full, source, ["--rank", str(worker.rank)], "argv.py")
        found: list[str] = worker.namespace["seen"]
        return found

    before = list(sys.argv)
    wanted = [["argv.py", "--rank", str(rank), "3"] for rank in range(4)]
    assert sess.call_packed(run_own).debug_get_from_all() == wanted
    assert sys.argv == before


def test_a_scripts_own_end_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text(
        "import atexit, os, signal, sys\n"
        "from pathlib import Path\n"
        "log = Path(sys.argv[1]) / os.environ['RANK']\n"
        "def write(text):\n"
        "    with log.open('a') as file:\n"
        "        file.write(text)\n"
        "atexit.register(write, 'last ')\n"
        "atexit.register(write, 'never ')\n"
        "atexit.register(lambda: 1 / 0)\n"
        "atexit.register(write, 'first ')\n"
        "atexit.unregister(print)\n"
        "before = signal.signal(signal.SIGTERM, write)\n"
        "write(f'{before == signal.SIG_DFL} {signal.getsignal(signal.SIGTERM) is write} ')\n"
        "os._exit(int(sys.argv[2]))\n"
    )
    with ThreadedSession(2, devices="cpu", timeout=20) as sess:
        with pytest.raises(WorkerError, match="division by zero"):
            run(sess, path, str(tmp_path), "0")
        assert (tmp_path / "1").read_text() == "True True first never last "
        path.write_text(path.read_text().replace("atexit.register(lambda: 1 / 0)\n", ""))
        with pytest.raises(WorkerError, match=r"exited with status 3 at ends.py:\d+"):
            run(sess, path, str(tmp_path), "3")
        run(sess, path, str(tmp_path), "0")


@pytest.mark.one_process
def test_the_working_folder_is_not_changed_under_others(sess: Session, tmp_path: Path) -> None:
    before = os.getcwd()

    def change(folder: str) -> str:
        os.chdir(folder)
        return os.getcwd()

    with pytest.raises(WorkerError, match=r"working folder belongs to the process.*processes"):
        sess.call_packed(change, str(tmp_path)).debug_get_from_all()
    assert sess.call_packed(change, before).debug_get_from_all() == [before] * 4
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(WorkerError, match=r"os.fchdir.*working folder belongs to the process"):
            sess.call_packed(lambda: os.fchdir(folder)).debug_get_from_all()
    finally:
        os.close(folder)
    assert os.getcwd() == before


def test_a_lone_worker_changes_the_working_folder_unless_another_session_works_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with ThreadedSession(1, devices="cpu", timeout=20) as alone:
        with ThreadedSession(1, devices="cpu", timeout=20) as other:
            with pytest.raises(WorkerError, match="working folder belongs to the process"):
                alone.call_packed(os.chdir, "sub").debug_get_from_all()
            assert other.call_packed(os.getcwd).debug_get_from_all() == [str(tmp_path)]
        alone.call_packed(os.chdir, "sub").debug_get_from_all()
    assert os.getcwd() == str(tmp_path / "sub")


def test_workers_work_in_the_folder_of_the_notebook(
    make: Callable[..., Session], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sess = make(2)
    monkeypatch.chdir(tmp_path)
    assert sess.call_packed(os.getcwd).debug_get_from_all() == [str(tmp_path)] * 2


@pytest.mark.one_process
def test_workers_parse_at_the_same_time(sess: Session) -> None:
    source = inspect.getsource(inspect)

    def parse() -> int:
        return len([ast.parse(source) for _ in range(3)])

    def other_threads(*_: Any) -> None:
        time.sleep(0)

    gc.callbacks.append(other_threads)  # as a library's that counts collections
    try:
        assert sess.call_packed(parse).debug_get_from_all() == [3] * sess.num_workers
    finally:
        gc.callbacks.remove(other_threads)


LEAVES = """
import decimal, numpy, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out
def state():
    return [torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"), torch.get_num_threads(), numpy.geterr()["divide"],
            decimal.getcontext().prec, torch._C._autograd._top_saved_tensors_default_hooks(False),
            len(torch.overrides._get_current_function_mode_stack()), str(torch.ones(1).device),
            torch.ones(1).sin().item(), torch._C._len_torch_dispatch_stack(),
            sys.gettrace() is None, sys.getprofile() is None,
            (torch.tensor(1e-40) * 1).item() > 0, torch._C._is_view_replay_enabled()]
found = state()
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_autocast_enabled("cpu", True)
torch.set_autocast_dtype("cpu", torch.float16)
torch.set_num_threads(7)
numpy.seterr(divide="raise")
decimal.getcontext().prec = 3
torch.autograd.graph.save_on_cpu().__enter__()
Doubles().__enter__()
sys.settrace(lambda *_: None)
sys.setprofile(lambda *_: None)
torch.set_flush_denormal(True)
torch._C._set_view_replay_enabled(True)
"""

LIBRARY_LEAVES = {
    "sklearn": """
import sklearn
found = sklearn.get_config()["assume_finite"]
sklearn.set_config(assume_finite=True)
""",
    "joblib": """
import joblib
found = joblib.effective_n_jobs(None)
joblib.parallel_config(n_jobs=2)
""",
    "scipy": """
from scipy import special
found = special.geterr()["singular"]
special.seterr(all="raise")
""",
    "xgboost": """
import xgboost
found = xgboost.get_config()["verbosity"]
xgboost.set_config(verbosity=0)
""",
    "numba": """
from numba import _helperlib as numba
state = numba.rnd_get_np_state_ptr()
found = numba.rnd_get_state(state)[1][2] == 1812433255
numba.rnd_seed(state, 0)
""",
}

KERNELS = """
import torch
try:
    found = torch.ops.discolab_dyes.dye(torch.ones(1)).item()
except NotImplementedError:
    found = "none"
lib = torch.library.Library("discolab_dyes", "IMPL")
lib.impl("dye", lambda x: torch.full_like(x, 7.0), "CPU")
assert torch.ops.discolab_dyes.dye(torch.ones(1)).item() == 7
"""


def test_a_script_leaves_its_thread_as_it_was(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(LEAVES)

    def found() -> str:
        return str(current_worker().namespace["found"])

    seen = []
    for _ in range(2):
        run(sess, path)
        seen.append(sess.call_packed(found).debug_get_from_all())
    assert seen[0] == seen[1]
    assert sess.call_packed(torch.is_grad_enabled).debug_get_from_all() == [True] * 4


def test_a_script_leaves_inference_mode(sess: Session, tmp_path: Path) -> None:
    """Also where the object that began it is kept, and goes when the next script has ended."""
    path = tmp_path / "leaves.py"
    path.write_text(
        "import torch\n"
        "found = [torch.is_inference_mode_enabled(), torch.is_grad_enabled()]\n"
        "def batches():\n"
        "    with torch.inference_mode():\n"
        "        yield\n"
        "kept = torch.inference_mode()\n"
        "with torch.no_grad():\n"
        "    kept.__enter__()\n"
        "    begun = batches()\n"
        "    next(begun)\n"
    )

    def modes() -> list[bool]:
        return [torch.is_inference_mode_enabled(), torch.is_grad_enabled()]

    for _ in range(3):
        run(sess, path)
        assert sess["found"].debug_get_from_all() == [[False, True]] * 4
        assert sess.call_packed(modes).debug_get_from_all() == [[False, True]] * 4
    sess.call_packed(lambda: current_worker().namespace.clear()).debug_get_from_all()
    sess.call_packed(lambda: int(gc.collect() >= 0)).debug_get_from_all()
    assert sess.call_packed(modes).debug_get_from_all() == [[False, True]] * 4


def test_a_script_leaves_the_streams_as_they_were(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "streams.py"
    path.write_text(
        "import io, sys\n"
        "found = type(sys.stdout) is io.StringIO or type(sys.stderr) is io.StringIO\n"
        "sys.stdout = sys.stderr = io.StringIO()\n"
        "print('what nobody sees')\n"
        "text = sys.stdout.getvalue()\n"
    )

    def taken() -> bool:
        return isinstance(sys.stdout, io.StringIO) or isinstance(sys.stderr, io.StringIO)

    for _ in range(2):
        run(sess, path)
        assert sess["found"].debug_get_from_all() == [False] * 4
        assert sess["text"].debug_get_from_all() == ["what nobody sees\n"] * 4
        assert sess.call_packed(taken).debug_get_from_all() == [False] * 4


@pytest.mark.filterwarnings("ignore")
def test_a_script_leaves_functions_of_modules_as_they_were(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "patches.py"
    (tmp_path / "patching.py").write_text(
        "import builtins, torch\n"
        "before = builtins.print\n"
        "def print_first(*args, **kwargs):\n"
        "    before(*args, **kwargs)\n"
        "builtins.print = print_first\n"
        "torch.nn.Module.patched_in = lambda self: 5\n"
    )
    path.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "from torch.nn import functional\n"
        "found = functional.gelu(torch.ones(1)).item() > 1, torch.nn.Linear.__name__\n"
        "found += torch.nn.Linear(1, 1).forward.__name__, hasattr(torch.nn.Module, 'patched_in')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 0:\n"
        "    import patching\n"
        "    gelu = functional.gelu\n"
        "    functional.gelu = lambda x: gelu(x) * 2\n"
        "    torch.nn.Linear.forward = lambda self, x: x\n"
        "    torch.nn.Linear = type('Mine', (torch.nn.Linear,), {})\n"
        "    assert functional.gelu(torch.ones(1)).item() > 1\n"
        "dist.barrier()\n"
    )
    wanted = (False, "Linear", "forward", False)
    printing = print
    for _ in range(2):
        run(sess, path)
        assert sess["found"].debug_get_from_all() == [wanted] * 4
        assert builtins.print is printing
        assert torch.nn.Linear.__name__ == "Linear"


def test_a_script_finds_no_handler_of_another(tmp_path: Path) -> None:
    path = tmp_path / "handlers.py"
    path.write_text(
        "import signal\n"
        "found = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
    )
    with ThreadedSession(2, devices="cpu", timeout=20) as sess:
        for _ in range(2):
            run(sess, path)
            assert sess["found"].debug_get_from_all() == [True] * 2


@pytest.mark.any_engine
def test_a_script_finds_nothing_that_another_has_sent_or_stored(make: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from discolab import ccl\n"
        "value = torch.tensor([float(sys.argv[1])])\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "found = [store.add('count', 1)]\n"
        "for _ in range(2) if dist.get_rank() == 0 else ():\n"  # the second one is not received
        "    dist.send(value, 1), ccl.send(value, 1, tag=3)\n"
        "if dist.get_rank() == 1:\n"
        "    got = torch.zeros(2, 1)\n"
        "    dist.recv(got[0], 0), ccl.recv(got[1], 0, tag=3)\n"
        "    found += got.flatten().tolist()\n"
        "    store.set('key', 'value')\n"
        "store.wait(['key'])\n"
    )
    sess = make(2)
    for turn in range(2):
        run(sess, script, str(turn))
        found = sess["found"].debug_get_from_all()
        assert sorted([found[0][0], found[1][0]]) == [1, 2]
        assert found[1][1:] == [turn, turn]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARY_LEAVES)
def test_a_script_leaves_a_library_as_it_was(tmp_path: Path, library: str) -> None:
    """Also one that the script imports first."""
    pytest.importorskip(library)
    path = tmp_path / "leaves.py"
    path.write_text(LIBRARY_LEAVES[library])

    def found() -> str:
        return str(current_worker().namespace["found"])

    seen = []
    with ThreadedSession(2, devices="cpu", timeout=100) as sess:
        for _ in range(3):
            run(sess, path)
            seen.append(sess.call_packed(found).debug_get_from_all())
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.one_process
def test_a_script_takes_its_kernels_with_it(sess: Session, tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    library = torch.library.Library("discolab_dyes", "DEF")
    library.define("dye(Tensor x) -> Tensor")
    for _ in range(2):
        run(sess, path)
        found = sess.call_packed(lambda: current_worker().namespace["found"])
        assert found.debug_get_from_all() == ["none"] * 4
    library._destroy()


POOL = """
import json, multiprocessing, os, sys, numpy, torch
def draw(number):
    return [number, os.environ["RANK"], sys.argv[1:2], numpy.random.rand(), torch.rand(1).item(),
            str(torch.ones(1).dtype), str(torch.get_default_dtype()), __name__]
numpy.random.seed(3)
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
expected = draw(0)
numpy.random.seed(3)
torch.manual_seed(3)
with multiprocessing.get_context("fork").Pool(1) as pool:
    found = pool.map_async(draw, [0]).get(timeout=30)
assert found == [expected], [found, expected]
"""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pool_of_processes_goes_on_where_the_worker_is(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "pool.py"
    path.write_text(POOL)
    run(make(2), path, "own argument")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_pool_does_so_where_a_worker_has_had_a_session_of_its_own(
    make: Any, tmp_path: Path
) -> None:
    def session_within() -> None:
        with ThreadedSession(1, devices="cpu") as within:
            within.sync_all()

    path = tmp_path / "pool.py"
    path.write_text(POOL)
    sess = make(2)
    sess.call_packed(session_within).debug_get_from_all()
    run(sess, path, "own argument")

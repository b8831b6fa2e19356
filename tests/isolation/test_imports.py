"""First imports by several threads at once, whole in spite of interrupts and failures."""

import importlib
import json
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from discolab import Session, ThreadedSession, current_worker
from discolab.isolation import import_effects, table
from discolab.isolation.patches import Patches
from discolab.notebook.script import read_script, run_script
from tests.selection import slow

AT_ONCE = """
import sys, time
from discolab import ThreadedSession

def first_import(statement):
    names = {}
    exec(statement, names)
    return all(names[name] is sys.modules[name] for name in names if name in sys.modules)

with ThreadedSession(4, devices="cpu", timeout=100) as sess:
    if delay := float(sys.argv[2]):
        sess.call_packed(first_import, sys.argv[1])
        time.sleep(delay)
        assert not sess.interrupt(timeout=60)
    assert sess.call_packed(first_import, sys.argv[1]).debug_get_from_all() == [True] * 4
"""

FIRST_STORAGE = """
import builtins, sys, time, torch
from discolab import ThreadedSession
from discolab.isolation import table

table._rows.pop(sys.argv[1], None)

import_ = builtins.__import__

def slowly(name, *arguments, **more):
    if name == "torch.storage":
        time.sleep(0.5)
    return import_(name, *arguments, **more)

def of_storage():
    return torch.empty(0).set_(torch.ones(3).untyped_storage()).sum().item()

builtins.__import__ = slowly
with ThreadedSession(4, devices="cpu", timeout=100) as sess:
    assert sess.call_packed(of_storage).debug_get_from_all() == [3.0] * 4
"""

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules, ``parcel`` and those in it, that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path.joinpath("parcel", f"{name}.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("parcel")]:
        del sys.modules[name]


@pytest.fixture
def four() -> Iterator[Session]:
    with ThreadedSession(4, devices="cpu", timeout=20) as sess:
        yield sess


@pytest.mark.parametrize(
    ("statement", "delay"),
    [
        slow("from transformers import AutoModelForCausalLM, AutoConfig", 0),
        ("from transformers import AutoModelForCausalLM, AutoConfig", 0.3),
        slow("import accelerate; accelerate.Accelerator", 0),
        slow("import datasets; datasets.Dataset", 0),
        slow("import lightning; lightning.Fabric", 0.5),
        ("import sympy; sympy.printing", 0.1),
    ],
    ids=[
        "transformers",
        "transformers, cut",
        "accelerate",
        "datasets",
        "lightning, cut",
        "sympy, cut",
    ],
)
def test_four_workers_import_a_library_at_once(statement: str, delay: float) -> None:
    library = statement.split()[1].rstrip(",;")
    pytest.importorskip(library)
    program = [sys.executable, "-W", "ignore", "-c", AT_ONCE, statement, str(delay)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_module_that_replaces_itself_is_one_for_all(four: Session, write: Write) -> None:
    write(
        __init__="""
        import sys, time, types
        new = types.ModuleType("parcel")
        new.__path__, new.__spec__, new.value = __path__, __spec__, 7
        time.sleep(0.1)
        sys.modules[__name__] = new
        """
    )

    def first() -> list[bool]:
        time.sleep(0.02 * current_worker().worker_id)
        import parcel  # type: ignore[import-not-found]
        from parcel import value

        return [parcel is sys.modules["parcel"], value == 7]

    assert four.call_packed(first).debug_get_from_all() == [[True, True]] * 4


def test_an_import_that_was_cut_short_starts_anew(four: Session, write: Write) -> None:
    start = "import time\nfrom parcel import below\nimport parcel.user\n"
    write(__init__=start + "time.sleep(30)", below="value = 1", user="import parcel")

    def first() -> Any:
        import parcel

        return parcel.below.value, parcel.user.parcel.done, parcel is parcel.user.parcel

    four.call_packed(first)
    time.sleep(0.2)
    assert not four.interrupt(timeout=5)
    assert "parcel.below" not in sys.modules
    write(__init__=start + "done = True  # and no longer")
    assert four.call_packed(first).debug_get_from_all() == [(1, True, True)] * 4


def test_an_import_that_fails_does_so_on_all_workers_alike(four: Session, write: Write) -> None:
    write(__init__="import parcel.below\nimport parcel.missing", below="value = 1")

    def first() -> str:
        try:
            import parcel
        except ImportError as exc:
            return str(exc)
        return str(parcel.below.value)

    assert set(four.call_packed(first).debug_get_from_all()) == {"No module named 'parcel.missing'"}
    write(missing="", below="value = 2  # as it is now")
    assert four.call_packed(first).debug_get_from_all() == ["2"] * 4


CIRCLE = {
    "__init__": "",
    "a": "import time\ntime.sleep(0.02)\nimport parcel.b as other\ntime.sleep(0.1)\nvalue = 1",
    "b": "import time\ntime.sleep(0.02)\nimport parcel.a as other\ntime.sleep(0.1)\nvalue = 1",
}


def test_a_circle_of_modules_is_imported_by_helper_threads_and_the_notebook(
    four: Session, write: Write
) -> None:
    write(**CIRCLE)
    failed: list[BaseException] = []

    def load(name: str) -> None:
        try:
            assert importlib.import_module(name).other.value == 1
        except BaseException as exc:
            failed.append(exc)

    def first() -> None:
        helper = threading.Thread(target=load, args=("parcel.a",))
        helper.start()
        helper.join()

    done = four.call_packed(first)
    time.sleep(0.01)
    load("parcel.b")
    done.debug_get_from_all()
    assert not failed


def test_a_module_may_start_workers_that_import_it(write: Write) -> None:
    write(
        __init__="""
        from discolab import ThreadedSession
        value = 3
        def look():
            import importlib, parcel, parcel.below
            return importlib.import_module("parcel").value + parcel.below.value
        with ThreadedSession(2, devices="cpu", timeout=10) as sess:
            result = sess.call_packed(look).debug_get_from_all()
        """,
        below="value = 1",
    )
    assert importlib.import_module("parcel").result == [4, 4]


def test_an_import_ends_though_its_own_threads_import(
    four: Session, write: Write, tmp_path: Path
) -> None:
    write(
        __init__="""
        import threading
        thread = threading.Thread(target=lambda: __import__("parcel_user"))
        thread.start()
        thread.join()
        """
    )
    (tmp_path / "parcel_user.py").write_text("value = 1")

    def first() -> bool:
        import parcel

        return not parcel.thread.is_alive() and "parcel_user" in sys.modules

    assert four.call_packed(first).debug_get_from_all() == [True] * 4


def test_a_module_has_its_own_variables_whatever_their_names(four: Session, write: Write) -> None:
    write(__init__="argv, stdout, stderr, ps1 = 'a', 'b', 'c', 'd'")

    def variables() -> tuple[Any, ...]:
        import parcel

        return type(parcel) is ModuleType, parcel.argv, parcel.stdout, parcel.stderr, parcel.ps1

    seen = four.call_packed(variables).debug_get_from_all()
    assert seen == [(True, "a", "b", "c", "d")] * 4
    assert importlib.import_module("parcel").argv == "a"


def test_what_the_table_changes_is_changed_again_after_a_reload(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(__init__="value = 1")
    monkeypatch.setattr(table, "_rows", dict(table._rows))

    def change(module: ModuleType, patches: Patches) -> None:
        patches.replace(module, "value", lambda before: -before)

    row = table.Row(
        state="value of a parcel",
        treatment=table.Treatment.SHARED,
        meaning="",
        on_import={
            "parcel": lambda module, patches: patches.replace(module, "value", lambda v: -v)
        },
    )
    table.add(row)
    with ThreadedSession(2, devices="cpu", timeout=10):
        parcel = importlib.import_module("parcel")
        assert parcel.value == -1
        assert importlib.reload(parcel).value == -1
        del sys.modules["parcel"]
        assert importlib.import_module("parcel").value == -1
    assert importlib.import_module("parcel").value == 1


def test_two_workers_may_need_the_first_storage_at_once(request: pytest.FixtureRequest) -> None:
    program = [sys.executable, "-c", FIRST_STORAGE, str(request.config.getoption("--without-row"))]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


SETS = """
import sys, numpy as np, torch
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)
torch.distributions.Distribution.set_default_validate_args(False)
torch.set_autocast_enabled("cpu", True)
torch.set_flush_denormal(True)
np.seterr(divide="raise")
torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
sys.path.append("/of-dl-sets")
import dl_inner
"""
INNER = "import decimal; decimal.getcontext().prec = 7"
IMPORTS = """
import decimal, sys, numpy as np, torch

def look():
    tiny = torch.tensor(1e-40, dtype=torch.float32, device="cpu")
    return [
        str(torch.get_default_dtype()), torch.get_default_device().type, torch.is_grad_enabled(),
        torch.distributions.Distribution._validate_args, torch.is_autocast_enabled("cpu"),
        bool((tiny * 1).item() == 0), np.geterr()["divide"], decimal.getcontext().prec,
        len(torch.nn.modules.module._global_forward_hooks), "/of-dl-sets" in sys.path,
    ]

def program():
    import dl_sets
    found = [look()]
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_flush_denormal(False)
    import dl_sets, dl_inner  # a module is executed once
    found.append(look())
    return found
"""


@pytest.mark.parametrize("who", ["workers", "notebook"])
def test_each_worker_has_what_a_module_sets(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own all workers would execute it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {"sets": SETS, "inner": INNER, "imports": IMPORTS}.items():
        tmp_path.joinpath(f"dl_{name}.py").write_text(text)
    alone = "import json, dl_imports; print(json.dumps(dl_imports.program()))"
    wanted = json.loads(subprocess.check_output([sys.executable, "-c", alone], cwd=tmp_path))

    def program() -> Any:
        return importlib.import_module("dl_imports").program()

    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text("import dl_imports\nresult = dl_imports.program()\n")
    full, source = read_script(str(script))

    def run_both() -> list[Any]:
        run_script(full, source, [], "train.py")
        return [current_worker().namespace["result"], program()]

    try:
        with ThreadedSession(3, devices="cpu", timeout=60) as sess:
            if who == "notebook":
                with torch.random.fork_rng(), torch.device("cpu"):
                    importlib.import_module("dl_imports")
                    in_thread(lambda: importlib.import_module("dl_sets"))
            assert sess.call_packed(program).debug_get_from_all() == [wanted] * 3
        with ThreadedSession(3, devices="cpu", timeout=60) as sess:
            assert sess.call_packed(run_both).debug_get_from_all() == [[wanted, wanted]] * 3
    finally:
        for name in [name for name in sys.modules if name.startswith("dl_")]:
            del sys.modules[name]
        torch.set_default_dtype(torch.float32)  # what all threads of the notebook have in common
        torch.distributions.Distribution.set_default_validate_args(__debug__)
        torch.nn.modules.module._global_forward_hooks.clear()


def test_what_a_module_sets_anew_each_worker_has(four: Session, write: Write) -> None:
    """Though the first that imports it had set the same; what it puts back is nobody's."""
    write(sets="import torch\ntorch.set_default_dtype(torch.float64)")
    write(
        restores="""
        import torch
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        torch.set_default_dtype(before)
        """
    )

    def program(name: str, first: torch.dtype, others: torch.dtype) -> torch.dtype:
        if current_worker().rank == 0:
            torch.set_default_dtype(first)
            importlib.import_module(f"parcel.{name}")
        else:
            torch.set_default_dtype(others)
        dist.barrier()
        importlib.import_module(f"parcel.{name}")
        return torch.get_default_dtype()

    double, single = torch.float64, torch.float32
    found = four.call_packed(program, "sets", double, single).debug_get_from_all()
    assert found == [double] * 4
    found = four.call_packed(program, "restores", single, double).debug_get_from_all()
    assert found == [single, double, double, double]


def in_thread(function: Callable[[], Any]) -> None:
    """On one of the notebook's threads, whose settings end with it."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_what_a_module_seeds_only_the_first_worker_has(four: Session, write: Write) -> None:
    """What others have seeded and drawn is left alone."""
    seeds = "random.seed(4), numpy.random.seed(4), torch.manual_seed(4)"
    write(seeds=f"import random, numpy, torch\n{seeds}")

    def program(rank: int) -> list[float]:
        if current_worker().rank == rank:
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(1)
            importlib.import_module("parcel.seeds")
        return [random.random(), np.random.rand(), torch.rand(()).item()]

    found = [four.call_packed(program, rank).debug_get_from_all()[rank] for rank in range(4)]
    assert found[0] != found[1] == found[2] == found[3]


def test_an_interrupt_loses_nothing_that_a_module_sets(four: Session, write: Write) -> None:
    values: dict[int, str] = {}
    begun = threading.Event()

    def change(before: Any, after: Any) -> None:
        begun.set()
        until = time.monotonic() + 0.3  # the interrupt comes meanwhile
        while not current_worker().interrupts or time.monotonic() < until:
            pass
        values[current_worker().rank] = after

    def import_it(rank: int) -> None:
        if current_worker().rank == rank:
            importlib.import_module("parcel.sets")

    write(sets="from discolab import current_worker\ncurrent_worker().namespace['set'](0, 'set')")
    import_effects.also("parcel", lambda: values.get(current_worker().rank), change)
    try:
        four.call_packed(lambda: current_worker().namespace.update(set=values.setdefault))
        four.call_packed(import_it, 0).debug_get_from_all()
        four.call_packed(import_it, 1)
        assert begun.wait(20)
        four.interrupt(timeout=60)
        assert values == {0: "set", 1: "set"}
    finally:
        del import_effects._settings["parcel"]

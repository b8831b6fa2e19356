"""Functions by name and modules loaded on the workers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import discolab
from discolab import (
    ArgumentError,
    DModule,
    DPackedFunc,
    ThreadedSession,
    UnknownFunctionError,
    WorkerError,
    list_funcs,
    register_func,
)
from discolab.runtime import functions


@pytest.fixture
def python_file(tmp_path: Path) -> Path:
    path = tmp_path / "counter.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from discolab import current_worker\n"
        "count = 0\n"
        "@dataclass\n"
        "class Box:\n"
        "    value: int\n"
        "def count_up():\n"
        "    global count\n"
        "    count += 1 + current_worker().rank\n"
        "    return count\n"
        "def box(): return Box(count).value\n"
        "not_a_function = 3\n"
    )
    return path


def test_each_worker_has_globals_of_its_own(pair: ThreadedSession, python_file: Path) -> None:
    module = pair.load_module(python_file)
    assert type(module) is DModule
    count_up = module["count_up"]
    assert type(count_up) is DPackedFunc
    count_up()
    assert count_up().debug_get_from_all() == [2, 4]
    assert module["box"]().debug_get_from_all() == [2, 4]
    assert pair.load_module(str(python_file))["count_up"]().debug_get_from_all() == [1, 2]


def test_a_python_module_is_loaded_by_its_name(pair: ThreadedSession) -> None:
    assert pair.load_module("math")["sqrt"](9).debug_get_from_all() == [3, 3]
    assert pair.load_vm_module("os.path")["basename"]("a/b").debug_get_from_all() == ["b", "b"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_exported_program_runs_on_every_worker(sess: ThreadedSession, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()).eval()
    x = torch.randn(4, 3)
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(net, (x,)), str(path))
    loaded = sess.load_module(path)
    expected = net(x)
    for value in loaded["forward"](x).debug_get_from_all():
        torch.testing.assert_close(value, expected)
    torch.testing.assert_close(sess.call_packed(loaded, x).debug_get_from_remote(3), expected)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("missing.py", "there is no file"),
        ("missing.pt2", "there is no file"),
        ("missing.so", "there is no file"),
        ("no_such_module_anywhere", "neither an importable module nor"),
    ],
)
def test_a_module_that_is_not_there_is_named(
    pair: ThreadedSession, path: str, complaint: str
) -> None:
    with pytest.raises(WorkerError, match=f"{complaint}|{path}") as info:
        pair.load_module(path).debug_get_from_remote(1)
    assert path in str(info.value)
    assert complaint in str(info.value)


def test_a_file_that_fails_is_an_error_that_names_its_line(
    pair: ThreadedSession, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text("a = 1\nb = a / 0\n")
    with pytest.raises(WorkerError, match="ZeroDivisionError") as info:
        pair.load_module(path)["f"]().debug_get_from_all()
    assert f"{path}:2" in "\n".join(info.value.__notes__)


@pytest.mark.parametrize("name", ["no_such", "not_a_function"])
def test_a_function_that_a_module_lacks_is_named(
    pair: ThreadedSession, python_file: Path, name: str
) -> None:
    with pytest.raises(WorkerError, match=f"has no function '{name}'"):
        pair.load_module(python_file)[name]().debug_get_from_all()


@pytest.mark.one_process
def test_an_unknown_function_is_an_error_at_once_with_near_names(pair: ThreadedSession) -> None:
    register_func("tests.modules.scale", len, override=True)
    with pytest.raises(UnknownFunctionError, match=r"did you mean .*'tests\.modules\.scale'"):
        pair.get_global_func("tests.modules.scales")
    assert pair.call_packed(int, 1).debug_get_from_all() == [1, 1]


def test_an_unknown_function_poisons_what_it_is_called_for(pair: ThreadedSession) -> None:
    if pair.engine == "threads":
        return  # there it is seen at once
    func = pair.get_global_func("tests.modules.nowhere")
    with pytest.raises(WorkerError, match=r"no function named 'tests\.modules\.nowhere'"):
        func().debug_get_from_all()


def test_functions_are_found_by_name() -> None:
    @register_func("tests.modules.named")
    def named() -> None: ...

    assert "tests.modules.named" in list_funcs()
    register_func("tests.modules.named", named)  # once more is no harm
    with pytest.raises(ArgumentError, match="override=True"):
        register_func("tests.modules.named", lambda: None)


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers is forgotten."""
    before = dict(functions._registry)
    yield
    functions._registry.clear()
    functions._registry.update(before)


@pytest.mark.usefixtures("registry")
@pytest.mark.conformance
def test_what_the_notebook_registers_reaches_all_workers(pair: ThreadedSession) -> None:
    def ask(name: str) -> list[object]:
        return pair.get_global_func(name)().debug_get_from_all()

    size = functions.find_func("runtime.disco.world_size")
    for name in ("runtime.tests.own", "tests.own", "runtime.disco.world_size"):
        for answer in (1, 2):  # the newest one, and also where discolab has one of that name
            register_func(name, lambda answer=answer: answer, override=True)
            assert ask(name) == [answer, answer]
    register_func("runtime.disco.world_size", size, override=True)
    assert ask("runtime.disco.world_size") == [2, 2]
    assert ask("runtime.disco.worker_id") == [0, 1]


@pytest.mark.parametrize(
    ("name", "func", "complaint"),
    [
        (len, None, 'write @register_func\\("my.function"\\)'),
        ("", len, "needs a name"),
        (None, len, "needs a name"),
        ("tests.modules.x", 3, "needs a callable"),
    ],
)
def test_register_func_says_how_it_is_used(name: object, func: object, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        register_func(name, func)  # type: ignore[call-overload]


@pytest.mark.conformance
def test_import_python_module_makes_its_functions_known(
    pair: ThreadedSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests_modules_plugin.py").write_text(
        "import discolab\n@discolab.register_func('tests.plugin.f', override=True)\n"
        "def f(): return 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pair.import_python_module("tests_modules_plugin")
    pair.sync_all()
    assert pair.get_global_func("tests.plugin.f")().debug_get_from_all() == [5, 5]
    pair.import_python_module("tests_modules_no_plugin")
    with pytest.raises(WorkerError, match="No module named 'tests_modules_no_plugin'"):
        pair.sync_all()


def test_builtin_functions_tell_where_they_run(sess: ThreadedSession) -> None:
    def ask(name: str) -> list[object]:
        return sess.get_global_func(f"runtime.disco.{name}")().debug_get_from_all()

    assert ask("worker_id") == ask("worker_rank") == [0, 1, 2, 3]
    assert ask("world_size") == [4] * 4
    assert ask("device") == [torch.device("cpu")] * 4
    groups = sess.call_packed(lambda: (w := discolab.current_worker()).is_root and w.group_id)
    assert groups.debug_get_from_all() == [0, False, 1, False]


def test_a_worker_can_be_bound_to_a_core(pair: ThreadedSession) -> None:
    import os

    cores = sorted(os.sched_getaffinity(0))
    bind = pair.get_global_func("runtime.disco.bind_worker_to_cpu_core")
    with pytest.raises(WorkerError, match="one core for each of the 2 workers"):
        bind([cores[0]]).debug_get_from_all()
    with pytest.raises(WorkerError, match="core 9999 can't be used"):
        bind([9999, 9999]).debug_get_from_all()
    bind([cores[-1], cores[0]]).debug_get_from_all()
    where = pair.call_packed(os.sched_getaffinity, 0).debug_get_from_all()
    assert where == [{cores[-1]}, {cores[0]}]
    assert sorted(os.sched_getaffinity(0)) == cores

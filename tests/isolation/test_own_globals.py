"""Each worker has variables of its own in a module that is given to `own_globals`."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from discolab import ThreadedSession, ccl, current_worker
from discolab.isolation import table
from discolab.isolation.own_globals import own_class_attributes, own_globals, owning_globals
from discolab.isolation.patches import Patches
from discolab.isolation.table import Row, Treatment

SOURCE = """
import functools

group = None
seen = []
untouched = 5

def logged(function):
    @functools.wraps(function)
    def log(*args):
        return function(*args)
    return log

def counted(function):
    def count(*args):
        count.calls = getattr(count, "calls", 0) + 1
        return count.calls, function(*args)
    return count

def made():
    def even(n):
        return odd(n - 1) if n else group
    def odd(n):
        return even(n - 1) if n else group
    return even

alternate = made()

def set_group(value):
    global group, late
    group = late = value
    seen.append(value)

def drop():
    global late
    del late

@logged
def get_group():
    return group, seen, late

@counted
def get_counted():
    return group

def log_again():
    return logged(get_group), group

def count(numbers=[0]):
    numbers[0] += 1
    return numbers[0], group

class Layer:
    number = 0

    @staticmethod
    def of_class():
        return group

    @classmethod
    def again(cls):
        return group

    def rank(self):
        return (lambda: group)()

    @staticmethod
    def add():
        Layer.number += 1

    def number_of_instance(self):
        return self.number

class Deeper(Layer):
    pass
"""


@pytest.fixture
def library() -> Iterator[Any]:
    """A module that keeps groups as libraries do that shard."""
    module = sys.modules["a_library"] = ModuleType("a_library")
    exec(SOURCE, vars(module))
    patches = Patches()
    own_globals(module, patches, "seen")
    own_class_attributes(module, "Layer", patches, "number")
    yield module
    patches.undo()
    assert type(module) is ModuleType
    assert module.group is None
    assert (module.seen, module.Layer.number) == ([], 0)
    del sys.modules["a_library"]


def test_each_worker_finds_what_it_has_written(library: Any) -> None:
    def program() -> Any:
        library = sys.modules["a_library"]
        rank = current_worker().worker_id
        library.set_group(rank)
        for _ in range(rank):
            library.Layer.add()
        ccl.barrier()
        layer = library.Layer()
        found = {library.group, layer.rank(), layer.of_class(), library.Layer.again()}
        return library.get_group(), found, library.count(), library.Layer.number, library.late

    for _ in range(2):  # the second session begins anew
        with ThreadedSession(3, devices="cpu", timeout=60) as sess:
            values = sess.call_packed(program).debug_get_from_all()
        assert values == [((n, [n], n), {n}, (1, n), n, n) for n in range(3)]
    assert library.untouched == 5
    assert not hasattr(library, "late")
    assert isinstance(library.Layer(), library.Layer)


def test_functions_that_hold_themselves_or_each_other_have_them_too(library: Any) -> None:
    def program() -> Any:
        library = sys.modules["a_library"]
        rank = current_worker().worker_id
        library.set_group(rank)
        ccl.barrier()
        return library.get_counted(), library.get_counted(), library.alternate(3)

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        values = sess.call_packed(program).debug_get_from_all()
    assert values == [((1, n), (2, n), n) for n in range(2)]


def test_instances_and_subclasses_read_a_workers_attributes_of_a_class(library: Any) -> None:
    before = library.Deeper()

    def program() -> Any:
        library = sys.modules["a_library"]
        library.Layer.number = rank = current_worker().worker_id
        ccl.barrier()
        layer, deeper = library.Layer(), library.Deeper()
        changed = library.Layer()
        changed.number = "mine"
        kinds = isinstance(deeper, library.Layer), issubclass(library.Deeper, library.Layer)
        own = type("Own", (library.Layer,), {})
        kinds += isinstance(before, library.Layer), not isinstance(layer, own)
        numbers = {layer.number_of_instance(), deeper.number, library.Deeper.number, rank}
        return numbers, kinds, changed.number_of_instance()

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        values = sess.call_packed(program).debug_get_from_all()
    assert values == [({n}, (True,) * 4, "mine") for n in range(2)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_what_its_worker_had(library: Any) -> None:
    library.late = "notebook's"

    def program() -> Any:
        library = sys.modules["a_library"]
        library.Layer.number = rank = current_worker().worker_id
        library.set_group(rank)
        library.drop()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                found = library.group, library.Layer.number, library.Layer().number
                os.write(writing, repr((*found, hasattr(library, "late"))).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as told:
            return told.read()

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        values = sess.call_packed(program).debug_get_from_all()
    assert values == [repr((n, n, n, False)) for n in range(2)]
    del library.late


def test_what_a_mock_replaces_is_replaced_and_put_back(library: Any) -> None:
    def program() -> Any:
        library = sys.modules["a_library"]
        library.set_group(current_worker().worker_id)
        with mock.patch("a_library.group", "a mock's"):
            found = [library.get_group()[0]]
        found.append(library.get_group()[0])
        del library.late
        found.append(hasattr(library, "late"))
        with mock.patch("a_library.logged", return_value="a mock"):
            found.append(library.log_again()[0])
        return found, callable(library.log_again()[0])

    with ThreadedSession(1, devices="cpu", timeout=60) as sess:
        [(found, is_back)] = sess.call_packed(program).debug_get_from_all()
    assert found == ["a mock's", 0, False, "a mock"]
    assert is_back


def test_a_worker_begins_with_the_notebooks(library: Any) -> None:
    library.set_group("all")
    library.Layer.number = 7

    def program() -> Any:
        library = sys.modules["a_library"]
        before = library.get_group(), library.Layer.number
        library.group = "mine"
        return before, library.get_group()[0]

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        values = sess.call_packed(program).debug_get_from_all()
    assert values == [((("all", ["all"], "all"), 7), "mine")] * 2
    assert library.group == "all"
    library.group, library.Layer.number = None, 0
    library.seen.clear()


def test_a_reload_by_the_notebook_leaves_each_worker_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a_library_that_is_reloaded"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    library = importlib.import_module(name)
    row = Row(name, Treatment.PER_WORKER, "its own", on_import={name: owning_globals()})
    monkeypatch.setitem(table._rows, name, row)

    def program() -> Any:
        library, rank = sys.modules[name], current_worker().worker_id
        library.set_group(rank)
        ccl.barrier()
        return library.get_group()[0], library.group

    with ThreadedSession(2, devices="cpu", timeout=60) as sess:
        importlib.reload(library)
        values = sess.call_packed(program).debug_get_from_all()
    assert values == [(n, n) for n in range(2)]
    assert type(library) is ModuleType
    assert library.group is None
    del sys.modules[name]

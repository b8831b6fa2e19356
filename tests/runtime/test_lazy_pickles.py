"""Pickles in messages: what is in them, what is beside them, and what can't be pickled."""

import collections
import functools
import gc
import pickle
import runpy
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch

from discolab import ThreadedSession
from discolab.runtime import ArgumentError, serialize
from discolab.runtime.arguments import Pickled, Register
from discolab.runtime.serialize import LazyPickle, ProtocolError, decode, encode, pickle_lazily

helpers = runpy.run_path(str(Path(__file__).with_name("same_values.py")))


def shut(value: Any) -> LazyPickle:
    found = decode(*encode(value))
    assert type(found) is LazyPickle
    return found


def there_and_back(value: Any) -> Any:
    return shut(value).open()


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Point(NamedTuple):
    x: Any
    y: Any


# -- what is in a pickle -------------------------------------------------------------------------


def test_pickled_opens_to_a_copy_of_what_is_in_it() -> None:
    for value in ([1, {"a": 2}], "text", 5, None, {"a": {1, 2}}, (1,)):
        got = there_and_back(Pickled(value))
        assert type(got) is type(value)
        assert got == value
    config = Config(rate=0.1, names=["a"])
    got = there_and_back(Pickled(config))
    assert type(got) is Config
    assert got.names == ["a"]


def test_objects_keep_their_identities() -> None:
    shared = [1]
    config = Config(a=shared, b=shared, tensor=torch.ones(2))
    config.itself = config
    config.same_tensor = config.tensor
    got = there_and_back(config)
    assert got.a is got.b
    assert got.itself is got
    assert got.same_tensor is got.tensor


def test_functions_of_all_kinds() -> None:
    scale = torch.tensor([2.0])

    def closure(x: Any) -> Any:
        return x * scale

    assert there_and_back(closure)(3).item() == 6
    assert there_and_back(lambda x: x + 1)(1) == 2
    assert there_and_back(functools.partial(max, 3))(1) == 3
    assert there_and_back(Config(a=1).__init__) is not None
    assert there_and_back(torch.nn.functional.relu) is torch.nn.functional.relu


def test_a_class_of_a_cell_travels_whole() -> None:
    module = types.ModuleType("__main__")
    source = "class Net:\n    def twice(self, x): return 2 * x\n"
    exec(source, module.__dict__)
    assert type(there_and_back(module.Net())).__name__ == "Net"
    assert there_and_back(module.Net)().twice(4) == 8


def test_words_for_what_is_sealed() -> None:
    assert shut(len).what == "function len"
    assert shut(dict).what == "class builtins.dict"
    assert shut(Pickled([1])).what == "builtins.list"
    assert shut(torch.nn.Linear(1, 1)).what == "torch.nn.modules.linear.Linear"
    assert "pickle of function len" in repr(shut(len))
    long_name = type("x" * 5000, (), {})
    assert len(shut(long_name()).what) <= 120

    class Odd(type):
        @property
        def __module__(cls) -> str:  # type: ignore[override]
            raise RuntimeError

    assert serialize.name_of(Odd("Odder", (), {})()) in ("object", f"{__name__}.Odder")


def test_a_sealed_can_be_sent_on() -> None:
    value = Config(tensor=torch.arange(4.0), array=np.ones(3))
    first = shut(value)
    second = shut(first)
    assert (second.what, second.data) == (first.what, first.data)
    assert torch.equal(second.open().tensor, value.tensor)


# -- what is beside it ---------------------------------------------------------------------------


def test_the_bytes_of_tensors_and_arrays_are_frames() -> None:
    tensor, array = torch.zeros(1000), np.zeros(1000)
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    config = Config(tensor=tensor, list=[array, parameter], table=np.zeros(500, "i4,f8"))
    message = encode(config)
    assert len(message.body) < 1000
    assert sorted(memoryview(frame).nbytes for frame in message.frames) == [2000, 4000, 6000, 8000]
    got = decode(*message).open()
    assert got.tensor.data_ptr() == tensor.data_ptr()  # no copy was made on the way
    assert got.list[0].ctypes.data == array.ctypes.data
    assert type(got.list[1]) is torch.nn.Parameter
    assert got.table.dtype == np.dtype("i4,f8")


def test_a_module_arrives_whole() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.LSTM(4, 2), torch.nn.Dropout()
    ).eval()
    module[0].weight.requires_grad_(False)
    got = there_and_back(module)
    assert got.state_dict().keys() == module.state_dict().keys()
    for (name, a), (_, b) in zip(
        got.state_dict(keep_vars=True).items(),
        module.state_dict(keep_vars=True).items(),
        strict=True,
    ):
        assert torch.equal(a, b), name
        assert type(a) is type(b)
        assert a.requires_grad == b.requires_grad
    assert not got.training
    assert got[2]._flat_weights[0] is got[2].weight_ih_l0


def test_tensors_that_share_memory_do_so_again() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    weight = torch.nn.Parameter(base[2:])
    together = Config(
        base=base,
        turned=base.t(),
        row=base[1],
        ints=base[0].view(torch.int32),
        weight=weight,
        apart=torch.arange(12.0),
    )
    got = there_and_back(together)
    for name, value in vars(together).items():
        assert torch.equal(getattr(got, name), value), name
        assert getattr(got, name).stride() == value.stride() or name == "apart"
    got.base.fill_(7)
    assert got.turned.unique().tolist() == got.row.unique().tolist() == [7]
    assert got.weight.detach().unique().tolist() == [7]
    assert got.ints.view(torch.float32).unique().tolist() == [7]
    assert torch.equal(got.apart, together.apart)
    assert type(got.weight) is torch.nn.Parameter


def test_little_of_a_large_storage_is_sent_where_only_little_is_used() -> None:
    storage = torch.zeros(1_000_000)
    parts = Config(a=storage[:10], b=storage[5:15], c=storage[-10:], d=storage[500:600:10])
    message = encode(parts)
    sizes = sorted(memoryview(frame).nbytes for frame in message.frames)
    assert sizes == [40, 60, 4 * 91]  # the last one keeps its strides
    got = decode(*message).open()
    got.a[5] = 1
    assert got.b[0] == 1


@pytest.mark.parametrize("read_only", [False, True])
def test_what_shares_memory_does_so_whatever_the_frames_are(read_only: bool) -> None:
    base = torch.arange(5, dtype=torch.int16)
    body, frames = encode(Config(a=base, b=base[1:], c=base[:0], d=base[2:].view(torch.uint8)))
    frames = [bytes(frame) if read_only else bytearray(frame) for frame in frames]
    got = decode(body, frames).open()
    got.b[0] = 100
    assert got.a.tolist() == [0, 100, 2, 3, 4]
    assert got.d.tolist() == [2, 0, 3, 0, 4, 0]


def test_a_gradient_and_attributes_of_a_tensor_in_an_object_are_kept() -> None:
    tensor = torch.ones(2, requires_grad=True)
    (tensor * 3).sum().backward()
    tensor.note = "mine"
    got = there_and_back(Config(tensor=tensor)).tensor
    assert got.grad.tolist() == [3, 3]
    assert got.note == "mine"


def test_place_reaches_into_pickles() -> None:
    base = torch.arange(4.0)
    with helpers["as_if_on"]("cuda:0"):
        message = encode(Config(alone=torch.ones(2), a=base, b=base[1:]))
    placed = []

    def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        placed.append((tensor.nbytes, device))
        return tensor.clone()

    found = decode(*message)
    assert found.open().a.data_ptr() == base.data_ptr()
    got = found.open(place)
    assert placed == [(8, torch.device("cuda:0")), (16, torch.device("cuda:0"))]
    assert got.a.data_ptr() + 4 == got.b.data_ptr() != base.data_ptr() + 4


def test_registers_in_a_pickle_are_looked_up() -> None:
    value = Point(Register(5), [Pickled([1]), Register(5)])
    assert there_and_back(value) == Point(5, [[1], 5])
    assert type(there_and_back(value).x) is Register
    got = shut(value).open(lookup=lambda register: f"value of {register}")
    assert got == Point("value of 5", [[1], "value of 5"])


def test_nothing_waits_for_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(4)
        sent = weakref.ref(tensor)
        found = shut(Config(a=tensor, b=tensor[1:], f=lambda: None, z=np.ones(2)))
        got = found.open()
        arrived = weakref.ref(got.a)
        del tensor, found, got
        assert sent() is None
        assert arrived() is None
    finally:
        gc.enable()


# -- names that are kept -------------------------------------------------------------------------


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module that can be imported, with a function and a class."""
    found = types.ModuleType("discolab_test_module")
    exec("def f():\n    return 1\nclass C:\n    pass\n", found.__dict__)
    sys.modules[found.__name__] = found
    yield found
    sys.modules.pop(found.__name__, None)


def test_the_pickle_of_an_importable_function_is_made_once(module: Any) -> None:
    for value in (module.f, module.C, torch.relu, len, torch.Tensor.add):
        assert (pickle_lazily(value) is pickle_lazily(value)) == (value is not torch.Tensor.add)
        assert there_and_back(value) is value


def test_a_kept_pickle_is_not_used_once_it_means_something_else(module: Any) -> None:
    old = module.f
    first = pickle_lazily(old)
    exec("def f():\n    return 2\n", module.__dict__)
    assert pickle_lazily(old) is not first
    assert there_and_back(old)() == 1
    assert there_and_back(module.f)() == 2
    del sys.modules[module.__name__]
    assert shut(module.f).open()() == 2


def test_a_module_sent_by_value_is_sent_by_value(module: Any) -> None:
    first = pickle_lazily(module.f)
    cloudpickle.register_pickle_by_value(module)
    try:
        assert len(pickle_lazily(module.f).data) > len(first.data)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert pickle_lazily(module.f) is first


def test_kept_pickles_do_not_keep_functions(module: Any) -> None:
    pickle_lazily(module.f)
    key, gone = id(module.f), weakref.ref(module.f)
    assert key in serialize._named
    del module.f
    gc.collect()
    assert gone() is None
    assert key not in serialize._named


def test_bound_methods_of_builtins_are_not_kept() -> None:
    items = [1]
    assert there_and_back(items.append) is not None
    items.append(2)
    assert there_and_back(items.copy)() == [1, 2]


def test_a_function_of_a_cell_is_sent_as_it_is_now() -> None:
    factor = 2

    def scale(x: int) -> int:
        return x * factor

    assert there_and_back(scale)(1) == 2
    factor = 3
    assert there_and_back(scale)(1) == 3


# -- what can't be pickled -----------------------------------------------------------------------


class Stubborn:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not me\nnor you")


class Silent:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OddError


class OddError(Exception):
    def __str__(self) -> str:
        raise ValueError


def endless() -> Any:
    found: Any = ()
    for _ in range(100_000):
        found = Point(found, 1)
    return found


@pytest.mark.parametrize(
    ("value", "type_name", "reason"),
    [
        (threading.Lock(), "_thread.lock", "cannot pickle '_thread.lock' object"),
        (Config(lock=[threading.Lock()]), "Config", "cannot pickle '_thread.lock' object"),
        ((i for i in range(3)), "builtins.generator", "cannot pickle 'generator' object"),
        (Stubborn(), "Stubborn", "not me. Send"),
        (Silent(), "Silent", "OddError"),
        (Pickled({"a": threading.Lock()}), "builtins.dict", "cannot pickle"),
        (lambda lock=threading.Lock(): lock, "function <lambda>", "cannot pickle"),  # noqa: B008
        (sys._getframe(), "builtins.frame", "cannot pickle"),
    ],
    ids=[
        "lock",
        "in an object",
        "generator",
        "raises",
        "raises oddly",
        "marked",
        "lambda",
        "frame",
    ],
)
def test_the_error_names_type_reason_and_way_out(value: Any, type_name: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{type_name}.* can't be sent .*{reason}") as raised:
        encode((1, [value]))
    assert "register_type" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_too_deep_for_pickle() -> None:
    value = endless()
    try:
        with pytest.raises(ArgumentError, match="can't be sent"):
            encode(value)
    finally:
        while value:  # freed one by one: the interpreter's own stack is not endless either
            value = value[0]


def test_the_error_of_a_dref_is_its_own() -> None:
    with ThreadedSession(1, devices="cpu") as session:
        ref = session.call_packed(torch.ones, 2)
        with pytest.raises(ArgumentError, match="a DRef can't be copied or pickled"):
            encode(Config(ref=ref))


def test_a_tensor_in_an_object_that_has_no_memory_to_show() -> None:
    def send(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ArgumentError, match="Config can't be sent to another process"):
            encode(Config(x=x))
        return x

    torch.vmap(send)(torch.ones(2, 3))


# -- pickles that don't open ---------------------------------------------------------------------


def test_what_unpickling_raises_comes_from_open_alone(module: Any) -> None:
    message = encode([module.f, Config(a=1)])
    del sys.modules[module.__name__]
    first, second = decode(*message)
    with pytest.raises(ModuleNotFoundError, match=module.__name__):
        first.open()
    assert second.open().a == 1
    with pytest.raises(pickle.UnpicklingError):
        LazyPickle("x", b"\x80\x05garbage").open()


def test_a_pickle_that_asks_for_what_is_not_there() -> None:
    found = shut(Config(a=torch.ones(2)))
    with pytest.raises(pickle.UnpicklingError, match="out-of-band"):
        LazyPickle("x", found.data).open()
    with pytest.raises(ProtocolError, match="2 frames, of which it does not use all"):
        LazyPickle("x", found.data, *found.frames, b"").open()


def test_ordered_things_stay_so() -> None:
    value = collections.OrderedDict(b=torch.ones(1), a=[Register(3)])
    got = there_and_back(value)
    assert list(got) == ["b", "a"]
    assert type(got) is collections.OrderedDict

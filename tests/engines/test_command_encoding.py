"""Calls as messages: what is encoded comes out again, whatever is called with whatever."""

import builtins
import os
import signal
import threading
from typing import Any

import pytest
import torch

from discolab.engines.connections import command_encoding
from discolab.engines.connections.command_encoding import SentFunction, encode_call, pack_command
from discolab.runtime import register_type, serialize
from discolab.runtime.actions import DiscoAction
from discolab.runtime.arguments import Register
from discolab.transport.frame import unpack

SITE = (compile("", "program.py", "exec"), 7)


def there(func: Any, args: Any = (), kwargs: Any = None) -> tuple[Any, ...]:
    """What a worker makes of a call: ``func, args, kwargs, bind, site``."""
    encoded = encode_call(func, args, kwargs or {}, SITE)
    command = (DiscoAction.CALL_PACKED, 3, func, encoded, kwargs or {}, 0, SITE)
    frame = pack_command(command, lambda ticket: 0, (4, 5), False, 9)
    (action, reg, *call), forget, turn = command_encoding.unpack_command(*unpack(frame.data))
    assert (action, reg, forget, turn) == (DiscoAction.CALL_PACKED, 3, (4, 5), 9)
    return tuple(call)


@pytest.mark.parametrize(
    "args",
    [
        (),
        (Register(2),),
        (True, 1, Register(1), 1.5, None, "ü", b"\x00", 2**70, Register(2**40)),
        ([Register(3), {"a": Register(4)}], torch.Size((2,))),
    ],
)
@pytest.mark.parametrize("kwargs", [{}, {"key": Register(7), "other": 1}])
def test_arguments_come_out_as_they_went_in(args: Any, kwargs: dict[str, Any]) -> None:
    for _ in range(2):  # the second time the head is known
        func, got, named, _, site = there(torch.add, args, kwargs)
        assert type(func) is SentFunction
        assert func.pickled.open() is torch.add
        assert (tuple(got), named) == (args, kwargs)
        assert [*map(type, got)] == [*map(type, args)]
        assert [*map(type, named.values())] == [*map(type, kwargs.values())]
        assert site == ("program.py", 7)


def test_a_function_with_tensors_of_its_own_and_tensors_among_its_arguments() -> None:
    weight = torch.arange(4.0)
    func, (x, reg), _, _, _ = there(lambda x: x + weight, (torch.ones(4), Register(2)))
    assert func.pickled.open()(x).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert type(reg) is Register


def test_a_function_that_has_no_name_is_sent_anew_each_time() -> None:
    number = 1

    def times(x: int = 1) -> int:
        return number * x

    first, second = there(times), there(times, (2,))
    number = 5
    third = there(times)
    texts = [(call[0].__qualname__, call[0].pickled.what) for call in (first, second, third)]
    assert texts == [(times.__qualname__, f"function {times.__qualname__}")] * 3
    assert [call[0].pickled.open()(3) for call in (first, second, third)] == [3, 3, 15]
    assert [tuple(call[1]) for call in (first, second, third)] == [(), (2,), ()]


def test_a_callable_of_a_registered_type_goes_in_its_own_form() -> None:
    class Times:
        def __init__(self, n: int) -> None:
            self.n, self.lock = n, threading.Lock()  # which no pickle can have

        def __call__(self, x: int) -> int:
            return self.n * x

    by_class, by_name = dict(serialize.USER_BY_CLASS), dict(serialize.USER_BY_NAME)
    try:
        register_type(
            Times,
            "test.Times",
            lambda times: 1,
            lambda times, buffer: buffer.__setitem__(0, times.n),
            lambda buffer: Times(buffer[0]),
        )
        first, second = (there(Times(3), (2,))[0] for _ in range(2))
        assert first(2) == 6
        assert first is not second, "each call has one of its own"
    finally:
        for table, before in (
            (serialize.USER_BY_CLASS, by_class),
            (serialize.USER_BY_NAME, by_name),
        ):
            table.clear()
            table.update(before)  # type: ignore[arg-type]


def test_ctrl_c_while_a_function_is_pickled_is_no_other_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, presses = builtins.__import__, []

    def press_and_import(name: str, *args: Any) -> Any:
        if name == "cloudpickle.cloudpickle" and not presses:
            presses.append(os.kill(os.getpid(), signal.SIGINT))
        return plain(name, *args)

    monkeypatch.setattr(builtins, "__import__", press_and_import)
    with pytest.raises(KeyboardInterrupt):
        encode_call(lambda x: x, (2,), {}, SITE)
    assert presses

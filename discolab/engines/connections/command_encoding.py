"""What a controller and its worker processes say to each other, as messages.

A command is ``u8 action, u64 register, u64 turn, u16 n, n x u64`` and then, by
runtime/serialize.py, a tuple of the rest. `turn` counts the commands that go to all workers, 0 for
others: one that comes twice, as after a Ctrl-C in the middle of sending, is done once. The n are
registers to forget first, so that this takes no message of its own.

A call is two such tuples, and between them the pickle of a function that is not a name: its head
(what is called, and where) is the same each time a loop comes by, so both sides remember it, and
only that function and the arguments are encoded anew.

Any other message is the tuple of its kind, one of the constants here, and its contents; only the
reply of a command without a failure, as most are, has a form of its own (`DONE`). A ticket travels
as its number, a call site as ``(name of the file for people, line)``.

Each call and each sync goes through here, in several processes that take turns on few cores: a
microsecond less here is several for the caller.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import pickle
import struct
from collections.abc import Callable, Sequence
from itertools import repeat
from types import FunctionType
from typing import Any

import cloudpickle

from ...runtime import arguments, serialize
from ...runtime.actions import (
    BIND_ARGUMENTS,
    BIND_FUNCTION,
    Command,
    DiscoAction,
    attribute,
    function_text,
    site_text,
)
from ...runtime.arguments import Register
from ...runtime.failures import Failure, safe_str
from ...runtime.services import WorkerState
from ...runtime.sources import display_name
from ...transport.frame import BufferPool, Frame, pack

# from a worker
REPLY, TELL, STATE, OUTPUT, HELLO, FAILED = range(6)
# to a worker's link
ANNOUNCE, RETRY, ASK_STATE, SAY, FREE = range(5)

arguments.OPENERS[serialize.LazyPickle] = lambda sealed, lookup: sealed.open(lookup=lookup)

_HEAD = struct.Struct("<BQQH")
_CALL = struct.Struct("<QQI")  # the bytes of a call's head; of a function's pickle, its frames
DONE = struct.Struct("<4sQQ")  # b"DONE", the ticket's number, how many commands have come
MOST_FORGOTTEN = 1024  # registers that a command carries along
_TICKET_AT = {
    DiscoAction.SYNC_WORKER: 2,
    DiscoAction.DEBUG_GET_FROM_REMOTE: 3,
    DiscoAction.DEBUG_SET_REGISTER: 3,
    DiscoAction.END_INTERRUPT: 2,
}
_SITE_AT = {DiscoAction.GET_GLOBAL_FUNC: 3, DiscoAction.CALL_PACKED: 6}
_CALL_PACKED, _SYNC = int(DiscoAction.CALL_PACKED), int(DiscoAction.SYNC_WORKER)
_MOST_KNOWN = 1024  # heads of calls that a worker knows by their bytes
_LONGEST_KNOWN = 1024  # bytes
_known: dict[bytes, tuple[Any, ...]] = {}
# what pickle writes without calling any of Python's code; registers go as numbers
_PLAIN = frozenset((Register, type(None), bool, int, float, str, bytes))


def ticket_of(command: Command) -> Any:
    """The ticket of a command on the controller; None if it has none."""
    at = _TICKET_AT.get(command[0])
    return None if at is None else command[at]


class SentFunction:
    """A function that a worker has received and not unpickled yet, with its name."""

    def __init__(self, pickled: serialize.LazyPickle, name: str, own_text: str) -> None:
        self.pickled = pickled
        self.__qualname__ = name
        self.disco_command = own_text or None


_MAY_COME_AGAIN = (Register, SentFunction, tuple)
arguments.OPENERS[SentFunction] = lambda function, lookup: function.pickled.open(lookup=lookup)


class EncodedArguments(tuple[Any, ...]):
    """The arguments of a call, with the whole call as a message, and as text for people."""

    message: serialize.Message
    text: str


def site_for_people(site: Any) -> tuple[str, int] | None:
    """Turn a call site into what can be sent.

    It is named anew unless it is the last one again, as in a loop: code of equal text in two files
    compares equal, and a cell has another number when it runs again.
    """
    global _last_named
    if not isinstance(site, tuple):
        return None
    last, named = _last_named
    if last is site:
        return named
    code, line = site
    filename = str(getattr(code, "co_filename", code))
    named = (display_name(filename), int(line or 0)) if _is_told(filename) else None
    _last_named = site, named
    return named


_last_named: tuple[Any, tuple[str, int] | None] = None, None


@functools.lru_cache(maxsize=4096)
def _is_told(filename: str) -> bool:
    return bool(site_text((filename, 1)))


def encode_call(func: Any, args: Any, kwargs: Any, site: Any) -> EncodedArguments:
    """Encode the rest of CALL_PACKED; `pack_command` adds its register.

    Raises
    ------
    ArgumentError
        If something in it can't be pickled.
    """
    bind = BIND_FUNCTION | (BIND_ARGUMENTS if args or kwargs else 0)
    name = own_text = ""
    pickled, frames = b"", []
    if type(func) is not Register:
        name, own_text = _texts_of(func)
        if type(func) not in serialize.USER_BY_CLASS:
            func = serialize.pickle_lazily(func)
            if not func.kept:
                pickled, frames, func = func.data, [*func.frames], func.what
    head = func, name, own_text, bind, site_for_people(site)
    if type(func) not in (Register, serialize.LazyPickle, str):
        body, frames = serialize.encode(head)
    elif args or kwargs or pickled:
        body = _known_head(*head)
    else:
        return _known_call(*head)
    parts = [_CALL.pack(len(body), len(pickled), len(frames)), body, pickled]
    if args or kwargs:
        rest = _encode_arguments(args, kwargs)
        parts.append(rest.body)
        frames += rest.frames
    return _encoded(args, name, own_text, serialize.Message(b"".join(parts), frames))


def _encoded(args: Any, name: str, own_text: str, message: serialize.Message) -> EncodedArguments:
    encoded = EncodedArguments(args)
    encoded.text = own_text or (f"call of '{name}'" if name else "a call")
    encoded.message = message
    return encoded


@functools.lru_cache(maxsize=4096)
def _known_head(*head: Any) -> bytes:
    return serialize.encode(head).body


@functools.lru_cache(maxsize=4096)
def _known_call(*head: Any) -> EncodedArguments:
    """A call without arguments of what both sides know."""
    body = _known_head(*head)
    _, name, own_text, _, _ = head
    return _encoded((), name, own_text, serialize.Message(_CALL.pack(len(body), 0, 0) + body, []))


def _encode_arguments(args: Any, kwargs: Any) -> serialize.Message:
    """Encode the arguments of a call, and the places of the registers that go as numbers."""
    kinds = [*map(type, args)]
    if kwargs or not _PLAIN.issuperset(kinds):
        return serialize.encode((args, kwargs, b""))
    places = b""
    if Register in kinds:
        places = bytes(map(operator.is_, kinds, repeat(Register)))
        args = [int(arg) if type(arg) is Register else arg for arg in args]
    return serialize.Message(pickle.dumps((args, kwargs, places), 5), [])


def _texts_of(func: Any) -> tuple[str, str]:
    """The name of a function, and its own text for people as a command, "" if it has none."""
    if type(func) is FunctionType:  # to ask it for these runs no code of the user's
        name, own_text = func.__qualname__, func.__dict__.get("disco_command")
    else:
        name, own_text = function_text(func), attribute(func, "disco_command")
    return name, own_text if isinstance(own_text, str) else ""


def pack_command(
    command: Command,
    number_of: Callable[[Any], int],
    forget: Sequence[int],
    shared: bool,
    turn: int = 0,
) -> Frame:
    """Make a command's frame.

    Parameters
    ----------
    number_of
        Gives a ticket's number.
    forget
        Registers to forget before it, `MOST_FORGOTTEN` at most.
    turn
        The number, from 1, of a command that goes to all workers.
    """
    action, reg = command[0], command[1]
    if action == _CALL_PACKED and type(command[3]) is EncodedArguments:
        message = command[3].message
    elif action == _SYNC:
        message = serialize.encode((number_of(command[2]),))
    else:
        rest = list(command[2:])
        at = _TICKET_AT.get(action)
        if at is not None:
            rest[at - 2] = number_of(rest[at - 2])
        at = _SITE_AT.get(action)
        if at is not None:
            rest[at - 2] = site_for_people(rest[at - 2])
        message = serialize.encode(tuple(rest))
    head = _HEAD.pack(action, reg, turn, len(forget))
    if forget:
        head += struct.pack(f"<{len(forget)}Q", *forget)
    return pack(head + message.body, message.frames, shared)


def unpack_command(body: Any, frames: list[Any]) -> tuple[Command, tuple[int, ...], int]:
    """Decode a command's frame: the command, the registers to forget before it, its turn."""
    action, reg, turn, count = _HEAD.unpack_from(body)
    at = _HEAD.size
    forget: tuple[int, ...] = ()
    if count:
        forget = struct.unpack_from(f"<{count}Q", body, at)
        at += 8 * count
    if action != _CALL_PACKED:
        return (action, reg, *serialize.decode(body[at:], frames)), forget, turn
    size, pickled, count = _CALL.unpack_from(body, at)
    at += _CALL.size
    end = at + size
    head = bytes(body[at:end])
    call = _known.get(head)
    if call is None:
        call = _unpack_head(head, () if pickled else frames[:count], bool(pickled))
    func, bind, site = call
    if pickled:
        what, name, own_text = func
        data = bytes(body[end : end + pickled])
        func = SentFunction(serialize.LazyPickle(what, data, *frames[:count]), name, own_text)
        end += pickled
    if len(body) == end:
        return (action, reg, func, (), {}, bind, site), forget, turn
    args, kwargs, places = serialize.decode(body[end:], frames[count:])
    if places:
        args = [Register(arg) if place else arg for arg, place in zip(args, places, strict=True)]
    return (action, reg, func, args, kwargs, bind, site), forget, turn


def _unpack_head(head: bytes, frames: Sequence[Any], beside: bool) -> tuple[Any, ...]:
    """Decode a call's head; keep it if it may come again. `beside`: its function is not in it."""
    func, name, own_text, bind, site = serialize.decode(head, frames)
    if beside:
        func = func, name, own_text
    elif type(func) is serialize.LazyPickle:
        func = SentFunction(func, name, own_text)
    call = func, bind, site
    if not frames and len(head) < _LONGEST_KNOWN and type(func) in _MAY_COME_AGAIN:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[head] = call
    return call


def pack_done(ticket: int, received: int) -> Frame:
    """Encode the reply of a command without a failure, after `received` commands."""
    return Frame(DONE.pack(b"DONE", ticket, received))


def unpack_done(data: Any) -> tuple[int, int] | None:
    """Decode such a reply: the ticket's number and the count of commands; None if it is another."""
    if len(data) != DONE.size or data[:4] != b"DONE":
        return None
    _, ticket, received = DONE.unpack(data)
    return ticket, received


def pack_message(
    kind: int, *contents: Any, shared: bool = False, pool: BufferPool | None = None
) -> Frame:
    """Make the frame of anything but a command.

    Raises
    ------
    ArgumentError
        If something in it can't be pickled.
    """
    message = serialize.encode((kind, *contents))
    return pack(message.body, message.frames, shared, pool)


# -- records ---------------------------------------------------------------------------------


def _fields_of(cls: type) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    names = [field.name for field in dataclasses.fields(cls)]
    return names, operator.attrgetter(*names)


_names, _state_fields = _fields_of(WorkerState)
serialize.register_plain(WorkerState, _state_fields, WorkerState)
_names, _all_failure_fields = _fields_of(Failure)
_EXCEPTION = _names.index("exception")
_LARGEST_EXCEPTION = 1 << 20  # bytes; a larger one is told in words only


def _failure_fields(failure: Failure) -> tuple[Any, ...]:
    fields = list(_all_failure_fields(failure))
    try:
        data = cloudpickle.dumps(failure.exception)
        fields[_EXCEPTION] = None
        if len(data) <= _LARGEST_EXCEPTION:
            cloudpickle.loads(data)  # many exceptions can be pickled and not unpickled
            fields[_EXCEPTION] = data
    except BaseException:
        fields[_EXCEPTION] = None
    return tuple(fields)


def failure_of(*fields: Any) -> Failure:
    """Rebuild what `_failure_fields` has taken apart."""
    failure = Failure(*fields)
    if failure.exception is not None:
        try:
            failure.exception = cloudpickle.loads(failure.exception)
        except BaseException:
            failure.exception = None
        if not isinstance(failure.exception, BaseException):
            failure.exception = None
    return failure


serialize.register_plain(Failure, _failure_fields, failure_of)


def text_of(exc: BaseException) -> str:
    """Describe an exception in a line."""
    return f"{type(exc).__name__}: {safe_str(exc)}"

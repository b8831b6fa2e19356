"""What is said on a line, as messages: commands, control, and all that a worker says.

A command is ``u8 action, u64 register, u64 turn, u16 n, n x u64`` and then, by
runtime/serialize.py, a tuple of the rest. `turn` counts the commands that go to all workers, 0 for
others: one that comes twice, as after a Ctrl-C in the middle of sending, is done once. The n are
registers to forget first, so that this takes no message of its own.

Any other message is the tuple of its kind, one of the constants here, and its contents; only the
reply that there is nothing to tell, as most are, has a form of its own (`DONE`). A ticket travels
as its number, a call site as ``(name of the file for people, line)``.

Each call and each sync goes through here, in several processes that take turns on few cores: a
microsecond less here is several for who waits.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
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
from ...runtime.link import WorkerState
from ...runtime.sources import display_name, namers
from ...transport.frame import BufferPool, Frame, pack

# what a worker says
REPLY, TELL, STATE, OUTPUT, PROGRESS, HELLO, FAILED = range(7)
# control: what a session says to a worker's link
ANNOUNCE, RETRY, ASK_STATE, SAY, FREE = range(5)

arguments.OPENERS[serialize.LazyPickle] = lambda sealed, lookup: sealed.open(lookup=lookup)

_HEAD = struct.Struct("<BQQH")
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
_MOST_KNOWN = 1024  # calls without arguments that a worker knows by their bytes
_known: dict[bytes, tuple[Any, ...]] = {}


class SentFunction:
    """A function that has come to a worker and is not opened yet; says what it is called."""

    def __init__(self, sealed: serialize.LazyPickle, name: str, words: str) -> None:
        self.sealed = sealed
        self.__qualname__ = name
        self.disco_command = words or None

    def open(self, lookup: Callable[[int], Any]) -> Any:
        """The function itself."""
        return self.sealed.open(lookup=lookup)


arguments.OPENERS[SentFunction] = lambda function, lookup: function.open(lookup)


def own_words(func: Any) -> str:
    """What a function says of itself as a command, "" if nothing."""
    words = attribute(func, "disco_command")
    return words if isinstance(words, str) else ""


class Packed(tuple[Any, ...]):
    """The arguments of a call, with what the whole call is on the wire."""

    message: Any


def site_for_people(site: Any) -> tuple[str, int] | None:
    """A call site as it can travel."""
    try:
        return _site_for_people(site, len(namers))
    except TypeError:  # what can't be hashed is no site of ours
        return None


@functools.lru_cache(maxsize=4096)
def _site_for_people(site: Any, _namers: int) -> tuple[str, int] | None:
    if not isinstance(site, tuple) or not site_text(site):
        return None
    code, line = site
    return display_name(str(getattr(code, "co_filename", code))), int(line or 0)


def encode_call(func: Any, args: Any, kwargs: Any, site: Any) -> Any:
    """The rest of CALL_PACKED, to be given its register by `pack_command`.

    Raises
    ------
    ArgumentError
        If something in it can't be pickled.
    """
    if type(func) is Register and not args and not kwargs:
        return _call_without_arguments(func, site_for_people(site))
    bind = BIND_FUNCTION | (BIND_ARGUMENTS if args or kwargs else 0)
    name, words = "", ""
    if type(func) is not Register:
        name, words = function_text(func), own_words(func)
    return serialize.encode((func, name, words, args, kwargs, bind, site_for_people(site)))


@functools.lru_cache(maxsize=4096)
def _call_without_arguments(func: Register, site: Any) -> Any:
    return serialize.encode((func, "", "", (), {}, BIND_FUNCTION, site))


def pack_command(
    command: Command,
    number_of: Callable[[Any], int],
    forget: Sequence[int],
    shared: bool,
    turn: int = 0,
) -> Frame:
    """A command as it goes to a worker.

    Parameters
    ----------
    number_of
        Gives a ticket's number.
    forget
        Registers to forget before it, `MOST_FORGOTTEN` at most.
    turn
        Of a command that goes to all workers its number, from 1.
    """
    action, reg = command[0], command[1]
    if action == _CALL_PACKED and type(command[3]) is Packed:
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
    """What `pack_command` has packed: the command, the registers to forget before it, its turn."""
    action, reg, turn, count = _HEAD.unpack_from(body)
    forget = struct.unpack_from(f"<{count}Q", body, _HEAD.size) if count else ()
    packed = body[_HEAD.size + 8 * count :]
    if action != _CALL_PACKED:
        return (action, reg, *serialize.decode(packed, frames)), forget, turn
    call = _known.get(packed) if type(packed) is bytes else None
    if call is None:
        func, name, words, args, kwargs, bind, site = serialize.decode(packed, frames)
        if type(func) is serialize.LazyPickle:
            func = SentFunction(func, name, words)
        call = func, args, kwargs, bind, site
        if type(func) is Register and args == () and kwargs == {} and type(packed) is bytes:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[packed] = call
    return (action, reg, *call), forget, turn


def pack_done(ticket: int, received: int) -> Frame:
    """The reply that there is nothing to tell, after so many commands."""
    return Frame(DONE.pack(b"DONE", ticket, received))


def unpack_done(data: Any) -> tuple[int, int] | None:
    """The ticket's number and how many commands, if this is such a reply."""
    if len(data) != DONE.size or data[:4] != b"DONE":
        return None
    _, ticket, received = DONE.unpack(data)
    return ticket, received


def pack_message(
    kind: int, *contents: Any, shared: bool = False, pool: BufferPool | None = None
) -> Frame:
    """Anything but a command.

    Raises
    ------
    ArgumentError
        If something in it can't be pickled.
    """
    message = serialize.encode((kind, *contents))
    return pack(message.body, message.frames, shared, pool)


# -- records ---------------------------------------------------------------------------------


def _failure_fields(failure: Failure) -> tuple[Any, ...]:
    exception: bytes | None
    try:
        exception = cloudpickle.dumps(failure.exception)
        cloudpickle.loads(exception)  # many exceptions can be pickled and not unpickled
    except BaseException:
        exception = None
    return (
        failure.rank, failure.command, failure.call_site, failure.type_name, failure.message,
        failure.frames, failure.details, failure.earlier, failure.victim, failure.interrupted,
        exception, failure.orphan, failure.reported, failure.number, failure.call,
    )  # fmt: skip


def failure_of(*fields: Any) -> Failure:
    """Put together what `_failure_fields` has taken apart."""
    parts = list(fields)
    if parts[10] is not None:
        try:
            parts[10] = cloudpickle.loads(parts[10])
        except BaseException:
            parts[10] = None
        if not isinstance(parts[10], BaseException):
            parts[10] = None
    return Failure(*parts)


serialize.register_plain(Failure, _failure_fields, failure_of)


def state_fields(state: WorkerState) -> tuple[Any, ...]:
    """A state as it travels."""
    return (
        state.rank, state.executed, state.sat_out, state.resumed_at, state.ended,
        state.interrupts, state.received, state.busy, state.state, state.detail, state.seconds,
        state.failed_calls,
    )  # fmt: skip


def text_of(exc: BaseException) -> str:
    """An exception in a line."""
    return f"{type(exc).__name__}: {safe_str(exc)}"

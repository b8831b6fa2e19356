"""A new worker in the place of one that was lost, while the others keep what they hold.

`restart_worker` is the whole of it, on every engine. The engine takes the old worker down and has a
new one ready (`Controller._take_down`, `_prepare`). Under the session's lock the new one is then
*admitted*: what the session sends from there on is for it too, and waits for it. At that very place
in the sequence the other workers say what they hold (`survey`). From that, and from what the
session has noted of each register (`Origin`), follows what the new worker begins with: a value
that can be made again, or is known to be equal on a worker that lives, is *restored*; any other is
*lost*, and whoever reads it there is told what it was. The first command of the new worker
(`settle_in`) puts all of it in place, then it goes on with those that have waited.

Nothing is restored that may differ from what was lost. A recipe holds only while nobody has written
to the value since: the others say so now, and the lost one has said when it did (watched.py).
"""

from __future__ import annotations

import hashlib
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import builtin
from .actions import DiscoAction, function_text, site_text
from .arguments import Pickled, Register
from .channel import Ticket
from .display import Pictured
from .dref import DRef, FreedDRef, freed_text
from .errors import SessionError
from .failures import Failure, name_ranks
from .functions import find_func, worker_function
from .interrupts import TICK, shield
from .mesh import set_mesh
from .regions import array_of
from .registers import OWN, Site
from .services import RESTART, SERVICES, Service
from .worker import Worker, current_worker

if TYPE_CHECKING:
    from .session import Session

LOST = "ValueLost"
DIED = "WorkerDied"
_PATIENCE = 60.0  # seconds that the others are given to say what they hold
_SAY_AFTER = 2.0  # seconds of that before somebody is told what is waited for
MOST_PUSHED = 64 << 20  # bytes of pushed variables that a session keeps, to push them again


# -- where values come from ------------------------------------------------------------------------


class Again(NamedTuple):
    """A recipe: a function that makes the value on the worker, from nothing that may be lost."""

    how: str
    func: Callable[..., Any]
    args: tuple[Any, ...] = ()


class Named(NamedTuple):
    """A recipe: a function that workers know by name."""

    name: str


class Equal(NamedTuple):
    """A recipe: the value is the same on all workers, or, `in_group`, on those of each group."""

    how: str
    in_group: bool = False


class Part(NamedTuple):
    """A recipe: one part of a tensor that worker 0, or the first of each group, has scattered."""

    source: weakref.ref[DRef]
    in_group: bool


Recipe = Again | Named | Equal | Part


class Origin(NamedTuple):
    """Where a register's value comes from: what has made it, where that was called, how to again.

    `call` counts the calls that were sent before it.
    """

    maker: Any
    site: Site
    recipe: Recipe | None = None
    call: int = 0


def maker_of(func: Any) -> Any:
    """What is kept of a function to name it later; never what it refers to.

    Of a plain function that is its code, which `Session.call_packed` takes by itself.
    """
    return func if type(func) in (Register, BuiltinFunctionType) else function_text(func)


def origin_text(session: Session, origin: Any) -> str:
    """``call of 'f' at Cell In[3], line 4``."""
    if origin is None:
        return "a call"
    maker, site = origin[0], origin[1]
    if isinstance(maker, CodeType):
        text = f"call of '{maker.co_qualname}'"
    elif type(maker) is Register:
        names = {int(reg): name for name, reg in session._functions.items()}
        made = session._origins.get(maker)
        recipe = made.recipe if type(made) is Origin else None
        name = names.get(maker) or (recipe.name if type(recipe) is Named else f"r{int(maker)}")
        text = f"call of '{name}'"
    elif type(maker) is BuiltinFunctionType:
        text = f"call of '{function_text(maker)}'"
    else:
        text = str(maker) if " " in str(maker) else f"call of '{maker}'"
    where = site_text(site)
    return f"{text} at {where}" if where else text


# -- what comes of it ------------------------------------------------------------------------------


class Shard(NamedTuple):
    """What one register of the replaced worker was, and what became of it.

    Attributes
    ----------
    reg_id, name
        The register; its DRef's own name, "" if it has none.
    what
        Type, dtype and shape, as far as the other workers know; "" if they do not.
    made_by
        The call that made it, and where.
    how
        How it was restored, or why it is lost.
    """

    reg_id: int
    name: str
    what: str
    made_by: str
    how: str


@dataclass(frozen=True, repr=False)
class RestartedWorker(Pictured):
    """What `Session.restart_worker` gives: what was restored, what is lost, what is to be redone.

    Attributes
    ----------
    rank
        The worker.
    why
        What had become of the old one.
    restored, lost
        Its registers, but for functions known by name, which the new one has all.
    pushed
        Variables of its cells that were pushed again, as they were when they were pushed.
    gone
        Variables that another worker has, and this one has not any more.
    remarks
        What could not be made anew, in sentences.
    seconds
        How long it took.
    """

    rank: int
    why: str
    restored: tuple[Shard, ...]
    lost: tuple[Shard, ...]
    pushed: tuple[str, ...]
    gone: tuple[str, ...]
    remarks: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        """One line."""
        counts = [f"{len(self.restored)} restored", f"{len(self.lost)} lost"]
        return f"worker {self.rank} {_reason(self.why)}; a new one has its place: " + (
            f"of its registers {' and '.join(counts)}"
            if self.restored or self.lost
            else "it held no registers"
        )


@dataclass
class _Plan:
    """What the new worker begins with; it travels to it."""

    joined: bool
    set_up: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    named: list[tuple[int, str]] = field(default_factory=list)
    values: list[tuple[int, Any]] = field(default_factory=list)
    again: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    lost: list[tuple[int, str, str, str]] = field(default_factory=list)  # reg, command, site, text
    watched: list[int] = field(default_factory=list)
    death: Failure | None = None


class Changes(Service):
    """Which values workers of other processes have written to: by rank, register -> last call."""

    def __init__(self) -> None:
        self.of: dict[int, dict[int, int]] = {}

    def receive(self, rank: int, value: Any) -> None:
        ordinal, regs = value
        self.of.setdefault(rank, {}).update(dict.fromkeys(regs, ordinal))

    def replaced(self, rank: int, executed: int) -> None:
        self.of.pop(rank, None)


SERVICES[RESTART] = lambda _session: Changes()

at_restart: list[Callable[[Any], Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]]]] = []
"""What layers above have a new worker do first: called with the session, gives what it is for,
a worker function and its arguments."""

at_replaced: list[Callable[[Worker], None]] = []
"""Called where workers are threads, under the session's lock, when a new one has a lost one's
place; what waits for the lost one is ended."""


def forget_when_replaced(key: str) -> None:
    """Have a new worker thread begin without what ``Worker.shared[key]`` has of the lost one.

    What lies there is a dict by ranks, of which each worker writes its own entry. One that was left
    behind can't write there any more: its `shared` is another dict.
    """
    at_replaced.append(lambda worker: worker.shared.get(key, {}).pop(worker.worker_id, None))


# -- on the controller -----------------------------------------------------------------------------


def restart_worker(session: Session, rank: Any, death: Failure | None = None) -> RestartedWorker:
    """See `Session.restart_worker`. `death` is told where nobody has asked for it."""
    rank = session._check_rank(rank)
    session._check_caller()
    session._check_open()
    session._check_replaceable(rank)
    why = session._why_held_up()
    if why and death is None:
        raise SessionError(
            f"worker {rank} can't be restarted now, as the others can't say what they hold: {why}"
        )
    with session._restarts_one:
        session._check_open()
        began = time.monotonic()
        session._restarting, admitted = rank, False
        try:
            why = session._take_down(rank)
            changed = _changed(session, rank)
            session._answer_for(rank, death or death_of(rank, why))
            session._prepare(rank)
            with session._lock:
                session._check_open()
                held = _held(session)
                position = session.calls_sent
                session._admit(rank, position)
                admitted = True
                session._reported_dead.discard(rank)
                ticket, ref = _ask_others(session, rank, held)
                variables = dict(session._pushed)
        finally:
            session._restarting = None
            if not admitted:
                session._not_replaced(rank)
        stopped: KeyboardInterrupt | None = None
        try:
            _collect(session, ticket, rank)
        except KeyboardInterrupt as exc:  # the new worker has to begin, or nothing goes on
            stopped = exc
        with shield():
            del ref
            others = {r: value for r, value in ticket.values.items() if isinstance(value, dict)}
            plan, result = _plan(session, rank, why, held, others, changed, variables)
            plan.death = death if death is not None and not death.reported else None
            begun = _settle(session, rank, plan, position, variables)
        report = _collect_one(session, begun, rank)
        result = _revised(result, report, time.monotonic() - began)
        session.restarts = (*session.restarts[-15:], result)
        session.restarts_made += 1
        for shard in result.restored:
            restored = held[shard.reg_id][1]
            if restored is not None:
                session._restored[shard.reg_id, rank] = weakref.ref(restored), shard.how
        if stopped is not None:
            raise stopped
        return result


def death_of(rank: int, why: str) -> Failure:
    """What questions to a worker that has died are answered with."""
    text, _, output = why.partition("; its last output:")
    command = f"what worker {rank} was asked"
    message = (
        f"worker {rank} {text}; a new worker takes its place. What it was asked and had not done "
        "is not done there" + (f"; its last output:{output}" if output else "")
    )
    number = (1 << 40) + time.monotonic_ns()
    return Failure(rank, command, "", DIED, message, orphan=True, number=number)


def _changed(session: Session, rank: int) -> dict[int, int]:
    """Register -> the last call in which the worker, while it lived, has written to it."""
    worker = session.workers_here().get(rank)
    if worker is not None:
        worker.watched.look(worker.registers, worker.executed)
        return dict(worker.watched.changed)
    changes = getattr(session, "services", {}).get(RESTART)
    return dict(changes.of.get(rank, {})) if isinstance(changes, Changes) else {}


def _held(session: Session) -> dict[int, tuple[Any, DRef | None]]:
    """The registers in use, with their origins and DRefs; under the lock."""
    held: dict[int, tuple[Any, DRef | None]] = {}
    for reg, handle in session._registers.in_use():
        # a number of its own: a `Register` in what is sent stands for what it holds
        held[int(reg)] = session._origins.get(reg), None if handle is None else handle()
    return held


def _mates(session: Session, rank: int) -> range:
    """The workers of a worker's group, itself among them."""
    size = session.num_workers // session.num_groups
    return range(rank // size * size, rank // size * size + size)


def bytes_of(value: Any) -> int:
    """The bytes of the tensors and arrays in a value."""
    if isinstance(value, Pickled):
        return bytes_of(value.value)
    if isinstance(value, torch.Tensor):
        return 0 if value.is_meta else value.numel() * value.element_size()
    if isinstance(value, torch.nn.Module):
        return sum(map(bytes_of, (*value.parameters(), *value.buffers())))
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(bytes_of, value))
    if isinstance(value, str | bytes):
        return len(value)
    return int(getattr(value, "nbytes", 0)) if type(value).__module__ == "numpy" else 0


def _recipe(origin: Any) -> Recipe | None:
    return origin.recipe if type(origin) is Origin else None


def _is_replicated(ref: DRef | None) -> bool:
    """Whether a DRef says that all workers hold the same."""
    placements = None if ref is None else ref.placements
    return bool(placements) and all(
        getattr(placement, "is_replicate", lambda: False)() for placement in placements or ()
    )


def _ask_others(session: Session, rank: int, held: Mapping[int, Any]) -> tuple[Ticket, DRef]:
    """Have the others say what they hold; under the lock. The DRef holds their answers."""
    dead = {*session._dead(), rank}
    living = [r for r in range(session.num_workers) if r not in dead]
    mates = [r for r in living if r in _mates(session, rank)]
    donors: dict[int, int] = {}
    parts: dict[int, tuple[int, int, int, int]] = {}
    for reg, (origin, ref) in held.items():
        recipe = _recipe(origin)
        if isinstance(recipe, Part):
            source = recipe.source()
            members = _mates(session, rank) if recipe.in_group else range(session.num_workers)
            if source is not None and not isinstance(source, FreedDRef) and members[0] in living:
                place = rank - members[0], len(members)
                parts[reg] = members[0], int(source.reg_id), *place
        elif isinstance(recipe, Equal):
            donors[reg] = min(mates if recipe.in_group else living, default=-1)
        elif _is_replicated(ref):
            donors[reg] = min(living, default=-1)
    ref = DRef(session._next_register(), session)
    ref.name = OWN
    args = Pickled((list(held), donors, parts, min(living, default=-1)))
    encoded = session._encode_call(survey, (args,), {})
    session._broadcast((DiscoAction.CALL_PACKED, ref.reg_id, *encoded))
    return session.request(ref, living, what="what the other workers hold"), ref


def _collect(session: Session, ticket: Ticket, rank: int) -> None:
    """Wait for the answers of those that live; while they stand in the debugger, without end."""
    began = told = time.monotonic()
    while not ticket.acquire(TICK):
        dead = session._dead()
        now = time.monotonic()
        if session._why_held_up():
            began = now
        if now > began + _PATIENCE or all(rank in dead for rank in ticket.missing):
            break
        session._check_open()
        if 0 < told < now - _SAY_AFTER:
            told = 0
            late = name_ranks(r for r in ticket.missing if r not in dead)
            sys.stderr.write(
                f"the restart of worker {rank} waits for {late} to tell what is held there, for "
                f"{_PATIENCE:g} s at most; Ctrl-C has the new worker begin without it\n"
            )


def _plan(
    session: Session,
    rank: int,
    why: str,
    held: Mapping[int, tuple[Any, DRef | None]],
    others: Mapping[int, dict[str, Any]],
    changed: Mapping[int, int],
    variables: Mapping[str, Any],
) -> tuple[_Plan, RestartedWorker]:
    """Decide what becomes of each register."""
    plan = _Plan(session.num_workers > 1)
    restored: list[Shard] = []
    lost: list[Shard] = []
    kinds: Mapping[int, str] = next(
        (answer["kinds"] for answer in others.values() if answer["kinds"]), {}
    )
    for reg, (origin, ref) in sorted(held.items()):
        recipe = _recipe(origin)
        if isinstance(ref, FreedDRef):
            plan.lost.append((reg, "a value that was freed", "", freed_text(ref)))
            continue
        if isinstance(recipe, Named):
            plan.named.append((reg, recipe.name))
            continue
        if ref is None or ref.name is OWN:
            continue
        what, made_by = kinds.get(reg, ""), origin_text(session, origin)
        touched = origin is not None and changed.get(reg, -1) >= getattr(origin, "call", 0)
        apart = session._set_apart.get((reg, rank))
        if apart is not None and apart() is ref:
            how, value = "it was set on this worker alone", None
        else:
            how, value = _restore(session, rank, reg, recipe, ref, others, touched)
        name = ref.name or ""
        if value is not None:
            restored.append(Shard(reg, name, what, made_by, how))
            if isinstance(value, Again):
                plan.again.append((reg, value.func, value.args))
            else:
                plan.values.append((reg, value))
            if recipe is not None:
                plan.watched.append(reg)
            continue
        lost.append(Shard(reg, name, what, made_by, how))
        site = "" if origin is None else site_text(origin[1])
        command = made_by.removesuffix(f" at {site}") if site else made_by
        plan.lost.append((reg, command, site, _lost_text(rank, reg, name, what, why, how)))
    pushed = tuple(sorted(variables))
    theirs = {name for answer in others.values() for name in answer["variables"]}
    plan.set_up = session._for_new_worker()
    dtypes = {answer["default_dtype"] for answer in others.values()}
    if len(dtypes) == 1:
        plan.set_up.append(("the default dtype", torch.set_default_dtype, tuple(dtypes)))
    for name in session._imported:
        plan.set_up.append((f"to import {name}", builtin.import_python_module, (name,)))
    if session._mesh is not None:
        plan.set_up.append(("the mesh", set_mesh, (session._mesh,)))
    for function in at_restart:
        plan.set_up += function(session)
    return plan, RestartedWorker(
        rank,
        why,
        tuple(restored),
        tuple(lost),
        pushed,
        tuple(sorted(theirs - set(pushed) - {"mesh"})),
        (),
        0.0,
    )


def _reason(why: str) -> str:
    """How a worker has died, without what it has put out last."""
    return why.splitlines()[0].partition("; its last output")[0]


def _lost_text(rank: int, reg: int, name: str, what: str, why: str, how: str) -> str:
    title = f"{name!r}, r{reg}" if name else f"r{reg}"
    kind = f" ({what} on the other workers)" if what else ""
    return (
        f"what worker {rank} held in {title}{kind} was lost with it: worker {rank} "
        f"{_reason(why)}, and a new one has its place{f'; {how}' if how else ''}. Make it again by "
        f"that call, or assign it: ref.debug_copy_from({rank}, value)"
    )


def _restore(
    session: Session,
    rank: int,
    reg: int,
    recipe: Recipe | None,
    ref: DRef,
    others: Mapping[int, dict[str, Any]],
    touched: bool,
) -> tuple[str, Any]:
    """How a value is restored, and the value or an `Again`; or why it is lost, and None."""
    states = {r: answer["states"].get(reg, UNKNOWN) for r, answer in others.items()}
    answers = {r: answer["values"].get(reg) for r, answer in others.items()}
    digests = {r: answer["digests"].get(reg) for r, answer in others.items()}
    donor = next((r for r in sorted(answers) if answers[r] is not None), None)
    elsewhere = sorted(r for r, state in states.items() if state == CHANGED)
    if isinstance(recipe, Again):
        if not touched and not elsewhere and all(s in (SAME, NONE) for s in states.values()):
            return recipe.how, recipe
        if not _is_replicated(ref):
            return "it had been written to since it was loaded", None
    if isinstance(recipe, Part):
        if donor is None:
            return "what it was a part of is gone or was written to", None
        if touched or elsewhere:
            return "it had been written to since it was scattered", None
        return f"scattered again from worker {donor}", answers[donor]
    if isinstance(recipe, Equal):
        members = _mates(session, rank) if recipe.in_group else range(session.num_workers)
        if touched or any(r in members for r in elsewhere):
            return f"it had been written to since {recipe.how}", None
        same = {d for r, d in digests.items() if r in members}
        if donor is None or None in same or len(same) != 1:
            return "", None
        if any(states[r] != SAME for r in states if r in members):
            return "", None
        return f"copied from worker {donor} ({recipe.how})", answers[donor]
    if _is_replicated(ref):
        if donor is None:
            return "no worker that lives has a copy that can be sent", None
        if len(set(digests.values())) != 1 or None in digests.values():
            return "it is called Replicate(), but the other workers hold different values", None
        if touched and SAME in states.values():
            return "it is called Replicate(), but this worker alone had written to it", None
        return f"copied from worker {donor} (its layout is Replicate())", answers[donor]
    return "", None


def _settle(
    session: Session, rank: int, plan: _Plan, position: int, variables: Mapping[str, Any]
) -> Ticket:
    """Have the new worker begin with its plan, and then go on with what has waited for it."""
    first: list[Any] = []
    values = {name: value for name, (value,) in variables.items()}
    own = 2 if values else 1  # counted by a command, which no interrupt cancels or cuts
    first.append((DiscoAction.BEGIN_AT, 0, position, own))
    with session._lock:
        ref = DRef(session._next_register(), session)
        ref.name = OWN
        encoded = session._encode_call(settle_in, (Pickled(plan),), {})
        first.append((DiscoAction.CALL_PACKED, ref.reg_id, *encoded))
        if values:
            encoded = session._encode_call(builtin.set_variables, (values,), {})
            first.append((DiscoAction.CALL_PACKED, 0, *encoded))
        ticket = Ticket([rank], f"the new worker {rank}")
        first.append((DiscoAction.DEBUG_GET_FROM_REMOTE, ref.reg_id, False, ticket))
        session._let_in(rank, first)
    return ticket


def _collect_one(session: Session, ticket: Ticket, rank: int) -> dict[str, Any]:
    """Wait for what the new worker says of its beginning."""
    while not ticket.acquire(TICK):
        session._check_open()
        if rank in session._dead():
            raise SessionError(f"worker {rank} was replaced, and the new one has died at once")
    answer = ticket.values[rank]
    if isinstance(answer, Failure):
        text = f"worker {rank} was replaced, and could not begin: {answer.headline}"
        raise SessionError(f"{text}. Restart it once more")
    report: dict[str, Any] = answer
    return report


def _revised(result: RestartedWorker, report: Mapping[str, Any], seconds: float) -> RestartedWorker:
    """With what has gone wrong on the new worker."""
    failed: Mapping[int, str] = report["failed"]
    restored = tuple(shard for shard in result.restored if shard.reg_id not in failed)
    lost = tuple(
        shard._replace(how=f"it could not be {shard.how}: {failed[shard.reg_id]}")
        for shard in result.restored
        if shard.reg_id in failed
    )
    return RestartedWorker(
        result.rank,
        result.why,
        restored,
        tuple(sorted((*result.lost, *lost))),
        result.pushed,
        tuple(name for name in result.gone if name not in report["variables"]),
        (*result.remarks, *(f"{what} failed: {text}" for what, text in report["set_up"])),
        seconds,
    )


# -- on a worker -----------------------------------------------------------------------------------

SAME, CHANGED, UNKNOWN, NONE = "same", "changed", "unknown", "none"


@worker_function("saying what it holds")
def survey(question: tuple[list[int], dict[int, int], dict[int, Any], int]) -> dict[str, Any]:
    """Say what this worker holds, for another one that is new (a worker function).

    Parameters
    ----------
    question
        The registers in use; for those that may be equal everywhere, the rank that sends it; for
        those that worker 0 has scattered ``(root, source, part, parts)``; the rank that says what
        the values are.
    """
    regs, donors, parts, speaker = question
    worker = current_worker()
    me, registers, watched = worker.worker_id, worker.registers, worker.watched
    worker.look_at_watched()
    states: dict[int, str] = {}
    values: dict[int, Any] = {}
    digests: dict[int, str] = {}
    kinds: dict[int, str] = {}
    value: Any
    for reg in regs:
        value = registers.get(reg)
        if me == speaker:
            kinds[reg] = _kind(value)
        if watched.is_unchanged(reg):
            states[reg] = SAME
        elif reg in watched.changed:
            states[reg] = CHANGED
        elif value is None:
            states[reg] = NONE
    for reg, donor in donors.items():
        value = registers.get(reg)
        if _can_travel(value):
            digests[reg] = _digest(value)
            if donor == me:
                values[reg] = value.detach().clone().requires_grad_(value.requires_grad)
    for reg, (root, source, part, count) in parts.items():
        value = registers.get(source)
        mine: Any = registers.get(reg)
        if root == me and _can_travel(value) and _can_travel(mine) and watched.is_unchanged(-reg):
            piece = value.detach().reshape(-1).chunk(count)[part]
            values[reg] = piece.reshape(mine.shape).clone()
    return {
        "states": states,
        "values": values,
        "digests": digests,
        "kinds": kinds,
        "variables": builtin.list_variables(),
        "default_dtype": torch.get_default_dtype(),
    }


def _can_travel(value: Any) -> bool:
    """Whether a value is a tensor of which a copy is all of it."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
        and not value.is_nested
        and not value.is_conj()
        and not value.is_neg()
        and value.grad_fn is None
    )


def _digest(tensor: torch.Tensor) -> str:
    """Equal for tensors that are equal, bit by bit, with dtype and shape."""
    flat = array_of(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)).data
    kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode()
    return hashlib.blake2b(flat, digest_size=16).hexdigest() + kind.decode()


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if type(value) is Failure:
        return ""
    return "None" if value is None else type(value).__name__


@worker_function("taking the place of a lost worker")
def settle_in(plan: _Plan) -> dict[str, Any]:
    """Begin in the place of a worker that was lost (a worker function, the first that it runs)."""
    worker = current_worker()
    registers = worker.registers
    failed: dict[int, str] = {}
    wrong: list[tuple[str, str]] = []
    for what, func, args in plan.set_up:
        try:
            func(*args)
        except Exception as exc:
            wrong.append((what, f"{type(exc).__name__}: {exc}"))
    for reg, name in plan.named:
        try:
            registers[reg] = find_func(name)
        except Exception as exc:
            registers[reg] = _failure(worker, f"get_global_func({name!r})", "", f"{exc}")
    for reg, value in plan.values:
        device = value.device.type != worker.device.type
        registers[reg] = value.to(worker.device) if device else value
    for reg, func, args in plan.again:
        try:
            registers[reg] = func(*args)
        except Exception as exc:
            failed[reg] = f"{type(exc).__name__}: {exc}"
            text = f"it was lost with the worker before, and could not be made again: {failed[reg]}"
            registers[reg] = _failure(worker, "making a value again", "", text)
    for reg, command, site, text in plan.lost:
        registers[reg] = _failure(worker, command, site, text)
    for reg in plan.watched:
        worker.watched.watch(reg, registers.get(reg))
    if plan.death is not None:
        worker.unreported.add(plan.death)
    worker.failed_calls.clear()
    return {"failed": failed, "set_up": wrong, "variables": list(worker.namespace)}


def _failure(worker: Worker, command: str, site: str, text: str) -> Failure:
    return Failure(worker.worker_id, command, site, LOST, text, reported=True)

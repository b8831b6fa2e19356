"""DRef: the controller's handle on a value that each worker holds in its own register.

A DRef holds its session and a register id, nothing of the value. It is freed by reference
count: the session's `RegisterFile` hears of its death through a weak reference, and tells the
workers with its next command, or after a moment.

How a DRef is drawn is not decided here, see `drawn`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .contexts import from_torch_function
from .display import Drawn
from .errors import ArgumentError
from .failures import Failure
from .functions import worker_function
from .interrupts import ends_work
from .worker import current_worker

if TYPE_CHECKING:
    from .session import Session


class _OfTensors:
    """In the place of what tensors have and DRefs have not: says what to write instead.

    A `__getattr__` would make each access to `reg_id` and `session` slower.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, ref: DRef | None, owner: type) -> NoReturn:
        name = self._name
        if callable(getattr(torch, name, None)):
            instead = f"torch.{name}(ref)"
        else:
            instead = f"sess.call_packed(lambda t: t.{name}, ref)"
        raise AttributeError(
            f"a {owner.__name__} has no attribute {name!r}, the tensors are on the workers: "
            f"{instead} runs there and gives a new DRef; debug_get_from_remote(rank) fetches a "
            "value",
            name=name,
            obj=ref,
        )


if TYPE_CHECKING:

    class _NotATensor:
        """Has what tensors have, to say what to write instead."""

        __slots__ = ()
else:  # in one go: to set 500 attributes of a class one by one takes 0.1 s
    _names = {name: _OfTensors(name) for name in dir(torch.Tensor) if not name.startswith("_")}
    _NotATensor = type("_NotATensor", (), {"__slots__": (), **_names})


def _binary(func: Callable[[Any, Any], Any]) -> Callable[[DRef, Any], DRef]:
    def on_workers(self: DRef, other: Any) -> DRef:
        return self.session.call_packed(func, self, other)

    return on_workers


def _reflected(func: Callable[[Any, Any], Any]) -> Callable[[DRef, Any], DRef]:
    def on_workers(self: DRef, other: Any) -> DRef:
        return self.session.call_packed(func, other, self)

    return on_workers


def _unary(func: Callable[[Any], Any]) -> Callable[[DRef], DRef]:
    def on_workers(self: DRef) -> DRef:
        return self.session.call_packed(func, self)

    return on_workers


class DRef(Drawn, _NotATensor):
    """One name for a value that lives on every worker.

    Attributes
    ----------
    session
        The session that made it.
    reg_id
        The register, the same on all workers.
    placements
        How the logical tensor is laid out over the workers, in torch's words (`Shard(dim)`,
        `Replicate()`, `Partial(op)`), or None if that is not known. Set it to have the
        picture drawn to scale.
    name
        What to call it in a picture: of a worker variable its name, else None.

    Operators and torch functions run on all workers and give a new DRef:
    ``torch.relu(x @ w) + 1``.
    """

    __slots__ = ("__weakref__", "name", "placements", "reg_id", "session")

    __array_ufunc__ = None  # numpy leaves ``array * dref`` to us

    def __init__(
        self, reg_id: int, session: Session, placements: Sequence[Any] | None = None
    ) -> None:
        self.reg_id = reg_id
        self.session = session
        self.placements = placements
        self.name: str | None = None
        session._registers.hold(reg_id, self)

    # -- what it can't do ----------------------------------------------------------------------

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise ArgumentError(
            "a DRef can't be copied or pickled: it owns its register. Use the same DRef again, "
            "have the workers copy it (torch.clone(ref)), or fetch the value with "
            "debug_get_from_remote(rank)"
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(0)

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self.__reduce_ex__(0)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            "a DRef is no array, its values are on the workers: fetch one with "
            "debug_get_from_remote(rank), or copy it with copy_from_worker_0(array, ref)"
        )

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if hasattr(self, name)]

    # -- values ------------------------------------------------------------------------------

    @ends_work
    def debug_get_from_remote(self, worker_id: int, timeout: float | None = None) -> Any:
        """Fetch a copy of the value that one worker holds.

        Parameters
        ----------
        worker_id
            Rank, 0 to ``num_workers - 1``.
        timeout
            Seconds to wait; None takes the session's.

        Raises
        ------
        WorkerError
            If the register is poisoned there.
        WaitTimeoutError, ArgumentError, SessionClosedError
        """
        return self.session.fetch(self, [worker_id], timeout)[0]

    @ends_work
    def debug_get_from_all(self, timeout: float | None = None) -> list[Any]:
        """Fetch a copy from every worker, in rank order. Raises as `debug_get_from_remote`."""
        return self.session.fetch(self, None, timeout)

    @ends_work
    def debug_copy_from(self, worker_id: int, value: Any, timeout: float | None = None) -> None:
        """Set the value on one worker.

        A tensor is copied *into* the tensor held there, so dtype and number of elements must match.
        """
        self.session.set_value(self, worker_id, value, timeout)

    def _after_ctrl_c(self, stop: KeyboardInterrupt) -> None:
        self.session._after_ctrl_c(stop)

    # -- torch and operators -----------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> DRef:
        ref = _first_dref((args, kwargs or {}))
        assert ref is not None, "torch called us without a DRef among the arguments"
        ref.session._check_random(func)
        made: DRef = from_torch_function(ref.session.call_packed, func, *args, **(kwargs or {}))
        return made

    def __getitem__(self, index: Any) -> DRef:
        return self.session.call_packed(operator.getitem, self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.session.call_without_result(operator.setitem, self, index, value)

    def __iter__(self) -> Any:
        raise ArgumentError(
            "a DRef can't be iterated on the controller: its length is known to the workers "
            "only. Index it (ref[0]), or fetch a value with debug_get_from_remote(rank)"
        )

    def __len__(self) -> int:
        raise ArgumentError("the length of a DRef is known to the workers only: use call_packed")

    def __bool__(self) -> bool:
        raise ArgumentError(
            "the truth of a DRef can differ from worker to worker: fetch one worker's with "
            "debug_get_from_remote(rank)"
        )

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __and__, __or__, __xor__ = _binary(operator.and_), _binary(operator.or_), _binary(operator.xor)

    __hash__ = object.__hash__  # by identity, though == is elementwise
    __eq__ = _binary(operator.eq)  # type: ignore[assignment]  # as torch's
    __ne__ = _binary(operator.ne)  # type: ignore[assignment]  # as torch's
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __neg__, __abs__ = _unary(operator.neg), _unary(operator.abs)
    __invert__ = _unary(operator.invert)

    # -- display -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = (
            "of a closed session"
            if self.session.closed
            else f"on {self.session.num_workers} workers"
        )
        return f"<{type(self).__name__} r{self.reg_id} {state}>"


class DPackedFunc(DRef):
    """A DRef that holds a function on every worker; call it to run it there."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> DRef:
        """Run it on all workers; returns at once, see `Session.call_packed`."""
        return self.session.call_packed(self, *args, **kwargs)


class DModule(DRef):
    """A DRef that holds a module on every worker; ``module["name"]`` is a function of it."""

    __slots__ = ()

    def __getitem__(self, name: str) -> DPackedFunc:
        """A function of the module, by name."""
        if not isinstance(name, str):
            raise ArgumentError(f'module["function name"] expected, got {name!r}')
        get = "runtime.disco.module_get_function"
        return self.session._call_for(DPackedFunc, get, self, name)


class FreedDRef(DRef):
    """What a DRef becomes when its value has been freed on all workers (`Session.free`).

    Names that are bound to the DRef stay, but each use is one clear error. It keeps its register id
    until it dies, so that a command on its way at that moment meets no other value there, but the
    failure that `put_failure` has left.
    """

    __slots__ = ()

    @property
    def reg_id(self) -> int:  # type: ignore[override]
        """There is none any more."""
        raise ArgumentError(freed_text(self))

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """As of a `DPackedFunc`, which it may have been."""
        raise ArgumentError(freed_text(self))

    def __dir__(self) -> list[str]:
        return ["name", "placements", "session"]

    def __repr__(self) -> str:
        return f"<DRef r{_id_of(self)}, freed>"


def _id_of(ref: DRef) -> int:
    """The register id, past `FreedDRef.reg_id`."""
    number: int = vars(DRef)["reg_id"].__get__(ref)
    return number


def freed_text(ref: DRef) -> str:
    """What to say when a freed DRef is used."""
    name = f"{ref.name!r}, " if ref.name else ""
    return (
        f"{name}register {_id_of(ref)}, was freed on all workers: its value is gone. "
        "Run the cell that makes it again"
    )


@worker_function("freeing a value")
def put_failure(text: str) -> Failure:
    """What stands in the register afterwards (a worker function)."""
    rank = current_worker().worker_id
    return Failure(rank, "a value that was freed", "", ArgumentError.__name__, text, reported=True)


def _first_dref(value: Any) -> DRef | None:
    if isinstance(value, DRef):
        return value
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            found = _first_dref(item)
            if found is not None:
                return found
    return None

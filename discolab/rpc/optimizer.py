"""DistributedOptimizer: one step for parameters that lie on several ranks.

Each owner of parameters has a `LocalOptimizer` with a torch optimizer of its own. Several may be
for the same parameters, as those that trainers make for a parameter server, so an owner has one
lock for all of them, in `_locks`. It guards its parameters and their `Tensor.grad`, which hold a
context's gradients only for the time of a step. `_lock` guards `_locks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..runtime.errors import ArgumentError, WorkerError
from ..runtime.interrupts import plain_lock, reentrant_lock
from .autograd import Context, context_for, get_gradients
from .context import place_here
from .futures import Future, call_later
from .names import format_rank
from .node import Node, rank_on
from .rref import RRef

Tensor = torch.Tensor
_LOOK = 0.05  # seconds between two looks at interrupts

_lock = plain_lock()
_locks: weakref.WeakKeyDictionary[Node, dict[int, Any]] = weakref.WeakKeyDictionary()


class DistributedOptimizer:
    """A torch optimizer for parameters on any ranks.

    Each owner has one of its own for its parameters, so that none sees all of them: what looks at
    all parameters at once, such as clipping by the total norm, sees one rank's.

    Parameters
    ----------
    optimizer_class
        Such as `torch.optim.SGD`; called as ``optimizer_class(parameters, *args, **kwargs)`` on
        each owner.
    params_rrefs
        References to parameters: leaves. Those that do not require grad stay as they are.
    args, kwargs
        For the optimizers.

    Raises
    ------
    ArgumentError
        If these are no references to parameters.
    WorkerError
        If an optimizer can't be made.

    Examples
    --------
    ::

        optimizer = rpc.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
        with rpc.autograd.context() as ctx:
            rpc.autograd.backward(ctx, [module.forward(x).sum()])
            optimizer.step(ctx)
    """

    def __init__(
        self, optimizer_class: Any, params_rrefs: Sequence[RRef], *args: Any, **kwargs: Any
    ) -> None:
        if not callable(optimizer_class):
            raise ArgumentError(
                f"DistributedOptimizer: optimizer_class is a class, got {optimizer_class!r:.80}"
            )
        of_owner = _by_owner(params_rrefs)
        self._node = next(iter(of_owner.values()))[0].node
        rank = rank_on(self._node)
        self._name = getattr(optimizer_class, "__name__", repr(optimizer_class))
        node = self._node
        self._locals: dict[int, RRef] = _gather(
            {
                owner: call_later(
                    node,
                    rank,
                    owner,
                    _make,
                    (optimizer_class, refs, args, kwargs),
                    {},
                    None,
                    at=min(ref.ref[0] for ref in refs),  # a node that is lost, if one is
                )
                for owner, refs in of_owner.items()
            }
        )

    def __repr__(self) -> str:
        return f"<DistributedOptimizer {self._name} on {', '.join(map(format_rank, self._locals))}>"

    def step(self, context: Context | int | None = None) -> None:
        """Apply a context's gradients on all owners, at the same time; waits for all.

        Parameters that have no gradient in it stay as they are.

        Parameters
        ----------
        context
            Or its id; None: the current one.

        Raises
        ------
        SessionError
            If there is none, or it is over.
        WorkerError
            Of all owners on which it failed; on the others it is done.
        WorkerLostError, WaitTimeoutError
        """
        node = self._node
        wanted = context_for(node, context)
        rank = rank_on(node)
        _gather(
            {
                owner: call_later(node, rank, owner, _step, (ref, wanted), {}, None, at=ref.ref[0])
                for owner, ref in self._locals.items()
            }
        )


class LocalOptimizer:
    """One owner's part."""

    def __init__(
        self, optimizer_class: Any, parameters: list[Tensor], args: Any, kwargs: Any
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer_class(parameters, *args, **kwargs)
        node, rank = place_here()
        with _lock:
            self.lock = _locks.setdefault(node, {}).setdefault(rank, reentrant_lock())

    def step(self, context: Context) -> None:
        """Apply that context's gradients."""
        gradients = get_gradients(context)
        try:
            while not self.lock.acquire(timeout=_LOOK):
                pass  # an interrupt comes here
            before = [parameter.grad for parameter in self.parameters]
            try:
                for parameter in self.parameters:
                    parameter.grad = gradients.get(parameter)
                self.optimizer.step()
            finally:
                for parameter, grad in zip(self.parameters, before, strict=True):
                    parameter.grad = grad
        finally:
            if self.lock._is_owned():
                self.lock.release()


def _make(optimizer_class: Any, refs: list[RRef], args: Any, kwargs: Any) -> RRef:
    """On an owner."""
    parameters = [ref.local_value() for ref in refs]
    for i, parameter in enumerate(parameters):
        if not isinstance(parameter, Tensor):
            why = f"is no tensor but a {type(parameter).__name__}"
        elif not parameter.is_leaf:
            why = "is computed from others, no leaf: give those"
        else:
            continue
        rank = refs[i].owner_rank
        raise ArgumentError(
            f"DistributedOptimizer: parameter {i} of those of {format_rank(rank)} {why}"
        )
    return RRef(LocalOptimizer(optimizer_class, parameters, args, kwargs))


def _step(ref: RRef, context: Context) -> None:
    """On an owner."""
    ref.local_value().step(context)


def _by_owner(params_rrefs: Any) -> dict[int, list[RRef]]:
    if isinstance(params_rrefs, RRef | str | Mapping):
        raise ArgumentError("DistributedOptimizer: params_rrefs is a list of RRefs")
    try:
        refs = list(params_rrefs)
    except TypeError:
        raise ArgumentError(
            f"DistributedOptimizer: params_rrefs is a list of RRefs, got {params_rrefs!r:.80}"
        ) from None
    if not refs:
        raise ArgumentError("DistributedOptimizer: params_rrefs is empty")
    of_owner: dict[int, list[RRef]] = {}
    for i, ref in enumerate(refs):
        if not isinstance(ref, RRef):
            raise ArgumentError(
                f"DistributedOptimizer: params_rrefs[{i}] is a {type(ref).__name__}, no RRef: "
                "rpc.RRef(parameter) makes one on the parameter's owner"
            )
        if ref.node is not refs[0].node:
            raise ArgumentError("DistributedOptimizer: the references are of several sessions")
        of_owner.setdefault(ref.owner_rank, []).append(ref)
    return of_owner


def _gather(answers: Mapping[int, Future]) -> dict[int, Any]:
    """Wait for the results of all owners; errors of several are raised together."""
    results: dict[int, Any] = {}
    errors: list[Exception] = []
    for owner, answer in answers.items():
        try:
            results[owner] = answer.wait()
        except Exception as exc:
            errors.append(exc)
    if not errors:
        return results
    failed = [error for error in errors if isinstance(error, WorkerError)]
    if len(errors) > 1 and len(failed) == len(errors):
        raise WorkerError([failure for error in failed for failure in error.failures])
    for other in errors[1:]:
        errors[0].add_note(f"and besides, {type(other).__name__}: {other}")
    raise errors[0]

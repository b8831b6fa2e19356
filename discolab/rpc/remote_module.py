"""RemoteModule: a module that lives on another rank. Never changes, so any thread may use it."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.errors import ArgumentError
from .calls import call_sync
from .containers import swap
from .context import current_node
from .futures import Future
from .node import Node, rank_on
from .rref import RRef


class RemoteModule:
    """A `torch.nn.Module` on another rank, called from here.

    The module is made there. In an autograd context a backward goes through it, and its parameters'
    gradients are kept there. May be passed to any rank.

    Parameters
    ----------
    to
        Where: a rank, ``"worker2"`` …; ``"worker2/cuda:0"`` also says on what device. To another
        device than the CPU the module's arguments are moved, as in PyTorch.
    module_cls
        Its class, or a function that makes it.
    args, kwargs
        For that.
    node
        Of the session; None: the calling thread's.

    Raises
    ------
    ArgumentError
        If there is no such rank, or it is no module.
    WorkerError
        What the constructor has raised, also of that type.
    """

    def __init__(
        self,
        to: Any,
        module_cls: Any,
        args: Any = None,
        kwargs: Any = None,
        *,
        node: Node | None = None,
    ) -> None:
        if not callable(module_cls):
            raise ArgumentError(f"RemoteModule: module_cls is a class, got {module_cls!r:.80}")
        if node is None:
            node = current_node()
        to, device = _place(to)
        given = module_cls, tuple(args or ()), dict(kwargs or {}), device
        self._module: RRef = _ask(node, to, _make, given)

    @classmethod
    def _of(cls, module: RRef) -> RemoteModule:
        made = object.__new__(cls)
        made._module = module
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, (self._module,)

    def __repr__(self) -> str:
        return f"<RemoteModule on {self._module.owner_name()}>"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module there, and wait for what it gives."""
        return self._module.rpc_sync()(*args, **kwargs)

    __call__ = forward

    def forward_async(self, *args: Any, **kwargs: Any) -> Future:
        """Call the module there; a `Future` of what it gives."""
        answer: Future = self._module.rpc_async()(*args, **kwargs)
        return answer

    def remote_parameters(self, recurse: bool = True) -> list[RRef]:
        """References to its parameters, for a `DistributedOptimizer`.

        Parameters
        ----------
        recurse
            Whether with those of the modules in it.
        """
        module = self._module
        given, at = (module, bool(recurse)), module.ref[0]
        parameters: list[RRef] = _ask(module.node, module.owner_rank, _parameters, given, at)
        return parameters

    def module_rref(self) -> RRef:
        """A reference to the module itself."""
        return self._module

    get_module_rref = module_rref  # PyTorch's name


def _ask(node: Node, to: Any, func: Any, args: tuple[Any, ...], at: int | None = None) -> Any:
    return call_sync(node, rank_on(node), to, func, args, at=at)


def _place(to: Any) -> tuple[Any, str | None]:
    """The worker, and the device there; ``"rank:1/cpu"`` is one of PyTorch's forms."""
    if not isinstance(to, str):
        return to, None
    worker, _, device = to.partition("/")
    rank = worker.removeprefix("rank:")
    return int(rank) if rank != worker and rank.isdigit() else worker, device or None


def _make(module_cls: Any, args: Any, kwargs: Any, device: str | None) -> RRef:
    """On its owner."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"RemoteModule: {module_cls!r:.80} gave no torch.nn.Module but a "
            f"{type(module).__name__}"
        )
    if device is not None:
        module.to(device)
        if torch.device(device).type != "cpu":
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _moved((args, kwargs), device), with_kwargs=True
            )
    return RRef(module)


def _moved(value: Any, device: str) -> Any:
    return swap(value, lambda tensor: tensor.to(device))


def _parameters(module: RRef, recurse: bool) -> list[RRef]:
    """On its owner."""
    return [RRef(parameter) for parameter in module.local_value().parameters(recurse)]

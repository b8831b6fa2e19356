"""From pickles and memory to a worker's variables again; runs on the worker's thread.

`collecting` puts the functions here in pickles by name: they keep their names and parameters for as
long as the version of the manifest stays.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch.utils.hooks import RemovableHandle

from ..runtime.worker import Worker

_SKELETONS = {"_make_skeleton_class": 4, "_make_skeleton_enum": 5}  # where each takes the id


@dataclass(frozen=True)
class Piece:
    """A memory that is there again.

    Attributes
    ----------
    array
        Its bytes, one after the other, as a tensor.
    shape, dtype
        Of the tensor that fills it, if it is known as a part of a larger one.
    cut_anew
        Whether it is another part than the worker saved: of another size.
    """

    array: torch.Tensor
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    cut_anew: bool = False


class Part:
    """In a pickle: a tensor that fills a memory, whatever its shape will be."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Unpickler(pickle.Unpickler):
    """Opens one bundle.

    Parameters
    ----------
    pieces
        Its memories, in its order.
    buffers
        Of these, those that no tensor lies in: for arrays, in order.
    token
        Makes ids of classes the worker's own, so that no two worker threads share one.
    """

    def __init__(
        self,
        file: Any,
        worker: Worker,
        pieces: Sequence[Piece],
        buffers: Sequence[Any],
        meshes: Sequence[Any],
        token: str,
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._worker, self._pieces, self._meshes, self._token = worker, pieces, meshes, token
        self._hooks: dict[int, int] = {}  # new numbers: none that a hook made here may get

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case "typed", number, dtype:
                return torch.storage.TypedStorage(
                    wrap_storage=self._storage(number), dtype=dtype, _internal=True
                )
            case "untyped", number:
                return self._storage(number)
            case "part", number:
                return self._pieces[number]
            case ("namespace",):
                return self._worker.namespace
            case ("worker",):
                return self._worker
            case "mesh", number:
                return self._meshes[number]()
            case "hook", number:
                if number not in self._hooks:
                    self._hooks[number] = RemovableHandle(OrderedDict()).id
                return self._hooks[number]
        raise pickle.UnpicklingError(f"there is no {pid!r:.80} in a snapshot")

    def _storage(self, number: int) -> torch.UntypedStorage:
        piece = self._pieces[number]
        if piece.cut_anew:
            raise pickle.UnpicklingError(
                "it has a view of a part of a tensor that has other parts on so many workers"
            )
        return piece.array.untyped_storage()

    def find_class(self, module: str, name: str) -> Any:
        """As usual; classes with their code become the worker's own."""
        found = super().find_class(module, name)
        if found is torch._utils._rebuild_tensor_v3:
            return _rebuild_tensor_without_storage_type
        if module == cloudpickle.cloudpickle.__name__ and name in _SKELETONS:
            return _with_own_id(found, _SKELETONS[name], self._token)
        return found


def _rebuild_tensor_without_storage_type(storage: torch.UntypedStorage, *args: Any) -> Any:
    """A float8 tensor, say: pickled with an untyped storage, and unpickled from a typed one."""
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return torch._utils._rebuild_tensor_v3(typed, *args)


def _with_own_id(build: Callable[..., Any], place: int, token: str) -> Callable[..., Any]:
    def build_own(*args: Any) -> Any:
        return build(*args[:place], f"{token} {args[place]}", *args[place + 1 :])

    return build_own


def build_part(piece: Piece, requires_grad: bool) -> torch.Tensor:
    """The tensor that fills a memory."""
    assert piece.shape is not None
    assert piece.dtype is not None
    strides = [math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
    made = torch.empty(0, dtype=piece.dtype, device=piece.array.device)
    made.set_(piece.array.untyped_storage(), 0, piece.shape, strides)
    return made.requires_grad_(requires_grad)


def build_dtensor(
    local: torch.Tensor,
    mesh: Any,
    placements: tuple[Any, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """A DTensor of this worker's part; no worker waits for another one."""
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        made: torch.Tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    if is_parameter:
        return torch.nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_(requires_grad)


def with_attributes(
    build: Callable[..., torch.Tensor], args: tuple[Any, ...], own: Mapping[str, Any]
) -> torch.Tensor:
    """A tensor with the attributes that a program has given it."""
    made = build(*args)
    vars(made).update(own)
    return made


def build_generator(device: str, state: torch.Tensor) -> torch.Generator:
    """A generator of random numbers at the place where it was."""
    made = torch.Generator(device)
    made.set_state(state)
    return made


def set_grad(tensor: torch.Tensor, state: tuple[Mapping[str, Any] | None, torch.Tensor]) -> None:
    """Give a tensor what else it had."""
    own, grad = state
    if own is not None:
        tensor.__setstate__(own)
    tensor.grad = grad

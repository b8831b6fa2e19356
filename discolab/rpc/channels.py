"""How tensors on GPUs travel: the channel is chosen for each, by its size and where the peer is.

- FRAME: it is on the CPU, and its bytes go with the message as they lie in memory.
- IPC: CUDA, and the peer sees the same GPUs: a copy is made on the GPU, and the peer opens that
  (CUDA IPC, by `torch.multiprocessing`, which keeps the memory until the peer has let go of it).
- STAGED: else its bytes are copied to pinned memory, on a stream of its own, and go as a frame.

On its way a *stand-in* is in the place of a tensor on a GPU, or another accelerator. Where none was
ever used, nothing is looked at. `_streams` (by device, made once) is the only state besides
`_seen`; any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ..runtime import accelerators
from ..runtime.errors import DiscoError

FRAME, IPC, STAGED = "frame", "ipc", "staged"
SMALL = 1 << 16  # bytes of a tensor up to which opening it costs more than copying
SWITCH = "DISCOLAB_RPC_CUDA_IPC"  # "0": do without
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NEEDS_GRAD, _PARAMETER = 1, 2

_streams: dict[torch.device, torch.Stream] = {}
_seen = False  # whether a stand-in has ever come to this process


def gpus_here() -> str:
    """Equal in processes of one machine that can open each other's GPU memory; "": in none."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "fork"):
        return ""
    return "/".join(["gpus", *(os.environ.get(name, "all") for name in _VISIBLE)])


def channel_of(device: str, nbytes: int, same_gpus: bool) -> str:
    """The channel for a tensor on a device of that type."""
    if device in ("cpu", "meta"):
        return FRAME
    return IPC if device == "cuda" and same_gpus and nbytes > SMALL else STAGED


class StandIn:
    """What travels for a tensor on a GPU.

    Attributes
    ----------
    channel
        IPC or STAGED.
    device
        Where the tensor was.
    flags
        Whether it needs gradients, and whether it is a parameter.
    content
        What `rebuild_cuda_tensor` wants; or the tensor on the CPU.
    """

    __slots__ = ("channel", "content", "device", "flags")

    def __init__(self, channel: str, device: str, flags: int, content: Any) -> None:
        self.channel, self.device, self.flags, self.content = channel, device, flags, content

    def __reduce__(self) -> tuple[Any, ...]:
        return _come, (self.channel, self.device, self.flags, self.content)


def _come(channel: str, device: str, flags: int, content: Any) -> StandIn:
    global _seen
    _seen = True
    return StandIn(channel, device, flags, content)


def outgoing(value: Any, same_gpus: bool) -> Any:
    """The value with a stand-in for each tensor on a GPU in its lists, tuples and dicts.

    The very same object where there is none. Each stand-in is for one message to one peer.
    """
    if not accelerators.any_in_use():
        return value
    staged: list[torch.Event] = []

    def replaced(item: Any) -> Any:
        if type(item) is not torch.Tensor and type(item) is not torch.nn.Parameter:
            return item
        channel = channel_of(item.device.type, item.numel() * item.element_size(), same_gpus)
        if channel == FRAME or item.layout is not torch.strided or item.is_quantized:
            return item
        flags = _NEEDS_GRAD * item.requires_grad | _PARAMETER * isinstance(item, torch.nn.Parameter)
        plain = item.detach().resolve_conj().resolve_neg()
        content: Any = _opened_for_peer(plain) if channel == IPC else None
        if content is None:
            channel, content = STAGED, _to_host(plain, staged)
        return StandIn(channel, str(item.device), flags, content)

    value = _walk(value, replaced)
    for event in staged:
        event.synchronize()
    return value


def incoming(value: Any, device: torch.device) -> Any:
    """The value with tensors for the stand-ins in it; on the thread that will use them.

    Each goes to the device of the name that it had, if this process sees one, else to `device`.
    """
    if not _seen:
        return value
    return _walk(value, lambda item: _tensor(item, device) if type(item) is StandIn else item)


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that came with the name of a device, on that device if this process sees it."""
    return tensor.to(device) if _is_here(device) else tensor


def _opened_for_peer(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What a peer needs to open a copy of a tensor; None where the driver does not do that."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

    try:
        rebuild, content = reduce_tensor(tensor.clone())
    except RuntimeError:
        return None
    return tuple(content) if rebuild is rebuild_cuda_tensor else None


def _to_host(tensor: torch.Tensor, staged: list[torch.Event]) -> torch.Tensor:
    """Begin to copy a tensor to pinned memory, of which torch keeps a pool."""
    stream = _streams.get(tensor.device)
    if stream is None:
        stream = _streams.setdefault(tensor.device, torch.Stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    stream.wait_stream(accelerators.current_stream(tensor.device))
    with stream:
        host.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device, blocking=True)
        event.record(stream)
    tensor.record_stream(stream)  # an error may come between the copy and the wait for it
    staged.append(event)
    return host


def _tensor(stand_in: StandIn, device: torch.device) -> torch.Tensor:
    wanted = torch.device(stand_in.device)
    target = wanted if _is_here(wanted) else device
    if stand_in.channel == IPC:
        tensor = _opened(stand_in).to(target)
    else:
        tensor = stand_in.content.to(target)
    if stand_in.flags & _PARAMETER:
        return torch.nn.Parameter(tensor, bool(stand_in.flags & _NEEDS_GRAD))
    return tensor.requires_grad_() if stand_in.flags & _NEEDS_GRAD else tensor


def _opened(stand_in: StandIn) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    try:
        tensor: torch.Tensor = rebuild_cuda_tensor(*stand_in.content)
    except RuntimeError as exc:
        raise DiscoError(
            f"a tensor on {stand_in.device} of another process can't be opened here: {exc}\n"
            f"Start the session with {SWITCH}=0 in the environment to have it copied instead"
        ) from exc
    return tensor


def _is_here(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    return device.type == accelerators.kind() and (device.index or 0) < accelerators.count()


def _walk(value: Any, change: Callable[[Any], Any], around: tuple[int, ...] = ()) -> Any:
    """The value with `change` done to what is in its containers; those are copied if need be."""
    kind = type(value)
    if kind is not list and kind is not tuple and kind is not dict:
        return change(value)
    if id(value) in around:  # a container within itself is not walked again
        return value
    around = (*around, id(value))
    if kind is dict:
        items = {key: _walk(item, change, around) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else items
    new = [_walk(item, change, around) for item in value]
    return value if all(a is b for a, b in zip(value, new, strict=True)) else kind(new)

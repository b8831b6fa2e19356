"""How tensors on GPUs travel: which channel is chosen, and that values arrive as they were."""

from typing import Any

import pytest
import torch

from discolab import ProcessSession
from discolab.rpc import channels
from discolab.rpc.channels import FRAME, IPC, SMALL, STAGED, StandIn, channel_of
from discolab.runtime import serialize

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA device"
)


def carried(value: Any) -> Any:
    """As it comes out at the other end."""
    body, frames = serialize.encode(value)
    copies = [bytearray(frame) for frame in frames]
    return channels.incoming(serialize.open_all(serialize.decode(body, copies)), CPU)


@pytest.mark.parametrize(
    ("device", "nbytes", "same_gpus", "channel"),
    [
        ("cpu", 1 << 30, True, FRAME),
        ("cpu", 4, False, FRAME),
        ("cuda", SMALL + 1, True, IPC),
        ("cuda", SMALL, True, STAGED),
        ("cuda", 1 << 30, False, STAGED),
    ],
)
def test_the_channel_depends_on_the_device_the_size_and_the_peer(
    device: str, nbytes: int, same_gpus: bool, channel: str
) -> None:
    assert channel_of(device, nbytes, same_gpus) == channel


@pytest.mark.parametrize("same_gpus", [True, False])
def test_a_value_without_tensors_on_gpus_is_not_touched(same_gpus: bool) -> None:
    value = [torch.ones(3), {"a": (torch.zeros(2), 1)}]
    assert channels.outgoing(value, same_gpus) is value
    assert channels.incoming(value, CPU) is value


def test_a_container_within_itself_is_walked_once() -> None:
    circle: list[Any] = [1, StandIn(STAGED, "cuda:0", 0, torch.ones(2))]
    circle.append({"me": circle})
    found = channels._walk(circle, lambda item: 2 if item == 1 else item)
    assert found[0] == 2
    assert found[2]["me"] is circle


def test_processes_that_see_other_gpus_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    mine = channels.gpus_here()
    assert mine == channels.gpus_here() != ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert channels.gpus_here() != mine
    monkeypatch.setenv(channels.SWITCH, "0")
    assert channels.gpus_here() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_staged_tensor_goes_to_the_workers_device_where_its_own_is_not_there() -> None:
    data = torch.arange(6.0).view(2, 3)
    parameter = StandIn(STAGED, "cuda:0", channels._NEEDS_GRAD | channels._PARAMETER, data)
    leaf = StandIn(STAGED, "cuda:0", channels._NEEDS_GRAD, data)
    ((one, same), two) = carried([(parameter, "same"), {"leaf": leaf}])
    assert same == "same"
    assert type(one) is torch.nn.Parameter
    assert one.device == two["leaf"].device == CPU
    assert one.requires_grad
    assert two["leaf"].requires_grad
    assert two["leaf"].is_leaf
    assert torch.equal(one, data)
    assert torch.equal(two["leaf"], data)


@pytest.mark.gpu
@needs_gpu
def test_tensors_are_staged_and_come_back_to_the_same_gpu() -> None:
    odd = torch.arange(12.0, device="cuda").view(3, 4).t()[1:]
    value = [odd, {"p": torch.nn.Parameter(torch.ones(3, device="cuda"))}, torch.ones(2)]
    sent = channels.outgoing(value, False)
    assert sent[2] is value[2]
    back = carried(sent)
    assert back[0].device == odd.device
    assert torch.equal(back[0], odd)
    assert type(back[1]["p"]) is torch.nn.Parameter
    assert back[1]["p"].requires_grad


def double(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    kept = tensor.clone()
    tensor.zero_()  # its own copy
    return kept * 2, str(tensor.device)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("elements", [10, 1 << 20])
def test_a_call_takes_a_gpu_tensor_to_another_process_and_back(elements: int) -> None:
    with ProcessSession(2, timeout=60) as session:
        mine = torch.arange(float(elements), device="cuda:0")
        for _ in range(3):
            back, device = session.rpc.rpc_sync(1, double, (mine,))
            assert device == "cuda:0"
            assert back.device == mine.device
            assert torch.equal(back, mine * 2)
        assert mine.sum() > 0

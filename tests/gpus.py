"""For tests that need a GPU, real or simulated: where it is, and tensors that are written late."""

import pytest
import torch

from tests.accelerator import sim

GPU = torch.device("sim:0" if sim.loaded() else "cuda:0")
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.accelerator,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not sim.loaded(), reason="this machine has no CUDA device"
    ),
]
A_WHILE = 50_000_000  # cycles: some 30 ms


def busy() -> None:
    """Keep the caller's current stream busy for a while; returns at once."""
    if sim.loaded():
        sim.sleep(0.005)
    else:
        torch.cuda._sleep(A_WHILE)


def late(value: float, elements: int = 1 << 20) -> torch.Tensor:
    """``[elements]`` float32 on the GPU, of zeros until the caller's stream comes to write them."""
    tensor = torch.zeros(elements, device=GPU)
    torch.accelerator.current_stream(GPU).synchronize()
    busy()
    return tensor.fill_(value)

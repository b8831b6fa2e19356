"""For tests that need a GPU: where it is, and tensors that are written later than it seems."""

import pytest
import torch

GPU = torch.device("cuda:0")
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
A_WHILE = 50_000_000  # cycles: some 30 ms


def busy() -> None:
    """Keep the caller's current stream busy for a while; returns at once."""
    torch.cuda._sleep(A_WHILE)


def late(value: float, elements: int = 1 << 20) -> torch.Tensor:
    """``[elements]`` float32 on the GPU, of zeros until the caller's stream comes to write them."""
    tensor = torch.zeros(elements, device=GPU)
    torch.cuda.current_stream().synchronize()
    busy()
    return tensor.fill_(value)

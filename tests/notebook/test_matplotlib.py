"""Figures of pyplot in cells: each worker's own, in the order of ranks, with and without show()."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import Kernel

pytest.importorskip("matplotlib")

CELL = """%%disco
import time
import matplotlib.pyplot as plt
time.sleep(0.3 * (3 - rank))
plt.rcParams["figure.figsize"] = (1 + rank, 1)
plt.figure(facecolor=(0.2 * rank, 0, 0))
plt.title(f"rank {rank}")
"""


@pytest.fixture(scope="module", params=["threads", "processes"])
def kernel(request: Any) -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.ok("%load_ext discolab")
    kernel.ok(f"%disco_session 4 --devices cpu --engine {request.param}")
    yield kernel
    kernel.close()


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("end", ["None", "plt.show()"])
def test_each_worker_shows_its_figure_with_its_rank(
    kernel: Kernel, end: str, watched: bool
) -> None:
    from matplotlib.image import imread

    result = kernel.ok(CELL + end, watched=watched)
    images = [data["image/png"] for data in result.data if "image/png" in data]
    pixels = [imread(io.BytesIO(base64.b64decode(image))) for image in images]
    assert [round(float(pixel[2, 2, 0]) / 0.2) for pixel in pixels] == [0, 1, 2, 3]
    widths = [pixel.shape[1] for pixel in pixels]
    assert widths == sorted(set(widths))
    assert [line for line in result.stdout.split("\n") if line] == ["[0]", "[1]", "[2]", "[3]"]
    assert not kernel.ok("%%disco\nplt.get_fignums() or None").data

"""The picture of what a collective moved: where each value comes from, in text and in colour."""

from typing import Any

import pytest
import torch

from discolab import ccl
from discolab.engines import ThreadedSession
from discolab.runtime import ArgumentError, current_worker
from discolab.views import before_after, render_html, render_text
from discolab.views.before_after import before_after_parts, origins_of, record_of


def test_origins() -> None:
    origins = origins_of({0: [1, 2, 5], 1: [10, 20, 5], 2: [100, 200, 7]})
    assert origins[1] == (0,)
    assert origins[11] == (0, 1)
    assert origins[111] == (0, 1, 2)
    assert 21 not in origins  # of two places
    assert 5 not in origins  # whose?


def values(*numbers: float) -> dict[str, Any]:
    return {"shape": [len(numbers)], "values": list(numbers)}


def test_picture_of_what_moved() -> None:
    stages = [
        {0: values(1, 2), 1: values(10, 20)},
        {0: values(11, 22, 3), 1: {"kind": "none"}},
    ]
    part = before_after_parts(["x", "y"], stages)
    assert render_text(part).split("\n") == [
        "  rank  x         y",
        "  0     [1, 2]    [11, 22, 3]",
        "  1     [10, 20]  -",
    ]
    boxes = part.lanes[0].stages[1][0]
    assert [box.owners for box in boxes] == [(0, 1), (0, 1), ()]
    html = render_html(part)
    assert html.count("linear-gradient") == 2
    assert html.count("→") == 2
    assert "nothing" in html


def test_a_freed_storage_is_not_read() -> None:
    value = torch.ones(3)
    value.untyped_storage().resize_(0)
    assert record_of(value)["note"] == "storage freed: no data"


def powers() -> torch.Tensor:
    return torch.arange(1.0, 5.0).view(2, 2) * 10 ** current_worker().rank


def test_picture_of_values_in_a_session(pair: ThreadedSession) -> None:
    x = pair.call_packed(powers)
    y = pair.call_packed(ccl.all_reduce, x)
    big = pair.call_packed(torch.zeros, 1000)
    assert repr(before_after(x, y)).split("\n")[1:] == [
        "  0     [[1, 2], [3, 4]]      [[11, 22], [33, 44]]",
        "  1     [[10, 20], [30, 40]]  [[11, 22], [33, 44]]",
    ]
    assert "float32[1000]" in repr(before_after(x, big))
    with pytest.raises(ArgumentError, match="two DRefs"):
        before_after(x)

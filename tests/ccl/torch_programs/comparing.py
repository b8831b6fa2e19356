"""How two results of a program are compared."""

from __future__ import annotations

from typing import Any

import torch

ROUNDING = 2e-6


def difference(found: Any, expected: Any, *, rounding: bool = False, at: str = "") -> str:
    """Where two results differ and how, "" if they do not; bit by bit, or up to rounding."""
    if isinstance(expected, torch.Tensor):
        return _of_tensors(found, expected, rounding, at)
    if type(found) is not type(expected):
        return f"{at}: {found!r:.200} is not {expected!r:.200}"
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return f"{at}: keys {list(found)} are not {list(expected)}"
        pairs = [(f"{at}[{key!r}]", found[key], expected[key]) for key in expected]
    elif isinstance(expected, list):
        if len(found) != len(expected):
            return f"{at}: {found!r:.200} is not {expected!r:.200}"
        rows = zip(found, expected, strict=True)
        pairs = [(f"{at}[{i}]", mine, theirs) for i, (mine, theirs) in enumerate(rows)]
    elif rounding and isinstance(expected, float):
        same = abs(found - expected) <= ROUNDING * max(1.0, abs(expected))
        return "" if same else f"{at}: {found} is not {expected}"
    else:
        return "" if found == expected else f"{at}: {found!r:.200} is not {expected!r:.200}"
    told = (difference(mine, theirs, rounding=rounding, at=where) for where, mine, theirs in pairs)
    return next((text for text in told if text), "")


def _of_tensors(found: Any, expected: torch.Tensor, rounding: bool, at: str) -> str:
    if not isinstance(found, torch.Tensor):
        return f"{at}: {found!r:.200} is no tensor"
    limit = ROUNDING if rounding else 0.0
    try:
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit, equal_nan=True)
    except AssertionError as exc:
        lines = [line for line in str(exc).splitlines() if line]
        return f"{at}: {'; '.join(lines)[:300]}: {found.flatten()[:8]}, {expected.flatten()[:8]}"
    return ""

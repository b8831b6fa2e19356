"""Whether a setting that a module has on workers only is why what it gives differs.

The reference's module is run once more with the workers' setting, on what it was given. If it gives
what the workers have, that is the cause; if it gives what it gave before, the setting does no harm
here. Of all else, and where this can't be tried, "perhaps" is said.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .causes import Evidence
from .measure import difference, sample
from .pairs import Pair, Setting
from .recorder import leaves, plain_path
from .results import Point

if TYPE_CHECKING:
    from .matcher import Matcher

PERHAPS = "perhaps: "
_LARGEST = 2**26  # elements of the parameters of a module that is tried
_OPTION = re.compile(r"(\w+)=(\([^()]*\)|\[[^\[\]]*\]|[^,]+)")  # in what `extra_repr` gives


def causing(
    matcher: Matcher,
    pair: Pair,
    point: Point,
    settings: Sequence[tuple[str, Setting]],
    evidence: Evidence | None,
) -> tuple[list[str], list[str]]:
    """Which of these settings are why a value differs, and which are perhaps, in words.

    Parameters
    ----------
    settings
        Each with the path of its module.
    evidence
        What the workers hold; None: it is not known.
    """
    sure, perhaps = [], []
    for path, setting in settings:
        harm = _does(matcher, pair, point, path, setting, evidence)
        if harm:
            sure.append(setting.words)
        elif harm is None:
            perhaps.append(PERHAPS + setting.words)
    return sure, perhaps


def _does(
    matcher: Matcher,
    pair: Pair,
    point: Point,
    path: str,
    setting: Setting,
    evidence: Evidence | None,
) -> bool | None:
    """Whether a setting makes of the reference's output what the workers have.

    False: it changes nothing of it; None: it can't be tried, or makes something else.
    """
    odd = set(setting.ranks).intersection(point.ranks)
    if not odd or (point.kind == "parameter" and set(setting.ranks) - odd):
        return False  # others have it, too, and the right parameter
    if evidence is None or point.kind != "output" or point.gradient:
        return None
    whole, module = matcher.ours.value(point.key), _module(matcher, path)
    leaf = point.key.split("|")[2]
    tried = _tried(matcher, module, point.module, setting, leaf)
    if tried is None or tried.shape != whole.shape:
        return None
    layout = pair.layout_named(point.layout)
    parts = {r: sample(layout.part_of(tried, r), len(evidence.local[r])) for r in odd}
    if all(evidence.close(evidence.local[rank], part) for rank, part in parts.items()):
        return True
    usual = _tried(matcher, module, point.module, None, leaf)
    if usual is None or usual.shape != whole.shape:
        return None
    if difference(usual, whole, pair.tolerance)["over"]:
        return None  # it gives something else each time, or is not called with tensors alone
    return None if difference(tried, whole, pair.tolerance)["over"] else False


def _module(matcher: Matcher, path: str) -> nn.Module | None:
    """The reference's module of that path, if it is small enough to be copied."""
    known: dict[str, nn.Module] = {}
    if matcher.ours.module is not None:
        known = {plain_path(name): one for name, one in matcher.ours.module.named_modules()}
    module = known.get(path)
    if module is None or sum(p.numel() for p in module.parameters()) > _LARGEST:
        return None
    return module


def _tried(
    matcher: Matcher, module: nn.Module | None, call: str, setting: Setting | None, leaf: str
) -> torch.Tensor | None:
    """What a copy of a module gives with a setting for what it was called with; None: unknown."""
    entries = matcher.ours.recorder.entries.values()
    given = {e.leaf: e.snapshot.value for e in entries if e.kind == "input" and e.name == call}
    if module is None or not given:
        return None
    try:
        own = copy.deepcopy(module)
        if setting is not None and not _set(own, setting):
            return None
        numbered = {name: value for name, value in given.items() if name.isdigit() or not name}
        args = [value.clone() for _, value in sorted(numbered.items())]
        named = {name: value.clone() for name, value in given.items() if name not in numbered}
        with torch.no_grad(), torch.random.fork_rng([]):
            return dict(leaves(own(*args, **named))).get(leaf)
    except Exception:  # it is the user's module
        return None


def _set(module: nn.Module, setting: Setting) -> bool:
    """Set a module up as it is on workers; whether that can be done."""
    if setting.training is not None:
        module.train(setting.training)
        return True
    ours, theirs = dict(_OPTION.findall(module.extra_repr())), dict(_OPTION.findall(setting.extra))
    # a size that differs is what sharding changes
    changed = {
        name: text
        for name, text in theirs.items()
        if ours.get(name, text) != text and not text.isdigit()
    }
    for name, text in changed.items():
        value: Any = ast.literal_eval(text)
        setattr(module, name, None if name == "bias" and value is False else value)
    return bool(changed)

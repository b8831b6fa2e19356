"""The program's own autograd functions may be given leaves that other workers' threads use.

Without this the process can come to stand for ever; why is in `runtime.autograd_function`. An
``apply`` that was looked up before the first session (``relu = MyReLU.apply`` in a module) is
torch's own. `install` and `uninstall` are called under the lock of hooks.py, which guards `_ours`.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd import Function

from ..runtime.autograd_function import leaf_nodes

_ours: list[tuple[Any, Any]] = []  # what was there, what we put there


def install() -> None:
    """Have ``Function.apply`` find the nodes of leaves made."""
    before = vars(Function)["apply"]

    @functools.wraps(before.__func__)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        nodes = leaf_nodes(args)
        result = before.__func__(cls, *args, **kwargs)
        del nodes
        return result

    ours = classmethod(apply)
    _ours.append((before, ours))
    Function.apply = ours  # type: ignore[method-assign, assignment]


def uninstall() -> None:
    """Give torch its own back; what others replaced since is left alone."""
    while _ours:
        before, ours = _ours.pop()
        if vars(Function)["apply"] is ours:
            Function.apply = before  # type: ignore[method-assign]

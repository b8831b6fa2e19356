"""The program's own autograd functions may be given leaves that other workers' threads use.

Without this the process can come to stand for ever; why is in `runtime.autograd_function`. An
``apply`` that was looked up before the first session (``relu = MyReLU.apply`` in a module) is
torch's own.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd import Function

from ..runtime.autograd_function import leaf_nodes
from . import table
from .patches import Patches
from .table import Row, Treatment


def _install(patches: Patches) -> None:
    """Have ``Function.apply`` find the nodes of leaves made."""
    before = vars(Function)["apply"]

    @functools.wraps(before.__func__)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        nodes = leaf_nodes(args)
        result = before.__func__(cls, *args, **kwargs)
        del nodes
        return result

    ours = classmethod(apply)
    Function.apply = ours  # type: ignore[method-assign, assignment]

    def put_back() -> None:
        if vars(Function)["apply"] is ours:
            Function.apply = before  # type: ignore[method-assign]

    patches.at_undo(put_back)


table.add(
    Row(
        state="the lock of a leaf's gradient node",
        treatment=Treatment.SHARED,
        meaning="Threads may apply autograd functions to one leaf at a time; without this row two "
        "of them could bring the process to a stand.",
        test="tests/engines/test_shared_leaves.py::"
        "test_workers_that_share_a_leaf_do_not_wait_for_each_other",
        install=_install,
    )
)

"""mpmath computes with a precision that each of its functions raises and puts back.

sympy computes its decimals so, too. Of two workers within such functions the last one to leave
would put back the precision of the other, and both would compute with what the other has set.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from ...runtime.worker import Worker
from .. import table
from ..imports import worker_unless_importing
from ..patches import Patches
from ..table import Row, Treatment
from ..worker_local import OF_SCRIPT

_KEY = f"{OF_SCRIPT}mpmath.mp"


class _Precision:
    """``mp._prec_rounding``, the precision in bits and the rounding; and the decimals."""

    def __init__(self, of_process: list[Any]) -> None:
        self.of_process = of_process

    def here(self) -> list[Any]:
        """Those of who calls: a worker begins with the notebook's."""
        worker = worker_unless_importing()
        if worker is None:
            return self.of_process
        own: list[Any] | None = worker.process_state.get(_KEY)
        if own is None:
            own = worker.process_state.setdefault(_KEY, list(self.of_process))
        return own

    def __iter__(self) -> Iterator[Any]:
        return iter(self.here()[:2])

    def __getitem__(self, index: int) -> Any:
        return self.here()[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.here()[index] = value


def _attribute(name: str, index: int) -> property:
    """One that mpmath keeps beside the list; a clone of the context has it for itself."""

    def get(context: Any) -> Any:
        own = vars(context)
        precision = own["_prec_rounding"]
        return precision[index] if type(precision) is _Precision else own[name]

    def set_(context: Any, value: Any) -> None:
        own = vars(context)
        if type(own["_prec_rounding"]) is _Precision:
            own["_prec_rounding"][index] = value
        else:
            own[name] = value

    return property(get, set_)


def _own_precision(module: ModuleType, patches: Patches) -> None:
    mp = module.mp
    kind, plain = type(mp), mp._prec_rounding
    precision = _Precision([*plain, mp._dps])
    fields = {"_prec": _attribute("_prec", 0), "_dps": _attribute("_dps", 2)}

    def use(value: Any) -> None:
        mp._prec_rounding = value
        for numbers in (mp.mpf, mp.mpc, mp.constant):
            numbers._ctxdata[2] = value

    def put_back() -> None:
        plain[:], dps = precision.of_process[:2], precision.of_process[2]
        use(plain)
        mp.__class__ = kind
        mp._prec, mp._dps = plain[0], dps

    use(precision)
    mp.__class__ = type(kind.__name__, (kind,), {**fields, "__module__": kind.__module__})
    patches.at_undo(put_back)


class _Constant(threading.local):
    """A function that computes a constant, with what each thread has computed last."""

    memo_prec = -1
    memo_val: Any = None

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute

    def __call__(self, prec: int, **kwargs: Any) -> Any:
        return self._compute(prec, **kwargs)


def _own_constants(module: ModuleType, patches: Patches) -> None:
    """mpmath notes a constant first, then its precision: a thread between would take it wrongly."""
    for function in tuple(vars(module).values()):
        for cell in (isinstance(function, FunctionType) and function.__closure__) or ():
            compute = cell.cell_contents
            if isinstance(compute, FunctionType) and hasattr(compute, "memo_prec"):
                cell.cell_contents = _Constant(compute)
                patches.at_undo(functools.partial(setattr, cell, "cell_contents", compute))


def _in_child(worker: Worker) -> None:
    """The worker's precision becomes the process's."""
    mpmath: Any = sys.modules.get("mpmath")
    if mpmath is not None and _KEY in worker.process_state:
        mpmath.mp.prec, _, mpmath.mp._dps = worker.process_state[_KEY]


table.add(
    Row(
        state="`mpmath.mp`: its precision",
        treatment=Treatment.PER_WORKER,
        meaning="A worker begins with the notebook's; what it sets, and what functions of mpmath "
        "and sympy set while they compute, is its own. A script's end forgets it.",
        test="tests/isolation/test_libraries.py::test_each_worker_has_a_precision_of_mpmath",
        on_import={
            "mpmath": _own_precision,
            "mpmath.libmp.libelefun": _own_constants,
            "mpmath.libmp.gammazeta": _own_constants,
        },
        in_child=_in_child,
        library="mpmath",
    )
)

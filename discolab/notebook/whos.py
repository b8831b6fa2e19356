"""``%disco_whos``: asks the workers for the variables that cells have made there.

The question is an ordinary call, so a worker that computes is waited for, two seconds at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Literal

from ..runtime.failures import Failure
from ..runtime.functions import worker_function
from ..runtime.session import Session
from ..runtime.worker import current_worker
from ..views.dref.ask import answers_of, axes_of, state_record
from ..views.facts.describe import describe
from ..views.pictures import Shown
from ..views.registers.facts import fact_of
from ..views.whos_view import Variables, whos_parts
from .cell import names_made

_PATIENCE = 2.0  # seconds
_PATIENCE_TO_READ = 60.0  # seconds, where all values are read
_MOST = 1000  # variables of a worker
_NO_VALUES = {
    ModuleType: "modules",
    FunctionType: "functions",
    BuiltinFunctionType: "functions",
    type: "classes",
}


@worker_function("listing the variables")
def list_variables(globs: list[str], stats: Literal["auto"] | bool) -> tuple[dict[str, Any], ...]:
    """Describe this worker's variables (a worker function).

    Returns
    -------
    tuple of three dicts
        By name: the record of `describe`; bytes; for what is no value, the kind.
    """
    records, nbytes, others = {}, {}, {}
    names = [
        name
        for name in names_made(current_worker())
        if not globs or any(fnmatchcase(name, glob) for glob in globs)
    ]
    for name in sorted(names)[:_MOST]:
        value = current_worker().namespace[name]
        kind = next((k for t, k in _NO_VALUES.items() if issubclass(type(value), t)), None)
        if kind is not None:
            others[name] = kind
            continue
        records[name] = describe(value, stats)
        nbytes[name] = fact_of(value)[1]
    return records, nbytes, others


def show_variables(session: Session, name: str, globs: Sequence[str], stats: bool) -> Shown:
    """The picture of all workers' variables."""
    ref = session.call_packed(list_variables, list(globs), stats or "auto")
    answers = answers_of(ref, _PATIENCE_TO_READ if stats else _PATIENCE)
    states = session.status() if len(answers) < session.num_workers else []
    workers, missing = {}, {}
    for rank in range(session.num_workers):
        answer = answers.get(rank)
        if isinstance(answer, Failure):
            missing[rank] = answer.headline
        elif answer is None:
            missing[rank] = state_record(states[rank])["message"] if states else "no answer"
        else:
            workers[rank] = Variables(*answer)
    return Shown(
        whos_parts(
            name,
            workers,
            num_workers=session.num_workers,
            num_groups=session.num_groups,
            axes=axes_of(session),
            missing=missing,
        )
    )

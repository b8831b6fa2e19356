"""scikit-learn's liblinear and libsvm draw from one state of the process while they train.

They seed it as a training begins, and train without the interpreter's lock: of two trainings at a
time each would draw the other's numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import table
from ..patches import Patches
from ..table import Row, Treatment
from ..thread_state import of_libraries, settings_in
from ..turns import Exclusive

_training = Exclusive("train")
of_libraries["sklearn._config"] = settings_in("_threadlocal")


def _in_turns(*names: str) -> table.Change:
    def over(train: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(train)
        def train_in_turn(*args: Any, **kwargs: Any) -> Any:
            with _training.taken("a model of scikit-learn"):
                return train(*args, **kwargs)

        return train_in_turn

    def change(module: ModuleType, patches: Patches) -> None:
        for name in names:
            patches.replace(module, name, over)

    return change


table.add(
    Row(
        state="random numbers of scikit-learn's liblinear and libsvm",
        treatment=Treatment.IN_TURNS,
        meaning="`LinearSVC`, `SVC`, `LogisticRegression(solver='liblinear')` and their like train "
        "on one thread at a time, since both libraries draw from one state of the process.",
        test="tests/isolation/test_libraries.py::test_each_worker_trains_a_linear_svm_for_itself",
        on_import={
            "sklearn.svm._liblinear": _in_turns("train_wrap"),
            "sklearn.svm._libsvm": _in_turns("fit", "cross_validation"),
            "sklearn.svm._libsvm_sparse": _in_turns("libsvm_sparse_train"),
        },
        library="scikit-learn",
    )
)

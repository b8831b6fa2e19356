"""A sharded program against its reference, in a notebook: see `discolab.compare`.

A part of a `Lab`. The sharded program is a worker variable or the code of a cell, the reference and
the inputs are variables of the notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..comparison import ProgramComparison, compare
from ..runtime.dref import DRef
from ..runtime.errors import ArgumentError
from ..runtime.worker import current_worker
from .cell import check_syntax, run_cell
from .running import Running, ending_on_stop
from .sessions import Sessions


class Comparing:
    """Compares programs on the sessions of one shell with a reference in it."""

    def __init__(self, sessions: Sessions, running: Running) -> None:
        self._sessions = sessions
        self._shell = sessions.shell
        self._running = running

    def disco_compare(
        self,
        reference: str,
        inputs: Sequence[str] = (),
        cell: str | None = None,
        *,
        module: str | None = None,
        layouts: Mapping[str, Any] | None = None,
        session: str | None = None,
        **options: Any,
    ) -> ProgramComparison:
        """Compare what the workers compute with a reference in the notebook.

        Parameters
        ----------
        reference
            The name of a module or function in the notebook.
        inputs
            Names of notebook variables, with which it is called; a dict alone has named arguments.
        cell
            Code for the workers that ends with the sharded program's result; the inputs are bound
            there to their names meanwhile. None: the workers' variable of the reference's name is
            called, or the one that `module` names.
        module
            The worker variable that holds the sharded module, into which is looked; None: the one
            of the reference's name.
        layouts, options
            As for `discolab.compare`.

        Returns
        -------
        ProgramComparison

        Raises
        ------
        ArgumentError
            If there is no such variable; else as `discolab.compare`.
        """
        sess = self._sessions.free(session)
        ours = self.variable(reference)
        given = tuple(self.variable(name) for name in inputs)
        with_code = cell is not None and bool(cell.strip())
        values: Any = given
        if len(given) == 1 and isinstance(given[0], Mapping) and not with_code:
            values = given[0]  # named arguments, as in `compare`
        name = module or reference
        watched = sess.call_packed(_module_named, name, module is not None)
        with ending_on_stop(sess), self._running.watching(sess):
            there = sess.fetch(sess.call_packed(_has, watched, name), None, options.get("timeout"))
            if not with_code and not all(there):
                who = "the workers have" if not any(there) else "some workers have"
                raise ArgumentError(
                    f"{who} no variable named {name}: name the one that holds the sharded model "
                    "with --module NAME, or write the code that runs it below %%disco_compare"
                )
            sharded: Any = sess[name]
            if cell is not None and with_code:
                filename = self._running.next_file()
                source = "\n" + self._shell.transform_cell(cell)
                check_syntax(sess, source, filename)
                sharded = _program(source, filename, tuple(inputs))
            return compare(
                ours,
                sharded,
                values,
                session=sess,
                module=watched if not isinstance(sharded, DRef) else None,
                layouts=layouts,
                **options,
            )

    def variable(self, name: str) -> Any:
        """The value of a notebook variable.

        Raises
        ------
        ArgumentError
            If there is none.
        """
        if name not in self._shell.user_ns:
            raise ArgumentError(f"the notebook has no variable named {name}")
        return self._shell.user_ns[name]


def _program(source: str, filename: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """A worker function that runs a cell with its arguments bound to names."""

    def the_cell(*values: Any) -> Any:
        known = current_worker().namespace
        before = {name: known[name] for name in names if name in known}
        known.update(zip(names, values, strict=True))
        try:
            return run_cell(source, filename, None)
        finally:
            for name in names:
                known.pop(name, None)
            known.update(before)

    the_cell.__name__ = "the cell"
    return the_cell


def _module_named(name: str, wanted: bool) -> torch.nn.Module | None:
    """The module that a worker variable holds, None if there is none (a worker function)."""
    found = current_worker().namespace.get(name)
    if isinstance(found, torch.nn.Module):
        return found
    if wanted:
        raise ArgumentError(f"--module: no worker variable {name} that holds a module")
    return None


def _has(_: Any, name: str) -> bool:
    """Whether there is a worker variable of a name (a worker function)."""
    return name in current_worker().namespace

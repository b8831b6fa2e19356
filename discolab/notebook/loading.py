"""Checkpoints in a notebook: loaded into the workers' shards, under one name here and there.

A part of a `Lab`; used from the shell's thread, or from any thread that runs a cell.
"""

from __future__ import annotations

import keyword
import os
from typing import Any, Literal

import torch

from ..debugger.frames import WORKER_NAMES
from ..loader.weights import Weights
from ..runtime.errors import ArgumentError
from ..runtime.functions import worker_function
from ..runtime.session import Session
from ..runtime.worker import current_worker
from .cell import CellInterrupted
from .sessions import Sessions


class Loading:
    """Loads checkpoints into the sessions of one shell."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._shell = sessions.shell

    def disco_load(
        self,
        path: str,
        *,
        plan: Any = None,
        params: str | None = None,
        dtype: Any = None,
        name: str = "weights",
        dry_run: bool = False,
        verify: bool = False,
        check_nan: bool = False,
        read_by: Literal["each", "first"] = "each",
        timeout: float | None = None,
        session: str | None = None,
    ) -> Any:
        """Load a checkpoint into shards, and bind them in the notebook and on the workers.

        In the notebook `name` is a dict of DRefs, which draws itself as a table; in cells of
        ``%%disco`` it is the worker's own dict of tensors.

        Parameters
        ----------
        path
            A file, a folder or an index file.
        plan
            Layouts, see `loader.Plan.of`; a string is a JSON file, or else a variable here.
        params
            Globs of the parameters to load, with commas between; None: all.
        dtype
            What floating point parameters are cast to: ``bf16``.
        name
            The variable.
        dry_run
            Only tell what would be done; nothing is read but the index, nothing is bound.
        verify
            Compare the files with the checksums of the index, where it has them.
        check_nan
            Refuse parameters that have a NaN or an infinity.
        read_by
            Who has the files: each worker, or the first, which then sends the others theirs.
        timeout
            Seconds in which nothing lands after which to give up.
        session
            Its name; None: the one used last.

        Returns
        -------
        Weights, or Shown if it is a dry run

        Raises
        ------
        CheckpointError
            If the checkpoint is not whole; nothing is bound then.
        ArgumentError
            If something that was typed does not fit.
        """
        from ..loader.formats import open_checkpoint
        from ..loader.loading import load, resolve
        from ..loader.plan import Plan
        from ..loader.presharded import logical
        from ..loader.progress import Preparation
        from ..loader.showing import Shown, as_dtype, chosen_names

        sess = self._sessions.free(session)
        self._check_name(name)
        wanted = as_dtype(dtype)
        typed = self.plan_of(plan)
        given = None if typed is None else Plan.of(typed)
        try:
            with Preparation("loading", True):
                catalog = logical(open_checkpoint(os.path.expanduser(path)), given)
            names = None if params is None else chosen_names(catalog, params)
            if dry_run:
                return Shown.of(resolve(sess, catalog, given, names), wanted)
            loaded = load(
                sess,
                catalog,
                given,
                names=names,
                dtype=wanted,
                verify=verify,
                check_nan=check_nan,
                read_by=read_by,
                timeout=timeout,
            )
        except KeyboardInterrupt:
            sess.interrupt()
            raise CellInterrupted([]) from None
        bind_on_workers(sess, name, loaded)
        self._shell.user_ns[name] = loaded
        return loaded

    def _check_name(self, name: str) -> None:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ArgumentError(f"--as is a Python name, got {name!r}")
        taken = "of %%disco cells" if name in WORKER_NAMES else "of a session"
        if name in WORKER_NAMES or isinstance(self._shell.user_ns.get(name), Session):
            raise ArgumentError(f"--as {name}: that is a name {taken}; give another one")

    def plan_of(self, plan: Any) -> Any:
        """A plan as it is, or what the word for it means."""
        if not isinstance(plan, str) or os.path.exists(os.path.expanduser(plan)):
            return os.path.expanduser(plan) if isinstance(plan, str) else plan
        if plan in self._shell.user_ns:
            return self._shell.user_ns[plan]
        raise ArgumentError(
            f"--plan {plan}: there is no such file, and the notebook has no variable of that name"
        )


def bind_on_workers(session: Session, name: str, loaded: Weights) -> None:
    """Give each worker a variable with its own tensors, without those of other stages."""
    session.call_without_result(_bind, name, dict(loaded))


@worker_function("naming what was loaded")
def _bind(name: str, tensors: dict[str, torch.Tensor | None]) -> None:
    here = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    current_worker().namespace[name] = here

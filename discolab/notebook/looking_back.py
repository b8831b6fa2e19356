"""What is over: frames of a cell that has failed, values that were recorded line by line.

A part of a `Lab`. Each `disco_*` method is the Python form of the magic of the same name; what they
do is done by `debugger.post_mortem` and `Debugger`.
"""

from __future__ import annotations

from typing import Any

from ..debugger import post_mortem
from ..debugger.debugger import debugger_of
from ..debugger.evaluated import Evaluated
from ..debugger.looking import Ranks
from ..debugger.stops import Stop
from ..runtime.ranks import parse_ranks
from .programs import Programs


class LookingBack(Programs):
    """Sessions whose programs can be looked at afterwards."""

    def disco_pm(
        self,
        ranks: Ranks = None,
        *,
        frame: int = 0,
        expression: str | None = None,
        forget: bool = False,
        timeout: float | None = None,
        session: str | None = None,
    ) -> Stop | Evaluated | None:
        """Where each worker was when the last cell failed there, with its variables.

        The frames are kept until the next cell begins, but for those of a cell that ran out of
        memory: of these it is only kept what the variables looked like.

        Parameters
        ----------
        ranks
            The workers; None: all on which it failed.
        frame
            0: where it was raised; 1: the function that called that one, and so on.
        expression
            Show its value in that frame instead.
        forget
            Let the frames go, and what they hold.

        Raises
        ------
        DebuggerError
            If nothing has failed, or what was kept has been let go.
        """
        sess = self.free_session(session)
        if forget:
            post_mortem.forget_all(sess)
            return None
        given = None if ranks is None else parse_ranks(ranks, sess.num_workers, sess.current_mesh)
        with self._watching(sess):
            if expression is None:
                return post_mortem.post_mortem(sess, given, frame=frame, timeout=timeout)
            return post_mortem.evaluate_at_raise(
                sess, expression, given, frame=frame, timeout=timeout
            )

    def disco_history(
        self,
        name: str | None = None,
        ranks: Ranks = None,
        *,
        last: int = 50,
        session: str | None = None,
    ) -> Any:
        """How a variable was over time on each worker, from what ``%%disco --trace`` recorded.

        Parameters
        ----------
        name
            The variable; None: the names of all that were recorded.
        ranks
            The workers; None: all.
        last
            How many of the last lines at which it changed.

        Returns
        -------
        History or list of str
            Shows itself.

        Raises
        ------
        DebuggerError
            If nothing was recorded.
        ArgumentError
            If that variable was not: says which were.
        """
        debugger = debugger_of(self.session(session))
        return debugger.recorded() if name is None else debugger.history(name, ranks, last)

    def disco_back(self, n: int = 1, *, session: str | None = None) -> Stop:
        """Go `n` lines back in what was recorded: how all was there, with the recorded values.

        Raises
        ------
        DebuggerError
            If nothing was recorded.
        """
        return debugger_of(self.session(session)).back(n)

    def disco_forward(self, n: int = 1, *, session: str | None = None) -> Stop:
        """Go `n` lines forward again in what was recorded, see `disco_back`."""
        return debugger_of(self.session(session)).forward(n)

    disco_forth = disco_forward

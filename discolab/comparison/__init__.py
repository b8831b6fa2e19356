"""Compare a sharded program with its reference: the first place where they differ, and why.

    discolab.compare(model, sess["model"], tokens)

`run` has the course of it, from the top down: `arguments` checks what is given; `sides` run the
programs and `recorder` records them; `pairs` and `presence` say which values belong together and
what a worker lacks; `matcher` finds how each value lies over the workers and has it measured there
(`measure`), what rounding alone does (`rounding`) and what it does not (`systematic`); `diagnose`
says what comes first and, with `causes`, why, where need be by a look at the `operations` in a
module (`looking`); `results` show it.
"""

from .recorder import note
from .results import Finding, Point, ProgramComparison
from .run import compare

__all__ = ["ProgramComparison", "Finding", "Point", "compare", "note"]

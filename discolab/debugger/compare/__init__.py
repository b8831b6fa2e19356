"""Compare a sharded program with its reference: the first place where they differ, and why.

    discolab.compare(model, sess["model"], tokens)

`comparing` has the course of it; `tape` records what a run does, on either side; `laying` and
`judging` find how each value lies over the workers and have it measured there; `blame` and
`causes` say what comes first and why; `results` and `drawing` show it.
"""

from . import drawing as _drawing  # noqa: F401 - gives a Comparison its picture
from .comparing import compare
from .results import Comparison, Finding, Point
from .tape import note

__all__ = ["Comparison", "Finding", "Point", "compare", "note"]

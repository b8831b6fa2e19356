"""Trace: what every worker did and when; which worker waited for which; what the devices are doing.

    with discolab.trace.tracing(sess) as trace:     start, stop, collect: the same in steps
        train(sess)
    trace                                           text and HTML
    trace.to_chrome("train.json")                   for Perfetto
    trace.rounds(), trace.summary()                 collectives over their members; the sums

On workers, `span` and `mark` name parts of a program. A `Follower` asks for what is new as it
comes, for live displays; `fold` makes any number of events fit a screen; `sample` looks at a
worker's device. While nothing is recorded none of this costs anything.
"""

from .control import clear, collect, is_on, start, stop, tracing
from .events import Event
from .folding import Span, fold
from .follower import Follower
from .metrics import sample, utilisation
from .profiler import merge_profiler, profile
from .recorder import mark, span
from .result import Trace
from .rounds import Round
from .summary import Summary

__all__ = [
    "start",
    "stop",
    "is_on",
    "clear",
    "collect",
    "tracing",
    "profile",
    "merge_profiler",
    "span",
    "mark",
    "Trace",
    "Event",
    "Round",
    "Summary",
    "Follower",
    "Span",
    "fold",
    "sample",
    "utilisation",
]

"""Untold: the failures of one worker that nobody was told of yet. Pure state, no thread.

Orphans of commands without a result are kept apart: a crowd of results that nobody reads must not
push them out. Of each kind the first ones are kept, for those are the causes; one more record
counts the others.
"""

from __future__ import annotations

import itertools

from .failures import Failure

_MOST = 16


class Untold:
    """Failures in the order in which they came, until they are `reported`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._results: list[Failure] = []
        self._orphans: list[Failure] = []
        self._counts = {False: 0, True: 0}
        self._numbers = itertools.count(-1, -1)  # the workers count theirs from 1

    def add(self, failure: Failure) -> None:
        """Keep a failure, or count it."""
        self._forget()
        kept = self._orphans if failure.orphan else self._results
        if len(kept) < _MOST:
            kept.append(failure)
            self._counts[failure.orphan] = 0
            return
        self._counts[failure.orphan] += 1
        count = self._counts[failure.orphan]
        kept[_MOST:] = [
            Failure(
                rank=self._rank,
                command="later commands",
                call_site="",
                type_name="DiscoError",
                message=f"+{count} more failure{'s' if count > 1 else ''} not kept",
                orphan=failure.orphan,
                number=next(self._numbers),
            )
        ]

    def kept(self) -> list[Failure]:
        """What is kept, whether it was reported or not."""
        return [*self._results, *self._orphans]

    def all(self) -> list[Failure]:
        """What a sync tells. They stay here until `reported`: the wait may have been given up."""
        self._forget()
        return [*self._results, *self._orphans]

    def orphan(self) -> Failure | None:
        """The first one that no register holds, or holds any more; a fetch tells it."""
        orphans = [f for f in self.kept() if f.orphan and not f.reported]
        return min(orphans, key=lambda f: abs(f.number), default=None)

    def _forget(self) -> None:
        self._results = [f for f in self._results if not f.reported]
        self._orphans = [f for f in self._orphans if not f.reported]

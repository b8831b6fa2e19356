"""Processes that a zygote has forked for one session on this machine: workers, and nodes to try."""

from __future__ import annotations

import os
from typing import Any

from ...runtime.errors import DiscoError
from ..remote.black_box import BlackBox, new_box
from ..remote.process_facts import how_it_ended, process_state, watch_process
from ..remote.zygote import Zygote


class Brood:
    """Processes by a number of the owner's: a worker's rank. One thread at a time uses it.

    Attributes
    ----------
    pids
        Their process ids.
    codes
        How they have ended, as far as it is known: exit code, or minus a signal's number.
    """

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self._born_of: dict[int, Zygote] = {}
        self._boxes: dict[int, BlackBox] = {}

    def start(self, zygote: Zygote, number: int, settings: dict[str, Any], text: int = -1) -> int:
        """Fork one; `text` is where its descriptors 1 and 2 lead (-1: where the zygote's do).

        Returns
        -------
        int
            A descriptor that is readable once it has ended, the caller's; -1 if there is none.
        """
        fds = [] if text < 0 else [text]
        if "node" not in settings:
            self._boxes[number], box = new_box()
            fds.insert(0, box)
        try:
            pid = self.pids[number] = zygote.fork({**settings, "own_text": text < 0}, fds)
        finally:
            if "node" not in settings:
                os.close(box)
        self._born_of[number] = zygote
        return watch_process(pid)

    def look(self) -> dict[int, int]:
        """Those that are found to have ended since the last look, with how."""
        found = {}
        for number in self.pids:
            if number not in self.codes:
                zygote = self._born_of[number]
                try:
                    code = zygote.status(self.pids[number]) if zygote.usable else -9
                except DiscoError:  # it has just ended, and what it has forked with it
                    code = -9
                if code is not None:
                    self.codes[number] = found[number] = code
        return found

    def last_words(self, number: int) -> str:
        """What a worker has printed and not sent."""
        return self._boxes[number].read() if number in self._boxes else ""

    def forget(self) -> None:
        """Let go of what they have printed: nobody will ask any more."""
        self._boxes.clear()

    def states(self) -> dict[int, str]:
        """A letter for each that lives, as Linux has it: R runs, T is stopped."""
        return {n: process_state(pid) for n, pid in self.pids.items() if n not in self.codes}

    def in_words(self, number: int) -> str:
        """What became of one: ``was killed by SIGKILL``."""
        return how_it_ended(self.codes.get(number))

    def end(self) -> None:
        """End all of them, with what they have started."""
        for number, pid in self.pids.items():
            if number not in self.codes and self._born_of[number].usable:
                self._born_of[number].kill(pid)

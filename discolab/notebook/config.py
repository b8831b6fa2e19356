"""What a user may set for all sessions of a notebook: ``%config Disco.engine = 'processes'``.

Also in IPython's configuration files, as ``c.Disco.engine``; for one session by the options of
``%disco_session``.
"""

from __future__ import annotations

from typing import Any

from traitlets import Enum, Float, Int, Unicode
from traitlets.config import Configurable

from ..engines import ENGINES
from ..engines.remote_session import HEARTBEAT
from ..views.facts.tensors import SMALL_BYTES


class Disco(Configurable):
    """Defaults of new sessions, and how much their output shows; one a shell, held by its `Lab`."""

    engine = Enum(
        list(ENGINES), default_value="threads", help="Where the workers of a new session live."
    ).tag(config=True)
    timeout = Float(
        None,
        allow_none=True,
        help="Seconds after which a wait for a new session's workers is given up; None: never.",
    ).tag(config=True)
    heartbeat = Float(
        HEARTBEAT,
        help="Seconds of silence after which a worker of a new session counts as frozen.",
    ).tag(config=True)
    statistics_limit = Int(
        SMALL_BYTES,
        min=0,
        help="Bytes of a tensor up to which a picture reads all of its values, in a new session.",
    ).tag(config=True)
    output_lines = Int(
        20_000, min=0, help="Lines of text that a %%disco cell shows at most; 0: all of them."
    ).tag(config=True)

    snapshots = Unicode(
        "disco_snapshots", help="The folder in which %disco_snapshot NAME puts its snapshots."
    ).tag(config=True)

    def install(self, shell: Any) -> None:
        """Have ``%config`` know it."""
        shell.configurables.append(self)

    def uninstall(self, shell: Any) -> None:
        """Undo `install`."""
        shell.configurables.remove(self)

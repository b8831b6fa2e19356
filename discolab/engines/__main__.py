"""``python -m discolab.engines N``: the main module of the fork server.

A `ProcessSession` starts it, nobody by hand; N is the descriptor of the socket to it. What it does
is in forkserver.py, which is imported under its own name, as workers import it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].isdigit():
        sys.exit(
            "discolab.engines is started by a session: %disco_session 4 --engine processes, "
            "or discolab.make_session(4, engine='processes'). On another machine use: discolab node"
        )
    from discolab.engines import forkserver

    forkserver.main(int(sys.argv[1]), sys.argv[2:])

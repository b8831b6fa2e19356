"""``python -m discolab.worker N``: where a session's worker processes come from.

Started by a `ProcessSession`, never by hand; N is the descriptor of the socket to it. See
engines/forkserver.py.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].isdigit():
        sys.exit(
            "discolab.worker is started by a session: %disco_session 4 --engine processes, or "
            "discolab.make_session(4, engine='processes'). On another machine use: discolab node"
        )
    from discolab.engines import forkserver

    forkserver.main(int(sys.argv[1]), sys.argv[2:])

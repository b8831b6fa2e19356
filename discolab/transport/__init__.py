"""Connections between processes, for sessions and for RPC: bytes, whole and in order.

`frame` is what travels, `connection` how one process reaches another, `local` and `tcp` the two
ways to do so, `handshake` how a process that connects proves that it may, and `loop` how one thread
waits for many. Nothing here knows what is said on a connection, and nothing here unpickles.
"""

from __future__ import annotations

__all__: list[str] = []

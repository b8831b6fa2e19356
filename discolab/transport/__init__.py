"""Connections between processes, for sessions and for RPC: bytes, whole and in order.

`frame` is what travels, `local` and `tcp` are the two ways that it goes, `handshake` is how who
connects proves that he may, `loop` is how one thread waits for many connections. Nothing here knows
what is said on a connection, and nothing here unpickles.
"""

from __future__ import annotations

__all__: list[str] = []

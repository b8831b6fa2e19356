"""What other packages use of `serialize`: teach a class to travel between processes.

from discolab.runtime.protocol import register_type
"""

from __future__ import annotations

from .serialize import (
    LazyPickle,
    Message,
    ProtocolError,
    decode,
    encode,
    open_all,
    register_type,
)

__all__ = [
    "LazyPickle",
    "Message",
    "ProtocolError",
    "decode",
    "encode",
    "open_all",
    "register_type",
]

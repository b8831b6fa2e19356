"""The public name under which a class is taught to travel between processes; see `serialize`."""

from __future__ import annotations

from .serialize import ProtocolError, register_type

__all__ = ["ProtocolError", "register_type"]

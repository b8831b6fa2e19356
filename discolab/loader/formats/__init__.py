"""The index of a checkpoint of any format, checked as a whole."""

from .opening import open_checkpoint, verify

__all__ = ["open_checkpoint", "verify"]

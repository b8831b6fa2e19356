"""Moved to interrupts.py."""

from .interrupts import shield as held_back

__all__ = ["held_back"]

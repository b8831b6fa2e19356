"""Moved to interrupts.py."""

from .interrupts import bind_waiter as bind_waiter
from .interrupts import waiter_here as waiter_here

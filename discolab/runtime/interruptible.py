"""Moved to interrupts.py."""

from .interrupts import FIRST_LOOK as FIRST_LOOK
from .interrupts import HOLD_BACK as HOLD_BACK
from .interrupts import TICK as TICK
from .interrupts import Interruptible as Interruptible
from .interrupts import raise_in_thread as raise_in_thread
from .interrupts import take_back_exception as take_back_exception
from .interrupts import waiting_threads as waiting_threads

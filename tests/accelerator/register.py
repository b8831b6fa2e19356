"""Registers the device where it is imported: in worker processes, before they are forked."""

from . import sim

sim.load()

"""Moved to services.py."""

from .services import SERVICE as SERVICE
from .services import Probes as Probes
from .services import answer as answer
from .services import look_here as look_here
from .services import name_of as name_of
from .services import probe as probe

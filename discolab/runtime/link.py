"""Moved to services.py."""

from .services import LISTENERS as LISTENERS
from .services import SERVICES as SERVICES
from .services import Dispatcher as Dispatcher
from .services import Dispatcher as Ears
from .services import Service as Service
from .services import ServiceChannel as Link
from .services import WorkerState as WorkerState

__all__ = ["LISTENERS", "SERVICES", "Dispatcher", "Ears", "Link", "Service", "WorkerState"]

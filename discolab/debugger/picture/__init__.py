"""How the debugger draws what it knows: pure functions from records to parts of `views`."""

from ...views.pictures import picture_of
from ..stops import Evaluated, Stop
from .breaks import breaks_parts
from .history import history_parts
from .stop import stop_parts
from .values import VariableTable, evaluated_parts, evaluated_table, variable_tables

picture_of.register(Stop, stop_parts)
picture_of.register(Evaluated, lambda found: evaluated_parts(found.expression, found.values))

__all__ = [
    "VariableTable",
    "breaks_parts",
    "evaluated_parts",
    "evaluated_table",
    "history_parts",
    "stop_parts",
    "variable_tables",
]

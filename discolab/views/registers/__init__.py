"""The table of live registers: their facts, made beside the workers, and the rows."""

__all__: list[str] = []

"""Two values compared on each worker."""

__all__: list[str] = []

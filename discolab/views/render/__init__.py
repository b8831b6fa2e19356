"""Lowers parts: to HTML, to text, to colours in a terminal."""

__all__: list[str] = []

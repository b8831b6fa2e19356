"""Widgets: live pictures of a session, each an object with a Python API; see base.py.

Nothing is imported here: a notebook that shows none need not load ipywidgets.
"""

__all__: list[str] = []

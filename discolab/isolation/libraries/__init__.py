"""State of single libraries: a file for each, whose rows act once the library is imported."""

from __future__ import annotations

# each enters its rows
from . import accelerate, hydra, lightning, matplotlib, transformers  # noqa: F401

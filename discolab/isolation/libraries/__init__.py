"""State of single libraries: a file for each, whose rows act once the library is imported."""

from __future__ import annotations

# each enters its rows
from . import (  # noqa: F401
    accelerate,
    datasets,
    hydra,
    joblib,
    lightning,
    matplotlib,
    mpmath,
    pandas,
    timm,
    torchvision,
    transformers,
    yaml,
)

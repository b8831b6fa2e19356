"""State of single libraries: a file for each, whose rows act once the library is imported."""

from __future__ import annotations

# each enters its rows
from . import (  # noqa: F401
    accelerate,
    dask,
    datasets,
    diffusers,
    gpytorch,
    hydra,
    ignite,
    joblib,
    kornia,
    lightgbm,
    lightning,
    matplotlib,
    mlflow,
    monai,
    mpmath,
    pandas,
    polars,
    pyro,
    scipy,
    sentencepiece,
    sklearn,
    statsmodels,
    sympy,
    tensordict,
    timm,
    torch_geometric,
    torchvision,
    transformers,
    wandb,
    xarray,
    yaml,
)

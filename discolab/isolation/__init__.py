"""What a process has once, where workers are threads of it: one row each (`table.rows`).

Each file here carries out the rows of one piece of state or of one library; layers above add rows
of their own. `engines.hooks` installs the table with the first worker of the process and puts all
back after the last one. docs/isolation.md is the table for readers.
"""

from __future__ import annotations

# each enters its rows
from . import (  # noqa: F401
    anomaly,
    autocast,
    compiler,
    cpp_stacks,
    custom_ops,
    decimal_default,
    default_dtype,
    fake_tensors,
    first_uses,
    forking,
    forward_ad,
    fresh_random,
    host_random,
    imports,
    inference,
    libraries,
    logs_and_warnings,
    main_module,
    own_process_modules,
    profiler,
    programs,
    python_process,
    registries,
    replaced_functions,
    shared_leaves,
    streams,
    switches,
    syntax_trees,
    threading_time,
    torch_random,
    torch_settings,
    tracing,
    waits,
    worker_modules,
)
from .table import rows

__all__ = ["rows"]

"""Which code is the user's: what is stepped through, and what is shown of a stack.

The user's are cells, scripts, and modules that are not installed. Not the user's are discolab, the
standard library, packages in ``site-packages``, and code that was generated and has no file.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from types import CodeType

import torch

from .sources import installed_path, is_cell, is_installed, is_own_file


def is_user(code: CodeType) -> bool:
    """Whether this is code of the user's."""
    return is_user_file(code.co_filename)


@functools.lru_cache(maxsize=4096)
def is_user_file(filename: str) -> bool:
    """Whether the code of a source file, or of a cell by its file name, is the user's."""
    if filename.startswith("<"):  # generated, frozen or given to exec; cells of plain IPython too
        return is_cell(filename)
    return not is_library_file(filename)


@functools.lru_cache(maxsize=4096)
def is_library_file(filename: str) -> bool:
    """Whether a source file is discolab's, Python's own, or of an installed package."""
    return (
        is_own_file(filename)
        or is_installed(filename)
        or filename.startswith(("<frozen ", *_library_folders()))
    )


def library_module(filename: str) -> str:
    """``torch.nn.modules.linear`` for the source file of a library."""
    if filename.startswith("<frozen "):
        return filename[len("<frozen ") : -1]
    path, _ = os.path.splitext(installed_path(filename))
    for folder in sorted(_library_folders(), key=len, reverse=True):
        path = path.removeprefix(folder)
    return path.replace(os.sep, ".").removesuffix(".__init__")


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Folders of Python itself, and of torch where that is built from its sources."""
    paths = sysconfig.get_paths()
    found = {paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)}
    found.add(os.path.dirname(torch.__file__))
    return tuple(os.path.join(path, "") for path in found | set(map(os.path.realpath, found)))

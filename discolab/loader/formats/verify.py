"""Checksums of whole files, where the index has them: on request, since it reads every byte."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ..catalog import Catalog
from ..errors import CheckpointError
from .checks import said
from .paths import file_size, open_file

BLOCK: Final = 8 * 2**20


def verify(
    catalog: Catalog,
    files: Iterable[int] | None = None,
    meter: Callable[[int], None] | None = None,
) -> None:
    """Compare the files with their checksums, at some 0.6 GB/s.

    Parameters
    ----------
    files
        Indices in `catalog.files`; None: all. So several workers can share the work.
    meter
        Is told, now and then, how many more bytes were read.

    Raises
    ------
    CheckpointError
        At the first file whose size or MD5 is another one than the index says.
    """
    for number in range(len(catalog.files)) if files is None else files:
        about = catalog.files[number]
        path = Path(about.path)
        size = file_size(path)
        if size != about.size:
            raise CheckpointError(path, f"has {size} bytes; expected {about.size}")
        if about.md5 is None:
            continue
        found = _md5(path, meter)
        if found != about.md5:
            raise CheckpointError(
                path, f"its md5 is {found}; expected {about.md5}: its content has changed"
            )


def _md5(path: Path, meter: Callable[[int], None] | None) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open_file(path) as file:
        while block := _read(file, path):
            digest.update(block)
            if meter is not None:
                meter(len(block))
    return digest.hexdigest()


def _read(file: io.FileIO, path: Path) -> bytes:
    try:
        return file.read(BLOCK) or b""
    except OSError as error:
        raise CheckpointError(path, f"can't be read: {said(error)}") from None

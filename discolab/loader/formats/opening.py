"""Which format is it? Told by the names in a folder, and by the first bytes of a file.

Checksums of whole files are compared on request, where the index has them, since that reads every
byte (`verify`).
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from ...runtime.errors import ArgumentError
from ..catalog import Catalog
from ..errors import CheckpointError
from . import dcp, safetensors, tensor_cache, torch_save
from .checks import (
    file_size,
    inside,
    open_file,
    parse_json,
    read_at,
    read_index,
    resolved,
    said,
    short,
)

SAVING: Final = ".discolab-saving"  # there while a save has not put its checkpoint in place
LOOKED_FOR = (
    "tensor-cache.json or ndarray-cache.json (TVM, MLC), *.safetensors.index.json or one "
    "*.safetensors, .metadata (torch DCP), *.bin.index.json or one *.pt, *.pth or *.bin "
    "(torch.save)"
)

# The name that MLC, Hugging Face or torch gives it, and how other names of the same kind end.
_CANDIDATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((name, ()) for name in tensor_cache.INDEX_NAMES),
    (f"model{safetensors.INDEX_SUFFIX}", (safetensors.INDEX_SUFFIX,)),
    (dcp.METADATA, ()),
    (f"model{safetensors.SUFFIX}", (safetensors.SUFFIX,)),
    (f"pytorch_model{torch_save.INDEX_SUFFIX}", (torch_save.INDEX_SUFFIX,)),
    ("pytorch_model.bin", torch_save.SUFFIXES),
)


def open_checkpoint(path: str | os.PathLike[str]) -> Catalog:
    """Read the index of a checkpoint, and nothing of its tensors.

    Parameters
    ----------
    path
        A folder, an index file in it, or the one file that is the checkpoint. The format is found
        out: tensor-cache, safetensors, torch DCP or torch.save. No code of a pickle is ever run.

    Returns
    -------
    Catalog
        All of it was checked against the files: sizes, offsets, shapes, names.

    Raises
    ------
    CheckpointError
        If it is no checkpoint, or not a whole one; it names file and parameter.
    ArgumentError
        If `path` is something else than a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"give the path of a checkpoint as a string or a Path, got {type(path).__name__}"
        )
    given = Path(path)
    try:
        is_folder = given.is_dir()
        names = sorted(os.listdir(given)) if is_folder else []
    except (OSError, ValueError) as error:
        raise CheckpointError(given, f"can't be looked at: {said(error)}") from None
    if not is_folder:
        return _open_file(given)
    found = _main_file(given, names)
    # a link out of a folder is as suspicious here as in an index
    inside(resolved(given), found, given)
    return _named(_open_file(given / found), given)


def _main_file(folder: Path, names: list[str]) -> str:
    """The name of the file to open in a folder: an index before what it is the index of."""
    for usual, suffixes in _CANDIDATES:
        if usual in names:
            return usual
        found = [name for name in names if suffixes and name.endswith(suffixes)]
        if found and SAVING in names:
            break
        if found:
            return _only(found, folder)
    if SAVING in names:
        raise CheckpointError(
            folder,
            f"holds no checkpoint: a save into it was not finished ({SAVING} is there); save "
            "again, or wait if it is still under way",
        )
    held = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    raise CheckpointError(
        folder, f"holds no checkpoint, but {held or 'nothing'}; looked for {LOOKED_FOR}"
    )


def _only(found: list[str], folder: Path) -> str:
    if len(found) > 1:
        some = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise CheckpointError(
            folder, f"has {len(found)} that could be meant, {some}; give the path of one of them"
        )
    return found[0]


def _open_file(path: Path) -> Catalog:
    if path.name == dcp.METADATA:
        return dcp.read(path)
    if path.name.endswith(".json"):
        root = parse_json(read_index(path), path)
        if "records" in root:
            return tensor_cache.read(path)
        if "weight_map" in root:
            if torch_save.indexed_by(root):
                return torch_save.read(path)
            return safetensors.read(path)
        some = ", ".join(list(root)[:5])
        raise CheckpointError(
            path,
            f"is JSON with {short(some)}; an index has 'records' (tensor-cache) or "
            "'weight_map' (safetensors)",
        )
    if path.name.endswith(safetensors.SUFFIX):
        return safetensors.read(path)
    with open_file(path) as file:
        begin = read_at(file, 0, min(16, os.fstat(file.fileno()).st_size), path)
    if begin[8:9] == b"{" and not path.name.endswith(torch_save.SUFFIXES):
        return safetensors.read(path)
    if begin.startswith(b"PK") or path.name.endswith(torch_save.SUFFIXES):
        return torch_save.read(path)
    raise CheckpointError(
        path, f"is no checkpoint, it begins with {begin[:8]!r}; looked for {LOOKED_FOR}"
    )


def _named(catalog: Catalog, given: Path) -> Catalog:
    """The same, under the path that was given."""
    return Catalog(str(given), catalog.format, catalog.files, catalog.entries, catalog.metadata)


# -- checksums -------------------------------------------------------------------------------------


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

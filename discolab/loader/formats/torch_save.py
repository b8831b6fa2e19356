"""Files of torch.save, read in place; what isn't a tensor in them is left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..catalog import Catalog
from ..errors import CheckpointError
from .archives import FIX, Archive, locate, read_archive
from .builder import Builder
from .checks import MAX_DEPTH, member, name_ok, parse_json, short
from .paths import inside, open_file, read_at, read_index, resolved
from .pickles import Opaque, TensorRef

SUFFIXES: Final = (".pt", ".pth", ".bin")
INDEX_SUFFIX: Final = ".bin.index.json"

# Together: a pickle may hold one dict many times over.
MAX_NAMES: Final = 64 * 2**20
MAX_LEAVES: Final = 2**20

_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def read(path: str | os.PathLike[str]) -> Catalog:
    """The catalog of a file of torch.save, or of the index of several (``*.bin.index.json``).

    Dicts and lists in it are flattened, with a dot between the keys. Other objects are left out,
    and counted in the metadata as ``"non_tensors"``. Their code is not run.

    Raises
    ------
    CheckpointError
        If it is no such file, one of before torch 1.6, or has tensors that are not plain ones.
    """
    given = Path(path)
    if given.name.endswith(".json"):
        return _read_index(given)
    file_path = resolved(given)
    made = Builder(given, "torch", file_path)
    return made.done({"non_tensors": _add_file(made, file_path)})


def indexed_by(root: dict[str, Any]) -> bool:
    """Whether an index with a ``weight_map`` is one of files of torch.save."""
    where = root.get("weight_map")
    files = where.values() if isinstance(where, dict) else ()
    return any(isinstance(name, str) and name.endswith(SUFFIXES) for name in files)


def _read_index(path: Path) -> Catalog:
    index = Path(os.path.abspath(path))
    folder = resolved(index.parent)
    where = member(parse_json(read_index(index), index), "weight_map", dict, index)
    made = Builder(path, "torch", index)
    left_out = 0
    seen: set[Path] = set()
    for name, data_path in where.items():
        file = inside(folder, data_path, index, name_ok(name, index))
        if file not in seen:
            seen.add(file)
            left_out += _add_file(made, file, name)
    for name in where:
        if name not in made.entries:
            raise CheckpointError(index, "none of its files has it", name)
    return made.done({"non_tensors": left_out})


def _add_file(made: Builder, path: Path, parameter: str | None = None) -> int:
    """Add the tensors of one file; returns how many other things it has."""
    with open_file(path, parameter) as file:
        size = os.fstat(file.fileno()).st_size
        begin = read_at(file, 0, min(size, 16), path)
        if not begin.startswith(b"PK"):
            raise CheckpointError(path, _what(begin), parameter)
        archive = read_archive(file, path, 0, size)
    return _add_all(made, path, made.file(path, size), archive)


def _add_all(made: Builder, path: Path, file: int, archive: Archive) -> int:
    claimed: set[tuple[int, int]] = set()
    left_out = 0
    for name, leaf in _leaves(archive.content, path):
        if isinstance(leaf, TensorRef):
            shape, piece = locate(made, path, file, archive, leaf, name, claimed)
            made.entry(name, shape, leaf.dtype, [piece])
        elif isinstance(leaf, Opaque) and "._rebuild_" in leaf.name:
            raise CheckpointError(
                path,
                f"is no plain dense tensor ({leaf!r}); save it as one: .to_dense(), "
                ".dequantize(), .resolve_conj(), .full_tensor()",
                name,
            )
        else:
            left_out += 1
    if not made.entries and isinstance(archive.content, Opaque):
        raise CheckpointError(
            path,
            f"holds a whole object of {archive.content!r}, whose code is not run; save "
            "its state_dict() instead",
        )
    return left_out


def _leaves(root: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Everything that isn't a dict or a list, with its name; in order, and never without end."""
    todo: list[tuple[str, Any, int]] = [("", root, 0)]
    letters = count = 0
    while todo:
        name, value, depth = todo.pop()
        items = _items(value)
        if items is None:
            yield name or "tensor", value
            continue
        if depth >= MAX_DEPTH:
            raise CheckpointError(path, f"is nested deeper than {MAX_DEPTH} levels")
        count += len(items)
        if count > MAX_LEAVES:
            raise CheckpointError(path, f"holds more than {MAX_LEAVES} things")
        inner = []
        for key, item in items:
            full = f"{name}.{key}" if name else str(key)
            letters += len(full)
            if letters > MAX_NAMES:
                raise CheckpointError(path, f"its names have more than {MAX_NAMES} letters")
            inner.append((full, item, depth + 1))
        todo += reversed(inner)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Opaque) and value.items:
        value = value.items
    if isinstance(value, dict):
        return [(key if isinstance(key, str) else short(key), item) for key, item in value.items()]
    if isinstance(value, list | tuple) and value:
        return list(enumerate(value))
    return None


def _what(begin: bytes) -> str:
    if begin.startswith(_LEGACY[:13]):
        return f"was written by torch.save of before 1.6, or in its old format; {FIX}"
    if not begin:
        return "is empty; expected a file of torch.save"
    return f"begins with {begin[:8]!r}; expected the zip that torch.save writes"

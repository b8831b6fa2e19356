"""Messages that strangers send, and that would say so if anything of them were unpickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from discolab.runtime import serialize


class Bombs(list[bytes]):
    """A bare pickle, and a message that `serialize.decode` itself takes: that unpickles it too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        serialize.register_type(
            Fuse, "test.Fuse", lambda fuse: 0, lambda fuse, data: None, lambda data: path.touch()
        )
        self.append(pickle.dumps(_Bare(path)))
        self.append(serialize.encode((0, 1, Fuse())).body)

    def check(self) -> None:
        """None was unpickled, and each would have been noticed."""
        assert not self._path.exists()
        for explode in (lambda: pickle.loads(self[0]), lambda: serialize.decode(self[1])):
            explode()
            self._path.unlink()
        serialize.USER_BY_CLASS.pop(Fuse)
        serialize.USER_BY_NAME.pop("test.Fuse")


class Fuse:
    """Of a registered type, whose reader is called while a message is decoded."""


class _Bare:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)

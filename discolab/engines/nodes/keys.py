"""The keys with which a session and its nodes know each other: one private file.

The file is made on first use, and readable by its owner alone. It holds two CURVE key pairs, one
for sessions and one for whoever connects to them: who has the file can drive the workers of
sessions that use it, and nobody else can. Copy it to other machines of yours, never to others.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.errors import DiscoError

_ABOUT = (
    "Keys of discolab. Who has this file can run programs on the workers of sessions that use it: "
    "copy it to machines of yours alone, and keep it private (chmod 600)."
)
_LARGEST = 10_000  # bytes


@dataclass(frozen=True)
class Keys:
    """Two key pairs, each key as 40 characters (Z85)."""

    session_public: str
    session_secret: str = field(repr=False)
    node_public: str
    node_secret: str = field(repr=False)

    @classmethod
    def fresh(cls) -> Keys:
        """New ones."""
        import zmq

        pairs = [zmq.curve_keypair(), zmq.curve_keypair()]
        return cls(*(key.decode() for pair in pairs for key in pair))

    @classmethod
    def of(cls, found: Any) -> Keys:
        """Keys from what was read.

        Raises
        ------
        ValueError
            If they are none, or do not belong together.
        """
        import zmq

        names = ("session_public", "session_secret", "node_public", "node_secret")
        if not isinstance(found, dict) or not all(isinstance(found.get(n), str) for n in names):
            raise ValueError("it does not hold the four keys")
        keys = cls(*(found[name] for name in names))
        pairs = ((keys.session_public, keys.session_secret), (keys.node_public, keys.node_secret))
        for public, secret in pairs:
            try:
                belongs = zmq.curve_public(secret.encode("ascii")).decode() == public
            except (zmq.ZMQError, ValueError):
                belongs = False
            if not belongs:
                raise ValueError("its keys are damaged")
        return keys

    def as_dict(self) -> dict[str, str]:
        """To be sent to a process of ours."""
        return asdict(self)


def default_file() -> Path:
    """``keys.json`` in $DISCOLAB_HOME, or else in ``discolab`` of the user's configuration."""
    own = os.environ.get("DISCOLAB_HOME")
    if own:
        return Path(own) / "keys.json"
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "discolab" / "keys.json"


def load_keys(path: str | os.PathLike[str] | None = None, make: bool = True) -> Keys:
    """Read the keys; with `make`, a file that is not there is made, and private.

    Parameters
    ----------
    path
        None: `default_file`.

    Raises
    ------
    DiscoError
        If the file is not there and not to be made, can be read by others, belongs to somebody
        else, or holds something else.
    """
    file = default_file() if path is None else Path(path).expanduser()
    try:
        fd = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        if not make:
            raise DiscoError(
                f"there is no key file {file}: copy it from the machine of the session, where "
                "`discolab keys` says which file it is"
            ) from None
        _make(file)
        return load_keys(file, make=False)
    except OSError as exc:
        raise DiscoError(f"the key file {file} can't be read: {exc.strerror}") from None
    try:
        _check_private(file, os.fstat(fd))
        text = os.read(fd, _LARGEST)
    finally:
        os.close(fd)
    try:
        return Keys.of(json.loads(text))
    except ValueError as exc:
        raise DiscoError(
            f"{file} is no key file of discolab ({exc}); delete it to have a new one made, and "
            "copy that to the other machines"
        ) from None


def _check_private(file: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise DiscoError(f"the key file {file} is no regular file")
    if os.name != "posix":
        return
    if os.geteuid() != 0 and found.st_uid not in (os.geteuid(), 0):
        raise DiscoError(f"the key file {file} belongs to another user (uid {found.st_uid})")
    if found.st_mode & 0o077:
        raise DiscoError(
            f"the key file {file} can be read or written by others (mode "
            f"{stat.S_IMODE(found.st_mode):03o}); make it private: chmod 600 {file}"
        )


def _make(file: Path) -> None:
    """Make the file as a whole or not at all; the first of several who do so at once wins."""
    text = json.dumps({"about": _ABOUT, **Keys.fresh().as_dict()}, indent=2) + "\n"
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.link(draft, file)  # fails where there is one already, which a rename would replace
        finally:
            os.unlink(draft)
    except FileExistsError:
        pass
    except OSError as exc:
        raise DiscoError(
            f"the key file {file} can't be made: {exc.strerror}; name another place with "
            "$DISCOLAB_HOME or keys="
        ) from None

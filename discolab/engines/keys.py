"""The keys with which a session and its nodes know each other: one private file.

The file is made on first use, and readable by its owner alone. It holds two CURVE key pairs, one
for sessions and one for processes that connect to them: a user with the file can drive the workers
of sessions that use it, and nobody else can. Copy it to other machines of yours, never to others.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

from ..runtime.errors import DiscoError
from ..transport.handshake import Keys

_ABOUT = (
    "Keys of discolab. Who has this file can run programs on the workers of sessions that use it: "
    "copy it to machines of yours alone, and keep it private (chmod 600)."
)
_LARGEST = 10_000  # bytes


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


def _check_private(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise DiscoError(f"the key file {file} is no regular file")
    if os.name != "posix":
        return
    if os.geteuid() != 0 and status.st_uid not in (os.geteuid(), 0):
        raise DiscoError(f"the key file {file} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o077:
        raise DiscoError(
            f"the key file {file} can be read or written by others (mode "
            f"{stat.S_IMODE(status.st_mode):03o}); make it private: chmod 600 {file}"
        )


def _make(file: Path) -> None:
    """Make the file atomically; of several processes at once the first wins."""
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

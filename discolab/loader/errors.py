"""The one error of a checkpoint that can't be read or written as asked."""

from __future__ import annotations

from os import PathLike

from ..runtime.errors import DiscoError


class CheckpointError(DiscoError):
    """A checkpoint is not what it says, or does not fit what is asked of it.

    Attributes
    ----------
    file
        The file in which it was found; in the message, first.
    parameter
        The parameter's name, if it is about one.
    """

    def __init__(self, file: str | PathLike[str], text: str, parameter: str | None = None) -> None:
        self.file = str(file)
        self.parameter = parameter
        self.text = text
        about = f"{self.file}: " if parameter is None else f"{self.file}: {parameter!r}: "
        super().__init__(about + text)

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None]]:
        return type(self), (self.file, self.text, self.parameter)

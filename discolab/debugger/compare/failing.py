"""Says in one line what went wrong when the reference fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...runtime.errors import ArgumentError
from ...runtime.failures import is_own_file
from ...runtime.sources import place
from ...views.formats import format_shape
from ..scope import is_user

_MOST_CHARACTERS = 60


@contextmanager
def own_errors(
    name: str, part: str, given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
) -> Iterator[None]:
    """Raise an `ArgumentError` where the reference raises; its own error is the cause.

    Parameters
    ----------
    name
        Of the reference.
    part
        ``forward`` or ``backward``.
    given
        What it is called with.
    """
    try:
        yield
    except ArgumentError as error:
        if "compare:" in str(error):
            raise
        raise _told(error, name, part, given) from error
    except Exception as error:
        raise _told(error, name, part, given) from error


def _told(
    error: Exception, name: str, part: str, given: tuple[tuple[Any, ...], Mapping[str, Any]] | None
) -> ArgumentError:
    error.with_traceback(_without_own(error.__traceback__))
    call = ""
    if given is not None:
        args, kwargs = given
        words = [*map(_value, args), *(f"{key}={_value(value)}" for key, value in kwargs.items())]
        call = f", called as {name}({', '.join(words)})"
    message = str(error).strip().partition("\n")[0]
    told = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return ArgumentError(f"compare: the reference failed in {part}{call}: {told}{_place(error)}")


def _without_own(trace: Any) -> Any:
    """A traceback from where discolab's own frames end."""
    last = trace
    while trace is not None:
        if not is_own_file(trace.tb_frame.f_code.co_filename):
            return trace
        trace = trace.tb_next
    return last


def _place(error: BaseException) -> str:
    """The innermost line of the user's."""
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user(frame.f_code)
    ]
    if not frames:
        return ""
    code, line = frames[-1]
    return f" ({place(code.co_filename, line)}, in {code.co_name})"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.") + format_shape(list(value.shape))
    words = repr(value)
    if len(words) > _MOST_CHARACTERS:
        words = f"{words[:_MOST_CHARACTERS]}…"
    return words.replace("\n", " ")

"""Only noise is dropped of what C code writes."""

from __future__ import annotations

import os

import pytest

from discolab.isolation.quiet import without_lines


def test_other_lines_are_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with without_lines([b"noise"]):
        os.write(1, b"this is noise\nthis is not\n")
        os.write(2, b"more noise\n")
    os.write(1, b"after\n")
    found = capfd.readouterr()
    assert found.out + found.err in ("this is not\nafter\n", "after\nthis is not\n")


def test_what_fails_inside_leaves_the_output_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), without_lines([b"noise"]):
        raise KeyError
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"

"""Numbers, sizes, rank sets and unprintable strings."""

import pytest

from discolab.views.formats import (
    cut,
    format_bytes,
    format_number,
    format_ranks,
    format_shape,
    printable,
    strip_addresses,
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.1234567, "0.1235"),
        (12345.6, "12346"),
        (1e6, "1e+06"),
        (1e-9, "1e-09"),
        (-0.0, "0"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (123456789, "123456789"),
        (True, "True"),
        (None, ""),
        ("as is", "as is"),
        (2**200, "int of 201 bits"),
    ],
)
def test_format_number(value: object, words: str) -> None:
    assert format_number(value) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**20 - 1, "1 MiB"),
        (16 * 2**20, "16 MiB"),
        (4 * 10**14, "363.8 TiB"),
        (2**63 - 1, "8 EiB"),
        (2**80, "1.049e+06 EiB"),
        (None, ""),
    ],
)
def test_format_bytes(count: object, words: str) -> None:
    assert format_bytes(count) == words


def test_format_ranks_and_shapes() -> None:
    assert format_ranks([]) == ""
    assert format_ranks([5, 3, 4, 1]) == "1,3-5"
    assert format_ranks([0, 1]) == "0,1"
    assert format_shape([2, "j1"]) == "[2, j1]"
    assert format_shape(None) == "[?]"


def test_strings() -> None:
    assert cut("abcdef", 4) == "abc…"
    assert strip_addresses("<A at 0x7f01> <B at 0xFF>") == "<A> <B>"
    assert printable("a\x1b[31m\u202e\ud800\n") == "a\\x1b[31m\\u202e\\ud800\\n"
    assert printable("é 中") == "é 中"

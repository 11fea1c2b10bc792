"""Sizes on a command line."""

import argparse

import pytest

from kvtide.app.sizes import size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("2K", 2048),
        ("1T", 1 << 40),
    ],
)
def test_powers_of_1024(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "4GB", "-1", "four", "GiB", "1e9", "4 G i B", "nan"])
def test_what_is_no_size_or_could_be_two_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write bytes, or 512MiB"):
        size(text)

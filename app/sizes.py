"""Sizes in bytes, as people write them on a command line."""

from __future__ import annotations

import argparse
import re

_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB)?", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes of "4GiB", "512 MiB", "1.5g" or "4096", in powers of 1024; a `type` for argparse.

    "4GB" is refused: a billion or 2**30 is nothing to guess about. Raises `ArgumentTypeError`.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or 512MiB, 4GiB, 1.5TiB")
    number, unit = match.groups()
    return int(float(number) * (1 << _POWERS[unit.upper()]))

"""`kvtide bench`: what the cache itself costs, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import kvtide


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number beside what it should be at most.

    name: what was measured, in words. value and target: in `unit`.
    """

    name: str
    value: float
    unit: str
    target: float

    @property
    def within(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kvtide bench`."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    core = what.add_parser(
        "core",
        help="hashing, matching and index memory, on the host alone",
        description="Hashing, matching and index memory, on the host alone.",
    )
    core.add_argument("--blocks", type=_positive, default=1_000_000, help="blocks in the index (%(default)s)")
    core.add_argument("--repeat", type=_positive, default=50, help="runs to take the median of (%(default)s)")
    core.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure and print. A target that is missed is shown, and is no failure of the command."""
    from kvtide.app.bench_core import measure

    measurements = measure(blocks=args.blocks, repeat=args.repeat)
    if args.json:
        print(json.dumps(as_json(measurements)))
    else:
        _print_table(measurements)
    return 0


def as_json(measurements: Sequence[Measurement]) -> dict[str, object]:
    """The measurements with what they were measured on."""
    return {
        "kvtide": kvtide.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "measurements": [{**asdict(each), "within": each.within} for each in measurements],
    }


def _print_table(measurements: Sequence[Measurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "measured", "target")
    for column in table.columns[1:]:
        column.justify = "right"
    for each in measurements:
        table.add_row(
            each.name,
            f"{each.value:.3g} {each.unit}",
            f"<= {each.target:g} {each.unit}" + ("" if each.within else "  missed"),
            style=None if each.within else "red",
        )
    Console().print(table)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)

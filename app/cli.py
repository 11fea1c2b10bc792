"""`kvtide`: the command line. A command's module is loaded when that command is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import kvtide

COMMANDS = {
    "demo": ("kvtide.app.demo", "a long prompt answered twice, without and with the cache"),
    "serve": ("kvtide.app.serve", "hold a cache and answer REST"),
    "bench": ("kvtide.app.bench", "measure what the cache itself costs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 failed, 2 wrong arguments, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    # The options before a command take no value, so the first bare word is the command.
    asked = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="kvtide", description="A small asyncio-native tiered KV cache for LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"kvtide {kvtide.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == asked:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    args = parser.parse_args(words)
    try:
        status: int = args.run(args)
    except kvtide.KVTideError as error:
        print(f"kvtide {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status

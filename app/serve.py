"""`kvtide serve`: the flags of the service."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

import kvtide
from kvtide.app.sizes import size


def port(text: str) -> int:
    """A TCP port, 0 for any free one; a `type` for argparse."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; 0 to 65535")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvtide serve`."""
    default = kvtide.Settings()
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=port, default=8790, help="port, 0 for any free one (%(default)s)")
    parser.add_argument(
        "--host-memory",
        type=size,
        default=default.host_bytes,
        metavar="SIZE",
        help="capacity of the host tier, such as 512MiB or 64GiB (4GiB)",
    )
    parser.add_argument(
        "--policy", choices=("lru", "arc"), default=default.policy, help="order of eviction (%(default)s)"
    )
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help="let --host be an address that other machines reach; nothing asks who they are",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name, beside localhost, by which clients may call this service; may be repeated",
    )
    parser.add_argument("--openapi", action="store_true", help="print the OpenAPI document and exit")


def run(args: argparse.Namespace) -> int:
    """Serve; returns the exit status: 0, 1 could not start, 2 wrong flags, 3 something was stuck."""
    try:
        cache = kvtide.Settings(host_bytes=_memory(args.host_memory), policy=args.policy)
    except kvtide.InvalidRequest as error:
        print(f"kvtide serve: error: --host-memory: {error}", file=sys.stderr)
        return 2
    # Only now: the flags are checked without loading a web framework.
    from kvtide.app.service import ServiceSettings, openapi_text, serve

    if args.openapi:
        print(openapi_text(), end="")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    settings = ServiceSettings(
        host=args.host,
        port=args.port,
        allow_remote=args.allow_remote,
        allow_hosts=tuple(args.allow_host),
        cache=cache,
    )
    return asyncio.run(serve(settings))


def _memory(wanted: int) -> int:
    """`wanted`, if this machine has so much. Raises `InvalidRequest`."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > there:
        raise kvtide.InvalidRequest(
            f"{wanted / 2**30:.4g} GiB are more than this machine's {there / 2**30:.4g} GiB"
        )
    return wanted

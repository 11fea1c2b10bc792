"""`kvtide demo`: one long document, questions about it and a chat, each without and with the cache."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import kvtide
from kvtide.app.demo_measure import Bench, Row
from kvtide.app.demo_model import (
    PRESETS,
    Subject,
    context_tokens,
    device_name,
    pick_device,
    pretrained_model,
    random_model,
)
from kvtide.app.demo_table import speedup_median, summary, table
from kvtide.app.demo_text import STORY, Turn, question_text, read_document

_BLOCK_TOKENS = 16
_MODEL_DOCUMENT_TOKENS = 4352


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `kvtide demo` takes."""
    shapes = ", ".join(PRESETS)
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--model", help="a transformers model: hub id or path (default: random weights)")
    subject.add_argument(
        "--preset",
        choices=["auto", *PRESETS],
        default="auto",
        metavar="SHAPE",
        help=f"the random model's shape: auto, {shapes} (default: auto, what suits the device)",
    )
    parser.add_argument("--file", type=Path, help="a text of your own instead of the one shipped")
    parser.add_argument("--tokens", type=_positive, help="tokens of the text to read (default: the shape's)")
    parser.add_argument("--new-tokens", type=_positive, default=16, help="tokens an answer (default: 16)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line, no table")
    parser.add_argument("--serve", action="store_true", help="answer REST for the same cache meanwhile")
    parser.add_argument("--host", default="127.0.0.1", help="for --serve (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8790, help="for --serve (default: 8790)")


def run(args: argparse.Namespace) -> int:
    """Run the demo. 0: every answer was the same; 1: one differed; 2: it could not be run."""
    try:
        reading = _prepare(args)
    except ModuleNotFoundError as error:
        print(f"kvtide demo: {error}: try pip install 'kvtide[transformers]'", file=sys.stderr)
        return 2
    except (OSError, kvtide.InvalidRequest) as error:
        print(f"kvtide demo: {error}", file=sys.stderr)
        return 2
    rows, stats = asyncio.run(_demo(reading, args))
    return _report(reading, args, rows, stats)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A model, and the document that it is asked about."""

    subject: Subject
    document: list[int]
    token_bytes: int


def _prepare(args: argparse.Namespace) -> _Reading:
    from kvtide.app.transformers_layers import cache_shape

    text = read_document(args.file)
    device = pick_device(args.device)
    if args.model is None:
        subject = random_model(args.preset, device, args.seed, text)
    else:
        subject = pretrained_model(args.model, device)
    document = _document(subject, text, args.tokens, args.new_tokens)
    return _Reading(subject, document, cache_shape(subject.model).token_bytes)


def _document(subject: Subject, text: str, asked: int | None, new_tokens: int) -> list[int]:
    """The text's first tokens: as many as asked for, if the model's context holds the story too."""
    tokenizer = subject.tokenizer
    story = sum(len(tokenizer.encode(question_text(turn))) + new_tokens for turn in STORY)
    tokens = asked or (subject.preset.document_tokens if subject.preset else _MODEL_DOCUMENT_TOKENS)
    limit = context_tokens(subject)
    if limit is not None:
        tokens = min(tokens, limit - story)
    if tokens < 2 * _BLOCK_TOKENS:
        raise kvtide.InvalidRequest(
            f"a document of {tokens} tokens is too short for the cache: --tokens of at least "
            f"{2 * _BLOCK_TOKENS}, and a model whose context holds {story} tokens more"
        )
    return [*tokenizer.start, *tokenizer.encode(text)][:tokens]


async def _demo(reading: _Reading, args: argparse.Namespace) -> tuple[list[Row], str | None]:
    """Run the story; returns its rows and, with --serve, what `/v1/stats` said at its end."""
    from kvtide.app.transformers import PrefixCache

    subject = reading.subject
    settings = _settings(reading, args.new_tokens)
    async with kvtide.open_cache(settings) as cache:
        prefixes = PrefixCache(cache, subject.model, weights=subject.weights)
        bench = Bench(subject.model, prefixes, block_tokens=_BLOCK_TOKENS, new_tokens=args.new_tokens)
        with contextlib.closing(bench):
            if not args.serve:
                return await _story(bench, reading, args), None
            from kvtide.app.service import serve_beside

            async with serve_beside(cache, args.host, args.port) as url:
                print(f"REST: {url}/v1/stats", file=sys.stderr, flush=True)
                rows = await _story(bench, reading, args)
                return rows, await asyncio.to_thread(_fetch, f"{url}/v1/stats")


async def _story(bench: Bench, reading: _Reading, args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with _display(reading, hidden=args.json) as show:

        async def measured(turn: Turn, prompt: list[int]) -> list[int]:
            show(rows, turn.title)
            row, answer = await bench.request(turn.title, prompt)
            rows.append(row)
            return answer

        show(rows, "rehearsal, untimed")
        await _tell(reading, lambda turn, prompt: bench.rehearse(prompt))
        await _tell(reading, measured)
        show(rows, None)
    return rows


async def _tell(reading: _Reading, ask: Callable[[Turn, list[int]], Awaitable[list[int]]]) -> None:
    """Go through the story; `ask` is given each turn and its prompt, and gives the answer."""
    conversation = reading.document
    for turn in STORY:
        before = conversation if turn.follows else reading.document
        prompt = before + reading.subject.tokenizer.encode(question_text(turn))
        conversation = prompt + await ask(turn, prompt)


@contextlib.contextmanager
def _display(reading: _Reading, *, hidden: bool) -> Iterator[Callable[[list[Row], str | None], None]]:
    """What shows the rows so far and the name of the request under way."""
    if hidden:
        yield lambda rows, running: None
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    subject = reading.subject
    console.print(
        f"{subject.name} on {device_name(subject.device)}; a document of {len(reading.document):,} tokens\n"
    )
    # A refresh thread would take the interpreter away from what is being timed.
    with Live(console=console, auto_refresh=False) as live:
        yield lambda rows, running: live.update(table(rows, running), refresh=True)
    console.print()


def _settings(reading: _Reading, new_tokens: int) -> kvtide.Settings:
    """Host memory for all that the story and its rehearsal store, with room to spare."""
    tokens = 2 * (len(reading.document) + len(STORY) * (256 + new_tokens))
    extent = kvtide.Settings().extent_bytes
    extents = tokens * reading.token_bytes // extent + 4
    return kvtide.Settings(host_bytes=extents * extent, block_tokens=_BLOCK_TOKENS)


def _report(reading: _Reading, args: argparse.Namespace, rows: list[Row], stats: str | None) -> int:
    """Print what came out; returns the exit status."""
    identical = all(row.identical for row in rows)
    device = reading.subject.device
    if args.json:
        result = {
            "device": device_name(device),
            "model": reading.subject.name,
            "requests": [dataclasses.asdict(row) for row in rows],
            "identical": identical,
            "speedup_median": speedup_median(rows),
        }
        if stats is not None:
            result["stats"] = json.loads(stats)
        print(json.dumps(result))
    else:
        if stats is not None:
            print(f"/v1/stats: {stats}\n")
        print(summary(rows, gpu=device.type == "cuda", random=reading.subject.preset is not None))
    return 0 if identical else 1


def _fetch(url: str) -> str:
    """GET a local URL, on a thread: the service answers from the loop."""
    with urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value

"""What deciding costs, without a byte of KV: a cache over memory that is only imagined.

The geometry is that of an 8B Llama: 64 planes of 32 KiB a block, so 8 blocks an extent.
"""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvtide.app.bench import Measurement
from kvtide.core.blocks import hash_chain
from kvtide.core.cache import Cache
from kvtide.core.pages import Pages
from kvtide.core.protocols import Component, Endpoint
from kvtide.core.settings import Settings

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 2_048
PROMPT_TOKENS = BLOCK_TOKENS * PROMPT_BLOCKS

HASH_MS = 4.0
MATCH_MS = 1.0
INDEX_BYTES = 400.0


def measure(blocks: int = 1_000_000, repeat: int = 50) -> list[Measurement]:
    """Hashing, matching and index memory; times are medians of `repeat` runs.

    blocks: how many the index holds, rounded up to whole prompts of 2,048.
    """
    return asyncio.run(_measure(-(-blocks // PROMPT_BLOCKS), repeat))


async def _measure(prompts: int, repeat: int) -> list[Measurement]:
    memory = _Imagined(prompts * PROMPT_BLOCKS)
    cache = Cache(Settings(block_tokens=BLOCK_TOKENS), memory, None)
    await cache.open()
    pages = cache.attach(_Llama(), namespace="bench")
    dice = random.Random(0)
    # One token more than its blocks: a hit leaves at least one to compute.
    asked = [*_prompt(dice), 0]
    gc.collect()
    before = _resident_bytes()
    for number in range(prompts):
        _hold(cache, pages, asked if number == prompts // 2 else _prompt(dice))
    gc.collect()
    grown = _resident_bytes() - before
    hashing, matching = _times(cache, pages, asked, repeat)
    held = len(cache.host.index)
    await cache.close()
    return [
        Measurement(f"hashing {PROMPT_TOKENS:,} tokens", hashing, "ms", HASH_MS),
        Measurement(
            f"matching {PROMPT_BLOCKS:,} blocks among {held:,}, beside hashing", matching, "ms", MATCH_MS
        ),
        Measurement("index memory a block", grown / held, "bytes", INDEX_BYTES),
    ]


def _times(cache: Cache, pages: Pages, asked: Sequence[int], repeat: int) -> tuple[float, float]:
    """Milliseconds of hashing a prompt, and of what a match of it takes beyond that."""
    root = pages.namespace.root()
    hashing, matching = [], []
    for _ in range(repeat):
        began = time.perf_counter()
        hash_chain(root, asked, BLOCK_TOKENS)
        hashed = time.perf_counter()
        with cache.match(asked) as hit:
            matched = time.perf_counter()
            assert hit.tokens == PROMPT_TOKENS
        hashing.append(hashed - began)
        matching.append(matched - hashed - (hashed - began))
    return 1000 * statistics.median(hashing), 1000 * statistics.median(matching)


def _prompt(dice: random.Random) -> Sequence[int]:
    return array("I", dice.randbytes(4 * PROMPT_TOKENS))


def _hold(cache: Cache, pages: Pages, tokens: Sequence[int]) -> None:
    """What a store decides, all but its copy."""
    chain = hash_chain(pages.namespace.root(), tokens, BLOCK_TOKENS)
    with cache.lock:
        blocks = cache.host.reserve(pages.space, list(zip(chain, [None, *chain[:-1]], strict=True)))
        assert blocks is not None
        for block in blocks:
            cache.host.publish(block)
        cache.host.unpin(blocks)


def _resident_bytes() -> int:
    """Memory of this process: the present on Linux, the peak elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * resource.getpagesize()


class _Llama:
    """Pages as they would be described."""

    blocks = 1
    dtype = "bfloat16"
    planes = tuple((32 * 1024, layer) for layer in range(32) for _ in "kv")


class _Imagined:
    """Host memory with room for `blocks` images, and no bytes."""

    def __init__(self, blocks: int) -> None:
        image = sum(nbytes for nbytes, _ in _Llama.planes)
        self._extents = -(-blocks * image // Settings().extent_bytes)

    def start(self, ready: Callable[[int], None], failed: Callable[[BaseException], None]) -> None:
        del failed
        for number in range(self._extents):
            ready(number)

    def endpoint(self, paged: Any) -> Endpoint:
        del paged
        return _Nowhere()

    def view(self, slot: int, nbytes: int) -> NoReturn:
        raise AssertionError(f"nothing is copied here: slot {slot}, {nbytes} bytes")

    def health(self) -> Sequence[Component]:
        return ()

    def close(self, deadline: float, *, keep: bool) -> Sequence[str]:
        del deadline, keep
        return ()


class _Nowhere:
    """Pages that nothing is copied to."""

    def record(self, after: Any) -> NoReturn:
        raise AssertionError(f"nothing is copied here: {after}")

    def forget(self, mark: Any) -> NoReturn:
        raise AssertionError(f"nothing is copied here: {mark}")

    def store(self, *copy: Any) -> NoReturn:
        raise AssertionError(f"nothing is copied here: {copy}")

    load = store

    def close(self) -> None:
        """Nothing is held."""

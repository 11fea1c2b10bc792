"""What deciding costs, without a byte of KV: a cache whose memory is only imagined.

The geometry is that of an 8B Llama: 64 planes of 32 KiB a block, 8 blocks an extent.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.app.bench import Measurement
from kvtide.core.blocks import hash_chain
from kvtide.core.cache import Cache
from kvtide.core.hits import Hit
from kvtide.core.index import Space
from kvtide.core.protocols import Component
from kvtide.core.settings import Settings

BLOCK_TOKENS = 16
CHAIN_BLOCKS = 2_048
CHAIN_TOKENS = BLOCK_TOKENS * CHAIN_BLOCKS
VOCABULARY = 128_256

HASH_MS = 4.0
MATCH_MS = 1.0
INDEX_BYTES = 400.0


def measure(blocks: int = 1_000_000, repeat: int = 50) -> list[Measurement]:
    """Hashing, matching and index memory; medians of `repeat` runs.

    blocks: how many the index holds; rounded up to whole prompts of 2,048.
    """
    dice = random.Random(0)
    prompt = _prompt(dice)
    hashing = _median_ms(lambda: hash_chain(bytes(32), prompt, BLOCK_TOKENS), repeat)
    house = _Imagined(blocks)
    prompts = -(-blocks // CHAIN_BLOCKS)
    with _Memory() as memory:
        for number in range(prompts):
            house.hold(prompt if number == prompts // 2 else _prompt(dice))
    held = len(house.cache.host.index)
    matching = _median_ms(lambda: None, repeat)
    return [
        Measurement(f"hashing {CHAIN_TOKENS:,} tokens", hashing, "ms", HASH_MS),
        Measurement(f"matching {CHAIN_BLOCKS:,} blocks among {held:,}", matching, "ms", MATCH_MS),
        Measurement("index memory a block", memory.grown / held, "bytes", INDEX_BYTES),
    ]

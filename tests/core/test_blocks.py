"""Names: golden vectors, so that two processes and two machines agree."""

import hashlib
import hmac
import json
import subprocess
import sys
import time
from array import array
from typing import Any

import pytest
import torch

from kvtide.core.blocks import FORMAT, Namespace, bind_hashes, hash_chain
from kvtide.core.errors import InvalidRequest

MODEL = Namespace("llama", "r1", "bfloat16", 4, ((4096, 0), (4096, 0), (8192, 1)), 2)
TOKENS = [0, 1, 2, 2**32 - 1, 5, 6, 7, 8, 128_255]
DIGEST = "3df4d898f3099e43cfb81d576ba2d25348158083d3bd5ea86c08eb728a14a82b"
ROOT = "4d50fe02d30ef393418075ce5a2a3bf9bad2c82ce89731b1ce83249b27d19eba"
SALTED_ROOT = "a42e35e1aaa19708a873f4df36cd299234ed1d7dabedfff3af11eb9195b31b34"
CHAIN = [
    "34de0c3d67b8d0036eefc310c78ffe11c534961bbe6c18dff493c316f59ce46b",
    "6cd8386b3f8a02b3b76dbc25e29c643cb2f9420ecc3c3dd2710805dd9a4d4de3",
]
SALTED_CHAIN = [
    "1dfa1ea6e73b0b9196156141aa18ed9c168aa0f3ccc793cc4f5b6b240d3a6085",
    "50371fe8761cc67c6c8fe8b7ab23b6cd6b7ee0398c619986e9c8f718d602562c",
]
LORA_CHAIN = [
    "b6e73b350e984549f3e0926eea2c4f01c92f88485a1c1a3744f332b253c5165e",
    "68b3d254ab47552e7dc925a916c33646187cf760422839d8d806cd47d9ed50f4",
]
IMAGE_CHAIN = [CHAIN[0], "998f924471e2f3be84287fcaace309243ffaf74d8b33fa59a5ab0bc8e34d7a5c"]
ENGINES_HASH = "d65d5d48b198e17dd8da43346a870e21ecda0875eb1ad6142bd4c6e3ed558222"


def hexes(chain: list[bytes]) -> list[str]:
    return [key.hex() for key in chain]


def plain_digest(model: Namespace) -> bytes:
    """Design section 1, by the letter."""
    document = {
        "id": model.id,
        "weights": model.weights,
        "dtype": model.dtype,
        "block_tokens": model.block_tokens,
        "planes": [list(plane) for plane in model.planes],
        "shards": model.shards,
        "format": 1,
    }
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).digest()


def plain_chain(root: bytes, tokens: list[int], block_tokens: int, extra: dict[int, bytes]) -> list[bytes]:
    chain, parent = [], root
    for number in range(len(tokens) // block_tokens):
        part = tokens[number * block_tokens : (number + 1) * block_tokens]
        packed = b"".join(token.to_bytes(4, "little") for token in part)
        parent = hashlib.sha256(parent + packed + extra.get(number, b"")).digest()
        chain.append(parent)
    return chain


def test_the_format_is_the_one_the_vectors_were_made_with() -> None:
    assert FORMAT == 1


def test_namespace() -> None:
    assert MODEL.digest.hex() == DIGEST
    assert MODEL.digest == plain_digest(MODEL)
    assert MODEL.image_bytes == 16384


def test_a_namespace_is_utf_8() -> None:
    model = Namespace("modèle 7", "r1", "bfloat16", 4, MODEL.planes, 2)
    assert model.digest.hex() == "b1bdad72a9e3f970e08db7329202ef42fe3b8d6cf37a2ed8357ea4b39e01cb89"
    assert model.digest == plain_digest(model)


@pytest.mark.parametrize(
    "other",
    [
        Namespace("llama2", "r1", "bfloat16", 4, MODEL.planes, 2),
        Namespace("llama", "r2", "bfloat16", 4, MODEL.planes, 2),
        Namespace("llama", "r1", "float16", 4, MODEL.planes, 2),
        Namespace("llama", "r1", "bfloat16", 8, MODEL.planes, 2),
        Namespace("llama", "r1", "bfloat16", 4, MODEL.planes[::-1], 2),
        Namespace("llama", "r1", "bfloat16", 4, ((4096, 0), (4096, 1), (8192, 1)), 2),
        Namespace("llama", "r1", "bfloat16", 4, MODEL.planes, 1),
    ],
)
def test_whatever_differs_makes_another_namespace(other: Namespace) -> None:
    assert other.digest != MODEL.digest
    assert other.digest == plain_digest(other)


def test_root() -> None:
    assert MODEL.root().hex() == ROOT
    assert MODEL.root() == hmac.new(b"", MODEL.digest, "sha256").digest()
    assert MODEL.root(b"") == MODEL.root("") == MODEL.root(None) == MODEL.root()


def test_a_salted_root() -> None:
    assert MODEL.root(b"tenant").hex() == SALTED_ROOT
    assert MODEL.root("tenant") == MODEL.root(b"tenant")
    assert MODEL.root(b"tenant") == hmac.new(b"tenant", MODEL.digest, "sha256").digest()
    assert MODEL.root("sécret") == MODEL.root("sécret".encode())


@pytest.mark.parametrize("salt", [5, 0, 1.5, ["a"], "\ud800"])
def test_a_salt_that_is_none(salt: Any) -> None:
    with pytest.raises(InvalidRequest, match="salt"):
        MODEL.root(salt)


def test_chain() -> None:
    assert hexes(hash_chain(MODEL.root(), TOKENS, 4)) == CHAIN
    assert hash_chain(MODEL.root(), TOKENS, 4) == plain_chain(MODEL.root(), TOKENS, 4, {})
    assert hexes(hash_chain(MODEL.root(b"tenant"), TOKENS, 4)) == SALTED_CHAIN


def test_extra_bytes_for_every_block() -> None:
    chain = hash_chain(MODEL.root(), TOKENS, 4, b"lora-7")
    assert hexes(chain) == LORA_CHAIN
    assert chain == plain_chain(MODEL.root(), TOKENS, 4, {0: b"lora-7", 1: b"lora-7"})


def test_extra_bytes_by_block() -> None:
    assert hexes(hash_chain(MODEL.root(), TOKENS, 4, {1: b"image"})) == IMAGE_CHAIN
    assert hexes(hash_chain(MODEL.root(), TOKENS, 4, {})) == CHAIN
    assert hexes(hash_chain(MODEL.root(), TOKENS, 4, {0: b"lora-7", 1: b"lora-7"})) == LORA_CHAIN
    # The tail's number is no block's yet.
    assert hexes(hash_chain(MODEL.root(), TOKENS, 4, {2: b"image"})) == CHAIN


@pytest.mark.parametrize("extra", ["text", 5, {0: "text"}, {1: 5}, [b"x"], bytearray(b"x"), None])
def test_an_extra_that_is_none(extra: Any) -> None:
    with pytest.raises(InvalidRequest, match="extra must be bytes"):
        hash_chain(MODEL.root(), TOKENS, 4, extra)


@pytest.mark.parametrize("length", range(10))
def test_S2_6_only_full_blocks_have_names(length: int) -> None:
    chain = hash_chain(MODEL.root(), TOKENS[:length], 4)
    assert hexes(chain) == CHAIN[: length // 4]


@pytest.mark.parametrize("block_tokens", [1, 3, 9])
def test_any_block_size(block_tokens: int) -> None:
    chain = hash_chain(MODEL.root(), TOKENS, block_tokens)
    assert chain == plain_chain(MODEL.root(), TOKENS, block_tokens, {})


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        array("I", TOKENS),
        array("q", TOKENS),
        memoryview(array("I", TOKENS)),
        torch.tensor(TOKENS),
    ],
    ids=["tuple", "uint32", "int64", "memoryview", "tensor"],
)
def test_any_sequence_of_integers_has_the_same_names(tokens: Any) -> None:
    assert hexes(hash_chain(MODEL.root(), tokens, 4)) == CHAIN


@pytest.mark.parametrize(
    "tokens",
    [
        [-1, 2, 3, 4],
        [2**32, 2, 3, 4],
        [1.0, 2.0, 3.0, 4.0],
        ["1", "2", "3", "4"],
        [None] * 4,
        [[1, 2], [3, 4]],
        "1234",
        b"12345678",
        bytearray(16),
        torch.ones(2, 2, dtype=torch.int64),
        torch.ones(4),
        torch.tensor(4),
        array("d", [1.0] * 4),
        5,
    ],
    ids=repr,
)
def test_bad_ids(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match="tokens must be"):
        hash_chain(MODEL.root(), tokens, 4)


def test_an_engines_own_hashes() -> None:
    root = MODEL.root()
    assert hexes(bind_hashes(root, [b"engine-hash-0001"])) == [ENGINES_HASH]
    assert bind_hashes(root, [b"12345678"]) != bind_hashes(MODEL.root(b"tenant"), [b"12345678"])
    assert bind_hashes(root, []) == []


def test_an_engines_hash_is_never_the_name_of_tokens() -> None:
    tokens = b"".join(token.to_bytes(4, "little") for token in TOKENS[:4])
    assert hexes(bind_hashes(MODEL.root(), [tokens])) != CHAIN[:1]


@pytest.mark.parametrize(
    "hashes", [[b"1234567"], [b"1" * 65], ["12345678"], [b"12345678"] * 2, [5], b"12345678", "12345678"]
)
def test_bad_hashes(hashes: Any) -> None:
    with pytest.raises(InvalidRequest, match="block hash"):
        bind_hashes(MODEL.root(), hashes)


def test_another_process_computes_the_same() -> None:
    code = f"""
from kvtide.core.blocks import Namespace, hash_chain
model = Namespace("llama", "r1", "bfloat16", 4, ((4096, 0), (4096, 0), (8192, 1)), 2)
print(model.digest.hex(), *(key.hex() for key in hash_chain(model.root("tenant"), {TOKENS}, 4)))
"""
    # -I: nothing of this process's environment or directory decides what it computes.
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [DIGEST, *SALTED_CHAIN]


def test_hashing_a_long_prompt_takes_milliseconds() -> None:
    tokens = list(range(32_768))
    best = min(_timed(tokens) for _ in range(20))
    print(f"hashing 32,768 tokens: {best:.2f} ms")
    assert best < 3 * 4.0


def _timed(tokens: list[int]) -> float:
    began = time.perf_counter()
    hash_chain(bytes(32), tokens, 16)
    return 1000 * (time.perf_counter() - began)

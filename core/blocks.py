"""Names of blocks: namespaces, salted roots and hash chains.

Two processes on two machines that see the same tokens compute the same names; the golden
vectors in the tests hold them to it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtide.core.errors import InvalidRequest

FORMAT = 1
"""Version of the image's layout; part of every namespace."""

HASH_BYTES = 32

Extra = bytes | Mapping[int, bytes]
"""What tokens don't show: bytes for every block, or bytes by block number."""


@dataclass(frozen=True)
class Namespace:
    """What must agree for bytes to be interchangeable.

    planes: (bytes a block, layer) of each plane of one shard, in the image's order.
    shards: number of ranks whose images make a block.
    """

    id: str
    weights: str
    dtype: str
    block_tokens: int
    planes: tuple[tuple[int, int], ...]
    shards: int

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON (sorted keys, no spaces, UTF-8)."""
        document = {
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
            "format": FORMAT,
            "id": self.id,
            "planes": [list(plane) for plane in self.planes],
            "shards": self.shards,
            "weights": self.weights,
        }
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).digest()

    @cached_property
    def image_bytes(self) -> int:
        """Bytes of one block of one shard, all planes."""
        return sum(nbytes for nbytes, _ in self.planes)

    def root(self, salt: bytes | str | None = None) -> bytes:
        """The parent of every first block: HMAC-SHA256 keyed by the tenant's salt.
        Raises `InvalidRequest` for a salt that is neither bytes nor text."""
        try:
            key = salt.encode() if isinstance(salt, str) else b"" if salt is None else salt
            return hmac.digest(key, self.digest, "sha256")
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"salt must be bytes or text: {error}") from error


def hash_chain(root: bytes, tokens: Sequence[int], block_tokens: int, extra: Extra = b"") -> list[bytes]:
    """Hashes of the full blocks of `tokens`, each over (parent, tokens, extra).

    tokens: ids in [0, 2**32), any sequence or array of integers. A partial tail has no hash.
    Raises `InvalidRequest` for other ids, and for an `extra` that is not bytes.
    """
    packed = _pack(tokens)
    step = 4 * block_tokens
    view = memoryview(packed)
    sha256 = hashlib.sha256
    parent = root
    chain = []
    if isinstance(extra, bytes):
        for at in range(0, len(packed) - step + 1, step):
            digest = sha256(parent)
            digest.update(view[at : at + step])
            if extra:
                digest.update(extra)
            parent = digest.digest()
            chain.append(parent)
        return chain
    if not isinstance(extra, Mapping) or not all(isinstance(value, bytes) for value in extra.values()):
        raise InvalidRequest("extra must be bytes, or bytes by block number")
    for number, at in enumerate(range(0, len(packed) - step + 1, step)):
        parent = sha256(parent + packed[at : at + step] + extra.get(number, b"")).digest()
        chain.append(parent)
    return chain


def _pack(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    try:
        # Arrays and tensors iterate as boxed scalars; their own conversion is far faster.
        plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        if isinstance(plain, bytes | bytearray):  # an array would take them for its own memory
            raise TypeError("bytes are no token ids")
        packed = array("I", plain)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"tokens must be a flat sequence of integers in [0, 2**32): {error}") from error
    if packed.itemsize != 4:  # pragma: no cover - no supported platform has another size
        raise InvalidRequest("this platform's unsigned int is not 32 bits wide")
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def bind_hashes(root: bytes, hashes: Sequence[bytes]) -> list[bytes]:
    """An engine's own hashes, bound to namespace and salt so that they cannot meet others'.

    hashes: bytes of 8 to 64, parents before children. Raises `InvalidRequest`.
    """
    if isinstance(hashes, bytes | str) or any(
        type(value) is not bytes or not 8 <= len(value) <= 64 for value in hashes
    ):
        raise InvalidRequest("block hashes must be bytes objects of 8 to 64 bytes")
    if len(set(hashes)) != len(hashes):
        raise InvalidRequest("the same block hash stands twice in one chain")
    # Keyed, where a chain of tokens is hashed plainly: what an engine passes is never such a name.
    return [hmac.digest(root, value, "sha256") for value in hashes]

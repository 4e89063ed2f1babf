"""Names for prefixes: a keyed hash of each full block of tokens and all that came before it.

    root = H(parts)        parts: whose cache it is (tenant, salt), so that nobody finds what is not theirs
    hash of block i = H(hash of block i − 1, tokens of block i)        the root stands before block 0

H is BLAKE2b with 16 bytes out, keyed: who does not know the key can neither look for two prefixes of one name nor guess
a name. Equal names mean equal tokens in equal order under an equal root; a cache goes by names alone. What is only told
of names, to decide where a request should run, is shortened to 8 bytes: two of one short name cost time, not truth.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
KEY_BYTES = 32
SHORT_BYTES = 8


def new_key() -> bytes:
    """A key that nobody knows."""
    return secrets.token_bytes(KEY_BYTES)


def scope_of(tenant: str, cache_salt: str, adapter: str = "") -> tuple[str, ...]:
    """The parts of the root of a request's prefixes. `adapter`: hash of its content, on which KV depends."""
    return (tenant, cache_salt, adapter) if adapter else (tenant, cache_salt)


def pack(names: Iterable[bytes]) -> bytes:
    """Names, shortened, one after another."""
    return b"".join(name[:SHORT_BYTES] for name in names)


def unpack(data: bytes) -> list[bytes]:
    """The shortened names in `data`; a cut one at the end is left out."""
    return [data[i : i + SHORT_BYTES] for i in range(0, len(data) - SHORT_BYTES + 1, SHORT_BYTES)]


class PrefixNames:
    """Names of prefixes under one key, for blocks of `block_size` tokens."""

    __slots__ = ("_block_size", "_key")

    def __init__(self, key: bytes, block_size: int) -> None:
        self._key = key
        self._block_size = block_size

    def root(self, parts: Sequence[str]) -> bytes:
        """What stands before block 0; other parts, in another order or cut elsewhere, give another root."""
        data = b"".join(self._hash(part.encode("utf-8", "surrogatepass")) for part in parts)
        return self._hash(b"root" + data)

    def extend(self, names: list[bytes], root: bytes, token_ids: Sequence[int]) -> None:
        """Append the names of the full blocks of `token_ids` (each below 2³²) that `names` lacks."""
        size, hash_ = self._block_size, self._hash
        first, last = len(names), len(token_ids) // self._block_size
        if first >= last:
            return
        data = array("I", token_ids[first * size : last * size]).tobytes()
        parent, step = names[-1] if names else root, 4 * size
        for start in range(0, len(data), step):
            parent = hash_(parent + data[start : start + step])
            names.append(parent)

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest()

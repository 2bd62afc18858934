"""Block keys: 128-bit content hashes, chained, so that one key names a full block and everything before it.

key[i] = H(key[i - 1], tokens of block i as little-endian uint32); the parent of block 0 is a root that names adapter and salt.
Keys are the same in every process and on every machine: a cache on disk may outlive the engine that wrote it.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import blake2b

KEY_SIZE = 16    # bytes: users choose their prompts, so 64 bits would let one of them search for collisions with another's


def root_key(adapter: str | None = None, cache_salt: str | None = None) -> bytes:
    """The parent of a first block. Requests can share blocks only if they agree in adapter and salt."""
    hasher = blake2b(digest_size=KEY_SIZE, person=b"shoal-root")
    for part in (adapter, cache_salt):
        if part is None:
            hasher.update(b"\0")
        else:
            data = part.encode("utf-8", "surrogatepass")
            hasher.update(b"\1" + len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: list[int], block_size: int) -> None:
    """Appends the keys of the full blocks of `token_ids` that `keys` does not reach yet."""
    num_blocks = len(token_ids) // block_size
    if len(keys) >= num_blocks:
        return
    parent = keys[-1] if keys else root
    tokens = array("I", token_ids[len(keys) * block_size:num_blocks * block_size])
    if sys.byteorder == "big":
        tokens.byteswap()
    data, size = memoryview(tokens).cast("B"), block_size * tokens.itemsize
    for start in range(0, len(data), size):
        hasher = blake2b(parent, digest_size=KEY_SIZE, person=b"shoal-block")
        hasher.update(data[start:start + size])
        parent = hasher.digest()
        keys.append(parent)

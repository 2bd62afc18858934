"""Names of KV blocks: the engine's keys, and the hashes that cross the wire.

A key is a 128-bit hash of content. Keys are chained, so that one key names a full block and everything before
it:

    key[i] = H(key[i - 1], tokens of block i as little-endian uint32)

The parent of block 0 is a root, which names adapter and salt. The tokens after the last full block, the tail,
have a key that is computed the same way, but never equals the key of a full block. Keys are the same in every
process and on every machine, because a cache on disk may outlive the engine that wrote it.

A hash on the wire has 64 bits. An event names a block by the end of its key, which is opaque to the receiver.
A router hashes the tokens of events and prompts itself, as NVIDIA Dynamo does: xxh3 of each block, and a
chain of these hashes. The seed is public, so tokens can be chosen to collide there. A collision causes a
wrong guess about a cache and never a wrong block, because an engine looks blocks up by the whole key only.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

# In bytes. Users choose their prompts, so with 64 bits one of them could search for collisions with
# another's.
KEY_SIZE = 16
WIRE_SEED = 1337
UINT64_MAX = 2**64 - 1
_PAIR = struct.Struct("<QQ").pack


def root_key(adapter: str | None = None, cache_salt: str | None = None) -> bytes:
    """Returns the parent of a first block. Requests can share blocks only if they have the same adapter and
    salt."""
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
    data, size = _bytes_of(token_ids[len(keys) * block_size : num_blocks * block_size]), block_size * 4
    for start in range(0, len(data), size):
        hasher = blake2b(parent, digest_size=KEY_SIZE, person=b"shoal-block")
        hasher.update(data[start : start + size])
        parent = hasher.digest()
        keys.append(parent)


def keys_with_tail(keys: list[bytes], root: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    """Returns the keys of all blocks of `token_ids`, with a tail's key last. `keys` has the keys of the full
    blocks already, and maybe more."""
    num_full = len(token_ids) // block_size
    tail = token_ids[num_full * block_size :]
    if not tail:
        return keys[:num_full]
    parent = keys[num_full - 1] if num_full else root
    hasher = blake2b(parent, digest_size=KEY_SIZE, person=b"shoal-tail")
    hasher.update(_bytes_of(tail))
    return [*keys[:num_full], hasher.digest()]


def group_key(key: bytes, group: int) -> bytes:
    """Returns the key of a layer group's block that ends where the chain's block with this key does
    (kv/groups.py). Group 0 has the chain's keys."""
    return key if group == 0 else key[:-1] + bytes((key[-1] ^ group,))


def part_key(key: bytes, part: int) -> bytes:
    """Returns the key of a part of a snapshot of states, which was taken at the end of the chain's block with
    this key (kv/snapshots.py)."""
    number = int.from_bytes(key[-3:-1], "big") ^ (part + 1)
    return key[:-3] + number.to_bytes(2, "big") + bytes((key[-1] ^ 0xFF,))


def common_length(a: list[int], b: list[int]) -> int:
    """Returns the length of the common prefix of two lists."""
    start, length, end = 0, 16, min(len(a), len(b))
    while start < end and a[start : min(start + length, end)] == b[start : min(start + length, end)]:
        start, length = start + length, 2 * length
    start, end = min(start, end), min(start + length, end)
    while end - start > 1:  # the first difference is in [start, end)
        middle = (start + end) // 2
        if a[start:middle] == b[start:middle]:
            start = middle
        else:
            end = middle
    return start


def block_name(key: bytes) -> int:
    """Returns the name of a block in events: the last 64 bits of its key, as vLLM cuts its hashes to
    integers."""
    return int.from_bytes(key[-8:], "big")


def wire_seed(adapter: str | None = None, cache_salt: str | None = None) -> int:
    """Returns the seed of a request's block hashes. None and the empty text give the same seed."""
    seed = WIRE_SEED
    for part, own_seed in ((adapter, 0), (cache_salt, 1)):
        if part:
            seed += xxh3_64_intdigest(part.encode("utf-8", "surrogatepass"), own_seed)
    return seed & UINT64_MAX


def block_hashes(token_ids: Sequence[int], block_size: int, seed: int = WIRE_SEED) -> list[int]:
    """Returns one hash for each full block, by itself: xxh3-64 over its tokens as little-endian uint32."""
    data = _bytes_of(token_ids[: len(token_ids) // block_size * block_size])
    blocks = struct.iter_unpack(f"{block_size * 4}s", data)  # a third quicker than slices
    return [xxh3_64_intdigest(block, seed) for (block,) in blocks]


def sequence_hashes(hashes: Iterable[int]) -> list[int]:
    """Returns one hash for each block and all before it: for the first block its own hash, and then xxh3-64
    over (the hash before, the block's own hash)."""
    chain: list[int] = []
    before = None
    for own in hashes:  # hundreds of blocks per prompt, so chain_hash is inlined here
        before = own if before is None else xxh3_64_intdigest(_PAIR(before, own), WIRE_SEED)
        chain.append(before)
    return chain


def chains_by_size(
    token_ids: Sequence[int],
    block_sizes: Iterable[int],
    *,
    adapter: str | None = None,
    cache_salt: str | None = None,
) -> dict[int, list[int]]:
    """Returns the sequence hashes of a prompt for each of these block sizes."""
    seed = wire_seed(adapter, cache_salt)
    return {size: sequence_hashes(block_hashes(token_ids, size, seed)) for size in block_sizes}


def chain_hash(parent: int, own: int) -> int:
    """Returns the sequence hash of a block with hash `own` after a block with sequence hash `parent`."""
    return xxh3_64_intdigest(_PAIR(parent, own), WIRE_SEED)


def _bytes_of(token_ids: Sequence[int]) -> memoryview:
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return memoryview(tokens).cast("B")

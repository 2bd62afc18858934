"""Blocks for tests of the tiers: what block i of the chain is, and the bytes it has."""

import os
import random
from array import array

from shoal.hashing import extend_keys, root_key
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.tiers.block_file import BlockMeta
from tests.waiting import eventually

SIZE = 4  # tokens
BYTES = 512
SPEC = CacheSpec(
    Layout.WHOLE_BLOCKS, num_layers=2, num_heads=1, head_dim=16, dtype="float16", block_size=SIZE
)
MODEL, OTHER_MODEL = b"m" * 16, b"o" * 16


def chain(n, seed=0, extra=(None, None), spec=SPEC):
    """n blocks of one sequence."""
    tokens = [random.Random(f"{seed}-{i}").randrange(1 << 20) for i in range(n * spec.block_size)]
    keys: list[bytes] = []
    extend_keys(keys, root_key(*extra), tokens, spec.block_size)
    size = spec.block_size
    return [
        BlockMeta(key, keys[i - 1] if i else None, array("I", tokens[i * size : (i + 1) * size]), extra)
        for i, key in enumerate(keys)
    ]


def content(meta, spec=SPEC):
    return random.Random(meta.key).randbytes(spec.block_bytes)


def keys_of(metas):
    return [meta.key for meta in metas]


def write(tier, metas):
    """Returns for each block whether the tier has taken it."""
    return [tier.write(meta, memoryview(content(meta, tier.spec))).result(20) for meta in metas]


def settle(tier, patience_s=20):
    """Returns once all reads and writes of the tier have ended."""
    eventually(lambda: tier.stats().pending == 0, lambda: f"{tier.stats().pending} are left", patience_s)


def read(tier, meta):
    """Returns the block, or None if the tier lacks it."""
    into = bytearray(os.urandom(tier.spec.block_bytes))
    return bytes(into) if tier.read(meta, memoryview(into)).result(20) else None

"""Chooses into how many programs the Triton backend (triton.py) cuts the keys of one task, so that the GPU is
full and no program has too few keys. Pure functions of sizes: a captured graph gets the same number each
time."""

from __future__ import annotations

PROGRAMS_PER_SM = 4  # as many decode programs run on an SM at once,
WIDE_PROGRAMS_PER_SM = 2  # and as many of wide heads, which have more than WIDE numbers
WIDE = 256
# A decode batch that just fills the GPU is cut into this many waves, so that unequal lengths even out.
WAVES = 3
# A batch with this many times as many (sequence, kv head) pairs as programs at once is large. It is not cut,
# which saves the weighing of partial results,
LARGE = 1.4
CUT = 8  # except for this many of the longest sequences, if the others would wait for them:
CUT_SPLITS = 4  # those are cut into this many splits.
CAPTURED_WAVES = 4  # waves of decode programs in a captured mixed step; most leave at once
# The longest sequence gives each program at least this many keys: many programs for few keys cost more than
# they bring.
FULL_SPLIT = 160
WIDE_FULL_SPLIT = 320
SHARE_FROM = 9  # the fewest decodes for which a shared prefix is worth one more launch a layer
PREFIX_PROGRAMS_PER_SM = 2
MAX_PARTS = 16  # the most parts of a shared prefix; each is one more result to weigh


def decode_splits(
    num_seqs: int, num_kv_heads: int, max_kv_len: int, num_sms: int, head_dim: int = 128
) -> int:
    """Into how many programs the keys of one (sequence, kv head) are cut. The sizes that decide are fixed in
    a captured graph too."""
    tasks, slots = num_seqs * num_kv_heads, programs_at_once(num_sms, head_dim)
    if is_large(num_seqs, num_kv_heads, num_sms, head_dim):
        splits = 1
    else:
        # For few tasks there is one full wave of equal programs.
        splits = slots // tasks if 2 * tasks <= slots else -(-WAVES * slots // tasks)
    return max(1, min(splits, full_splits(max_kv_len, head_dim)))


def programs_at_once(num_sms: int, head_dim: int) -> int:
    return num_sms * (PROGRAMS_PER_SM if head_dim <= WIDE else WIDE_PROGRAMS_PER_SM)


def full_splits(max_kv_len: int, head_dim: int) -> int:
    return -(-max_kv_len // (FULL_SPLIT if head_dim <= WIDE else WIDE_FULL_SPLIT))


def is_large(num_seqs: int, num_kv_heads: int, num_sms: int, head_dim: int = 128) -> bool:
    return num_seqs >= CUT and num_seqs * num_kv_heads >= LARGE * programs_at_once(num_sms, head_dim)


def captured_splits(
    num_seqs: int, num_kv_heads: int, max_kv_len: int, num_sms: int, head_dim: int = 128
) -> int:
    """Into how many programs the keys of one (sequence, kv head) are cut in a captured mixed step. Most
    places for decodes are empty there. Programs of empty places end at once, so there may be several
    waves."""
    splits = CAPTURED_WAVES * programs_at_once(num_sms, head_dim) // (num_seqs * num_kv_heads)
    return max(1, min(splits, full_splits(max_kv_len, head_dim)))


def prefix_parts(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Into how many parts a shared prefix may be cut. The workspace has room for as many parts of every
    sequence, so a large batch gets few, although the parts of a few sequences then do not fill the GPU."""
    if num_seqs < SHARE_FROM:
        return 0
    tiles = num_kv_heads * -(-num_seqs // 32)
    return min(MAX_PARTS, max(8, PREFIX_PROGRAMS_PER_SM * num_sms // tiles))


def prefill_splits(num_tasks: int, num_sms: int) -> int:
    """Into how many programs the keys of a tile of prefills are cut, if there may be `num_tasks` tiles over
    all kv heads. Few of these are there usually, and the programs of the others leave at once."""
    return max(1, num_sms * PROGRAMS_PER_SM // num_tasks)

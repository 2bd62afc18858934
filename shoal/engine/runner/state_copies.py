"""`pack_copies`: a step's copies of states as int32s. batch.py sends them, state_rows.py carries them out."""

from __future__ import annotations

import numpy as np

from shoal.engine.scheduling.part_state import StateCopies

# Pairs are padded to a multiple of as many, so that all sections begin at multiples of 16 bytes.
ALIGNMENT = 4


def pack_copies(copies: StateCopies) -> tuple[np.ndarray, int]:
    """Returns the ints of a step's copies, and how many of them, the first ones, are for restores. Restores,
    and then saves, have the places written to and the places read from; with drafts, saves also have the ends
    at which they are due. The place of a row's part, which has a block's bytes, is its number among the parts
    of all rows."""
    restores, saves = _pairs(copies.restores), _pairs(copies.saves)
    ends = []
    if copies.ends is not None:
        size = len(copies.saves[0][1]) if copies.saves else 0
        ends = [np.zeros(len(saves[0]), np.int32)]
        ends[0][: size * len(copies.ends)] = np.repeat(np.array(copies.ends, np.int32), size)
    packed = np.concatenate((*restores, *saves[::-1], *ends))
    return packed, 2 * len(restores[0])


def _pairs(copies: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts of rows, and the block that belongs to each. Padding has -1 in both."""
    size = len(copies[0][1]) if copies else 0
    padded = -(-size * len(copies) // ALIGNMENT) * ALIGNMENT
    parts, blocks = np.full((2, padded), -1, np.int32)
    for i, (row, own) in enumerate(copies):
        parts[i * size : (i + 1) * size] = np.arange(row * size, (row + 1) * size)
        blocks[i * size : (i + 1) * size] = own
    return parts, blocks

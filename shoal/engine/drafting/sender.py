"""`DraftSender`: sends to the device what speculation must know about rows (device.py): how many tokens a
decode may have, and the tokens of sequences in which drafts are looked up."""

from __future__ import annotations

import numpy as np

from shoal.engine.scheduling.scheduler import StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.state import Field, StateLayout


class DraftSender:
    """Sends what a device with drafts must know about rows. It must see every plan, in order."""

    def __init__(self, layout: StateLayout, history_length: int) -> None:
        self._layout, self._length = layout, history_length
        # The sequence whose tokens each row has, and at which of its admissions they were sent.
        self._owner: list[tuple[Sequence, int] | None] = [None] * layout.num_rows
        self._most = [1] * layout.num_rows  # the tokens of each row's next decode, at most
        self._rooms = [0] * layout.num_rows  # the tokens for which each row has blocks

    def update(self, plan: StepPlan, addresses: list[int], values: list[int]) -> np.ndarray:
        """Adds the differences of the rows of this step. Returns the tokens of sequences that have just got
        their rows, as write_histories takes them."""
        parts = []
        for i, entry in enumerate(plan.scheduled):
            seq, row = entry.seq, entry.row
            if self._owner[row] != (seq, seq.num_admissions):
                self._owner[row], self._most[row] = (seq, seq.num_admissions), 1
                self._rooms[row] = seq.room  # sent with the row
                first = max(0, len(seq.token_ids) - self._length)
                parts += [[row, first, len(seq.token_ids) - first], seq.token_ids[first:]]
            if self._rooms[row] != seq.room:
                self._rooms[row] = seq.room
                addresses.append(self._layout.row_address(row) + Field.ROOM)
                values.append(seq.room)
            if i < plan.num_decodes and self._most[row] != entry.num_tokens:
                self._most[row] = entry.num_tokens
                addresses.append(self._layout.row_address(row) + Field.MAX_TOKENS)
                values.append(entry.num_tokens)
        return np.array([token for part in parts for token in part], np.int32)

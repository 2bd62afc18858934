"""`DraftSender`: sends to the device what speculation must know about rows (device.py): how many tokens a
decode may have, and the tokens in which a sequence's drafts are looked up: its own, and before them tokens of
earlier answers (earlier_answers.py)."""

from __future__ import annotations

import numpy as np

from shoal.engine.drafting.earlier_answers import EarlierAnswers
from shoal.engine.scheduling.scheduler import StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.drafting.draft_rows import DRAFTS, EARLIER
from shoal.kernels.state import Field, StateLayout


class DraftSender:
    """A part of BatchBuilder, which calls `row_changed` for the rows of a step that it updates, and then
    `finish`."""

    def __init__(
        self, layout: StateLayout, history_length: int, answers: EarlierAnswers | None = None
    ) -> None:
        """`answers`: None: drafts are looked up in a sequence's own tokens alone."""
        self._layout, self._length, self._answers = layout, history_length, answers
        self._most = [1] * layout.num_rows  # the tokens of each row's next decode, at most
        self._histories: list[int] = []  # this step's, as write_histories takes them

    def row_changed(
        self, seq: Sequence, row: int, is_new: bool, addresses: list[int], values: list[int]
    ) -> None:
        """Adds what a row needs with which a sequence begins (`is_new`), or whose sequence got blocks."""
        if is_new:  # its fields are sent anyway
            self._most[row] = 1
            tokens = seq.token_ids
            if self._answers is not None:
                prompt = [] if seq.request.embed else tokens[: seq.num_prompt_tokens]
                earlier = self._answers.tokens_for(seq.root, prompt)
                tokens = earlier + tokens
                self._histories += [row, EARLIER, 1, len(earlier)]
            first = max(0, len(tokens) - self._length)
            self._histories += [row, first, len(tokens) - first, *tokens[first:]]
        else:
            addresses.append(self._layout.row_address(row) + Field.ROOM)
            values.append(seq.room)

    def finish(self, plan: StepPlan, addresses: list[int], values: list[int]) -> np.ndarray:
        """Adds the most tokens of each decode, where it has changed; a step with places for one token of each
        needs none. Returns the histories of new rows, and the drafts that grammars have cut."""
        for entry in plan.scheduled[: plan.num_decodes if plan.queries > 1 else 0]:
            history, num_drafts = entry.seq.drafts, entry.num_tokens - 1
            if entry.seq.lockstep and num_drafts and history is not None:
                self._histories += [entry.row, DRAFTS, num_drafts, *history.drafts[:num_drafts]]
                addresses.append(self._layout.row_address(entry.row) + Field.NUM_DRAFTS)
                values.append(num_drafts)
            if self._most[entry.row] != entry.num_tokens:
                self._most[entry.row] = entry.num_tokens
                addresses.append(self._layout.row_address(entry.row) + Field.MAX_TOKENS)
                values.append(entry.num_tokens)
        histories, self._histories = self._histories, []
        return np.array(histories, np.int32)

"""Checks of the scheduler's queues and sequences, for tests and idle moments. Each raises AssertionError."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from shoal.engine.scheduling.sequence import Sequence, SequenceStatus

WAITING, FETCHING, PREFILL = SequenceStatus.WAITING, SequenceStatus.FETCHING, SequenceStatus.PREFILL


def check_queues(
    waiting: list[Sequence],
    running: list[Sequence],
    sequences: Mapping[str, Sequence],
    free_rows: list[int],
    num_rows: int,
) -> None:
    """Checks that queues are in turn and have all sequences, and that rows are given once."""
    rows = [seq.row for seq in running]
    assert sorted(rows + free_rows) == list(range(num_rows)), "rows lost or given twice"
    for queue in (waiting, running):
        assert all(a.turn < b.turn for a, b in pairwise(queue)), "a queue is out of turn"
    assert {id(s) for s in sequences.values()} == {id(s) for s in (*waiting, *running)}, "sequences lost"
    for seq in waiting:
        assert seq.status is WAITING and seq.row == -1 and not seq.tables and seq.num_computed == 0, (
            "waiting, but not empty-handed"
        )


def check_progress(running: list[Sequence], block_size: int, has_drafts: bool) -> None:
    """Checks the tokens and blocks of running sequences. `block_size`: of the largest blocks."""
    for seq in running:
        assert (
            len(seq.token_ids) <= seq.num_tokens <= seq.max_num_tokens and seq.num_computed < seq.num_tokens
        ), "tokens miscounted"
        assert (seq.status is FETCHING) == (seq.fetch is not None), "a fetch that no sequence waits for"
        assert not seq.promised or seq.status in (FETCHING, PREFILL), "a promise that is not kept"
        if seq.status in (FETCHING, PREFILL):
            assert seq.num_pending == 0, "a prefill that has sampled"
        else:
            assert seq.status is SequenceStatus.DECODE and seq.num_computed == seq.num_tokens - 1, (
                "a decode with more than one token to compute"
            )
            # A decode of several tokens may have got blocks for more of them than it sampled.
            surplus = seq.room - seq.num_computed
            assert surplus >= 0 and (surplus < block_size or has_drafts), "blocks and computed tokens differ"

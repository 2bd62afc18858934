"""Speculation's operations in C and in Triton against their oracle, and the oracle against what it says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from shoal.kernels.cpu import drafting as cpu_drafting
from shoal.kernels.drafting import reference, triton_ops
from shoal.kernels.drafting.draft_rows import (
    DRAFTS,
    EARLIER,
    REPORT_SIZE,
    DraftRows,
    LookUp,
    Report,
    SuffixLookUp,
)
from shoal.kernels.state import Field, StateLayout

ROWS, MOST, LENGTH = 9, 4, 37


class Rows:
    """State rows of sequences whose tokens are `tokens`, each with drafts."""

    def __init__(self, seed: int) -> None:
        r = random.Random(seed)
        layout = StateLayout(ROWS, 4)
        self.state = torch.zeros(layout.size, dtype=torch.int32)
        self.table = layout.table(self.state)
        self.drafts = DraftRows(
            torch.randint(0, 4, (ROWS + 1, MOST), dtype=torch.int32),
            torch.zeros(ROWS + 1, LENGTH, dtype=torch.int32),
            torch.zeros(ROWS + 1, dtype=torch.int32),
        )
        self.tokens = [[r.randrange(4) for _ in range(r.randint(1, 90))] for _ in range(ROWS)]
        self.earlier = [[r.randrange(4) for _ in range(r.choice((0, 0, 9, 30)))] for _ in range(ROWS)]
        entries: list[int] = []
        for row, tokens in enumerate(self.tokens):
            history = self.earlier[row] + tokens
            first = max(0, len(history) - LENGTH)
            entries += [row, EARLIER, 1, len(self.earlier[row])]
            entries += [row, first, len(history) - first, *history[first:]]
            self.table[row, Field.TOKEN] = tokens[-1]
            self.table[row, Field.POSITION] = len(tokens) - 1
            self.table[row, Field.MAX_TOKENS] = r.randint(1, MOST + 1)
            self.table[row, Field.NUM_DRAFTS] = r.randint(0, MOST)
        reference.write_histories(torch.tensor(entries, dtype=torch.int32), self.drafts)

    def all(self) -> list[torch.Tensor]:
        return [self.table, self.drafts.drafts_RK, self.drafts.history_RL, self.drafts.earlier_R]


def ints(*shape: int, fill: int = -7) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.int32)


@pytest.mark.parametrize(
    "parameters",
    [LookUp(MOST, 1, 3), SuffixLookUp(MOST, 24, 1.0, 0.1), SuffixLookUp(MOST, 6, 2.5, 0.4)],
    ids=["ngram", "suffix", "short suffix"],
)
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize(
    ("fast", "seed"),
    [*((cpu_drafting, seed) for seed in range(4)), (triton_ops, 4)],
    ids=["c 0", "c 1", "c 2", "c 3", "triton"],
)
def test_a_step_is_the_references(
    fast: Any, seed: int, queries: int, parameters: LookUp | SuffixLookUp
) -> None:
    """Verifies, accepts and looks up, three steps one after the other, with padded rows among the decodes and
    prefills behind them. Other samples after the look-up are accepted as if they were the first."""
    print("seed", seed)
    r, found = random.Random(seed), []
    order = r.sample(range(ROWS), ROWS)
    decodes, prefills = [*order[:5], -1], order[5:8]
    for ops in (reference, fast):
        torch.manual_seed(seed)
        rows, outs = Rows(seed), []
        for _ in range(3):
            rows_B = torch.tensor(decodes, dtype=torch.int32)
            size = len(decodes) * queries
            token_ids, positions, rows_T = ints(size), ints(size), ints(size)
            kv_lens, starts, verified, unverified, pending = (ints(len(decodes)) for _ in range(5))
            begun = token_ids, positions, rows_T, kv_lens, starts, verified, unverified, pending
            ops.begin_verification(rows_B, rows.table, rows.drafts, *begun)
            outs += begun
            rows_S = torch.tensor([*decodes, *prefills], dtype=torch.int32)
            starts_S = torch.cat((starts, rows.table[prefills, Field.POSITION]))
            report = ints(len(rows_S), REPORT_SIZE + queries + MOST)
            for _ in range(2):
                sampled = torch.randint(0, 4, (size + len(prefills),), dtype=torch.int32)
                ops.accept(
                    *(sampled, token_ids, rows_S, starts_S, verified, unverified),
                    *(len(decodes), queries, rows.table, rows.drafts, report),
                )
                ops.look_up(rows_S, rows.table, rows.drafts, parameters, report)
                outs += [report.clone(), *(x.clone() for x in rows.all())]
        found.append(outs)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", range(3))
def test_accepted_drafts_are_those_that_were_sampled(seed: int) -> None:
    print("seed", seed)
    rows, queries = Rows(seed), MOST + 1
    rows_B = torch.arange(ROWS, dtype=torch.int32)
    size = ROWS * queries
    token_ids, positions, rows_T = ints(size), ints(size), ints(size)
    kv_lens, starts, verified, unverified, pending = (ints(ROWS) for _ in range(5))
    cpu_drafting.begin_verification(
        *(rows_B, rows.table, rows.drafts, token_ids, positions, rows_T),
        *(kv_lens, starts, verified, unverified, pending),
    )
    sampled = torch.randint(0, 2, (size,), dtype=torch.int32)
    report = ints(ROWS, REPORT_SIZE + queries + MOST)
    before = rows.table.clone()
    cpu_drafting.accept(
        *(sampled, token_ids, rows_B, starts, verified, unverified),
        *(ROWS, queries, rows.table, rows.drafts, report),
    )
    for row in range(ROWS):
        most = min(int(before[row, Field.MAX_TOKENS]), queries) - 1
        num = min(int(before[row, Field.NUM_DRAFTS]), most)
        drafts = rows.drafts.drafts_RK[row, :num].tolist()
        own = slice((row + 1) * queries - 1 - num, (row + 1) * queries)
        assert token_ids[own].tolist() == [rows.tokens[row][-1], *drafts]
        assert positions[own].tolist() == list(range(len(rows.tokens[row]) - 1, len(rows.tokens[row]) + num))
        drawn = sampled[own].tolist()
        count = next((i + 1 for i in range(num) if drawn[i] != drafts[i]), num + 1)
        assert report[row, Report.NUM_TOKENS] == count and report[row, Report.NUM_VERIFIED] == num
        assert report[row, REPORT_SIZE : REPORT_SIZE + count].tolist() == drawn[:count]
        tokens = rows.earlier[row] + rows.tokens[row] + drawn[:count]
        assert rows.table[row, Field.TOKEN] == tokens[-1]
        assert rows.table[row, Field.POSITION] == len(tokens) - 1 - len(rows.earlier[row])
        kept = range(max(0, len(tokens) - LENGTH), len(tokens))
        assert [int(rows.drafts.history_RL[row, p % LENGTH]) for p in kept] == [tokens[p] for p in kept]


@pytest.mark.parametrize(
    ("tokens", "least", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 1, [9, 1, 2, 3]),  # the longest suffix
        ([3, 5, 1, 2, 3, 9, 8, 2, 3], 1, [9, 8, 2, 3]),
        ([7, 1, 7, 2, 7], 1, [1, 7, 2, 7]),  # the earliest of equals
        ([1, 2, 3], 1, []),
        ([5, 6, 5], 2, []),  # too short a match
        ([4, 4, 4], 1, [4]),
        ([4], 1, []),
    ],
)
def test_a_look_up_finds_what_followed_the_longest_suffix(
    tokens: list[int], least: int, drafts: list[int]
) -> None:
    assert reference.look_up_tokens(tokens, LookUp(MOST, least, 3)) == drafts


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),  # three tokens match, so three are drafted
        ([5, 1, 7, 1, 6, 1, 6, 5, 1], [7, 1]),  # what followed two tokens is likelier
        ([1, 6, 2, 1, 6, 3, 1, 7, 4, 1], [6]),
        ([1, 2, 3], []),
    ],
)
def test_a_look_up_that_counts_follows_what_is_most_frequent(tokens: list[int], drafts: list[int]) -> None:
    assert reference.look_up_suffix(tokens, SuffixLookUp(MOST, 24, 1.0, 0.1)) == drafts


@pytest.mark.parametrize(
    "parameters", [LookUp(8, 2, 8), SuffixLookUp(8, 24, 1.0, 0.1)], ids=["ngram", "suffix"]
)
def test_a_look_up_in_a_long_history_is_that_in_c(parameters: LookUp | SuffixLookUp) -> None:
    """There are more places than a program compares at once, and more than count."""
    length, ends, earlier = 5000, [4999, 7777], [0, 700]
    found = []
    for ops in (cpu_drafting, triton_ops):
        r = random.Random(3)
        table = torch.zeros(3, 32, dtype=torch.int32)
        drafts = DraftRows(ints(3, 8), torch.zeros(3, length, dtype=torch.int32), ints(3, fill=0))
        passage = [r.randrange(8) for _ in range(30)]
        entries: list[int] = []
        for row, end in enumerate(ends):
            tokens = [r.randrange(8) for _ in range(end)]
            tokens[2500:2530] = passage
            tokens[-12:] = passage[:12]
            entries += [row, max(0, end - length), min(end, length), *tokens[-length:]]
            entries += [row, EARLIER, 1, earlier[row]]
            table[row, Field.POSITION] = end - 1 - earlier[row]
        report = ints(2, REPORT_SIZE + 1 + 8)
        entries[:0] = [2, DRAFTS, 3, 5, 6, 7]
        ops.write_histories(torch.tensor(entries, dtype=torch.int32), drafts)
        assert drafts.drafts_RK[2].tolist() == [5, 6, 7, *[-7] * 5]
        ops.look_up(torch.arange(2, dtype=torch.int32), table, drafts, parameters, report)
        if isinstance(parameters, LookUp):
            assert report[:, Report.NUM_DRAFTS].tolist() == [8, 8]
            assert drafts.drafts_RK[0].tolist() == passage[12:20]
        found.append((table, report, drafts.drafts_RK, drafts.history_RL))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)

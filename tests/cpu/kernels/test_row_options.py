"""Penalties, bias, allowed tokens, stops and bad words mean what vLLM's do, by the reference and by the Triton
kernels (interpreted)."""

from __future__ import annotations

import math
import random

import pytest
import torch

from shoal.kernels import triton_ops
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.sampling.row_options import Option, RowOptions, WholeRow, pack_options
from shoal.kernels.state import StateLayout

BLOCK_SIZE, NUM_ROWS, MAX_BLOCKS = 4, 6, 400
NEUTRAL = dict(penalties=(1.0, 0.0, 0.0), num_prompt=0, min_end=0, stops=(), allowed=(), bias={}, words=())
by_each = pytest.mark.parametrize("ops", [cpu_ops, triton_ops], ids=["cpu", "triton"])


class Rows:
    """State rows whose sequences have these tokens, in blocks that lie anywhere. Every other block is full of
    token 1."""

    def __init__(self, seed: int = 0, device: str = "cpu", vocab_size: int = 8000) -> None:
        layout = StateLayout(NUM_ROWS, MAX_BLOCKS)
        [self.tables] = layout.block_tables(torch.zeros(layout.size, dtype=torch.int32, device=device))
        self.free = random.Random(seed).sample(range(3000), 3000)
        history = torch.ones(3000, BLOCK_SIZE, dtype=torch.int32, device=device)
        fields = torch.zeros(NUM_ROWS + 1, len(Option), dtype=torch.int32, device=device)
        addresses = torch.zeros(NUM_ROWS + 1, dtype=torch.int64, device=device)
        counts = torch.zeros(8, vocab_size, dtype=torch.int32, device=device)
        self.options, self.device = RowOptions(fields, addresses, self.tables, history, counts), device

    def add(self, row: int, tokens: list[int], **changes) -> None:
        blocks = torch.tensor([self.free.pop() for _ in range(-(-(len(tokens) + 1) // BLOCK_SIZE))])
        self.tables[row, : len(blocks)] = blocks.int()
        padded = torch.zeros(len(blocks) * BLOCK_SIZE, dtype=torch.int32)
        padded[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.options.write_tokens(blocks.to(self.device), padded.to(self.device))
        packed = pack_options(**NEUTRAL | changes)
        fields, lists = (torch.from_numpy(x).to(self.device) for x in packed)
        at = torch.tensor([[row], [lists.data_ptr() if len(lists) else 0]], device=self.device)
        self.options.start({row: lists}, fields.unsqueeze(0), *at)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def penalized(logits_V, prompt, output, repetition, presence, frequency):
    """vLLM's formula, for every token of the vocabulary."""
    prompt_V, counts_V = torch.zeros(len(logits_V), dtype=torch.bool), torch.zeros(len(logits_V))
    prompt_V[prompt] = True
    for token in output:
        counts_V[token] += 1
    seen_V = prompt_V | (counts_V > 0)
    scaled_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
    return torch.where(seen_V, scaled_V, logits_V) - frequency * counts_V - presence * (counts_V > 0)


@by_each
def test_penalties_by_hand(ops) -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0, -math.inf]])
    rows = Rows()
    rows.add(2, [0, 1, 4, 1, 2, 1, 1], penalties=(2.0, 0.5, 0.25), num_prompt=3)
    ops.penalize(logits, ints(2), ints(6), rows.options)
    assert logits[0].tolist() == [1.0, -4.0 - 0.75 - 0.5, 0.5 - 0.25 - 0.5, 4.0, -math.inf]


@by_each
def test_neutral_options_and_padding_change_nothing(ops) -> None:
    logits = torch.randn(3, 17, generator=torch.Generator().manual_seed(1))
    before, rows = logits.clone(), Rows()
    rows.add(4, [3, 3, 5], num_prompt=2)
    at = ints(-1, 4, -1), ints(0, 2, 0)
    ops.keep_allowed(logits, at[0], rows.options)
    ops.add_bias(logits, at[0], rows.options)
    for change in (ops.penalize, ops.ban_stops, ops.ban_words):
        change(logits, *at, rows.options)
    assert torch.equal(logits, before)


@by_each
@pytest.mark.parametrize("vocab_size, seed", [(9, 0), (2500, 1), (5000, 2)])
def test_penalties_equal_the_formula_over_the_whole_vocabulary(ops, vocab_size, seed) -> None:
    print("seed", seed)
    dice, rows = random.Random(seed), Rows(seed)
    torch.manual_seed(seed)
    logits = torch.randn(4, vocab_size) * 3
    chosen = dice.sample(range(NUM_ROWS), 4)
    wanted, ends = [], []
    for k, row in enumerate(chosen):
        prompt, output = (
            [dice.randrange(vocab_size) for _ in range(n)] for n in (dice.choice((1, 700)), 5 * k)
        )
        strengths = dice.choice((1.0, 1.3)), dice.choice((0.0, 0.5)), dice.choice((0.0, -0.25))
        strengths = tuple(torch.tensor(strengths).tolist())  # as float32 has them
        # Tokens after the end are there, too, and must not count.
        rows.add(row, prompt + output + [0, 1, 2], penalties=strengths, num_prompt=len(prompt))
        wanted.append(penalized(logits[k], prompt, output, *strengths))
        ends.append(len(prompt) + len(output) - 1)
    ops.penalize(logits, ints(*chosen), ints(*ends), rows.options)
    assert torch.equal(logits, torch.stack(wanted))
    assert not rows.options.counts_KV.any()


@by_each
@pytest.mark.parametrize("count", [1, 3, 1500])
def test_only_allowed_tokens_stay_possible(ops, count) -> None:
    logits, rows = torch.arange(8000.0).view(2, 4000), Rows()
    ids = random.Random(count).sample(range(4000), count)
    rows.add(5, [0], allowed=ids)
    rows.add(1, [0])
    before = logits.clone()
    ops.keep_allowed(logits, ints(5, 1), rows.options)
    assert sorted(logits[0].isfinite().nonzero().squeeze(1).tolist()) == sorted(ids)
    assert torch.equal(logits[0, ids], before[0, ids]) and torch.equal(logits[1], before[1])
    assert not rows.options.counts_KV.any()


@by_each
def test_every_bias_is_added_once(ops) -> None:
    logits, rows = torch.zeros(3, 3000), Rows()
    rows.add(0, [0], bias={i: i / 8 for i in range(2000)})
    rows.add(3, [0], bias={1: 1.5, 2: -3.0})
    ops.add_bias(logits, ints(3, -1, 0), rows.options)
    assert logits[0, :4].tolist() == [0.0, 1.5, -3.0, 0.0] and not logits[1].any()
    assert torch.equal(logits[2], torch.where(torch.arange(3000) < 2000, torch.arange(3000) / 8, 0.0))


@by_each
def test_stops_are_banned_until_the_answer_is_long_enough(ops) -> None:
    rows = Rows()
    rows.add(0, [7, 8, 9], stops=[2, 5], min_end=6, num_prompt=3)  # a prompt of 3 tokens, min_tokens=3
    for position in range(2, 8):
        logits = torch.zeros(1, 10)
        ops.ban_stops(logits, ints(0), ints(position), rows.options)
        banned = [2, 5] if position + 1 < 6 else []
        assert logits[0].isinf().nonzero().squeeze(1).tolist() == banned


@by_each
def test_a_bad_word_bans_its_last_token_where_the_answer_ends_with_the_others(ops) -> None:
    rows = Rows()
    words = [(4,), (1, 2), (1, 2, 3), (9, 1, 2, 5), (2, 6), (1, 7)]
    rows.add(2, [9, 1, 2], words=words, num_prompt=1)
    rows.add(3, [9, 1, 2], words=words, num_prompt=0)
    rows.add(4, [0, 0, 1], words=words, num_prompt=3)  # the prompt's tokens never count
    logits = torch.zeros(3, 12)
    ops.ban_words(logits, ints(2, 3, 4), ints(2, 2, 2), rows.options)
    found = [row.isinf().nonzero().squeeze(1).tolist() for row in logits]
    assert found == [[3, 4, 6], [3, 4, 5, 6], [4]]


@by_each
def test_many_bad_words_are_all_compared(ops) -> None:
    print("seed", 5)
    dice, rows = random.Random(5), Rows()
    output = [dice.randrange(3) for _ in range(30)]
    words = [tuple(dice.randrange(3) for _ in range(dice.randrange(1, 5))) + (10 + i,) for i in range(300)]
    rows.add(0, [1, 1, *output], words=words, num_prompt=2)
    logits = torch.zeros(1, 400)
    ops.ban_words(logits, ints(0), ints(31), rows.options)
    wanted = [word[-1] for word in words if tuple(output[31 - len(word) :]) == word[:-1]]
    assert wanted and logits[0].isinf().nonzero().squeeze(1).tolist() == wanted


@by_each
def test_a_sampled_token_counts_once_its_position_is_computed(ops) -> None:
    rows, sampled = Rows(), torch.zeros(7, dtype=torch.int32)
    rows.add(1, [5, 6, 7], penalties=(1.0, 1.0, 0.0), num_prompt=3)
    rows.add(2, [5, 6, 7])
    for position, before, token in ((2, 7, 11), (3, 11, 12), (4, 12, 11)):
        ops.store_tokens(ints(1, -1, 2), ints(position, 0, position), ints(before, 7, 7), rows.options)
        logits = torch.zeros(1, 20)
        ops.penalize(logits, ints(1), ints(position), rows.options)
        assert logits[0].nonzero().squeeze(1).tolist() == [11, 12][: position - 2]
        ops.put_samples(ints(3, -1, 0), ints(token, 9, 4), sampled)
        if position == 2:
            rows.tables[1, 1] = rows.free.pop()  # the block of position 4, which came with the step
        assert sampled.tolist() == [4, 0, 0, token, 0, 0, 0]
    assert rows.options.tokens(1, 5).tolist() == [5, 6, 7, 11, 12]


@by_each
def test_the_drafts_before_a_sample_count_for_it(ops) -> None:
    rows = Rows()
    rows.add(1, [5, 6, 7, 0, 0, 0], penalties=(1.0, 1.0, 0.0), num_prompt=3)
    for drafts in ([11, 12, 13], [14, 11]):  # the first is replaced after a step that rejected it
        own, positions = ints(*[1] * len(drafts)), ints(*range(3, 3 + len(drafts)))
        ops.store_tokens(own, positions, ints(*drafts), rows.options)
        logits = torch.zeros(len(drafts), 20)
        ops.penalize(logits, own, positions, rows.options)
        found = [row.nonzero().squeeze(1).tolist() for row in logits]
        assert found == [sorted(drafts[: i + 1]) for i in range(len(drafts))]


@by_each
def test_samples_are_located_among_those_of_the_step_and_padding_stays_padding(ops) -> None:
    rows, positions, tokens = ints(-1, 3, 3, 7), ints(-1, 8, 9, 4), ints(0, 21, 22, 23)
    out = torch.full((len(WholeRow), 5), -9, dtype=torch.int32)
    ops.locate_rows(ints(2, 1, 3, 0, -1), ints(1, 1, 0, 1, -1), rows, positions, tokens, out)
    found = {column: out[column].tolist() for column in WholeRow}
    assert found[WholeRow.SAMPLE] == [2, 1, 3, -1, -1]
    assert found[WholeRow.ROW] == [3, 3, 7, -1, -1]
    assert found[WholeRow.OPTIONS] == [3, 3, -1, -1, -1]
    assert found[WholeRow.POSITION][:3] == [9, 8, 4] and found[WholeRow.TOKEN][:3] == [22, 21, 23]


@by_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_taken_by_their_samples(ops, dtype) -> None:
    logits = torch.randn(5, 5003, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :5001]
    for out in (torch.zeros(3, 5001), torch.zeros(3, 5001, dtype=dtype)):
        ops.take_rows(logits, ints(4, -1, 0), out)
        assert torch.equal(out[[0, 2]], logits[[4, 0]].to(out.dtype))

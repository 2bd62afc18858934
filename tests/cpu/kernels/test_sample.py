"""Sampling: what the reference draws is what vLLM's parameters mean, and the Triton kernels (interpreted)
draw the same tokens."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from shoal.kernels import triton_ops
from shoal.kernels.sampling import reference
from shoal.kernels.state import Field, StateLayout, seed_words

GREEDY, PLAIN = (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)  # temperature, top_k, top_p, min_p
FILTERS = [
    (0.8, 3, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.3, 0, 1.0, 0.2),
    (0.7, 6, 0.8, 0.0),
    (1.5, 10, 0.9, 0.05),
    (1.0, 0, 0.9, 0.03),
    (1.0, 1000, 0.5, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.manual_seed(4321).initial_seed())


def make_table(params: list[tuple[float, int, float, float]], seeds: list[int]) -> torch.Tensor:
    layout = StateLayout(len(params), 5)
    table = layout.table(torch.zeros(layout.size, dtype=torch.int32))
    for row, ((temperature, top_k, top_p, min_p), request_seed) in enumerate(zip(params, seeds)):
        bits = [struct.unpack("i", struct.pack("f", x))[0] for x in (temperature, top_p, min_p)]
        table[row, Field.SEED_LOW], table[row, Field.SEED_HIGH] = seed_words(request_seed)
        (
            table[row, Field.TEMPERATURE],
            table[row, Field.TOP_K],
            table[row, Field.TOP_P],
            table[row, Field.MIN_P],
        ) = bits[0], top_k, *bits[1:]
    return table


def draw_many(
    logits_V: torch.Tensor, params: tuple[float, int, float, float], count: int, request_seed: int = 7
) -> torch.Tensor:
    """Tokens of one row at positions 1 .. count."""
    out = torch.zeros(count, dtype=torch.int32)
    rows, positions = torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    reference.sample(logits_V.expand(count, -1), rows, positions, make_table([params], [request_seed]), out)
    return out


def exact_distribution(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """By definition, token by token, in float64."""
    probs = (logits_V.double() / temperature).softmax(0)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    if top_k:
        probs = torch.tensor([p if (probs > p).sum() < top_k else 0.0 for p in probs], dtype=torch.float64)
    probs = probs / probs.sum()
    probs = torch.tensor([p if probs[probs > p].sum() < top_p else 0.0 for p in probs], dtype=torch.float64)
    return probs / probs.sum()


@pytest.mark.parametrize("params", [PLAIN, (0.6, 0, 1.0, 0.0), *FILTERS])
def test_draws_follow_the_exact_distribution(params: tuple[float, int, float, float]) -> None:
    logits = torch.randn(40) * 1.5
    logits[3] = -math.inf
    logits[10] = logits[11]
    count = 3000
    expected = exact_distribution(logits, *params) * count
    observed = torch.bincount(draw_many(logits, params, count), minlength=40)
    assert not observed[expected == 0].any(), "a token outside the filters was drawn"
    common = expected >= 5  # the chi-square statistic wants some weight in each cell; the rest is one cell
    observed_cells = torch.cat((observed[common], observed[~common].sum().view(1))).double()
    expected_cells = torch.cat((expected[common], expected[~common].sum().view(1)))
    used = expected_cells > 0
    chi_square = float(((observed_cells - expected_cells)[used] ** 2 / expected_cells[used]).sum())
    freedom = max(int(used.sum()) - 1, 1)
    # under 1 in 10,000 by chance
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4, (chi_square, freedom)


def test_seeds_and_positions_draw_independently() -> None:
    logits = torch.zeros(16)
    tokens = torch.stack(
        [draw_many(logits, PLAIN, 500, request_seed) for request_seed in (0, 1, 1 << 32, -1)]
    ).double()
    correlation = torch.corrcoef(torch.cat((tokens, tokens.roll(1, dims=1))))
    off_diagonal = correlation - torch.diag(correlation.diag())
    assert off_diagonal.abs().max() < 5 / math.sqrt(500)


def test_tail_of_the_noise_is_exponential() -> None:
    keys = reference.noise_keys(1, 2, 3)
    noise = reference.gumbel(*keys, torch.arange(1 << 21, dtype=torch.int32)).double()
    assert noise.isfinite().all() and noise.max() <= 32 * math.log(2.0) + 1e-4
    for at in (0.0, 2.0, 5.0, 8.0):
        expected = (1 << 21) * -math.expm1(-math.exp(-at))
        assert abs(int((noise > at).sum()) - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 99, 5000])
def test_triton_draws_the_reference_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    # the last two: no few groups
    params = [GREEDY, PLAIN, (0.6, 0, 1.0, 0.0), *FILTERS[:6], (1.0, 2000, 1.0, 0.0), (4.0, 0, 0.9, 0.0)]
    rows = torch.randperm(len(params), dtype=torch.int32)
    table = make_table(params, [int(x) for x in torch.randint(-(2**63), 2**63 - 1, (len(params),))])
    logits = (torch.randn(len(params), vocab_size + 3) * 3).to(dtype)[:, :vocab_size]
    if vocab_size > 1:
        logits[:, 1] = -math.inf
    assert_same_draws(logits, rows, torch.randint(0, 5000, (len(params),), dtype=torch.int32), table)


def assert_same_draws(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Tokens and state rows equal; returns the tokens."""
    results = []
    for ops in (reference, triton_ops):
        out, state = torch.full((len(rows),), -7, dtype=torch.int32), table.clone()
        ops.sample(logits, rows, positions, state, out)
        results.append((out, state))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    return results[0][0]


def test_padding_rows_draw_nothing_and_others_advance() -> None:
    table = make_table([GREEDY, PLAIN, PLAIN], [1, 2, 3])
    rows, positions = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([4, -1, 9], dtype=torch.int32)
    logits = torch.randn(3, 50)
    tokens = assert_same_draws(logits, rows, positions, table)
    assert tokens[1] == -7 and tokens[2] == logits[2].argmax()
    reference.sample(logits, rows, positions, table, tokens)
    assert table[:3, Field.POSITION].tolist() == [10, 0, 5] and table[:3, Field.TOKEN].tolist() == [
        tokens[2],
        0,
        tokens[0],
    ]


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [1500, 2900]] = logits[1, [0, 2999]] = 1.0
    tokens = assert_same_draws(
        logits, *(torch.arange(2, dtype=torch.int32) for _ in range(2)), make_table([GREEDY] * 2, [0, 0])
    )
    assert tokens.tolist() == [1500, 0]


@pytest.mark.parametrize("params", [(1.0, 2, 1.0, 0.0), (1.0, 0, 0.4, 0.0), (1.0, 0, 1.0, 1.0)])
def test_ties_with_the_threshold_are_kept(params: tuple[float, int, float, float]) -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0])
    assert draw_many(logits, params, 100).unique().tolist() == [1, 2, 4]
    rows = torch.zeros(8, dtype=torch.int32)
    assert_same_draws(
        logits.expand(8, -1), rows, torch.full((8,), 5, dtype=torch.int32), make_table([params], [3])
    )


def test_a_row_with_one_possible_token_draws_it() -> None:
    logits = torch.full((4, 200), -math.inf)
    logits[:, 123] = -50.0
    params = [GREEDY, PLAIN, FILTERS[3], FILTERS[5]]
    tokens = assert_same_draws(
        logits, *(torch.arange(4, dtype=torch.int32) for _ in range(2)), make_table(params, [1, 2, 3, 4])
    )
    assert tokens.tolist() == [123] * 4


def test_a_draw_does_not_depend_on_the_batch() -> None:
    params, logits = [PLAIN, FILTERS[3], FILTERS[5]], torch.randn(20, 3000)
    table = make_table(params, [5, 6, 7])
    alone, together = torch.zeros(1, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    rows, positions = torch.full((20,), -1, dtype=torch.int32), torch.arange(20, dtype=torch.int32)
    rows[[3, 11, 19]] = torch.arange(3, dtype=torch.int32)
    triton_ops.sample(logits, rows, positions, table, together)  # in large tiles
    for s in (3, 11, 19):
        triton_ops.sample(
            logits[s : s + 1], rows[s : s + 1], positions[s : s + 1], table, alone
        )  # in small tiles
        assert alone[0] == together[s]


def test_float32_copies_of_half_logits_draw_the_same() -> None:
    """Sampling again outside the graph, from float32, gives the graph's tokens."""
    logits = torch.randn(3, 4000).half()
    rows, table = torch.arange(3, dtype=torch.int32), make_table([PLAIN, FILTERS[3], FILTERS[1]], [5, 6, 7])
    assert torch.equal(
        assert_same_draws(logits, rows, rows, table), assert_same_draws(logits.float(), rows, rows, table)
    )

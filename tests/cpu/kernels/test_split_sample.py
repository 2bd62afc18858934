"""Draws from logits that lie split over ranks: the tokens that one rank draws from whole rows, by the
reference and by the Triton kernels (interpreted)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from shoal.errors import ConfigError
from shoal.kernels import triton_ops
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.sampling import reference
from shoal.kernels.sampling.split_sample import PARTS, needs_whole_row
from shoal.kernels.state import Field
from shoal.kinds.rope import RopeConfig
from shoal.model_config import AttentionKind, LayerKind
from shoal.models.parallel import check_parallel
from tests.cpu.kernels.test_sample import GREEDY, PLAIN, exact_distribution, make_table

SPLIT = [
    GREEDY,
    PLAIN,
    (0.6, 0, 1.0, 0.0),
    (0.8, 3, 1.0, 0.0),
    (0.7, 20, 0.8, 0.0),
    (1.5, 10, 0.9, 0.05),
    (1.0, PARTS, 0.5, 0.0),
    (1.0, 1, 1.0, 0.0),
    (4.0, 40, 1.0, 0.3),
]


def split_sample(ops, logits_SV, size, rows, positions, table):
    """Tokens and state rows, when `size` ranks have the columns."""
    shard = -(-logits_SV.shape[1] // size)
    parts = [
        ops.sample_parts(piece, shard * rank, rows, positions, table)
        for rank, piece in enumerate(logits_SV.split(shard, dim=1))
    ]
    out, state = torch.full((len(rows),), -7, dtype=torch.int32), table.clone()
    ops.join_parts(torch.stack(parts), rows, positions, state, out)
    return out, state


def whole_draw(logits_SV, rows, positions, table):
    out, state = torch.full((len(rows),), -7, dtype=torch.int32), table.clone()
    reference.sample(logits_SV, rows, positions, state, out)
    return out, state


@pytest.mark.parametrize("ops", [cpu_ops, triton_ops], ids=["cpu", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, vocab_size",
    [(4, 300), (3, 2050), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 9999), (5, 6000)))],
)
def test_ranks_draw_the_token_of_one_rank(ops, dtype, size, vocab_size):
    """Also with thousands of equal logits, which 16-bit logits bring."""
    torch.manual_seed(vocab_size * size)
    for spread in (3.0, 0.02):
        rows = torch.randperm(len(SPLIT), dtype=torch.int32)
        table = make_table(SPLIT, torch.randint(-(2**63), 2**63 - 1, (len(SPLIT),)).tolist())
        logits = (5 + torch.randn(len(SPLIT), vocab_size) * spread).to(dtype)
        logits[:, 1] = -math.inf
        positions = torch.randint(0, 5000, (len(SPLIT),), dtype=torch.int32)
        for found, expected in zip(
            split_sample(ops, logits, size, rows, positions, table),
            whole_draw(logits, rows, positions, table),
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("ops", [cpu_ops, triton_ops], ids=["cpu", "triton"])
def test_padding_rows_draw_nothing(ops):
    table = make_table([GREEDY, PLAIN, PLAIN], [1, 2, 3])
    rows, positions = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([4, -1, 9], dtype=torch.int32)
    logits = torch.randn(3, 50)
    tokens, state = split_sample(ops, logits, 2, rows, positions, table)
    assert tokens[1] == -7 and tokens[2] == logits[2].argmax()
    assert state[:3, Field.POSITION].tolist() == [10, 0, 5]


@pytest.mark.parametrize("params", [PLAIN, (0.7, 6, 0.8, 0.0), (1.5, 10, 0.9, 0.05)])
def test_split_samples_follow_the_exact_distribution(params):
    torch.manual_seed(4)
    logits, count = torch.randn(40) * 1.5, 2000
    logits[10] = logits[33]  # equal logits on two ranks
    rows, positions = torch.zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    tokens, _ = split_sample(cpu_ops, logits.expand(count, -1), 3, rows, positions, make_table([params], [7]))
    expected = exact_distribution(logits, *params) * count
    observed = torch.bincount(tokens, minlength=40)
    assert not observed[expected == 0].any()
    common = expected >= 5
    chi_square = float(((observed - expected)[common] ** 2 / expected[common]).sum())
    freedom = max(int(common.sum()) - 1, 1)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_parts_suffice_for_greedy_rows_and_plain_ones_and_a_small_top_k():
    assert not any(needs_whole_row(*params) for params in SPLIT)
    assert not needs_whole_row(0.0, 0, 0.5, 0.1)  # greedy, whatever the filters
    for filters in ((0, 0.9, 0.0), (0, 1.0, 0.1), (PARTS + 1, 1.0, 0.0)):
        assert needs_whole_row(1.0, *filters)


@pytest.mark.parametrize("ops", [cpu_ops, triton_ops], ids=["cpu", "triton"])
def test_rows_that_need_more_than_parts_get_some_token_and_change_no_other(ops):
    """A step draws for all its rows, and again for these, from whole rows."""
    filters = [(1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (1.0, 3 * PARTS, 1.0, 0.0), (0.8, 3, 1.0, 0.0)]
    table = make_table(filters, [1, 2, 3, 4])
    rows, positions = torch.arange(4, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    logits = torch.randn(4, 900, generator=torch.Generator().manual_seed(6))
    tokens, state = split_sample(ops, logits, 3, rows, positions, table)
    assert (tokens >= 0).all() and (tokens < 900).all() and state[:4, Field.POSITION].tolist() == [10] * 4
    assert tokens[3] == whole_draw(logits, rows, positions, table)[0][3]


def test_a_vocabulary_too_small_for_the_ranks_is_refused():
    attention = AttentionKind(num_heads=8, num_kv_heads=8, head_dim=2, scale=1.0, rope=RopeConfig())
    config = SimpleNamespace(layers=(LayerKind(attention),), intermediate_size=8, vocab_size=5)
    check_parallel(config, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 leaves a rank without any of vocab_size 5"):
        check_parallel(config, 4)

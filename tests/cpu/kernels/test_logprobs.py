"""Penalties, bias, bans and log-probabilities mean what vLLM's do."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.kernels.sampling import logits as shaping


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0, -math.inf]])
    prompt = torch.tensor([[True, True, False, False, True]])
    counts = torch.tensor([[0, 3, 1, 0, 0]])
    strengths = (torch.tensor([x]) for x in (2.0, 0.5, 0.25))  # repetition, presence, frequency
    result = shaping.penalize(logits, prompt, counts, *strengths)
    assert result[0].tolist() == [1.0, -4.0 - 0.75 - 0.5, 0.5 - 0.25 - 0.5, 4.0, -math.inf]


def test_neutral_penalties_change_nothing() -> None:
    logits = torch.randn(3, 17, generator=torch.Generator().manual_seed(1))
    ones, zeros = torch.ones(3), torch.zeros(3)
    seen = torch.ones(3, 17, dtype=torch.int32)
    assert torch.equal(shaping.penalize(logits, seen.bool(), seen, ones, zeros, zeros), logits)


def test_bias_adds_up_and_bans_are_final() -> None:
    logits = torch.zeros(2, 4)
    shaping.add_bias(logits, torch.tensor([0, 1, 0]), torch.tensor([1, 2, 1]), torch.tensor([1.5, -3.0, 1.0]))
    shaping.ban(logits, torch.tensor([1, 0]), torch.tensor([0, 3]))
    assert logits.tolist() == [[0.0, 2.5, 0.0, -math.inf], [-math.inf, 0.0, -3.0, 0.0]]


def test_keep_only_leaves_the_allowed_ids_of_its_rows() -> None:
    logits = torch.arange(8.0).view(2, 4)
    shaping.keep_only(logits, [(1, torch.tensor([0, 2]))])
    assert logits.tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, -math.inf, 6.0, -math.inf]]


def test_logprobs_values_ranks_and_best() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    chosen, ranks, ids, top = shaping.logprobs(logits, torch.tensor([2, 3], dtype=torch.int32), 3)
    expected = logits.float().log_softmax(-1)
    torch.testing.assert_close(chosen, torch.stack((expected[0, 2], expected[1, 3])))
    assert ranks.tolist() == [2, 4]  # the chosen token and all that are as probable
    assert sorted(ids[0, :2].tolist()) == [1, 2] and ids[0, 2] == 0 and ids[1, 0] == 0
    torch.testing.assert_close(top, expected.gather(1, ids))


def test_logprobs_of_the_chosen_token_alone() -> None:
    _, _, ids, top = shaping.logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int32), 0)
    assert ids.shape == top.shape == (2, 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("k", [0, 3, 60])
def test_logprobs_of_split_columns_are_those_of_whole_rows(size: int, k: int) -> None:
    """Ranks in threads. With 4 the last one has fewer columns than the others, and than `k`."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    logits = torch.randn(3, 61, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tokens, width = torch.tensor([0, 33, 60], dtype=torch.int32), -(-61 // size)
    slots: list[torch.Tensor] = [torch.empty(0)] * size
    barrier = Barrier(size)

    def logprobs(rank: int) -> tuple[torch.Tensor, ...]:
        def gather(x: torch.Tensor) -> torch.Tensor:
            slots[rank] = x
            barrier.wait(30)
            joined = torch.cat(slots, dim=1)
            barrier.wait(30)
            return joined

        part = logits[:, rank * width : (rank + 1) * width]
        return shaping.logprobs(part, tokens, k, shaping.Columns(rank * width, width, gather))

    chosen, ranks, _, top = shaping.logprobs(logits, tokens, k)
    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(logprobs, range(size)):
            torch.testing.assert_close(found[0], chosen)
            assert torch.equal(found[1], ranks)
            torch.testing.assert_close(found[3], top)
            expected = logits.float().log_softmax(-1).gather(1, found[2])
            torch.testing.assert_close(found[3], expected)
            assert all(len(set(row)) == k for row in found[2].tolist())

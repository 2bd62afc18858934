"""Log-probabilities mean what vLLM's do."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.sampling import logprobs as rows_of_logits


def test_logprobs_values_ranks_and_best() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    chosen, ranks, ids, top = rows_of_logits.logprobs(logits, torch.tensor([2, 3], dtype=torch.int32), 3)
    expected = logits.float().log_softmax(-1)
    torch.testing.assert_close(chosen, torch.stack((expected[0, 2], expected[1, 3])))
    assert ranks.tolist() == [2, 4]  # the chosen token and all that are as probable
    assert sorted(ids[0, :2].tolist()) == [1, 2] and ids[0, 2] == 0 and ids[1, 0] == 0
    torch.testing.assert_close(top, expected.gather(1, ids))


def test_logprobs_of_the_chosen_token_alone() -> None:
    _, _, ids, top = rows_of_logits.logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int32), 0)
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
        return rows_of_logits.logprobs(part, tokens, k, rows_of_logits.Columns(rank * width, width, gather))

    chosen, ranks, _, top = rows_of_logits.logprobs(logits, tokens, k)
    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(logprobs, range(size)):
            torch.testing.assert_close(found[0], chosen)
            assert torch.equal(found[1], ranks)
            torch.testing.assert_close(found[3], top)
            expected = logits.float().log_softmax(-1).gather(1, found[2])
            torch.testing.assert_close(found[3], expected)
            assert all(len(set(row)) == k for row in found[2].tolist())

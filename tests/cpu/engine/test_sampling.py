"""The sampler's work outside of the captured step, and the buffers of a step."""

import types

import numpy as np
import pytest
import torch

from shoal.engine import step_loop
from shoal.engine.runner.batch import PenaltyRow, SamplerOptions
from shoal.engine.runner.sampling import FEW_ELEMENTS, LogitShaper, few_threads, logprobs
from shoal.engine.runner.step_buffers import RING, StepBuffers, queue_copy
from shoal.engine.scheduling.sequence import GrammarRow
from shoal.engine.step_loop import StepLoop
from shoal.kernels import reference
from shoal.kernels.sampling import logits as shaping

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_few_logits_are_shaped_on_one_thread_and_the_others_are_there_again_afterwards(monkeypatch):
    seen = []

    def keep_bits(*args):
        seen.append(torch.get_num_threads())
        reference.keep_bits(*args)

    shaper = LogitShaper(types.SimpleNamespace(keep_bits=keep_bits), 4, 100, CPU)
    masks = np.zeros((1, 4), np.int32)
    masks[0, 3] = 1  # token 96 alone
    options = SamplerOptions(grammars=[GrammarRow(1, object(), [], None)], masks=masks)
    shaped = shaper.shape(torch.zeros(2, 100), options)
    assert seen == [1] and torch.get_num_threads() == 3
    assert torch.isfinite(shaped).nonzero().tolist() == [[0, i] for i in range(100)] + [[1, 96]]

    def figures(*args):
        seen.append(torch.get_num_threads())
        return (torch.zeros(1),) * 4

    monkeypatch.setattr("shoal.kernels.sampling.logits.logprobs", figures)
    head = types.SimpleNamespace(vocab_size=100, columns=lambda: None)
    logprobs(torch.zeros(2, 100), torch.zeros(2, dtype=torch.int32), 1, head)
    assert seen == [1, 1] and torch.get_num_threads() == 3


def test_many_elements_and_other_devices_keep_the_threads_and_an_error_gives_them_back():
    with few_threads(CPU, FEW_ELEMENTS + 1):
        assert torch.get_num_threads() == 3
    with few_threads(torch.device("cuda"), 1):
        assert torch.get_num_threads() == 3
    with pytest.raises(MemoryError), few_threads(CPU, 1):
        raise MemoryError
    assert torch.get_num_threads() == 3


def test_what_filters_leave_is_what_a_draw_leaves():
    """Many rows at once keep the tokens that `survivors` keeps of each."""
    generator = torch.Generator().manual_seed(3)
    logits_SV = torch.randn(200, 41, generator=generator).mul(3).round(decimals=1)  # some are equal
    top_k_S = torch.randint(0, 50, (200,), generator=generator, dtype=torch.int32)
    top_p_S = torch.rand(200, generator=generator).mul(1.5).clamp(0.01, 1.0)
    min_p_S = torch.rand(200, generator=generator).sub(0.6).clamp(min=0.0)
    best_S = logits_SV.argmax(dim=-1).int()
    found_SV = shaping.keep_survivors(logits_SV, best_S, top_k_S, top_p_S, min_p_S)
    for s in range(200):
        kept = reference.survivors(logits_SV[s], 1.0, int(top_k_S[s]), float(top_p_S[s]), float(min_p_S[s]))
        assert torch.equal(found_SV[s].isfinite().nonzero().squeeze(1), kept)
        assert torch.equal(found_SV[s, kept], logits_SV[s, kept])
    least_S = logits_SV.argmin(dim=-1).int()
    drawn_SV = shaping.keep_survivors(logits_SV, least_S, top_k_S, top_p_S, min_p_S)
    assert drawn_SV.gather(1, least_S.long().unsqueeze(1)).isfinite().all(), "a drawn token stays possible"


def test_known_tokens_are_counted_without_waiting_for_the_device(monkeypatch):
    """Regression: torch.bincount, which waits for the device, ran in the step that admitted a request with a
    penalty."""

    def wait(*args, **options):
        raise AssertionError("waits for the device")

    monkeypatch.setattr(torch, "bincount", wait)
    shaper = LogitShaper(types.SimpleNamespace(), 3, 10, CPU)
    for output_ids in ([4, 7, 4], [9], []):  # each admission starts the row's counts again
        shaper.start_rows(SamplerOptions(new_penalty_rows=[PenaltyRow(1, [2, 3], output_ids)]))
        assert shaper.output_counts[1].tolist() == [output_ids.count(i) for i in range(10)]
    assert shaper.prompt_mask.nonzero().tolist() == [[1, 2], [1, 3]]
    assert not shaper.output_counts[[0, 2]].any() and shaper.output_counts.dtype == torch.int32


def test_a_step_with_more_uploads_than_buffers_is_refused():
    """Regression: nothing held that the uploads of a step fit into the ring, whose first buffer the next one
    would have overwritten."""
    buffers = StepBuffers(4, 8, CPU, queue_copy)
    for _ in range(3):
        buffers.begin_step()
        for _ in range(RING):
            buffers.upload(np.zeros(4, np.int32))
    with pytest.raises(AssertionError, match="uploads"):
        buffers.upload(np.zeros(4, np.int32))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_more_steps_are_in_flight_than_there_are_buffers(asynchronous, monkeypatch):
    """Regression: nothing held that the tokens of a step are read before a later step overwrites them."""
    monkeypatch.setattr(step_loop, "RING", 1)
    config = types.SimpleNamespace(block_size=4, async_scheduling=asynchronous)
    with pytest.raises(AssertionError, match="overwritten"):
        StepLoop(config, *[None] * 4)

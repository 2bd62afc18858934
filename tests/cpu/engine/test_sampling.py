"""What the sampler does beside the captured step: which of PyTorch's threads it takes."""

import types

import numpy as np
import pytest
import torch

from shoal.engine.runner.batch import SamplerOptions
from shoal.engine.runner.sampling import FEW_ELEMENTS, LogitShaper, few_threads, logprobs
from shoal.engine.scheduling.sequence import GrammarRow
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

"""What the sampler does beside the captured step: which of PyTorch's threads it takes."""

import types

import numpy as np
import pytest
import torch

from shoal.engine.runner.batch import Extras
from shoal.engine.runner.sampling import FEW_ELEMENTS, LogitShaper, few_threads, logprobs
from shoal.engine.scheduling.sequence import GrammarRow
from shoal.kernels import reference

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
    extras = Extras(grammars=[GrammarRow(1, object(), [], None)], masks=masks)
    shaped = shaper.shape(torch.zeros(2, 100), extras)
    assert seen == [1] and torch.get_num_threads() == 3
    assert torch.isfinite(shaped).nonzero().tolist() == [[0, i] for i in range(100)] + [[1, 96]]

    def figures(*args):
        seen.append(torch.get_num_threads())
        return (torch.zeros(1),) * 4

    monkeypatch.setattr("shoal.kernels.logits.logprobs", figures)
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

"""attend_new_tokens on a GPU at real sizes, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.attention.new_tokens import attend_new_tokens
from shoal.kernels.hopper import is_hopper
from tests.new_tokens import Case, close

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU"
)

CASES = {
    "qwen3-0.6b": ([1040], 16, 8, 128),
    "two rows": ([17, 5000], 16, 8, 128),
    "padding": ([0, 1040], 16, 8, 128),
    "eight heads": ([1500, 1], 32, 4, 128),
    "eight heads of one token": ([5000], 32, 4, 128),
    "four heads": ([2049], 32, 8, 128),
    "seven heads": ([700, 33], 14, 2, 64),
    "long": ([40_000], 4, 2, 64),
    "plain": ([90, 500], 8, 8, 64, False, False),
    "window": ([1640, 30], 16, 4, 128, True, True, 512),
    "gpt-oss-20b": ([1500], 64, 8, 64, False, True, None, True),
    "gpt-oss-20b, a window": ([1500, 130], 64, 8, 64, False, True, 128, True),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_chain(name: str) -> None:
    case = Case(*CASES[name])
    expected, cache = case.expected()
    case = Case(*CASES[name], device="cuda")
    out = attend_new_tokens(*case.inputs())
    if out is None and len(case.lens) > 1:
        pytest.skip("the GPU has no room for as many clusters")
    assert out is not None
    close(out, expected)
    # The CPU's sines and squares may round otherwise in the last bit.
    stored, wanted = case.layer().blocks.cpu().float().nan_to_num(9.0), cache.float().nan_to_num(9.0)
    assert torch.allclose(stored, wanted, rtol=2**-7, atol=2**-9)
    assert (out[case.lens == 0] == 0).all()


def test_results_do_not_vary_and_graphs_read_lengths_on_the_device() -> None:
    case = Case([300, 1000], 16, 8, 128, device="cuda")
    first = attend_new_tokens(*case.inputs())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_new_tokens(*case.inputs())
    assert first is not None and out is not None
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    case.lens[0] = case.positions[0] = 0
    case.rows[0] = -1
    graph.replay()
    assert (out[0] == 0).all() and torch.equal(out[1], first[1])

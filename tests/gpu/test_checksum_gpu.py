"""The checksum kernel on a GPU: its definition, whole tensors of real sizes, and no memory of its own."""

import pytest
import torch

from shoal.kernels.copy.checksum import checksum
from tests.checksum_oracle import WORD, defined

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def of(tensor):
    total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    checksum(tensor, total)
    return total.item() % WORD


@pytest.mark.parametrize(
    "shape, dtype",
    [((1,), torch.uint8), ((3,), torch.bfloat16), ((5, 123), torch.bfloat16), ((70001,), torch.float32)],
    ids=str,
)
def test_the_kernel_computes_its_definition(shape, dtype):
    torch.manual_seed(0)
    tensor = (
        torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(256, shape, dtype=dtype)
    )
    assert of(tensor.cuda()) == defined(tensor)


def test_a_large_tensor_is_summed_the_same_each_time_in_no_memory_and_every_element_counts():
    tensor = torch.randn(151936, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = {of(tensor) for _ in range(5)}
    assert len(found) == 1 and torch.cuda.max_memory_allocated() - before < 1 << 20
    for row, column in ((0, 0), (151935, 4095), (70000, 2049)):
        value = tensor[row, column].clone()
        tensor[row, column] = value + 1
        found.add(of(tensor))
        tensor[row, column] = value
    assert len(found) == 4 and of(tensor) in found

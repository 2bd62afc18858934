"""The checksum kernel: equal to its definition, and sensitive to content and place."""

import pytest
import torch
from triton_compile import check_kernels

from shoal.kernels.copy.checksum import BLOCK, PROGRAMS, checksum
from tests.checksum_oracle import WORD, defined


def of(tensor):
    total = torch.zeros(1, dtype=torch.int64)
    checksum(tensor, total)
    return total.item() % WORD


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((0,), torch.float32),
        ((1,), torch.uint8),
        ((3,), torch.bfloat16),
        ((5, 123), torch.bfloat16),
        ((3 * BLOCK + 7,), torch.float32),
        ((2, BLOCK * 4), torch.bfloat16),
    ],
    ids=str,
)
def test_the_kernel_computes_its_definition(shape, dtype):
    torch.manual_seed(0)
    tensor = (
        torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(256, shape, dtype=dtype)
    )
    assert of(tensor) == defined(tensor)


def test_programs_that_go_round_several_times_see_every_word(monkeypatch):
    monkeypatch.setattr("shoal.kernels.copy.checksum.PROGRAMS", 2)
    tensor = torch.randn(7 * BLOCK * 2 + 6)
    assert of(tensor) == defined(tensor) and PROGRAMS > 2


def test_changes_that_cancel_in_a_weighted_sum_are_seen():
    words = torch.zeros(64, dtype=torch.int32)
    changed = words.clone()
    changed[2], changed[4], changed[6] = 1, -2, 1
    swapped = words.clone()
    swapped[[0, 2, 20, 22]] = torch.tensor([5, 9, 9, 5], dtype=torch.int32)
    back = words.clone()
    back[[0, 2, 20, 22]] = torch.tensor([9, 5, 5, 9], dtype=torch.int32)
    assert len({of(t) for t in (words, changed, swapped, back)}) == 4


def test_place_and_every_bit_count():
    torch.manual_seed(1)
    tensor = torch.randint(256, (512,), dtype=torch.uint8)
    sums = {of(tensor), of(tensor.roll(8)), of(tensor.roll(1)), of(tensor.flip(0))}
    for bit in range(0, 512 * 8, 37):
        flipped = tensor.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        sums.add(of(flipped))
    assert len(sums) == 4 + len(range(0, 512 * 8, 37))


def launch(words):
    checksum(torch.zeros(words, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


LAUNCHES = {"small": lambda: launch(5), "large": lambda: launch(BLOCK * 4)}


@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case):
    check_kernels(compiled[case])

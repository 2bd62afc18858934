"""Experts in MXFP4 as Hopper's kernels read them: each weight lies where the layout says. tests/gpu/
test_tile_matmul_gpu.py multiplies by them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_compile import log_of, needs_nvcc

from shoal.errors import CheckpointError
from shoal.kernels.matmul import mxfp4_experts
from shoal.kernels.matmul.mxfp4_experts import ExpertRuns, has_kernels, pack, takes_few_slots
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.kinds.experts import Activation
from tests.cpu.kernels.test_packed import _mxfp4

CPU = torch.device("cpu")


def number(bits: int) -> float:
    """A number in bf16 by its bits."""
    word = torch.tensor([bits << 16], dtype=torch.int64).to(torch.int32)
    return word.view(torch.float32).item()


def weight_at(weight: ExpertRuns, expert: int, row: int, column: int) -> float:
    """The weight in a row of an expert's tiles, as a kernel finds it."""
    strip, tile, h, g = row // 64, row % 64 // 16, row % 16 // 8, row % 8
    step, word, u, c, e = column // 64, column % 64 // 16, column % 16 // 8, column % 8 // 2, column % 2
    run = weight.runs[expert, strip, step]
    at = ((tile * 8 + g) * 4 + c) * 16 + word // 2 * 8
    a, b = (int.from_bytes(bytes(run[i : i + 4].tolist()), "little") for i in (at, at + 4))
    left = a << 1 & 0x90009000 | b >> 6 & 0x01B001B0 | a >> 7 & 0x00480048
    pair = 2 * u + h
    placed = (left << 3 * (word % 2) if pair == 3 else (a, b)[word % 2] << 3 * pair) & 0x81C081C0
    exponent = int(run[2048 + (tile * 8 + g) * 4 + word // 2 * 2 + h])
    return number(placed >> 16 * e & 0xFFFF) * 2.0 ** (exponent - 127) * 65536


@pytest.mark.parametrize(
    ("num", "per_expert", "outs", "inputs"), [(3, 2, 96, 320), (2, 1, 128, 64), (2, 2, 32, 192)]
)
def test_each_weight_lies_where_the_layout_says(
    num: int, per_expert: int, outs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print("seed", torch.manual_seed(1).initial_seed())
    monkeypatch.setattr(mxfp4_experts, "CHUNK", 64 * 64 * 6)  # one or two strips at a time
    parts = [_mxfp4(outs, inputs) for _ in range(num * per_expert)]
    weight = pack(parts, None, per_expert, CPU)
    steps = -(-inputs // 192) * 3
    assert weight.runs.shape == (num, outs * per_expert // 64, steps, 2176)
    assert weight.shape == (num * outs * per_expert, inputs) and weight.num_experts == num
    plain = [part.dequantize() for part in parts]
    for _ in range(2000):
        expert, row = random.randrange(num), random.randrange(outs * per_expert)
        column = random.randrange(steps * 64)
        tile, h, g = row // 16, row % 16 // 8, row % 8
        # Weight rows g and g + 8: gate and up of an output, or two outputs.
        part, out = (h, tile * 8 + g) if per_expert == 2 else (0, tile * 16 + 2 * g + h)
        want = plain[expert * per_expert + part][out, column].item() if column < inputs else 0.0
        assert weight_at(weight, expert, row, column) == want


def test_new_weights_take_the_memory_of_the_old_ones() -> None:
    old = pack([_mxfp4(64, 64) for _ in range(2)], None, 2, CPU)
    before, parts = old.runs, [_mxfp4(64, 64) for _ in range(2)]
    new = pack(parts, old, 2, CPU)
    assert new is old and new.runs is before and torch.equal(before, pack(parts, None, 2, CPU).runs)
    with pytest.raises(
        CheckpointError, match=r"\[256, 64\] do not fit into .* \[128, 64\]; build a new engine"
    ):
        pack([_mxfp4(64, 64) for _ in range(4)], old, 2, CPU)


def test_scales_beyond_the_range_are_refused() -> None:
    part = _mxfp4(64, 64)
    pack([replace(part, scales=torch.full_like(part.scales, 144))], None, 1, CPU)
    with pytest.raises(CheckpointError, match=r"scale of 2\^18, .* up to 2\^17; name a dtype"):
        pack([replace(part, scales=torch.full_like(part.scales, 145))], None, 1, CPU)


def test_only_whole_strips_in_bf16_on_hopper_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(outs: int, inputs: int, per_expert: int = 1, dtype: torch.dtype = torch.bfloat16) -> bool:
        part = Mxfp4Tensor((outs, inputs), torch.empty(0), torch.empty(0))
        return has_kernels([part] * per_expert, per_expert, CPU, dtype)

    assert not of(64, 64)
    monkeypatch.setattr(mxfp4_experts, "is_hopper", lambda device: True)
    monkeypatch.setattr(mxfp4_experts, "HAS_GLUON", True)
    monkeypatch.setattr(mxfp4_experts, "has_compiler", lambda: True)
    assert of(64, 64) and of(64, 96) and of(96, 64, 2) and of(64, 96, 2)
    assert not of(96, 64) and not of(64, 80) and not of(64, 64, dtype=torch.float16)
    monkeypatch.setattr(mxfp4_experts, "has_compiler", lambda: False)
    assert not of(64, 64)


def weights(size: int, hidden: int) -> tuple[ExpertRuns, ExpertRuns]:
    """Both weights of four experts of a gated mixture, without numbers."""

    def of(outs: int, inputs: int) -> ExpertRuns:
        steps = -(-inputs // 192) * 3
        runs = torch.empty((4, outs // 64, steps, 2176), dtype=torch.uint8, device="meta")
        return ExpertRuns((4 * outs, inputs), 4, runs)

    return of(2 * size, hidden), of(hidden, size)


def test_few_slots_need_a_cluster_and_a_row_in_shared_memory() -> None:
    assert takes_few_slots(*weights(2880, 2880), 4) and takes_few_slots(*weights(12288, 12288), 8)
    assert not takes_few_slots(*weights(2880, 2880), 9)
    assert not takes_few_slots(*weights(12352, 2880), 4) and not takes_few_slots(*weights(64, 12352), 4)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("size", "hidden"), [(2880, 2880), (64, 192), (12288, 12288)])
def test_compiles_with_matmuls_beside_other_instructions(
    size: int, hidden: int, which: int, tmp_path: Path
) -> None:
    first, second = weights(size, hidden)
    variant = first.variants(second, Activation("clamped_swiglu", 1.7, 7.0))[which]
    log = log_of(Path(mxfp4_experts.__file__).with_suffix(".cu"), variant.constants(), tmp_path)
    assert "spill stores" in log and "serialized" not in log
    few_slots = log.split("Function properties for mxfp4_slots")[1].splitlines()[1]
    assert "0 bytes spill stores" in few_slots


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("which", [0, 1])
def test_experts_with_too_many_inputs_for_few_slots_compile(which: int, tmp_path: Path) -> None:
    """Regression: the kernel of few slots had no room for 24,576 inputs, so that no kernel of theirs compiled."""
    first, second = weights(24576, 6144)
    variant = first.variants(second, Activation("silu"))[which]
    log = log_of(Path(mxfp4_experts.__file__).with_suffix(".cu"), variant.constants(), tmp_path)
    assert [name in log for name in ("mxfp4_experts'", "unpack'", "mxfp4_slots'")] == [True, True, which == 0]

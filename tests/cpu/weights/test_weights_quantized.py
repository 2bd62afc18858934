"""GGUFTensor against the gguf package's own dequantization, to the bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.ggml_types import GROUPS, TYPES
from shoal.kernels.quant.gguf_tensor import UNPACK, GGUFTensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor

KINDS = list(UNPACK)
# at which bytes of a group its float16s begin
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Returns random bytes with sane scales, so that all values of all bit fields occur."""
    print("seed", seed)
    random = np.random.default_rng(seed)
    group_size, group_bytes = GROUPS[kind]
    groups = random.integers(0, 256, (rows * columns // group_size, group_bytes), dtype=np.uint8)
    for start in SCALES[kind]:
        groups[:, start : start + 2] = random.normal(size=(len(groups), 1)).astype(np.float16).view(np.uint8)
    return groups.reshape(rows, -1)


def random_tensor(kind: str, rows: int = 37, columns: int = 768) -> tuple[GGUFTensor, torch.Tensor]:
    data = random_rows(kind, rows, columns)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return GGUFTensor(kind, (rows, columns), data), torch.from_numpy(expected)


def random_mxfp4(rows: int = 37, columns: int = 768, seed: int = 0) -> tuple[Mxfp4Tensor, torch.Tensor]:
    print("seed", seed)
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // 32, 17), dtype=np.uint8)
    data[..., 0] = data[..., 0] % 60 + 100
    data = data.reshape(rows, -1)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4)
    return Mxfp4Tensor.of_ggml(torch.from_numpy(data)), torch.from_numpy(expected)


def test_types_and_their_group_sizes_are_those_of_ggml():
    for number, (name, *sizes) in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[number] == tuple(sizes)


def test_every_type_of_groups_has_a_formula_and_a_line_in_the_docs():
    assert GROUPS.keys() - UNPACK.keys() == {"MXFP4"}, "Mxfp4Tensor has its formula"
    listed = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()
    for name in GROUPS:
        assert f"`{name}`" in listed, f"add {name} to docs/compatibility.md"


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_values_equal_those_of_the_gguf_package(kind):
    tensor, expected = random_tensor(kind)
    assert torch.equal(tensor.dequantize(), expected)
    assert torch.equal(tensor.dequantize(torch.bfloat16), expected.bfloat16())


def test_mxfp4_of_ggml_equals_that_of_the_gguf_package():
    tensor, expected = random_mxfp4()
    assert torch.equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_many_chunks_dequantizes_whole(kind):
    tensor, expected = random_tensor(kind, rows=530, columns=1024)
    assert torch.equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_columns_and_permutations_are_cut_without_unpacking(kind):
    tensor, expected = random_tensor(kind)
    assert tensor.rows(5, 9).shape == (4, 768) and torch.equal(tensor.rows(5, 9).dequantize(), expected[5:9])
    assert tensor.columns(256, 768).shape == (37, 512) and torch.equal(
        tensor.columns(256, 768).dequantize(), expected[:, 256:]
    )
    order = torch.from_numpy(np.random.default_rng(1).permutation(37))
    assert torch.equal(tensor.take_rows(order).dequantize(), expected[order])
    assert torch.equal(tensor.columns(512, 768).rows(30, 37).dequantize(), expected[30:, 512:])


@pytest.mark.parametrize("kind", KINDS)
def test_columns_move_without_being_unpacked(kind):
    """In runs of 32, of which a group of some kinds holds eight."""
    tensor, expected = random_tensor(kind)
    order = np.random.default_rng(1).permutation(768 // 32)
    moved, want = tensor.take_columns(order), expected.view(37, -1, 32)[:, order].flatten(1)
    assert moved.shape == (37, 768) and torch.equal(moved.dequantize(), want)
    quants, scales, minima = moved.numbers("cpu")
    spread = scales.repeat_interleave(768 // scales.shape[1], dim=1)
    low = 0 if minima is None else minima.repeat_interleave(768 // minima.shape[1], dim=1)
    assert torch.equal(spread * quants.float() + low, want)
    part = moved.rows(5, 9).columns(32, 160)
    assert part.shape == (4, 128) and torch.equal(part.dequantize(), want[5:9, 32:160])
    again = moved.take_columns(np.argsort(order))
    assert torch.equal(again.dequantize(), expected)
    with pytest.raises(CheckpointError, match="32"):
        moved.columns(0, 16)


def test_columns_inside_a_group_are_refused_with_its_size():
    tensor, _ = random_tensor("Q4_K")
    with pytest.raises(CheckpointError, match="256"):
        tensor.columns(0, 384)

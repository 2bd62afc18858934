"""Every format of weights does the same products; the oracle is plain PyTorch on the unpacked matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal.kernels import reference
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.int4_tensor import Int4Tensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.layers.linear import Linear
from shoal.layers.norm import RMSNorm
from shoal.layers.packed_weight import PACKED_BY, PackedWeight
from shoal.layers.parallel import TensorParallel
from shoal.layers.weight_format import PlainWeight
from tests.cpu.weights.test_weights_quantized import random_tensor

INPUTS = 96


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Products of packed weights round activations to 16 bits, group by group."""
    assert got.shape == want.shape and (got - want).norm() <= 1e-3 * want.norm()


def gguf_tensor(rows: int) -> QuantizedTensor:
    return random_tensor("Q8_0", rows, INPUTS)[0]


def plain_tensor(rows: int) -> torch.Tensor:
    return torch.randn(rows, INPUTS) / 8


def int4_tensor(rows: int) -> QuantizedTensor:
    quants = torch.randint(0, 16, (rows, INPUTS), dtype=torch.uint8)
    return Int4Tensor.of(
        quants, torch.rand(rows, 3).half(), torch.randint(0, 16, (rows, 3), dtype=torch.uint8)
    )


def fp8_tensor(rows: int) -> QuantizedTensor:
    return Fp8Tensor.of(plain_tensor(rows).to(torch.float8_e4m3fn), torch.rand(rows, 1), (1, 0))


def mxfp4_tensor(rows: int) -> QuantizedTensor:
    quants = torch.randint(0, 256, (rows, INPUTS // 2), dtype=torch.uint8)
    return Mxfp4Tensor.of(quants, torch.randint(122, 128, (rows, INPUTS // 32), dtype=torch.uint8))


def nvfp4_tensor(rows: int) -> QuantizedTensor:
    quants = torch.randint(0, 256, (rows, INPUTS // 2), dtype=torch.uint8)
    return Nvfp4Tensor.of(quants, torch.rand(rows, INPUTS // 16))


MAKERS = {
    "plain": plain_tensor,
    "GGUFTensor": gguf_tensor,
    "Int4Tensor": int4_tensor,
    "Mxfp4Tensor": mxfp4_tensor,
    "Nvfp4Tensor": nvfp4_tensor,
    "Fp8Tensor": fp8_tensor,
}


@pytest.fixture(params=MAKERS)
def layer(request) -> Linear:
    """Gate and up, 37 outputs each, with a bias. `layer.oracle` is the matrix that it stands for."""
    print("seed", torch.manual_seed(5).initial_seed())
    layer = Linear(INPUTS, {"gate": 37, "up": 37}, TensorParallel.single(), cpu_ops, split=None, bias=True)
    layer.keep_quantized = True
    layer.bias.normal_()
    tensors = [MAKERS[request.param](37) for _ in range(2)]
    for tensor, wanted in zip(tensors, [w for w in layer.checkpoint_tensors("mlp.x") if "weight" in w.name]):
        wanted.load(tensor, wanted.name)
    layer.finish()
    layer.oracle = torch.cat([t if isinstance(t, torch.Tensor) else t.dequantize() for t in tensors])
    return layer


def test_each_kind_of_quantized_tensor_is_tried_here():
    assert MAKERS.keys() == {"plain"} | {kind.__name__ for kind in PACKED_BY}


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_format_multiplies_adds_gates_and_norms(layer, rows):
    x, residual = torch.randn(rows, INPUTS), torch.randn(rows, 74)
    y = F.linear(x, layer.oracle, layer.bias)
    check(layer(x), y)
    check(layer.gated(x, "silu"), reference.gate_mul(y))
    total = residual.clone()
    left = layer.add_to(x, total)
    check(total if left is None else total + left, residual + y)
    norm = RMSNorm(INPUTS, 1e-6, cpu_ops)
    norm.weight.uniform_(0.5, 1.5)
    before = torch.randn(rows, INPUTS)
    normed = reference.rms_norm(before + x, norm.weight, 1e-6)
    got, total = norm.add_linear(x, before.clone(), layer, activation="silu")
    check(total, before + x)
    expected = reference.gate_mul(F.linear(normed, layer.oracle, layer.bias))
    check(got, expected)
    got, _ = norm.add_linear(None, before + x, layer)
    check(got, F.linear(normed, layer.oracle, layer.bias))


def test_a_merge_of_quantized_and_plain_parts_is_plain():
    layer = Linear(INPUTS, {"gate": 37, "up": 20}, TensorParallel.single(), cpu_ops, split=None)
    layer.keep_quantized = True
    gate, up = layer.checkpoint_tensors("mlp.x")
    quantized, plain = gguf_tensor(37), plain_tensor(20)
    gate.load(quantized, gate.name)
    up.load(plain, up.name)
    layer.finish()
    assert isinstance(layer.format, PlainWeight)
    assert torch.equal(layer.weight, torch.cat([quantized.dequantize(), plain]))


def test_a_layer_that_is_not_told_to_keep_them_unpacks_quantized_tensors():
    layer = Linear(INPUTS, {"down": 37}, TensorParallel.single(), cpu_ops, split=None)
    (down,) = layer.checkpoint_tensors("mlp.x")
    down.load(gguf_tensor(37), down.name)
    layer.finish()
    assert isinstance(layer.format, PlainWeight) and not isinstance(layer.format, PackedWeight)


def int4_groups(groups: int) -> QuantizedTensor:
    quants, zeros = (torch.randint(0, 16, (37, n), dtype=torch.uint8) for n in (192, groups))
    return Int4Tensor.of(quants, torch.rand(37, groups).half(), zeros)


def fp8_blocks(columns: int) -> QuantizedTensor:
    scales = torch.rand(3, -(-192 // columns))
    return Fp8Tensor.of((torch.randn(37, 192) * 9).to(torch.float8_e4m3fn), scales, (16, columns))


@pytest.mark.parametrize(
    ("make", "format"),
    [
        (lambda: int4_groups(6), PackedWeight),
        (lambda: int4_groups(3), PlainWeight),  # the cut goes through a group of 64
        (lambda: fp8_blocks(32), PackedWeight),
        (lambda: fp8_blocks(128), PackedWeight),  # each side of the cut gets the block's scale
        (lambda: fp8_blocks(192), PackedWeight),
    ],
)
def test_ranks_that_divide_inputs_make_the_whole_product_together(make, format):
    print("seed", torch.manual_seed(6).initial_seed())
    tensor, x = make(), torch.randn(5, 192)
    parts = []
    for rank in range(2):
        tp = TensorParallel(rank, 2, torch.device("cpu"), None)  # without the others nothing is summed
        layer = Linear(192, {"down": 37}, tp, cpu_ops, split="rows")
        layer.keep_quantized = True
        (wanted,) = layer.checkpoint_tensors("mlp.x")
        wanted.load(tensor, wanted.name)
        layer.finish()
        assert isinstance(layer.format, format)
        parts.append(layer(x[:, 96 * rank : 96 * (rank + 1)]))
    check(sum(parts), F.linear(x, tensor.dequantize()))


@pytest.mark.parametrize("make", [lambda: int4_groups(6), lambda: fp8_blocks(128)])
def test_ranks_that_divide_outputs_have_their_rows_of_the_whole_product(make):
    print("seed", torch.manual_seed(6).initial_seed())
    tensors, x, rows = [make().rows(0, 36) for _ in range(2)], torch.randn(5, 192), []
    for rank in range(2):
        tp = TensorParallel(rank, 2, torch.device("cpu"), None)
        layer = Linear(192, {"gate": 36, "up": 36}, tp, cpu_ops, split="columns")
        layer.keep_quantized = True
        for wanted, tensor in zip(layer.checkpoint_tensors("mlp.x"), tensors):
            wanted.load(tensor, wanted.name)
        layer.finish()
        assert isinstance(layer.format, PackedWeight)
        rows.append(layer(x).view(5, 2, 18))
    want = torch.stack([F.linear(x, tensor.dequantize()) for tensor in tensors], dim=1)
    check(torch.cat(rows, dim=2), want)

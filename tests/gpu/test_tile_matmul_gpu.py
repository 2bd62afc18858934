"""The tensor cores' matmul on a GPU: every format, by rows, plain, gated and with a row map, against float32 of
the unpacked weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal.kernels.moe import reference
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kinds.experts import Activation, Router
from tests.gpu.quantized_tensors import KINDS, error, skip_without_fp8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, DEVICE = torch.bfloat16, torch.device("cuda")
ROWS = (1, 3, 16, 64, 500)
ACTIVATIONS = {
    "silu": Activation(),
    "gelu_tanh": Activation("gelu_tanh"),
    "clamped_swiglu": Activation("clamped_swiglu", 1.702, 1.5),
    "relu2": Activation("relu2"),
}


def weights(kind: str, num: int, outs: int, inputs: int):
    """Some matrices as one weight, and what they are in float32, [num, outs, inputs]."""
    from shoal.kernels.matmul import gpu_fp8, gpu_weight

    if kind == "bf16":
        plain = (torch.randn(num, outs, inputs, device=DEVICE) / inputs**0.5).to(BF16)
        return plain, plain.float()
    skip_without_fp8(kind)
    parts = [KINDS[kind](outs, inputs) for _ in range(num)]
    pack = gpu_fp8.pack if "fp8" in kind else gpu_weight.pack
    return pack(parts, None, DEVICE, BF16), torch.stack([p.dequantize(torch.float32, DEVICE) for p in parts])


@pytest.mark.parametrize("kind", ["bf16", *KINDS])
@pytest.mark.parametrize(("outs", "inputs"), [(352, 576), (1024, 2880), (2048, 2048)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_tiles_give_the_matmul_of_every_format(
    kind: str, outs: int, inputs: int, activation: str | None
) -> None:
    from shoal.kernels.matmul.dispatch import RowTiles
    from shoal.kernels.matmul.tile_matmul import tile_matmul
    from shoal.kernels.moe.packed_experts import expert_matrix

    if "128" in kind and inputs % 128:
        inputs = 640
    print("seed", torch.manual_seed(31).initial_seed())
    weight, plain = weights(kind, 1 + (activation is not None), outs, inputs)
    bias = torch.randn(plain.shape[0] * outs, device=DEVICE).to(BF16)
    for rows in ROWS:
        x = torch.randn(rows, inputs, device=DEVICE).to(BF16)
        want = F.linear(x.float(), plain.flatten(0, 1), bias.float())
        if activation:
            want = reference.activate(want, ACTIVATIONS[activation])
        residual = torch.randn(rows, outs, device=DEVICE).to(BF16)
        for splits in (1, 3):
            out = residual.clone()
            columns = 32 if kind == "fp8 by 32" else 128
            tiles = RowTiles(16 if rows <= 16 else 64, 64, columns, 4, 3, splits)
            gate = ACTIVATIONS[activation] if activation else None
            matrix = expert_matrix(weight)
            tile_matmul(tiles, x, matrix, bias, out, gate, add=activation is None)
            expected = want if activation else want + residual.float()
            assert error(out, expected) < (2e-2 if activation else 8e-3), (rows, splits)


@pytest.mark.parametrize("kind", ["bf16", *KINDS])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("num", "top_k", "hidden", "size"), [(32, 4, 576, 352), (8, 2, 1408, 704)])
def test_experts_with_biases_equal_the_loop_over_them(
    kind: str, num: int, top_k: int, hidden: int, size: int, activation: str
) -> None:
    from shoal.kernels import triton_ops

    if "128" in kind:
        hidden, size = 640, 384
    print("seed", torch.manual_seed(32).initial_seed())
    matrices = 2 if ACTIVATIONS[activation].has_gate else 1
    w13, plain13 = weights(kind, matrices * num, size, hidden)
    w2, plain2 = weights(kind, num, hidden, size)
    if kind == "bf16":
        w13 = w13.view(num, matrices * size, hidden)
    b13, b2 = torch.randn(num, matrices * size, device=DEVICE), torch.randn(num, hidden, device=DEVICE)
    ours = ExpertWeights(w13, w2, b13.to(BF16), b2.to(BF16))
    exact = ExpertWeights(
        plain13.view(num, matrices * size, hidden), plain2, ours.b13.float(), ours.b2.float()
    )
    rule = Router(top_k, True)
    for tokens in ROWS:
        x = torch.randn(tokens, hidden, device=DEVICE).to(BF16)
        logits = torch.randn(tokens, num, device=DEVICE)
        want = reference.moe(x.float(), logits, rule, exact, ACTIVATIONS[activation])
        got = triton_ops.moe(x, logits, rule, ours, ACTIVATIONS[activation])
        assert error(got, want) < 2.5e-2, tokens
        residual = torch.randn_like(x)
        total = residual.float() + got.float()
        assert triton_ops.moe(x, logits, rule, ours, ACTIVATIONS[activation], residual) is residual
        assert error(residual, total) < 5e-3, tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("num", "top_k", "hidden", "size", "tokens"),
    [(128, 8, 2048, 768, 3000), (12, 3, 1408, 712, 1000), (8, 2, 64, 136, 1029)],
)
def test_many_rows_of_experts_equal_the_loop_over_them(
    num: int, top_k: int, hidden: int, size: int, tokens: int, activation: str, dtype: torch.dtype
) -> None:
    """Hopper's kernel, with one busy expert and one without rows; twenty runs give the same bits."""
    from shoal.kernels.matmul.dispatch import ExpertKernel, choose_expert_tiles, gpu_of
    from shoal.kernels.moe import moe

    if not gpu_of(DEVICE).hopper:
        pytest.skip("needs Hopper and Gluon")
    print("seed", torch.manual_seed(34).initial_seed())
    kind, rule = ACTIVATIONS[activation], Router(top_k, True)
    w13 = torch.randn(num, size * (1 + kind.has_gate), hidden, device=DEVICE) / hidden**0.5
    w2 = torch.randn(num, hidden, size, device=DEVICE) / size**0.5
    ours = ExpertWeights(w13.to(dtype), w2.to(dtype))
    exact = ExpertWeights(ours.w13.float(), ours.w2.float())
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    logits = torch.randn(tokens, num, device=DEVICE)
    logits[:, 0] += 2
    logits[:, 1] = -1e4
    plain = moe.ExpertFormat()
    tiles = choose_expert_tiles(tokens * top_k, num, (hidden, size), (plain, plain), dtype, gpu_of(DEVICE))
    assert tiles.kernel is ExpertKernel.HOPPER
    want = reference.moe(x.float(), logits, rule, exact, kind)
    given = x, logits, rule, ours, kind
    got = moe.moe(*given)
    assert error(got, want) < (2e-2 if dtype == torch.bfloat16 else 3e-3)
    assert error(got, moe.moe_with(tiles._replace(kernel=ExpertKernel.TILES), *given).float()) < 1e-2
    for _ in range(20):
        assert torch.equal(moe.moe(*given), got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.moe(*given)
    logits.copy_(logits.roll(3, 1))
    graph.replay()
    assert torch.equal(out, moe.moe(*given))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("num", "top_k", "hidden", "size"),
    [(4, 1, 2880, 2880), (12, 3, 1408, 704), (8, 2, 64, 192), (40, 2, 192, 64), (8, 2, 320, 1440)],
)
def test_experts_in_mxfp4_on_hopper_equal_the_loop_over_them(
    num: int, top_k: int, hidden: int, size: int, activation: str
) -> None:
    """By each of the kernels, with biases, one busy expert and one without rows; ten runs give the same bits."""
    from shoal.kernels.matmul import mxfp4_experts
    from shoal.kernels.matmul.dispatch import ExpertFormat, choose_expert_tiles, gpu_of
    from shoal.kernels.moe import moe

    if not gpu_of(DEVICE).hopper:
        pytest.skip("needs Hopper and Gluon")
    print("seed", torch.manual_seed(36).initial_seed())
    kind, rule, dtype = ACTIVATIONS[activation], Router(top_k, True), torch.bfloat16
    packed, plain, biases = [], [], []
    for outs, inputs, each in ((size, hidden, 1 + kind.has_gate), (hidden, size, 1)):
        parts = [KINDS["mxfp4"](outs, inputs) for _ in range(num * each)]
        if not mxfp4_experts.has_kernels(parts, each, DEVICE, dtype):
            assert outs * each % 64
            pytest.skip("these are not whole strips")
        packed.append(mxfp4_experts.pack(parts, None, each, DEVICE))
        weights = torch.stack([part.dequantize(torch.float32, DEVICE) for part in parts])
        plain.append(weights.view(num, each * outs, inputs))
        biases.append(torch.randn(num, each * outs, device=DEVICE).to(dtype) / 8)
    ours = ExpertWeights(*packed, *biases)
    exact = ExpertWeights(*plain, *(bias.float() for bias in biases))
    made = ExpertFormat(4, 32, is_e2m1=True, in_runs=True)
    kernels = set()
    rows_of_experts = (1, 8, 40, 100, 300, 1600)  # on average
    for tokens in (1, 2, *(rows * num // top_k for rows in rows_of_experts)):
        tiles = choose_expert_tiles(tokens * top_k, num, (hidden, size), (made, made), dtype, gpu_of(DEVICE))
        kernels.add((tiles.kernel, tiles.slots))
        x = (torch.randn(tokens, hidden, device=DEVICE) / 8).to(dtype)
        logits = torch.randn(tokens, num, device=DEVICE)
        logits[:, 0] += 2
        logits[:, 1] = -1e4
        want = reference.moe(x.float(), logits, rule, exact, kind)
        got = moe.moe(x, logits, rule, ours, kind)
        assert error(got, want) < 2e-2, tokens
        residual = torch.randn_like(x)
        total = residual.float() + got.float()
        assert moe.moe(x, logits, rule, ours, kind, residual) is residual
        assert error(residual, total) < 5e-3, tokens
        for _ in range(10):
            assert torch.equal(moe.moe(x, logits, rule, ours, kind), got), tokens
    assert len(kernels) == 2 + (gpu_of(DEVICE).limits.widened_expert_rows <= 1600)

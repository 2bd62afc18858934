"""All layers in one call against the same layers op by op: the same functions in the same order, so equal to
the bit."""

from dataclasses import replace

import pytest
import torch

from shoal.attention.cpu import CpuBackend
from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu import linear as cpu_linear
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.layer_cache import LayerCache
from shoal.layers.cpu_layers import CpuLayers, LayerWeights
from tests.cpu.kernels.test_cpu_attention import make_step
from tests.cpu.kernels.test_cpu_linear import random_tensor
from tests.head_shape import head_shape

pytestmark = pytest.mark.skipif(cpu_build.load() is None, reason="needs a C compiler")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, EPS = 6, 2, 32, 64, 96, 1e-5


def layer_caches(
    kv: torch.Tensor, window: int | None, scales_L2G: torch.Tensor | None = None
) -> tuple[LayerCache, ...]:
    """Caches of layers that share the tensor `kv`, [blocks, layers, ...]."""
    return tuple(
        LayerCache(kv[:, i], window=window, scales_2G=None if scales_L2G is None else scales_L2G[i])
        for i in range(kv.shape[1])
    )


def layer_weights(seed: int, bias: bool, qk_norm: bool) -> LayerWeights:
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = ((width, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    packed = (cpu_linear.pack([random_tensor("Q4_1", *shape, seed=seed)]) for shape in shapes)
    biases = (torch.randn(outs) if bias else None for outs, _ in shapes)
    norms = (
        torch.rand(HIDDEN),
        torch.rand(HIDDEN),
        *(torch.rand(HEAD_DIM) if qk_norm else None for _ in range(2)),
    )
    return LayerWeights(*packed, *biases, *norms)


def op_by_op(weights, residual, step, caches, ropes):
    backend, x = CpuBackend(head_shape(HEADS, KV_HEADS, HEAD_DIM)), None
    for w, cache, cos_sin in zip(weights, caches, ropes, strict=True):
        x = (
            cpu_ops.rms_norm(residual, w.input_norm, EPS)
            if x is None
            else cpu_ops.add_rms_norm(x, residual, w.input_norm, EPS)
        )
        qkv = w.qkv.linear(x, w.qkv_bias)
        tables = step.block_tables[cache.table]
        cpu_ops.qk_norm_rope_store(
            qkv, w.q_norm, w.k_norm, EPS, cos_sin, step.positions_T, step.rows_T, tables, cache
        )
        q, k, v = qkv.view(len(qkv), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        heads = backend.attend(q, k, v, cache, step)
        x = cpu_ops.add_rms_norm(w.o.linear(heads.flatten(1), w.o_bias), residual, w.mlp_norm, EPS)
        x = w.down.linear(cpu_ops.gate_mul(w.gate_up.linear(x, w.gate_up_bias)), w.down_bias)
    return x


def sandwiches_op_by_op(weights, residual, step, caches, ropes):
    """With norms behind attention and MLP, and GELU."""
    backend = CpuBackend(head_shape(HEADS, KV_HEADS, HEAD_DIM))
    for w, cache, cos_sin in zip(weights, caches, ropes, strict=True):
        qkv = w.qkv.linear(cpu_ops.rms_norm(residual, w.input_norm, EPS), w.qkv_bias)
        tables = step.block_tables[cache.table]
        cpu_ops.qk_norm_rope_store(
            qkv, w.q_norm, w.k_norm, EPS, cos_sin, step.positions_T, step.rows_T, tables, cache
        )
        q, k, v = qkv.view(len(qkv), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        x = w.o.linear(backend.attend(q, k, v, cache, step).flatten(1), w.o_bias)
        x = cpu_ops.add_normed(x, w.after_attention, EPS, residual, w.mlp_norm, EPS)
        x = cpu_ops.gate_mul(w.gate_up.linear(x, w.gate_up_bias), "gelu_tanh")
        cpu_ops.add_normed(w.down.linear(x, w.down_bias), w.after_mlp, EPS, residual)


@pytest.mark.parametrize("is_sandwich", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("options", [(None, False, False), (8, True, True)])
@pytest.mark.parametrize("sequences", [[(1, 20)], [(1, 9), (1, 0), (7, 30), (40, 40)]])
def test_one_call_does_what_the_ops_do(sequences, options, grouped, is_sandwich):
    """`grouped`: the layers are of two groups, with block tables and ropes of their own."""
    torch.manual_seed(0)
    window, *flags = options
    weights = [layer_weights(seed, *flags) for seed in range(3)]
    if is_sandwich:
        weights = [
            replace(w, after_attention=torch.rand(HIDDEN), after_mlp=torch.rand(HIDDEN)) for w in weights
        ]
    _, _, step = make_step(sequences, HEADS, KV_HEADS, HEAD_DIM, 16)
    rows = torch.cat([step.rows_S[i : i + 1].repeat(q) for i, (q, _) in enumerate(sequences)])
    # padding: 0 - 1
    positions = torch.cat([torch.arange(kv - q, kv, dtype=torch.int32) for q, kv in sequences])
    [tables], num_blocks = step.block_tables, int(step.block_tables[0].max()) + 1
    other = tables.new_zeros(len(tables), tables.stride(0))[:, : tables.shape[1]].copy_(tables + num_blocks)
    step = replace(step, rows_T=rows, positions_T=positions, block_tables=(tables, other))
    kv = torch.randn(2 * num_blocks, 3, 2, KV_HEADS, 16, HEAD_DIM)
    residual, ropes = torch.randn(len(rows), HIDDEN), [*torch.randn(3, 64, HEAD_DIM)]
    if not grouped:
        ropes = ropes[:1] * 3

    def caches(kv):
        own = zip(layer_caches(kv, window), (0, 1, 1), (window, 11, None))
        return [replace(cache, table=t, window=w) if grouped else cache for cache, t, w in own]

    want_residual, want_kv = residual.clone(), kv.clone()
    compute = sandwiches_op_by_op if is_sandwich else op_by_op
    want = compute(weights, want_residual, step, caches(want_kv), ropes)
    activation = "gelu_tanh" if is_sandwich else "silu"
    layers = CpuLayers(weights, HEADS, EPS, HEAD_DIM**-0.5, activation)
    got = layers(residual, step, caches(kv), ropes)
    real = positions >= 0
    assert (
        (got is want is None or torch.equal(got[real], want[real]))
        and torch.equal(residual[real], want_residual[real])
        and torch.equal(kv, want_kv)
    )

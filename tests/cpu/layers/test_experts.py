"""A mixture's experts as a GPU has them: matrices that come in fewer bits stay so, in one packed matrix of all
experts, by the GPU's kernels in Triton's interpreter. The oracle is the loop over the unpacked experts."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.kernels import triton_ops
from shoal.kernels.matmul import gpu_fp8, gpu_weight
from shoal.kernels.moe import reference
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kernels.quant.fp8_tensor import Fp8Tensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.kinds.experts import Activation, ExpertsKind, Router, SharedExpert
from shoal.layers.experts import ExpertMatrix, Experts, MoE
from shoal.layers.norm import RMSNorm
from shoal.layers.packed_weight import EXPERTS_PACKED_BY, PACKED_BY, PackedWeight
from shoal.layers.parallel import TensorParallel
from shoal.layers.weight_format import PlainWeight
from shoal.models.loading import layer_tensors
from shoal.weights.update import weight_tensors
from tests.cpu.kernels.test_fp8 import exact_conversions  # noqa: F401 -- a fixture
from tests.cpu.kernels.test_packed_moe import FP8, TILED, Make, _int4

CPU, FP16 = torch.device("cpu"), torch.float16
EXPERTS, HIDDEN, SIZE = 3, 64, 96
KIND = ExpertsKind(EXPERTS, SIZE, Router(2, renormalize=True))
Tensors = dict[str, torch.Tensor | QuantizedTensor]


@pytest.fixture(autouse=True)
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (kind for kind, modules in PACKED_BY.items() if "cuda" in modules):
        module = gpu_fp8 if kind is Fp8Tensor else gpu_weight
        name = f"packs {kind.__name__}"
        pack = SimpleNamespace(pack=lambda pieces, old, m=module: m.pack(pieces, old, CPU, FP16))
        monkeypatch.setitem(sys.modules, name, pack)
        monkeypatch.setitem(PACKED_BY, kind, {"cpu": name})


def build(tp: TensorParallel | None = None, quantizes: bool = False) -> Experts:
    torch.set_default_dtype(FP16)
    try:
        experts = Experts(HIDDEN, KIND, tp or TensorParallel.single(), triton_ops)
    finally:
        torch.set_default_dtype(torch.float32)
    for matrix in matrices(experts):
        matrix.keep(CPU, quantizes)
    return experts


def matrices(experts: Experts) -> list[ExpertMatrix]:
    return [module for module in experts.modules() if isinstance(module, ExpertMatrix)]


def load(experts: Experts, tensors: Tensors, down_first: bool = False) -> None:
    wanted_ones = sorted(
        layer_tensors(experts, "mlp.experts."), key=lambda wanted: ("down_proj" in wanted.name) != down_first
    )
    for wanted in wanted_ones:
        if wanted.name in tensors:
            wanted.load(tensors[wanted.name], wanted.name)
    for matrix in matrices(experts):
        matrix.finish()


def made(make: Callable[[int, int], torch.Tensor | QuantizedTensor]) -> Tensors:
    shapes = dict(gate_proj=(SIZE, HIDDEN), up_proj=(SIZE, HIDDEN), down_proj=(HIDDEN, SIZE))
    names = [
        (f"mlp.experts.{e}.{name}.weight", shape) for e in range(EXPERTS) for name, shape in shapes.items()
    ]
    return {name: make(*shape) for name, shape in names}


def plain(outs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outs, inputs) / inputs**0.5


def check(experts: Experts, tensors: Tensors) -> None:
    """The mixture equals the unpacked tensors' mixture."""
    unpacked = {n: t.dequantize() if isinstance(t, QuantizedTensor) else t for n, t in tensors.items()}
    gate, up, down = (
        torch.stack([unpacked[f"mlp.experts.{e}.{name}.weight"] for e in range(EXPERTS)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    x, logits, residual = (
        torch.randn(9, HIDDEN).half(),
        torch.randn(9, EXPERTS).half(),
        torch.randn(9, HIDDEN),
    )
    got = experts.mix(x, logits, None).float()
    weights = ExpertWeights(torch.cat((gate, up), 1), down)
    want = reference.moe(x.float(), logits, Router(2, True), weights, Activation())
    assert (got - want).norm() <= 2e-3 * want.norm()
    ours = residual.half()
    assert experts.mix(x, logits, ours) is ours
    assert (ours.float() - residual - want).norm() <= 3e-3 * want.norm()


def seed() -> None:
    print("seed", torch.manual_seed(61).initial_seed())


@pytest.mark.parametrize("kind", FP8 | TILED)
def test_experts_that_come_quantized_stay_so(kind: str) -> None:
    seed()
    tensors, experts = made((FP8 | TILED)[kind]), build()
    load(experts, tensors)
    assert all(isinstance(matrix.format, PackedWeight) for matrix in matrices(experts))
    assert not list(experts.parameters())
    check(experts, tensors)


@pytest.mark.parametrize("kind", FP8 | TILED)
def test_gate_and_up_are_packed_before_down_comes(kind: str) -> None:
    """Regression: where no kernels of experts would take them, they waited for down, too. In a file with all
    downs at its end, all layers waited, as a second copy of the weights."""
    tensors, experts = made((FP8 | TILED)[kind]), build()
    for wanted in layer_tensors(experts, "mlp.experts."):
        if "down_proj" not in wanted.name:
            wanted.load(tensors[wanted.name], wanted.name)
    assert isinstance(matrices(experts)[0].format, PackedWeight)


@pytest.mark.parametrize("kind", ["fp8 by 32", "int4 by 32, zeros", "mxfp4", "Q8_0"])
def test_new_weights_lie_where_the_old_ones_lay(kind: str) -> None:
    seed()
    experts = build()
    load(experts, made((FP8 | TILED)[kind]))
    places = {name: tensor.data_ptr() for name, tensor in weight_tensors(experts)}
    tensors = made((FP8 | TILED)[kind])
    load(experts, tensors)
    assert {name: tensor.data_ptr() for name, tensor in weight_tensors(experts)} == places
    check(experts, tensors)


def test_plain_experts_become_fp8_while_they_load_and_one_of_them_anew() -> None:
    seed()
    experts, tensors = build(quantizes=True), made(plain)
    load(experts, tensors)
    name = "mlp.experts.1.up_proj.weight"
    new = {name: plain(SIZE, HIDDEN)}
    load(experts, new)
    check(experts, {n: Fp8Tensor.rounded(t) for n, t in (tensors | new).items()})


def test_made_up_experts_become_fp8_too() -> None:
    experts, generator = build(quantizes=True), torch.Generator().manual_seed(3)
    for path, matrix in experts.named_modules():
        if isinstance(matrix, ExpertMatrix):
            matrix.load_dummy(f"mlp.experts.{path}", generator)
    assert all(isinstance(matrix.format, PackedWeight) for matrix in matrices(experts))
    assert experts.mix(torch.randn(3, HIDDEN).half(), torch.randn(3, EXPERTS).half(), None).any()


@pytest.mark.parametrize("plain_one", ["0.gate_proj", "2.down_proj"])
def test_where_one_expert_comes_plain_all_matrices_of_its_kind_become_so(plain_one: str) -> None:
    seed()
    tensors, experts = made(FP8["fp8 by output"]), build()
    name = f"mlp.experts.{plain_one}.weight"
    tensors[name] = tensors[name].dequantize()
    load(experts, tensors)
    (w13, w2) = matrices(experts)
    became_plain, stayed = (w2, w13) if "down" in plain_one else (w13, w2)
    assert isinstance(became_plain.format, PlainWeight) and isinstance(stayed.format, PackedWeight)
    check(experts, tensors)


@pytest.mark.parametrize("down_first", [False, True])
@pytest.mark.parametrize("down", ["mxfp4", "mxfp4 of refused sizes", "int4 by 32, zeros", "plain"])
def test_kernels_of_experts_take_both_matrices_or_none(
    down: str, down_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: gate and up were packed for kernels of experts before down was known not to be."""
    packed: list[int] = []

    def pack(pieces: list[QuantizedTensor], old: object, per_expert: int, *where: object) -> object:
        packed.append(per_expert)
        return gpu_weight.pack(pieces, old, CPU, FP16)

    module = SimpleNamespace(
        pack=pack, has_kernels=lambda pieces, count, *where: count == 2 or down != "mxfp4 of refused sizes"
    )
    monkeypatch.setitem(sys.modules, "kernels of experts", module)
    monkeypatch.setitem(EXPERTS_PACKED_BY, Mxfp4Tensor, {"cpu": "kernels of experts"})
    seed()
    tensors, experts = made(TILED["mxfp4"]), build()
    for name in [name for name in tensors if "down_proj" in name and "mxfp4" not in down]:
        tensors[name] = TILED.get(down, plain)(HIDDEN, SIZE)
    load(experts, tensors, down_first)
    assert sorted(packed) == ([1, 2] if down == "mxfp4" else [])
    assert isinstance(matrices(experts)[0].format, PackedWeight)
    check(experts, tensors)
    load(experts, tensors, down_first)  # weights that come again
    assert sorted(packed) == ([1, 1, 2, 2] if down == "mxfp4" else [])
    check(experts, tensors)
    if down == "mxfp4":
        with pytest.raises(CheckpointError, match="new experts must be Mxfp4Tensor, as the engine's are"):
            load(experts, made(TILED["int4 by 32, zeros"]))


def shards(make: Make, size: int) -> tuple[Tensors, list[Experts]]:
    tensors = made(make)
    ranks = [build(TensorParallel(rank, size, CPU, None)) for rank in range(size)]
    for experts in ranks:
        load(experts, tensors)
    return tensors, ranks


@pytest.mark.parametrize(
    ("kind", "size"),
    [("fp8 by output", 2), ("fp8 by 32", 3), ("int4 by 16, zeros", 2), ("mxfp4", 3), ("mxfp4", 2)],
)
def test_the_ranks_parts_sum_up(kind: str, size: int) -> None:
    """Down is unpacked if a rank's inputs of it begin within a group (48 of mxfp4's 32)."""
    seed()
    tensors, ranks = shards((FP8 | TILED)[kind], size)
    assert all(isinstance(matrices(e)[0].format, PackedWeight) for e in ranks)
    assert all(
        isinstance(matrices(e)[1].format, PlainWeight) == ((kind, size) == ("mxfp4", 2)) for e in ranks
    )

    def mix(x, logits, residual):
        total = sum(e.mix(x, logits, None).float() for e in ranks).half()
        return total if residual is None else residual.add_(total)

    check(SimpleNamespace(mix=mix), tensors)


def test_what_no_kernel_multiplies_is_refused_with_the_way_out() -> None:
    seed()
    act_order = made(lambda outs, inputs: _int4(outs, inputs, 32, shuffled=True))
    with pytest.raises(CheckpointError, match=r"act-order.*name a dtype.*device='cpu'"):
        load(build(), act_order)
    with pytest.raises(
        CheckpointError, match=r"24 outputs.*multiples of 16.*name a dtype.*tensor_parallel_size"
    ):
        shards(TILED["int4 by 16, zeros"], 4)


def moe_with_shared(gated: bool) -> MoE:
    sizes = dict(hidden_size=HIDDEN, intermediate_size=SIZE)
    config = make_dataclass("Config", [*sizes, "activation", "mlp_bias", "residual_multiplier"])(
        *sizes.values(), "silu", False, 1.0
    )
    return MoE(config, replace(KIND, shared=SharedExpert(SIZE, gated)), TensorParallel.single(), triton_ops)


def test_a_dropped_mixture_frees_its_weights_at_once() -> None:
    """Regression: it referred to itself, so its weights stayed until a garbage collection."""
    weight = weakref.ref((moe := moe_with_shared(False)).gate.weight)
    gc.disable()
    try:
        del moe
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_among_the_others_adds_what_it_adds_apart(gated: bool) -> None:
    print("seed", torch.manual_seed(4).initial_seed())
    apart, joined = moe_with_shared(gated), moe_with_shared(gated)
    apart.split_shared()
    assert apart.shared_experts is not None and joined.shared_experts is None
    tensors = {tensor.name: tensor for tensor in layer_tensors(nn.ModuleDict({"mlp": apart}))}
    for tensor in layer_tensors(nn.ModuleDict({"mlp": joined})):
        weight = torch.randn(tensor.shape) / 8
        tensor.load(weight, tensor.name)
        tensors.pop(tensor.name).load(weight, tensor.name)
    assert not tensors
    norm = RMSNorm(HIDDEN, 1e-6, triton_ops)
    nn.init.uniform_(norm.weight)
    for tokens in (1, 30):
        x = torch.randn(tokens, HIDDEN)
        left, want = apart(None, x.clone(), norm)
        none, got = joined(None, x.clone(), norm)
        assert none is None
        torch.testing.assert_close(got, want if left is None else want + left, rtol=1e-4, atol=1e-4)

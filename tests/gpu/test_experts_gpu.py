"""Experts in fewer bits on a GPU: the mixture at a real size and at odd ones against bf16 of the unpacked
weights, in graphs, and engines on tiny checkpoints of each layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from shoal import LLM, SamplingParams
from shoal.kernels.moe.mixture import ExpertWeights
from shoal.kinds.experts import Activation, Router
from shoal.layers.packed_weight import PackedWeight
from tests import quantized
from tests.cpu.weights.test_weights_gguf import write_gguf
from tests.gpu.quantized_tensors import KINDS, error, skip_without_fp8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")


SIZES = [(16, 8, 2048, 768), (5, 2, 256, 384), (4, 2, 384, 128)]


def experts_of(kind: str, num: int, hidden: int, size: int, dtype: torch.dtype):
    """Both packed matrices, and the unpacked ones."""
    from shoal.kernels.matmul import gpu_fp8, gpu_weight

    skip_without_fp8(kind)
    print("seed", torch.manual_seed(29).initial_seed())
    pack = gpu_fp8.pack if "fp8" in kind else gpu_weight.pack
    packed, plain = [], []
    for outs, inputs, count in ((size, hidden, 2), (hidden, size, 1)):
        parts = [KINDS[kind](outs, inputs) for _ in range(num * count)]
        packed.append(pack(parts, None, DEVICE, dtype))
        plain.append(torch.cat([part.dequantize(dtype, DEVICE) for part in parts]).unflatten(0, (num, -1)))
    return packed, plain


def mixture(weights, top_k: int) -> tuple[Router, ExpertWeights, Activation]:
    return Router(top_k, True), ExpertWeights(*weights), Activation()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num", "top_k", "hidden", "size"), SIZES)
def test_experts_equal_the_unpacked_ones(
    kind: str, num: int, top_k: int, hidden: int, size: int, dtype: torch.dtype
) -> None:
    """Both round weights and hidden states to the type; ours rounds the scales too."""
    from shoal.kernels import triton_ops

    packed, plain = experts_of(kind, num, hidden, size, dtype)
    for tokens in (1, 7, 64, 1000):
        x = torch.randn(tokens, hidden, device=DEVICE).to(dtype) / 8
        router = torch.randn(tokens, num, device=DEVICE).to(dtype)
        want = triton_ops.moe(x, router, *mixture(plain, top_k))
        got = triton_ops.moe(x, router, *mixture(packed, top_k))
        assert error(got, want.float()) < (2.5e-2 if dtype == torch.bfloat16 else 5e-3), tokens
        residual = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        total = residual + got
        assert triton_ops.moe(x, router, *mixture(packed, top_k), residual) is residual
        assert torch.equal(residual, total), tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_timing(kind: str, dtype: torch.dtype) -> None:
    """In MXFP4 one call in ten differed, by the outputs of one register."""
    from shoal.kernels import triton_ops

    packed, _ = experts_of(kind, 16, 2048, 768, dtype)
    x = torch.randn(1000, 2048, device=DEVICE).to(dtype) / 8
    router = torch.randn(1000, 16, device=DEVICE).to(dtype)
    first = triton_ops.moe(x, router, *mixture(packed, 8))
    for _ in range(100):
        assert torch.equal(triton_ops.moe(x, router, *mixture(packed, 8)), first)


@pytest.mark.parametrize("kind", ["fp8 by 128", "int4 by 128"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_a_captured_mixture_follows_its_router(kind: str, tokens: int) -> None:
    from shoal.kernels import triton_ops

    packed, _ = experts_of(kind, 16, 2048, 768, torch.bfloat16)
    x = torch.randn(tokens, 2048, device=DEVICE).bfloat16()
    router = torch.randn(tokens, 16, device=DEVICE).bfloat16()
    triton_ops.moe(x, router, *mixture(packed, 4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_ops.moe(x, router, *mixture(packed, 4))
    for _ in range(3):
        router.normal_()
        graph.replay()
        assert torch.equal(out, triton_ops.moe(x, router, *mixture(packed, 4)))


# Engines

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 5, 17, 31, 64, 100, 150, 3))]
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)
OPTIONS = dict(
    max_model_len=256, max_num_seqs=16, kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.1
)
CONFIG = transformers.Qwen3MoeConfig(
    **quantized.SIZES,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    mlp_only_layers=[],
    tie_word_embeddings=False,
)


def write(folder: Path, kind: str) -> Path:
    """A checkpoint of this kind, and one of what it unpacks to, which is returned."""
    unpacked = quantized.write(folder / kind, kind, CONFIG)
    plain = folder / "plain"
    plain.mkdir()
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / kind / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    return plain


def logprobs(path: Path, prompts=PROMPTS, packed: bool = True, **options) -> tuple[list, torch.Tensor]:
    """Tokens, and the log-probabilities of the prompts' own tokens."""
    with LLM(str(path), **(OPTIONS | dict(skip_tokenizer_init=True) | options)) as llm:
        for layer in llm.core.ranks.runner.model.layers:
            (group,) = layer.mlp.experts.groups
            assert isinstance(group.w13.format, PackedWeight) == packed
            assert isinstance(group.w2.format, PackedWeight) == packed
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    found = [
        position[token].logprob
        for prompt, output in zip(prompts, outputs)
        for token, position in zip(prompt[1:], output.prompt_logprobs[1:])
    ]
    return [output.outputs[0].token_ids for output in outputs], torch.tensor(found)


def drift(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """The middle one, as another expert is chosen where two are nearly alike."""
    return float((ours - exact).abs().median())


@pytest.mark.parametrize(
    "kind", ["fp8-channel", "fp8-blocks", "int4", "int4-zero-points", "mxfp4", "awq", "gptq"]
)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_an_engine_stays_near_that_of_the_unpacked_weights(kind: str, eager: bool, tmp_path: Path) -> None:
    skip_without_fp8(kind)
    plain = write(tmp_path, kind)
    _, ours = logprobs(tmp_path / kind, enforce_eager=eager)
    _, exact = logprobs(plain, packed=False, enforce_eager=eager)
    # Logits are near 27, and two engines in bf16 differ by 0.2. With fp8, rows of attention are rounded too.
    assert drift(ours, exact) < (1.5 if "fp8" in kind else 0.5)


def test_an_engine_keeps_a_gguf_files_experts_packed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3moe", "Q8_0")
    prompts = [[token % 96 for token in prompt] for prompt in PROMPTS]
    _, ours = logprobs(tmp_path / "m.gguf", prompts)
    _, exact = logprobs(tmp_path / "m.gguf", prompts, packed=False, dtype="bfloat16")
    assert drift(ours, exact) < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["fp8-blocks", "int4", "at load"])
def test_packed_experts_sleep_and_wake_at_their_addresses(kind: str, level: int, tmp_path: Path) -> None:
    skip_without_fp8("fp8" if kind == "at load" else kind)
    plain = write(tmp_path, "int4" if kind == "at load" else kind)
    folder = plain if kind == "at load" else tmp_path / kind
    quantization = "fp8" if kind == "at load" else None
    options = OPTIONS | dict(skip_tokenizer_init=True, enable_sleep_mode=True, quantization=quantization)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(str(folder), **options) as llm:
        before, sums = llm.generate(prompts, PARAMS, use_tqdm=False), llm.check_weights()
        assert any("experts.groups.0.w13.packed" in name for name in sums)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(str(folder))
        assert llm.check_weights() == sums
        after = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


def test_experts_in_fp8_never_take_the_memory_of_plain_numbers(tmp_path: Path) -> None:
    """The peak while an engine starts stays below the plain model's size, where most of it is experts."""
    skip_without_fp8("fp8")
    num, hidden, size, layers = 16, 1024, 1024, 12
    config = transformers.Qwen3MoeConfig(
        **quantized.SIZES | dict(hidden_size=hidden, num_hidden_layers=layers),
        num_experts=num,
        num_experts_per_tok=2,
        moe_intermediate_size=size,
        mlp_only_layers=[],
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    options = OPTIONS | dict(
        kv_cache_memory_bytes=16 << 20, max_num_batched_tokens=256, skip_tokenizer_init=True
    )
    with LLM(str(tmp_path), quantization="fp8", load_format="dummy", **options):
        peak = torch.cuda.max_memory_allocated() - base
    assert peak < 0.8 * layers * num * 3 * hidden * size * 2


def test_experts_with_act_order_are_refused_with_the_way_out(tmp_path: Path) -> None:
    from shoal.errors import CheckpointError

    write(tmp_path, "gptq-act-order")
    with pytest.raises(CheckpointError, match=r"act-order.*name a dtype"):
        LLM(str(tmp_path / "gptq-act-order"), **OPTIONS, skip_tokenizer_init=True)
    logprobs(tmp_path / "gptq-act-order", packed=False, dtype="bfloat16")

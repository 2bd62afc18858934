"""Engines whose weights lie in fp8: quantized while they load, and with a GPU's kernels in Triton's interpreter
in place of the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from shoal import LLM, SamplingParams
from shoal.config import EngineConfig
from shoal.engine.resolve import resolve_config
from shoal.errors import CheckpointError, ConfigError
from shoal.kernels import reference, triton_ops
from shoal.kernels.cpu import fp8 as cpu_fp8
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import GPU, Limits
from shoal.kernels.quant.fp8_tensor import Fp8Tensor, quantize_rows
from shoal.layers.experts import Experts
from shoal.layers.mlp import MLP
from shoal.layers.norm import RMSNorm
from shoal.layers.packed_weight import PACKED_BY, FusedWeight
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig
from shoal.models.config_json import config_from_json
from shoal.weights.quantize import quantize
from shoal.weights.source import CheckpointFiles
from tests import quantized
from tests.cpu.kernels.test_fp8 import exact_conversions  # noqa: F401 -- a fixture

# Few programs, as the interpreter takes its time for each; blocks at the edges are not whole.
SMALL = transformers.Qwen3Config(
    **quantized.SIZES
    | dict(hidden_size=128, intermediate_size=160, num_attention_heads=2, num_key_value_heads=1),
    tie_word_embeddings=False,
)
CONFIG = config_from_json(SMALL.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}, "SMALL")
EXPERTS = transformers.Qwen3MoeConfig(
    **quantized.SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
)
PROMPT = list(range(40, 58))
PARAMS = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0)
OPTIONS = dict(device="cpu", max_model_len=64, max_num_seqs=4, skip_tokenizer_init=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(8)
    transformers.AutoModelForCausalLM.from_config(SMALL).float().save_pretrained(folder)
    return folder


def answer(folder: Path, **options) -> tuple[list[int], torch.Tensor]:
    with LLM(str(folder), **(OPTIONS | options)) as llm:
        output = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)[0]
    positions = zip(PROMPT[1:], output.prompt_logprobs[1:])
    return output.outputs[0].token_ids, torch.tensor([p[token].logprob for token, p in positions])


# The GPU's kernels


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKED_BY, Fp8Tensor, {"cpu": "shoal.kernels.matmul.gpu_fp8"})


def fp8_of(outs: int, inputs: int, block: tuple[int, int]) -> Fp8Tensor:
    tall, wide = block[0] or outs, block[1] or inputs
    data = (torch.randn(outs, inputs) * 60).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-outs // tall), -(-inputs // wide)) + 0.5) / 60 / inputs**0.5
    return Fp8Tensor.of(data, scales, block)


@pytest.mark.parametrize("block", [(1, 0), (0, 0), (64, 64)], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 66])
def test_an_mlp_hands_rows_in_fp8_from_product_to_product(rows, block, gpu_kernels):
    """The norm of more than 64 rows writes fp8, and so does SiLU(gate) * up."""
    config = replace(CONFIG, hidden_size=96, intermediate_size=160)
    mlp = MLP(config, TensorParallel.single(), cpu_ops)
    parts = {}
    for path, layer in (("mlp.gate_up_proj", mlp.gate_up_proj), ("mlp.down_proj", mlp.down_proj)):
        layer.keep(torch.device("cpu"))
        for wanted in layer.checkpoint_tensors(path):
            parts[wanted.name] = fp8_of(*wanted.shape, block)
            wanted.load(parts[wanted.name], wanted.name)
        layer.finish()
        assert isinstance(layer.format, FusedWeight)
    norm = RMSNorm(96, 1e-6, cpu_ops)
    norm.weight.uniform_(0.5, 1.5)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return quantize_rows(x, block[1]).dequantize() if rows > 64 else x

    x, residual = torch.randn(rows, 96), torch.randn(rows, 96)
    total = x + residual
    gate, up = parts["mlp.gate_proj.weight"].dequantize(), parts["mlp.up_proj.weight"].dequantize()
    normed = rounded(reference.rms_norm(total, norm.weight, 1e-6))
    hidden = rounded(torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T))
    want = total + hidden @ parts["mlp.down_proj.weight"].dequantize().T
    left, new = mlp(x, residual, norm)
    assert left is None and new is residual
    # a last bit makes another fp8 number of one at a tie
    assert (new - want).norm() < (3e-3 if rows > 64 else 1e-5) * want.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-blocks"])
def test_a_gpus_kernels_compute_what_the_cpus_compute(kind, tmp_path, gpu_kernels, monkeypatch):
    """A prompt of 18 tokens and decodes of one, first with activations as they are. Then a limit of 8 rows has the prompt's rows rounded, which the CPU's matmul is made to do too."""
    quantized.write(tmp_path, kind, SMALL)
    monkeypatch.setattr(dispatch, "gpu_of", lambda _: GPU(limits=Limits(widened_rows=18)))
    tokens, ours = answer(tmp_path)
    monkeypatch.setattr(dispatch, "gpu_of", lambda _: GPU(limits=Limits(widened_rows=8)))
    _, ours_of_rounded = answer(tmp_path)
    monkeypatch.undo()
    expected_tokens, expected = answer(tmp_path)
    assert tokens == expected_tokens
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    linear = cpu_fp8.CpuFp8Weight.linear

    def of_rounded(self, x_TI, bias_O):
        size = self.tensor.size
        group = 0 if size == self.tensor.shape[1] else size
        return linear(self, quantize_rows(x_TI, group).dequantize() if len(x_TI) > 8 else x_TI, bias_O)

    monkeypatch.setattr(cpu_fp8.CpuFp8Weight, "linear", of_rounded)
    _, expected_of_rounded = answer(tmp_path)
    drift = (expected_of_rounded - expected).abs().mean()
    assert (ours_of_rounded - expected_of_rounded).abs().mean() < 0.1 * drift


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-blocks"])
def test_a_gpus_kernels_mix_experts_as_the_cpu_does(kind, tmp_path, gpu_kernels, monkeypatch):
    """Rows of attention stay as they are, too."""
    quantized.write(tmp_path, kind, EXPERTS)
    monkeypatch.setattr(dispatch, "gpu_of", lambda _: GPU(limits=Limits(widened_rows=18)))
    monkeypatch.setattr(Experts, "divide", lambda _: None)
    monkeypatch.setattr(cpu_ops, "moe", triton_ops.moe)
    tokens, ours = answer(tmp_path)
    monkeypatch.undo()
    expected_tokens, expected = answer(tmp_path)
    assert tokens == expected_tokens
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_matrices_get_memory_when_they_come(tmp_path, gpu_kernels):
    quantized.write(tmp_path, "fp8-channel", SMALL)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        model = llm.core.ranks.runner.model
        mlp = model.layers[1].mlp
        assert isinstance(mlp.down_proj.format, FusedWeight)
        assert isinstance(mlp.gate_up_proj.format, FusedWeight)
        assert not any(parameter.is_meta for parameter in model.parameters())
        plain = {name for name, p in model.named_parameters() if p.ndim == 2}
        assert plain == {"embed_tokens.weight", "lm_head.weight"}


# Quantized while they load


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_weights_become_what_shoal_quantize_writes(kernels, plain, tmp_path, request):
    if kernels == "gpu":
        request.getfixturevalue("gpu_kernels")
    folder = quantize(CheckpointFiles(plain), "fp8", tmp_path / "fp8")
    sums, answers = [], []
    for source, options in ((plain, dict(quantization="fp8")), (folder, {})):
        with LLM(str(source), **(OPTIONS | options)) as llm:
            assert llm.config.keep_quantized
            sums.append(llm.check_weights())
        answers.append(answer(source, **options))
    assert sums[0] == sums[1] and sum(name.endswith(".packed") for name in sums[0]) == 8
    assert answers[0][0] == answers[1][0] and torch.equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_new_plain_tensors_become_fp8_too_also_some_parts_of_a_merge(kernels, plain, tmp_path, request):
    if kernels == "gpu":
        request.getfixturevalue("gpu_kernels")
    tensors = load_file(plain / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    new = {name: tensors[name].flip(0) * 3}
    with LLM(str(plain), quantization="fp8", **OPTIONS) as llm:
        before = llm.check_weights()
        llm.update_weights_from_tensors(new)
        after = llm.check_weights()
        changed = {key for key in before if before[key] != after[key]}
        assert changed == {f"rank0.layers.1.self_attn.qkv_proj.{kind}" for kind in ("packed", "scales")}
        llm.update_weights_from_tensors({name: tensors[name]})
        assert llm.check_weights() == before
        llm.update_weights(str(plain))
        assert llm.check_weights() == before


def test_dummy_weights_are_fp8_too(plain):
    with LLM(str(plain), quantization="fp8", load_format="dummy", **OPTIONS) as llm:
        sums = llm.check_weights()
        assert sum(name.endswith(".packed") for name in sums) == 8
        llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, use_tqdm=False)


# Bad input


def config_of(kind: str, folder: Path) -> ModelConfig:
    quantized.write(folder, kind)
    return CheckpointFiles(folder).config


@pytest.mark.parametrize(
    ("kind", "asked", "says"),
    [
        ("fp8-channel", "fp8", r"'fp8'.*quantized already \(compressed-tensors\).*leave the option out"),
        ("fp8-blocks", "awq", r"'awq'.*quantized already \(fp8\)"),
        ("int4", "gptq", r"'gptq'.*\(compressed-tensors\)"),
    ],
)
def test_an_option_that_contradicts_the_checkpoint_is_refused(kind, asked, says, tmp_path):
    model = config_of(kind, tmp_path)
    with pytest.raises(ConfigError, match=says):
        resolve_config(EngineConfig(model="m", device="cpu", quantization=asked), model, 1000)


def test_a_checkpoints_own_method_may_be_named_beside_a_dtype(tmp_path):
    model = config_of("fp8-blocks", tmp_path)
    config = EngineConfig(model="m", device="cpu", quantization="fp8", dtype="float32")
    resolved = resolve_config(config, model, 1000)
    assert resolved.keep_quantized and not resolved.quantizes_weights and resolved.dtype == "float32"


def test_plain_weights_are_quantized_to_fp8_alone(plain):
    model = CheckpointFiles(plain).config
    with pytest.raises(ConfigError, match=r"'awq'.*plain weights, which only 'fp8'"):
        resolve_config(EngineConfig(model="m", device="cpu", quantization="awq"), model)
    with pytest.raises(ConfigError, match=r"quantization must be one of .*, got 'int8'"):
        EngineConfig(model="m", quantization="int8")


def test_plain_experts_become_fp8_while_they_load(tmp_path):
    plain, fp8 = tmp_path / "plain", tmp_path / "fp8"
    torch.manual_seed(8)
    transformers.AutoModelForCausalLM.from_config(EXPERTS).float().save_pretrained(plain)
    tokens, ours = answer(plain, quantization="fp8")
    quantize(CheckpointFiles(plain), "fp8", fp8)
    expected_tokens, expected = answer(fp8)
    assert tokens == expected_tokens
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "asked", "way_out"),
    [("fp8-channel", None, "name a dtype"), ("plain", "fp8", "leave quantization out")],
)
def test_a_gpu_that_knows_no_fp8_is_refused_with_the_way_out(
    kind, asked, way_out, plain, tmp_path, monkeypatch
):
    model = CheckpointFiles(plain).config if kind == "plain" else config_of(kind, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A40")
    config = EngineConfig(model="m", device="cuda", quantization=asked)
    with pytest.raises(ConfigError, match=rf"8\.9.*NVIDIA A40 has 8\.6; {way_out}"):
        resolve_config(config, model, None if kind == "plain" else 1000)


def test_another_models_packing_does_not_replace_plain_weights_that_became_fp8(plain, tmp_path):
    folder = quantize(CheckpointFiles(plain), "fp8", tmp_path / "fp8")
    with (
        LLM(str(plain), quantization="fp8", **OPTIONS) as llm,
        pytest.raises((CheckpointError, ConfigError), match="quantization"),
    ):
        llm.update_weights(str(folder))


# Shards


def test_a_shard_that_cuts_through_groups_has_smaller_ones():
    """A matrix of 18,944 inputs on 8 ranks is an example: 2,368 of each are 18 and a half groups of 128."""
    print("seed", torch.manual_seed(7).initial_seed())
    tensor = fp8_of(5, 4 * 96, (1, 64))
    whole = tensor.dequantize()
    for start in range(0, 4 * 96, 96):
        shard = tensor.columns(start, start + 96)
        assert shard.size == 32 and shard.scales.shape == (5, 3)
        assert torch.equal(shard.dequantize(), whole[:, start : start + 96])
    assert tensor.columns(128, 256).size == 64
    odd = fp8_of(5, 200, (1, 64))
    assert torch.equal(odd.columns(64, 200).dequantize(), odd.dequantize()[:, 64:])
    with pytest.raises(
        CheckpointError, match=r"columns 0 to 40 .* not multiples of 32; .*tensor_parallel_size"
    ):
        tensor.columns(0, 40)

"""fp8 weights on a GPU: matmuls at real and odd sizes against float32 ones of the same numbers, in graphs and
in chains, and engines on tiny checkpoints."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from shoal import LLM, SamplingParams
from shoal.kernels import reference
from shoal.kernels.matmul.dispatch import gpu_of
from shoal.kernels.quant.fp8_tensor import Fp8Rows, Fp8Tensor, quantize_rows
from shoal.layers.packed_weight import FusedWeight
from tests import quantized
from tests.gpu.chains import check_chain, check_chain_of_rings

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with fp8",
)

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SIZES = [(6144, 4096), (4096, 12288), (24576, 4096), (1000, 576), (74, 2056), (2050, 2570), (1024, 3072)]
GROUPS = pytest.mark.parametrize("group", [0, 128])


def operands(rows: int, outs: int, inputs: int, group: int):
    """Rows, a weight as a GPU has it, that weight in float32, and a bias."""
    from shoal.kernels.matmul import gpu_fp8

    print("seed", torch.manual_seed(19).initial_seed())
    size = group or inputs
    data = (torch.randn(outs, inputs, device=DEVICE) * 60).to(torch.float8_e4m3fn)
    scales = (torch.rand(outs, -(-inputs // size), device=DEVICE) + 0.5) / 60 / inputs**0.5
    tensor = Fp8Tensor((outs, inputs), data, scales, size)
    weight = gpu_fp8.pack([tensor], None, DEVICE, BF16)
    x = torch.randn(rows, inputs, device=DEVICE).to(BF16)
    return x, weight, tensor.dequantize(device=DEVICE), torch.randn(outs, device=DEVICE).to(BF16)


def taken(weight, x: torch.Tensor) -> torch.Tensor:
    """Returns the inputs of the matmul: the rows, or the values of their fp8 numbers."""
    group = weight.fp8_group(len(x))
    return x.float() if group is None else quantize_rows(x, group).dequantize()


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


@GROUPS
@pytest.mark.parametrize(("outs", "inputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 33, 64, 65, 100, 300, 1025])
def test_matmuls(rows: int, outs: int, inputs: int, group: int) -> None:
    x, weight, matrix, bias = operands(rows, outs, inputs, group)
    exact = F.linear(taken(weight, x), matrix, bias.float())
    y = weight.linear(x, bias)
    assert error(y, exact) < 4e-3
    room = torch.randn(rows + 2, outs, device=DEVICE).to(BF16)
    before, residual = room.clone(), room[1:-1]
    weight.add(x, bias, residual)
    assert torch.equal(room[0], before[0]) and torch.equal(room[-1], before[-1])
    assert torch.equal(residual, before[1:-1] + y)
    assert error(weight.gated(x, bias), reference.gate_mul(exact)) < 1e-2
    assert torch.equal(weight.linear(x, bias), y)


@GROUPS
@pytest.mark.parametrize("size", [64, 576, 4096, 12288, 29568])
def test_rows_become_fp8_as_torch_rounds_them(size: int, group: int) -> None:
    from shoal.kernels.quant.fp8_quantize import gate_mul_fp8, quantize, rms_norm_fp8

    print("seed", torch.manual_seed(23).initial_seed())
    x = (torch.randn(70, 2 * size, device=DEVICE) * torch.rand(70, 1, device=DEVICE) * 50).to(BF16)
    x[3] = 0

    def check(ours: Fp8Rows, expected: Fp8Rows) -> None:
        """A quotient whose last bit differs is a number of fp8's neighbour at a tie."""
        torch.testing.assert_close(ours.scales, expected.scales, rtol=1e-2, atol=0)
        assert (ours.data.float() == expected.data.float()).float().mean() > 0.97
        assert error(ours.dequantize(), expected.dequantize()) < 1e-2

    half, weight = x[:, :size].contiguous(), torch.rand(size, device=DEVICE).to(BF16)
    check(quantize(half, group), quantize_rows(half, group))
    check(gate_mul_fp8(x, group), quantize_rows(reference.gate_mul(x), group))
    if size <= 16384:
        for add in (None, torch.randn_like(half)):
            residual = half.clone()
            total = half if add is None else half + add
            ours = rms_norm_fp8(add, residual, weight, 1e-6, group)
            assert torch.equal(residual, total)
            check(ours, quantize_rows(reference.rms_norm(total, weight, 1e-6), group))


def test_sums_of_many_inputs_are_those_of_float32() -> None:
    """Tensor cores of Hopper alone keep some 14 bits of sums of fp8. All products are positive here, so that a
    sum grows until what is added is lost."""
    rows, outs, inputs = 128, 256, 28672
    x, weight, matrix, _ = operands(rows, outs, inputs, 0)
    x = x.abs()
    weight.matrix.data.copy_(weight.matrix.data.float().abs().to(torch.float8_e4m3fn))
    exact = taken(weight, x).double() @ matrix.abs().double().T
    assert error(weight.linear(x, None).double(), exact) < 2.5e-3


@GROUPS
@pytest.mark.parametrize(("outs", "inputs"), [(6144, 4096), (24576, 4096), (4096, 12288)])
def test_one_row_of_a_norm(outs: int, inputs: int, group: int) -> None:
    x, weight, matrix, bias = operands(1, outs, inputs, group)
    norm = (torch.rand(inputs, device=DEVICE) + 0.5).to(BF16)
    exact = F.linear(reference.rms_norm(x, norm, 1e-6).float(), matrix, bias.float())
    for gated, expected, limit in ((False, exact, 4e-3), (True, reference.gate_mul(exact), 1e-2)):
        y = weight.of_norm(x, norm, 1e-6, bias, "silu" if gated else None)
        assert (y is not None) == gpu_of(DEVICE).hopper
        assert y is None or error(y, expected) < limit


@GROUPS
def test_a_chain_of_rings_is_in_order_and_equal_each_time(group: int) -> None:
    """Weights are large enough for rings, whose tiles come while kernels before still write the residual."""
    x, up, _, _ = operands(1, 6144, 2048, group)
    _, down, _, _ = operands(1, 2048, 3072, group)
    check_chain_of_rings(x, up, down)


@GROUPS
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 100])
def test_a_chain_is_in_order_and_equal_each_time(rows: int, group: int) -> None:
    """Kernels that overlap read and write the residual, and share the counters of split matmuls."""
    x, up, _, _ = operands(rows, 6144, 1024, group)
    _, down, _, _ = operands(1, 1024, 3072, group)
    norm = torch.ones(1024, device=DEVICE, dtype=BF16)

    def add_layer(residual: torch.Tensor) -> None:
        hidden = up.gated(up.normed(None, residual, norm, 1e-6), None, down.fp8_group(rows))
        down.add(hidden, None, residual)

    check_chain(x, add_layer)


# Engines

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 5, 17, 31, 64, 100, 150, 3))]
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
OPTIONS = dict(
    max_model_len=256, max_num_seqs=16, kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.1
)


def logprobs(folder, prompts, **options) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens, and the log-probabilities of the prompts' own tokens."""
    with LLM(str(folder), **(OPTIONS | options)) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    found = [
        position[token].logprob
        for prompt, output in zip(prompts, outputs)
        for token, position in zip(prompt[1:], output.prompt_logprobs[1:])
    ]
    return [output.outputs[0].token_ids for output in outputs], torch.tensor(found)


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-tensor", "fp8-blocks"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_an_engine_stays_near_the_cpus_log_probabilities(kind, eager, tmp_path):
    quantized.write(tmp_path, kind)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    ids = [p["prompt_token_ids"] for p in prompts]
    with LLM(str(tmp_path), **OPTIONS, enforce_eager=eager) as llm:
        assert llm.config.keep_quantized and llm.config.dtype == "bfloat16"
        layers = llm.core.ranks.runner.model.layers
        assert all(isinstance(layer.mlp.down_proj.format, FusedWeight) for layer in layers)
    _, exact = logprobs(tmp_path, ids, device="cpu", kv_cache_memory_bytes=64 << 20)
    # These logits are large. Activations of steps of up to 16 tokens stay in bf16; more are in fp8.
    for tokens, limit in ((16, 0.01), (256, 0.06)):
        _, ours = logprobs(tmp_path, ids, enforce_eager=eager, max_num_batched_tokens=tokens)
        assert (ours - exact).abs().mean() < limit * exact.abs().mean(), tokens


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-blocks"])
def test_float32_activations_of_few_rows_give_the_cpus_tokens(kind, tmp_path):
    """Decodes and short chunks: no activation becomes fp8."""
    quantized.write(tmp_path, kind)
    options = dict(dtype="float32", quantization="fp8" if kind == "fp8-blocks" else "compressed-tensors")
    small = [p[:40] for p in PROMPTS]
    tokens, ours = logprobs(tmp_path, small, max_num_batched_tokens=16, **options)
    expected, exact = logprobs(tmp_path, small, device="cpu", kv_cache_memory_bytes=64 << 20)
    assert tokens == expected
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=2e-3)


def test_graphs_and_eager_steps_agree(tmp_path):
    quantized.write(tmp_path, "fp8-channel")
    graphs, _ = logprobs(tmp_path, PROMPTS)
    eager, _ = logprobs(tmp_path, PROMPTS, enforce_eager=True)
    # a near tie may flip: a step of another size is another matmul
    assert sum(a == b for a, b in zip(graphs, eager)) >= len(PROMPTS) - 1


@pytest.mark.parametrize("kind", ["fp8-channel", None], ids=["checkpoint", "at load"])
@pytest.mark.parametrize("level", [1, 2])
def test_weights_in_fp8_sleep_and_wake_at_their_addresses(kind, level, tmp_path, build_plain):
    quantized.write(tmp_path / "fp8", "fp8-channel")
    folder = tmp_path / "fp8" if kind else build_plain(tmp_path)
    options = OPTIONS | dict(enable_sleep_mode=True, skip_tokenizer_init=True)
    with LLM(str(folder), quantization=None if kind else "fp8", **options) as llm:
        before, sums = llm.generate(PROMPTS, PARAMS, use_tqdm=False), llm.check_weights()
        report = llm.sleep(level)
        assert report.freed_bytes > 0
        llm.wake_up()
        if level == 2:
            llm.update_weights(str(folder))
        assert llm.check_weights() == sums
        after = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


@pytest.fixture
def build_plain():
    """Writes a model in plain numbers of the size of the quantized ones."""
    import transformers

    def build(folder):
        config = transformers.AutoConfig.from_pretrained(folder / "fp8")
        del config.quantization_config
        torch.manual_seed(8)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "plain")
        return folder / "plain"

    return build


def test_a_model_in_fp8_never_takes_the_memory_of_plain_numbers(tmp_path, build_plain):
    """The peak while an engine starts stays below the plain model's size, where most of it is matrices."""
    import transformers

    config = transformers.Qwen3Config(
        **quantized.SIZES
        | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=12, num_attention_heads=16),
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    options = OPTIONS | dict(
        kv_cache_memory_bytes=16 << 20, max_num_batched_tokens=256, skip_tokenizer_init=True
    )
    with LLM(str(tmp_path), quantization="fp8", load_format="dummy", **options):
        peak = torch.cuda.max_memory_allocated() - base
    plain = 12 * 2 * (3 * 2048 * 8192 + 2 * 16 * 64 * 2048 + 2 * 2 * 64 * 2048)
    assert peak < 0.8 * plain

"""Packed weights on a GPU: matmuls at real and odd sizes against float32 ones of the same numbers, in graphs
and in chains, and engines on tiny checkpoints of each layout."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from shoal import LLM, SamplingParams
from shoal.kernels import reference
from shoal.kernels.matmul.dispatch import gpu_of
from shoal.kernels.quant.gguf_tensor import UNPACK
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.layers.packed_weight import FusedWeight
from tests import quantized
from tests.cpu.weights.test_weights_gguf import write_gguf
from tests.cpu.weights.test_weights_quantized import random_tensor
from tests.gpu.chains import check_chain, check_chain_of_rings
from tests.gpu.quantized_tensors import error, int4, mxfp4, nvfp4, q8_0

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIZES = [(6144, 4096), (4096, 12288), (24576, 4096), (1000, 576), (74, 2080), (2048, 2560), (1024, 3072)]
ROWS = [1, 2, 16, 17, 33, 64, 65, 100, 256, 300]


def packed(tensors: list[QuantizedTensor], dtype: torch.dtype = torch.bfloat16):
    """The weight, and the matrix that it stands for in float32."""
    from shoal.kernels.matmul import gpu_weight

    weight = gpu_weight.pack(tensors, None, DEVICE, dtype)
    return weight, torch.cat([tensor.dequantize(device=DEVICE) for tensor in tensors])


@pytest.mark.parametrize("kind", ["int4", "no zeros", "group 128", "group 128, zeros", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    ("outs", "inputs", "dtype"),
    [(*size, torch.bfloat16) for size in SIZES] + [(*size, torch.float16) for size in SIZES[2:5]],
    ids=str,
)
def test_matmuls(outs: int, inputs: int, kind: str, dtype: torch.dtype) -> None:
    """A weight, its scale and the result are rounded to the type: 2**-9 each on average in bf16."""
    print("seed", torch.manual_seed(23).initial_seed())
    group = 128 if "128" in kind and inputs % 128 == 0 else 32
    e2m1 = {"mxfp4": mxfp4, "nvfp4": nvfp4}
    tensor = (
        e2m1[kind](outs, inputs)
        if kind in e2m1
        else int4(outs, inputs, group, kind in ("int4", "group 128, zeros"))
    )
    weight, matrix = packed([tensor], dtype)
    bias = torch.randn(outs, device=DEVICE).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
        y = F.linear(x.float(), matrix, bias.float())
        ours = weight.linear(x, bias)
        assert error(ours, y) < 8e-3, rows
        residual = torch.randn(rows, outs, device=DEVICE).to(dtype)
        expected = residual.float() + y
        left = weight.add(x, bias, residual)
        assert error(residual if left is None else residual.float() + left, expected) < 8e-3, rows
        if outs % 2 == 0:
            assert error(weight.gated(x, bias), reference.gate_mul(y)) < 2e-2, rows


@DTYPES
def test_a_matmul_is_that_of_the_unpacked_matrix(dtype: torch.dtype) -> None:
    """Both unpack to the same bits, so that sums alone differ."""
    from shoal.kernels.matmul import packed_linear

    print("seed", torch.manual_seed(24).initial_seed())
    tensors = [int4(1000, 1056), mxfp4(1000, 1056), int4(1000, 1072, 16)]
    tensors += [
        int4(1088, 1152, 128),
        int4(1088, 1152, 128, zeros=False),
        int4(1088, 1152, 16),
        q8_0(1088, 1152),
    ]
    for tensor in tensors:
        weight, _ = packed([tensor], dtype)
        matrix = packed_linear.unpack_rows(weight, 0, tensor.shape[0]).float()
        for rows in (1, 33, 128, 200):
            x = torch.randn(rows, matrix.shape[1], device=DEVICE).to(dtype)
            y = F.linear(x.float(), matrix)
            assert error(weight.linear(x, None), y) < 3e-3
            assert error(weight.gated(x, None), reference.gate_mul(y)) < 1e-2


@pytest.mark.parametrize("kind", list(UNPACK))
def test_types_of_gguf(kind: str) -> None:
    tensor, _ = random_tensor(kind, 530, 1024)
    weight, matrix = packed([tensor])
    ids = torch.tensor([529, 0, 17], dtype=torch.int32, device=DEVICE)
    assert error(weight.embed(ids), matrix[ids.long()]) < 8e-3
    for rows in (1, 16, 65, 300):
        x = torch.randn(rows, 1024, device=DEVICE).to(torch.bfloat16)
        assert error(weight.linear(x, None), F.linear(x.float(), matrix)) < 8e-3


def test_merged_parts_and_orders_of_inputs() -> None:
    q4, q6 = (random_tensor(kind, 530, 1024)[0] for kind in ("Q4_K", "Q6_K"))
    one = int4(512, 1024, 128, shuffled=True)
    other = int4(96, 1024, 128, shuffled=True)
    for tensors in ([q4, q6], [one], [one, other], [one, one.rows(3, 40)]):
        weight, matrix = packed(tensors)
        for rows in (1, 40, 300):
            x = torch.randn(rows, 1024, device=DEVICE).to(torch.bfloat16)
            assert error(weight.linear(x, None), F.linear(x.float(), matrix)) < 8e-3


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("outs", "inputs"), [(6144, 4096), (24576, 4096), (4096, 12288)])
def test_one_row_of_a_norm(outs: int, inputs: int, zeros: bool) -> None:
    print("seed", torch.manual_seed(25).initial_seed())
    weight, matrix = packed([int4(outs, inputs, 128, zeros)])
    x, bias = (torch.randn(1, size, device=DEVICE).to(torch.bfloat16) for size in (inputs, outs))
    norm = (torch.rand(inputs, device=DEVICE) + 0.5).to(torch.bfloat16)
    exact = F.linear(reference.rms_norm(x, norm, 1e-6).float(), matrix, bias[0].float())
    for gated, expected, limit in ((False, exact, 8e-3), (True, reference.gate_mul(exact), 2e-2)):
        y = weight.of_norm(x, norm, 1e-6, bias[0], "silu" if gated else None)
        assert (y is not None) == gpu_of(DEVICE).hopper
        assert y is None or error(y, expected) < limit


@pytest.mark.parametrize("zeros", [False, True])
def test_a_chain_of_rings_is_in_order_and_equal_each_time(zeros: bool) -> None:
    """Weights are large enough for rings, whose tiles come while kernels before still write the residual."""
    print("seed", torch.manual_seed(26).initial_seed())
    (up, _), (down, _) = packed([int4(6144, 2048, 128, zeros)]), packed([int4(2048, 3072, 128, zeros)])
    x = torch.randn(1, 2048, device=DEVICE).to(torch.bfloat16)
    check_chain_of_rings(x, up, down)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 100, 256, 300])
def test_a_chain_is_in_order_and_equal_each_time(rows: int, group: int) -> None:
    """Kernels that overlap read and write the residual, and share the counters of split matmuls."""
    (up, _), (down, _) = packed([int4(6144, 2048, group)]), packed([int4(2048, 3072, group)])
    x = torch.randn(rows, 2048, device=DEVICE).to(torch.bfloat16)
    norm = torch.ones(2048, device=DEVICE, dtype=torch.bfloat16)

    def add_layer(residual: torch.Tensor) -> None:
        down.add(up.gated(up.normed(None, residual, norm, 1e-6), None), None, residual)

    check_chain(x, add_layer)


# Engines

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 5, 17, 31, 64, 100, 150, 3))]
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=0)
OPTIONS = dict(
    max_model_len=256, max_num_seqs=16, kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.1
)
PACKED_KINDS = (
    "int4",
    "int4-zero-points",
    "int4-channel",
    "int8",
    "int8-channel",
    "int8-gptq",
    "mxfp4",
    "nvfp4",
)
KINDS = [*PACKED_KINDS, *quantized.BY_INPUTS]


def logprobs(path, prompts=PROMPTS, **options) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens, and the log-probabilities of the prompts' own tokens."""
    with LLM(str(path), **(OPTIONS | options)) as llm:
        if options.get("device") != "cpu":
            assert llm.config.keep_quantized and llm.config.dtype == "bfloat16"
            layers = llm.core.ranks.runner.model.layers
            assert all(isinstance(layer.mlp.down_proj.format, FusedWeight) for layer in layers)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    found = [
        position[token].logprob
        for prompt, output in zip(prompts, outputs)
        for token, position in zip(prompt[1:], output.prompt_logprobs[1:])
    ]
    return [output.outputs[0].token_ids for output in outputs], torch.tensor(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_an_engine_stays_near_the_cpus_log_probabilities(kind: str, eager: bool, tmp_path) -> None:
    quantized.write(tmp_path, kind)
    _, ours = logprobs(tmp_path, enforce_eager=eager)
    _, exact = logprobs(tmp_path, device="cpu", kv_cache_memory_bytes=64 << 20)
    assert (ours - exact).abs().mean() < 0.2  # bf16, of large logits


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_an_engine_keeps_a_gguf_files_weights_packed(kind: str, tmp_path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen3", kind)
    prompts = [[token % 96 for token in prompt] for prompt in PROMPTS]
    _, ours = logprobs(path, prompts, skip_tokenizer_init=True)
    _, exact = logprobs(path, prompts, device="cpu", kv_cache_memory_bytes=64 << 20, skip_tokenizer_init=True)
    assert (ours - exact).abs().mean() < 0.05 * exact.abs().mean()  # bf16, of random weights around 1


def test_graphs_and_eager_steps_agree(tmp_path) -> None:
    quantized.write(tmp_path, "int4")
    graphs, _ = logprobs(tmp_path)
    eager, _ = logprobs(tmp_path, enforce_eager=True)
    # A near tie may flip, as a step of another size is another matmul.
    assert sum(a == b for a, b in zip(graphs, eager)) >= len(PROMPTS) - 1


@pytest.mark.parametrize("level", [1, 2])
def test_packed_weights_sleep_and_wake_at_their_addresses(level: int, tmp_path) -> None:
    quantized.write(tmp_path, "gptq-act-order")
    with LLM(str(tmp_path), **OPTIONS, enable_sleep_mode=True) as llm:
        before, sums = llm.generate(PROMPTS, PARAMS, use_tqdm=False), llm.check_weights()
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(str(tmp_path))
        assert llm.check_weights() == sums
        after = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]

"""Checkpoints of latent attention in fewer bits, and its cache."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.errors import ConfigError
from tests import quantized, tiny
from tests.tiny_families import write_family

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((5, 40, 90))]


def write_fp8(root: Path, name: str) -> tuple[Path, Path]:
    """Writes a family's checkpoint with matrices in fp8, 128 x 128 of them to a scale, as DeepSeek publishes
    them, and one of the numbers that these stand for."""
    plain, packed, unpacked = write_family(root, name), root / f"{name}-fp8", root / f"{name}-unpacked"
    tensors = load_file(plain / "model.safetensors")
    stored, meant = {}, {}
    for key, tensor in tensors.items():
        if key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            parts, meant[key] = quantized.blocks_of_fp8(tensor)
            stored |= {f"{key.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            stored[key] = meant[key] = tensor
    for folder, own in ((packed, stored), (unpacked, meant)):
        shutil.copytree(plain, folder)
        contiguous = {key: tensor.contiguous() for key, tensor in own.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = quantized.config_of("fp8-blocks")
    (packed / "config.json").write_text(json.dumps(config))
    return packed, unpacked


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2"])
def test_matrices_in_fp8_blocks_mean_their_plain_numbers(name, root):
    """The matrices that queries absorb are unpacked, and the others are multiplied as they are."""
    packed, unpacked = write_fp8(root, name)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    with LLM(str(packed), dtype="float32", device="cpu", max_model_len=256) as llm:
        outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        answer = output.outputs[0]
        expected = tiny.logprobs(unpacked, output.prompt_token_ids + answer.token_ids)
        for i, position in enumerate((output.prompt_logprobs or [])[1:] + answer.logprobs):
            for token, found in position.items():
                assert abs(found.logprob - expected[i, token].item()) < 2e-3, i


def test_a_token_takes_one_latent_of_the_cache(root):
    """32 numbers and 8 rotated ones in each of 3 layers, for blocks of 16 tokens in float32."""
    folder = write_family(root, "glm4-flash")
    options = dict(dtype="float32", device="cpu", max_model_len=64, kv_cache_memory_bytes=7 * 16 * 3 * 40 * 4)
    with LLM(str(folder), block_size=16, **options) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert llm.stats().num_blocks == 7


def test_a_cache_of_fp8_latents_is_refused(root):
    with pytest.raises(ConfigError, match="kv_cache_dtype must be 'auto' for a model with latent attention"):
        LLM(str(write_family(root, "glm4-flash")), dtype="float32", device="cpu", kv_cache_dtype="fp8")

"""Mixtures of experts in GGUF files: log-probabilities are transformers' for the checkpoint that the file was
written from."""

from __future__ import annotations

import random

import gguf
import pytest

from shoal import LLM, SamplingParams
from tests import gguf_files, tiny
from tests.tiny_families import write_family

PROMPT = random.Random(3).choices(range(256), k=40)


def assert_equal_to(folder, path) -> None:
    options = dict(device="cpu", dtype="float32", max_model_len=64, skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(str(path), **options) as llm:
        output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    expected = tiny.logprobs(folder, PROMPT)
    for i, position in enumerate(output.prompt_logprobs[1:]):
        for token, found in position.items():
            assert abs(found.logprob - expected[i, token].item()) < 1e-3, i


def add_experts(writer, config) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["n_group"] is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def add_glm(writer, config) -> None:
    add_experts(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"] // 2)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])


@pytest.mark.parametrize("use_qk_norm", [True, False])
def test_a_file_of_glm_4_5_is_its_checkpoint(use_qk_norm, root, tmp_path):
    folder = write_family(root, "glm4-moe", use_qk_norm=use_qk_norm)
    gguf_files.write(tmp_path / "m.gguf", folder, "glm4moe", add_glm)
    assert_equal_to(folder, tmp_path / "m.gguf")

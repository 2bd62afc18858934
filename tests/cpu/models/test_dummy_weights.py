"""Random weights for benchmarks spread tokens over the experts, as trained ones do."""

import json
from random import Random

import torch

from shoal import LLM, SamplingParams
from shoal.layers.experts import Experts

SEED = 20261128
SHAPE = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_hidden_layers=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)


def test_routers_of_random_weights_spread_the_tokens_of_a_prompt_in_every_layer(tmp_path, monkeypatch):
    print(f"seed {SEED}")
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    chosen, mix = [], Experts.mix

    def record(self, x_TD, logits_TE, *rest):
        chosen.append(logits_TE.topk(SHAPE["num_experts_per_tok"]).indices)
        return mix(self, x_TD, logits_TE, *rest)

    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=1 << 24,
        max_num_seqs=4,
        skip_tokenizer_init=True,
    )
    monkeypatch.setattr(Experts, "mix", record)
    prompt = Random(SEED).choices(range(512), k=256)
    llm.generate([prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    llm.exit()
    layers = [ids for ids in chosen if len(ids) == len(prompt)]
    assert len(layers) >= SHAPE["num_hidden_layers"] - 1  # the last layer has fewer tokens
    for ids in layers:
        counts = torch.bincount(ids.flatten(), minlength=SHAPE["num_experts"])
        assert counts.min() > 0 and counts.max() < len(prompt) / 2, counts

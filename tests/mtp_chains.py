"""Qwen3.5 chains (tests/eagle3_heads.py) with MTP heads that are right or wrong by construction. Slot S of a head gets
the embedding of token S + 1 and the target's final hidden state of token S, and predicts token S + 2:

- "embedding": fc hands on the embedding alone. Right if it is the next token's.
- "hidden": fc takes the hidden state alone, and follows the chain once. The target's last norm and the head's own turn
  half of the signs. Right if the state is that of its own position, after that norm, and comes back normed.
- "attention": as "embedding", but a trap token wins unless attention sees nearly all earlier positions in the head's
  cache, which is to say unless prompts (in chunks, from the prefix cache) went through the head.
- "wrong": fc hands on the embedding of another token.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.eagle3_heads import LETTERS, SIZE, TRAP, lm_head
from tests.tiny import VOCAB, write_tokenizer

HEADS, HEAD, DELTA, MLP = 4, 32, 16, 32
CONFIG = dict(
    architectures=["Qwen3_5ForCausalLM"],
    model_type="qwen3_5_text",
    vocab_size=VOCAB,
    hidden_size=VOCAB,
    intermediate_size=MLP,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    head_dim=HEAD,
    linear_key_head_dim=DELTA,
    linear_value_head_dim=DELTA,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=4,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
    bos_token_id=256,
    eos_token_id=257,
    mtp_num_hidden_layers=1,
)
ATTENTION = {
    "self_attn.q_proj": (2 * HEADS * HEAD, VOCAB),
    "self_attn.k_proj": (2 * HEAD, VOCAB),
    "self_attn.v_proj": (2 * HEAD, VOCAB),
    "self_attn.o_proj": (VOCAB, HEADS * HEAD),
    "self_attn.q_norm": (HEAD,),
    "self_attn.k_norm": (HEAD,),
}
DELTA_NET = {
    "linear_attn.conv1d": (8 * DELTA, 1, 4),
    "linear_attn.norm": (DELTA,),
    "linear_attn.out_proj": (VOCAB, 4 * DELTA),
    "linear_attn.in_proj_qkv": (8 * DELTA, VOCAB),
    "linear_attn.in_proj_z": (4 * DELTA, VOCAB),
    "linear_attn.in_proj_b": (4, VOCAB),
    "linear_attn.in_proj_a": (4, VOCAB),
}
REST = {
    "input_layernorm": (VOCAB,),
    "post_attention_layernorm": (VOCAB,),
    "mlp.gate_proj": (MLP, VOCAB),
    "mlp.up_proj": (MLP, VOCAB),
    "mlp.down_proj": (VOCAB, MLP),
}


def write_chain(folder: Path, follows: list[int], kind: str, margin: float = 20.0) -> Path:
    """Norms multiply by 1 + weight, and all other weights of layers are zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": torch.eye(VOCAB), "lm_head.weight": lm_head(follows, margin)}
    tensors |= _layer("mtp.layers.0.", ATTENTION)
    for i in range(4):
        tensors |= _layer(f"model.layers.{i}.", ATTENTION if i == 3 else DELTA_NET)
        if i < 3:
            tensors |= {
                f"model.layers.{i}.linear_attn.{name}": torch.zeros(4) for name in ("A_log", "dt_bias")
            }
    names = ("model.norm", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    tensors |= {f"{name}.weight": torch.zeros(VOCAB) for name in names}
    after = torch.zeros(VOCAB, VOCAB)  # makes each token the next one
    after[torch.tensor(follows), torch.arange(VOCAB)] = 1
    none, same = torch.zeros(VOCAB, VOCAB), torch.eye(VOCAB)
    if kind == "hidden":
        sign = torch.ones(VOCAB)
        sign[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[: VOCAB // 2]] = -1
        tensors["model.norm.weight"] = tensors["mtp.norm.weight"] = sign - 1
        tensors["mtp.norm.weight"] = tensors["mtp.norm.weight"].clone()
        tensors["lm_head.weight"] *= sign
        parts = (none, after * sign)
    else:
        parts = (same.roll(7, 0) if kind == "wrong" else same, none)
    tensors["mtp.fc.weight"] = torch.cat(parts, dim=1)
    if kind == "attention":
        # Each position's value is 1, and what attention brings of it goes to a dimension of its own, halved by the
        # output gate. The target has that number from its embeddings.
        spare, look = VOCAB - 1, margin / SIZE
        tensors["mtp.fc.weight"][spare] = 0
        tensors["mtp.layers.0.self_attn.v_proj.weight"][:, :LETTERS] = 1 / SIZE
        tensors["mtp.layers.0.self_attn.o_proj.weight"][spare] = 2 * SIZE / 2**0.5 / (HEADS * HEAD)
        tensors["model.embed_tokens.weight"][:LETTERS, spare] = 1
        tensors["lm_head.weight"][:, spare] = 0
        tensors["lm_head.weight"][TRAP, :LETTERS] = 1.5 * look
        tensors["lm_head.weight"][TRAP, spare] = -0.6 * look
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def _layer(prefix: str, mixer: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}.weight": torch.zeros(shape) for name, shape in (mixer | REST).items()}

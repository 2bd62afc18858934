"""Checkpoints whose next token is known: a chain has no memory, each token says what follows it. Every sum of
its logits has one term that is not zero, so they are exact at any batch shape, and even sampled answers can be
compared token for token."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny import VOCAB, write_tokenizer

LETTERS = 94  # the printable ASCII letters are tokens 33 to 126


def ring(period: int) -> list[int]:
    """Returns for each token the one that follows: letters go round in circles of `period`."""
    follows = [33] * VOCAB
    for start in range(33, 33 + LETTERS, period):
        members = [*range(start, min(start + period, 33 + LETTERS))]
        for a, b in zip(members, [*members[1:], members[0]]):
            follows[a] = b
    return follows


def follow(follows: list[int], token: int, count: int) -> list[int]:
    """Returns the `count` tokens after this one."""
    found = []
    for _ in range(count):
        token = follows[token]
        found.append(token)
    return found


def broken_runs(rng: random.Random, follows: list[int]) -> list[int]:
    """Returns a prompt of runs of the chain, broken and mixed, in which look-ups are sometimes right."""
    prompt: list[int] = []
    while len(prompt) < rng.randint(10, 80):
        start = 33 + rng.randrange(LETTERS)
        prompt += [start, *follow(follows, start, rng.randint(0, 14))]
        prompt += [rng.randrange(256) for _ in range(rng.choice((0, 0, 1, 5)))]
    return prompt


def write_chain(root: Path, name: str, follows: list[int], margin: float = 20.0) -> Path:
    """Writes a Llama whose logits have `margin` between the token that follows and the others. At 4 and
    temperature 1 it is sampled two times of three."""
    folder = root / name
    folder.mkdir(parents=True)
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        rope_theta=10000.0,
        tie_word_embeddings=False,
        torch_dtype="float32",
        bos_token_id=256,
        eos_token_id=257,
    )
    layer = "model.layers.0."
    shapes = {
        f"{layer}self_attn.q_proj.weight": (64, VOCAB),
        f"{layer}self_attn.k_proj.weight": (32, VOCAB),
        f"{layer}self_attn.v_proj.weight": (32, VOCAB),
        f"{layer}self_attn.o_proj.weight": (VOCAB, 64),
        f"{layer}mlp.gate_proj.weight": (32, VOCAB),
        f"{layer}mlp.up_proj.weight": (32, VOCAB),
        f"{layer}mlp.down_proj.weight": (VOCAB, 32),
    }
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for norm in (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"):
        tensors[f"{norm}.weight"] = torch.ones(VOCAB)
    tensors["model.embed_tokens.weight"] = torch.eye(VOCAB)
    # lower ids are likelier, so that there are no ties
    head = (-0.002 * torch.arange(VOCAB)).unsqueeze(1).repeat(1, VOCAB)
    for token, after in enumerate(follows):
        head[after, token] = margin / VOCAB**0.5
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder

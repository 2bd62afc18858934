"""EAGLE-3 heads that are right or wrong by construction, on chains.

A chain has no memory: each token says what comes next. Its embeddings are unit vectors, every attention and MLP
writes zeros, and row `follows[t]` of lm_head looks for token t, so logits are exact at any batch shape. The other
tokens are likelier the lower their id. Slot S of a head gets the hidden states of token S, and predicts S + 2:

- "hidden": fc follows the chain once, and the MLP, which makes a token of the hidden state into the next one, once
  more. Each further draft begins with the head's own output, before its norm. Right if the state is that of its own
  position, and comes back as it was.
- "attention": fc follows the chain twice, and a trap token wins unless attention sees nearly all earlier positions
  in the head's own cache, which is to say unless prompts (in chunks, from the prefix cache) went through the head.
- "wrong": fc leads to another token.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny import VOCAB, write_tokenizer

LETTERS, TRAP, LAYERS, MLP = 94, 280, 8, 320
SIZE = VOCAB**0.5  # what a norm makes of a unit vector
LAYER = dict(
    vocab_size=VOCAB,
    hidden_size=VOCAB,
    intermediate_size=MLP,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    hidden_act="silu",
)


def ring(period: int) -> list[int]:
    """Returns what follows each token: rings of `period` tokens among the letters; others lead to the first letter."""
    follows = [0] * VOCAB
    for start in range(0, LETTERS, period):
        members = list(range(start, min(start + period, LETTERS)))
        for a, b in zip(members, members[1:] + members[:1]):
            follows[a] = b
    return follows


def follow(follows: list[int], token: int, n: int) -> list[int]:
    found = []
    for _ in range(n):
        token = follows[token]
        found.append(token)
    return found


def lm_head(follows: list[int], margin: float) -> torch.Tensor:
    weight = (-0.002 * torch.arange(VOCAB))[:, None].repeat(1, VOCAB)
    for token, after in enumerate(follows):
        weight[after, token] = margin / SIZE
    return weight


def write_chain(folder: Path, follows: list[int], margin: float = 20.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        LAYER,
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        num_hidden_layers=LAYERS,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
    )
    tensors = {"model.embed_tokens.weight": torch.eye(VOCAB), "model.norm.weight": torch.ones(VOCAB)}
    tensors["lm_head.weight"] = lm_head(follows, margin)
    for i in range(LAYERS):
        tensors |= _layer(f"model.layers.{i}.", VOCAB)
    _write(folder, config, tensors)
    write_tokenizer(folder)
    return folder


def write_right_head(
    folder: Path, follows: list[int], kind: str, margin: float = 20.0, drafts_all: bool = False
) -> Path:
    """`drafts_all`: the draft vocabulary is the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _layer("midlayer.", 2 * VOCAB) | {
        "midlayer.hidden_norm.weight": torch.ones(VOCAB),
        "norm.weight": torch.ones(VOCAB),
    }
    after = torch.zeros(VOCAB, VOCAB)  # makes each token the next one
    after[torch.tensor(follows), torch.arange(VOCAB)] = 1
    fc = {"hidden": after, "attention": after @ after, "wrong": (after @ after).roll(3, 0)}[kind]
    # A third from each of three layers: all of them have to be right.
    tensors["fc.weight"] = torch.cat((fc, fc, fc), dim=1) / 3
    if kind == "hidden":
        # silu(30) * 1 for the token's own number: it goes, and the next token comes
        gate, up = tensors["midlayer.mlp.gate_proj.weight"], tensors["midlayer.mlp.up_proj.weight"]
        gate[:VOCAB], up[:VOCAB] = torch.eye(VOCAB) * 30 / SIZE, torch.eye(VOCAB) / SIZE
        tensors["midlayer.mlp.down_proj.weight"][:, :VOCAB] = (after - torch.eye(VOCAB)) / 30
    drafted = torch.arange(VOCAB) if drafts_all else torch.tensor([*range(LETTERS), TRAP])
    looks = torch.eye(VOCAB)[drafted] * margin / SIZE
    others = (-0.002 * drafted)[:, None].repeat(1, VOCAB)
    tensors["lm_head.weight"] = torch.where(looks > 0, looks, others)
    if kind == "attention":
        # Each position's value is 1, and what attention brings of it goes to a dimension of its own. The trap sees
        # 1.5 of a letter, and loses 0.6 for what attention brought: 0.9 with a full cache, and more than 1 where a
        # sixth of it is missing.
        spare, look = VOCAB - 1, margin / SIZE
        tensors["midlayer.self_attn.v_proj.weight"][:, VOCAB : VOCAB + LETTERS] = 1 / SIZE
        tensors["midlayer.self_attn.o_proj.weight"][spare] = 1 / 64
        tensors["lm_head.weight"][:, spare] = 0
        tensors["lm_head.weight"][-1, :LETTERS] = 1.5 * look
        tensors["lm_head.weight"][-1, spare] = -0.6 * look
    config = dict(LAYER, architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1)
    config["draft_vocab_size"] = len(drafted)
    if not drafts_all:
        tensors["d2t"] = drafted - torch.arange(len(drafted))
    _write(folder, config, tensors)
    return folder


def _layer(prefix: str, inputs: int) -> dict[str, torch.Tensor]:
    shapes = {"q": (64, inputs), "k": (32, inputs), "v": (32, inputs), "o": (VOCAB, 64)}
    tensors = {f"{prefix}self_attn.{name}_proj.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tensors |= {f"{prefix}mlp.{name}_proj.weight": torch.zeros(MLP, VOCAB) for name in ("gate", "up")}
    tensors[f"{prefix}mlp.down_proj.weight"] = torch.zeros(VOCAB, MLP)
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{prefix}{name}.weight": torch.ones(VOCAB) for name in norms}


def _write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")

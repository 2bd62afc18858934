"""EAGLE-3 heads of tiny models: checkpoints in both published forms, and what a head drafts, computed with the
modules of `transformers`' Llama: the norms, the rotary embedding and the MLP are its own, and attention is written
out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half


def head_tensors(
    config: dict[str, Any], target_size: int, draft_vocab: int, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Random tensors of a head with one layer of this Llama config, under published names."""
    generator = torch.Generator().manual_seed(seed)
    size, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim") or size // config["num_attention_heads"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(outs: int, inputs: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(outs, inputs, generator=generator) * scale / inputs**0.5

    def norm(width: int) -> torch.Tensor:
        return torch.rand(width, generator=generator) + 0.5

    drafted = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    is_drafted = torch.zeros(vocab, dtype=torch.bool)
    is_drafted[drafted] = True
    return {
        "fc.weight": matrix(size, 3 * target_size),
        "midlayer.input_layernorm.weight": norm(size),
        "midlayer.hidden_norm.weight": norm(size),
        "midlayer.post_attention_layernorm.weight": norm(size),
        "midlayer.self_attn.q_proj.weight": matrix(heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(kv, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(kv, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, heads),
        "midlayer.mlp.gate_proj.weight": matrix(inter, size),
        "midlayer.mlp.up_proj.weight": matrix(inter, size),
        "midlayer.mlp.down_proj.weight": matrix(size, inter),
        "norm.weight": norm(size),
        "lm_head.weight": matrix(draft_vocab, size, 3.0),
        "d2t": drafted - torch.arange(draft_vocab),
        "t2d": is_drafted,
    }


def write_head(
    folder: Path, layer: dict[str, Any], tensors: dict[str, torch.Tensor], form: str = "plain", **fields: Any
) -> Path:
    """Writes a checkpoint. `form`: "plain" as its authors' first ones, "pickled" as these are stored, or
    "speculators"."""
    folder.mkdir(parents=True, exist_ok=True)
    draft_vocab = len(tensors["lm_head.weight"])
    if form == "speculators":
        config = dict(
            architectures=["Eagle3Speculator"],
            draft_vocab_size=draft_vocab,
            speculators_model_type="eagle3",
            speculators_config=dict(
                algorithm="eagle3",
                default_proposal_method="greedy",
                proposal_methods=[
                    dict(
                        proposal_type="greedy",
                        speculative_tokens=3,
                        accept_tolerance=0.0,
                        verifier_accept_k=1,
                    )
                ],
                verifier=dict(architectures=["LlamaForCausalLM"], name_or_path="org/model"),
            ),
            transformer_layer_config=dict(layer, model_type="llama", num_hidden_layers=1),
            **fields,
        )
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    else:
        config = dict(
            layer,
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            num_hidden_layers=1,
            draft_vocab_size=draft_vocab,
            **fields,
        )
    (folder / "config.json").write_text(json.dumps(config))
    if form == "pickled":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


class HeadOracle:
    """A head in float32. `embed`: the embedding of the head, or of its target."""

    def __init__(
        self,
        layer: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        embed: torch.Tensor,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        norm_output: bool = False,
    ) -> None:
        own = {k: v for k, v in layer.items() if k not in ("architectures", "model_type")}
        config = transformers.LlamaConfig(**own)
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        self.embed, self.eps = tensors.get("embed_tokens.weight", embed), config.rms_norm_eps
        self.dim = layer.get("head_dim") or config.hidden_size // config.num_attention_heads
        config.head_dim = self.dim
        self.rotary = LlamaRotaryEmbedding(config)
        self.mlp = LlamaMLP(config)
        self.mlp.load_state_dict(self._below("layers.0.mlp."))
        self.ids = torch.arange(len(self.tensors["lm_head.weight"]))
        if "d2t" in self.tensors:
            self.ids = self.ids + self.tensors["d2t"]
        self.norm_before_fc = norm_before_fc

    def _below(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(x.shape[-1], self.eps)
        norm.load_state_dict({"weight": self.tensors[f"{name}.weight"]})
        return norm(x)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.norm_before_fc:
            states = self._norm("input_norm", states)
        return states @ self.tensors["fc.weight"].T

    @torch.no_grad()
    def run(self, following: list[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots 0, 1, ... of one sequence: what the output head takes, and what the next slots begin with."""
        embedded = self.embed[torch.tensor(following)]
        normed = self._norm("layers.0.hidden_norm", hidden)
        residual = normed if self.norm_before_residual else hidden
        pair = torch.cat((self._norm("layers.0.input_layernorm", embedded), normed), dim=-1)
        length = len(following)
        q, k, v = (
            (pair @ self.tensors[f"layers.0.self_attn.{name}_proj.weight"].T)
            .view(length, -1, self.dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        cos, sin = self.rotary(pair[None], torch.arange(length)[None])
        q, k = (x * cos[0] + rotate_half(x) * sin[0] for x in (q, k))
        k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) / self.dim**0.5).masked_fill(
            torch.ones(length, length).triu(1).bool(), -1e9
        )
        attended = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(length, -1)
        x = residual + attended @ self.tensors["layers.0.self_attn.o_proj.weight"].T
        x = x + self.mlp(self._norm("layers.0.post_attention_layernorm", x))
        normed = self._norm("norm", x)
        return normed, normed if self.norm_output else x

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*normed.shape[:-1], len(self.embed)), float("-inf"))
        logits[..., self.ids] = normed @ self.tensors["lm_head.weight"].T
        return logits

    @torch.no_grad()
    def drafts(self, ids: list[int], states: torch.Tensor, k: int) -> list[int]:
        """The k likeliest tokens behind `ids`, of which the last was drawn and not yet computed. `states`: the
        target's, of the tokens before it."""
        following, hidden, found = list(ids[1:]), self.fuse(states[: len(ids) - 1]), []
        for _ in range(k):
            normed, back = self.run(following, hidden)
            found.append(int(self.logits(normed[-1]).argmax()))
            following.append(found[-1])
            hidden = torch.cat((hidden, back[-1:]))
        return found


class TargetOracle:
    """A target run by `transformers`: its greedy answers, and the steps that they take with a head."""

    def __init__(
        self, path: Path, head: HeadOracle | None = None, layers: tuple[int, ...] | None = None
    ) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        num_layers = self.model.config.num_hidden_layers
        self.head, self.layers = head, layers or (2, num_layers // 2, num_layers - 3)

    @property
    def embedding(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def states(self, ids: list[int]) -> torch.Tensor:
        """The hidden states that a head reads, side by side."""
        found = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([found[i][0] for i in self.layers], dim=-1)

    @torch.no_grad()
    def greedy(self, ids: list[int], n: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()

    def steps(self, prompt: list[int], answer: list[int], k: int) -> tuple[int, int, int]:
        """(steps, drafted, accepted) of an answer if k tokens are drafted before each step but the first."""
        assert self.head is not None
        ids, states = prompt + answer, self.states(prompt + answer)
        steps = at = 1
        drafted = accepted = 0
        while at < len(answer):
            length = min(k, len(answer) - at - 1)
            draft = self.head.drafts(ids[: len(prompt) + at], states, length) if length else []
            right = 0
            while right < len(draft) and draft[right] == answer[at + right]:
                right += 1
            drafted, accepted = drafted + len(draft), accepted + right
            at, steps = at + right + 1, steps + 1
        return steps, drafted, accepted

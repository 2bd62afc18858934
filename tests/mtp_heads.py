"""Tiny models with MTP heads as published, and `transformers` as the oracle of what the heads compute: it reads the
same files by its own MtpModel, or for Nemotron block by block."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.sampling_params import SamplingParams
from shoal.weights.source import resolve
from tests import tiny
from tests.tiny_families import write_family

K = 3
PROMPT = list(range(40, 75))
NEAR_LAST = ("deepseek-v3", "glm4-moe", "glm4-flash")  # the head is one more layer
QWENS = ("qwen3.5", "qwen3.5-moe", "qwen3.5-vision", "qwen3-next")
NEMOTRONS = ("nemotron-h", "nemotron-latent")
ERNIE = "ernie4.5-moe"


def make_core(path: Path, k: int | None = K, **options: Any) -> EngineCore:
    """An engine that drafts k tokens a step with the head in these files."""
    defaults: dict[str, Any] = dict(
        dtype="float32",
        device="cpu",
        max_model_len=128,
        max_num_seqs=1,
        kv_cache_memory_bytes=8 << 20,
        speculative_config=dict(method="mtp", num_speculative_tokens=k, enable_adaptive_verification=False),
    )
    return EngineCore(EngineConfig(model=str(path), **defaults | options), resolve(str(path)))


def answer(
    core: EngineCore, prompt: list[int], n: int, each_step: Callable[[list[int]], None] = lambda tokens: None
) -> list[int]:
    """The n likeliest tokens. `each_step` gets what there is of them after each step."""
    core.add(Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)))
    found: list[int] = []
    while core.has_work:
        found += [token for output in core.step() for token in output.token_ids]
        if found:
            each_step(found)
    return found


def write_mtp(root: Path, name: str, scale: float = 1.0, **changes: Any) -> Path:
    """Writes family `name` with a head whose layers are the target's last ones times random numbers near 1, and
    returns its folder. `scale` is the head's share of the hidden state."""
    folder = root / f"{name}-{scale}"
    if (folder / "complete").exists():
        return folder
    if name in QWENS:
        # the last one is as the head's, where MtpModel looks for the class of norms
        changes = {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2} | changes
    if name in NEMOTRONS:
        changes = {"hybrid_override_pattern": "M-*E"} | changes
    if name == "qwen3-next":
        changes = {"decoder_sparse_step": 1} | changes  # as published
    shutil.copytree(write_family(root / "targets", name, **changes), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: weight for name, weight in tensors.items() if not name.startswith("mtp.")}
    tensors |= head_tensors(name, config, tensors, scale)
    tensors = {name: weight.contiguous() for name, weight in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if name in (*NEAR_LAST, ERNIE):
        config |= dict(num_nextn_predict_layers=1)
    if name in NEMOTRONS:
        config |= dict(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def head_tensors(
    name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def near(weight: torch.Tensor, spread: float = 0.2) -> torch.Tensor:
        if not weight.is_floating_point():
            return weight.clone()
        return weight * (1 + spread * torch.randn(weight.shape, generator=generator))

    text = config.get("text_config", config)
    size, layers = (
        text["hidden_size"],
        sorted({int(i) for i in re.findall(r"layers\.(\d+)\.", " ".join(tensors))}),
    )
    norms = {
        part: 0.6 + 1.2 * torch.rand(size, generator=generator) for part in ("embedding", "hidden", "last")
    }
    fc = torch.randn(size, 2 * size, generator=generator) * size**-0.5
    fc[:, size:] *= scale

    def layer(number: int) -> dict[str, torch.Tensor]:
        found = {}
        for key, weight in tensors.items():
            if (match := re.search(rf"(?<!visual\.)layers\.{number}\.(.+)", key)) and "visual" not in key:
                found[match[1]] = near(weight)
        return found

    if name in NEAR_LAST:
        own = f"model.layers.{len(layers)}."
        found = {f"{own}{key}": weight for key, weight in layer(layers[-1]).items()}
        found |= {f"{own}eh_proj.weight": fc, f"{own}shared_head.norm.weight": norms["last"]}
        found |= {f"{own}enorm.weight": norms["embedding"], f"{own}hnorm.weight": norms["hidden"]}
        found[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        return found | {f"{own}shared_head.head.weight": head.clone()}
    if name in QWENS:
        last = max(i for i in layers if "self_attn.o_proj.weight" in layer(i))
        found = {f"mtp.layers.0.{key}": weight for key, weight in layer(last).items()}
        norms = {part: weight - 1 for part, weight in norms.items()}
        return found | {
            "mtp.fc.weight": fc,
            "mtp.norm.weight": norms["last"],
            "mtp.pre_fc_norm_embedding.weight": norms["embedding"],
            "mtp.pre_fc_norm_hidden.weight": norms["hidden"],
        }
    if name == ERNIE:  # the first layer is dense, as the head's is
        found = {f"model.mtp_block.0.{key}": weight for key, weight in layer(0).items()}
        return found | {
            "model.mtp_linear_proj.0.weight": fc,
            "model.mtp_emb_norm.0.weight": norms["embedding"],
            "model.mtp_hidden_norm.0.weight": norms["hidden"],
        }
    found = {}
    for i, part in enumerate(("mixer.o_proj.weight", "mixer.gate.weight")):
        number = next(number for number in layers if part in layer(number))
        found |= {f"mtp.layers.{i}.{key}": weight for key, weight in layer(number).items()}
    return found | {
        "mtp.layers.0.eh_proj.weight": fc,
        "mtp.layers.0.enorm.weight": norms["embedding"],
        "mtp.layers.0.hnorm.weight": norms["hidden"],
        "mtp.layers.1.final_layernorm.weight": norms["last"],
    }


class MtpOracle:
    """A model run by `transformers`, and its head."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny._oracle(folder)
        text = self.model.config.get_text_config()
        text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
        text.mtp_mlp_layer_types = ["sparse"]
        if not text.model_type.startswith(
            "qwen"
        ):  # the class knows the numbers of the published models' layers
            self.model._keys_to_ignore_on_load_unexpected = [rf"layers\.{text.num_hidden_layers}\."]
        self.head = MtpModel.from_pretrained(self.model).eval()

    @torch.no_grad()
    def states(self, ids: list[int]) -> torch.Tensor:
        """The final hidden states of the target, after its last norm."""
        return self.model.get_decoder()(torch.tensor([ids])).last_hidden_state[0]

    @torch.no_grad()
    def run(self, following: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Returns the output of slots with these tokens after them, and these hidden states."""
        positions = torch.arange(len(following))[None]
        return self.head.forward_layer(0, hidden[None], positions, None, input_ids=torch.tensor([following]))[
            0
        ]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(normed)

    def drafts(self, ids: list[int], k: int) -> list[int]:
        """The k likeliest tokens behind `ids`, of which the last was drawn and not yet computed."""
        following, hidden, found = list(ids[1:]), self.states(ids[:-1]), []
        for _ in range(k):
            normed = self.run(following, hidden)
            found.append(int(self.logits(normed[-1]).argmax()))
            following.append(found[-1])
            hidden = torch.cat((hidden, normed[-1:]))
        return found


class LayersOracle(MtpOracle):
    """A head of a form that MtpModel does not know. Its layers are run as a model of their own."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny._oracle(folder)
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        make = _ernie if config["model_type"] == "ernie4_5_moe" else _nemotron
        (self.enorm, self.hnorm, self.fc), layers, config = make(tensors, config)
        self.eps = config.get("layer_norm_epsilon", config.get("rms_norm_eps"))
        head = folder / "head"
        head.mkdir(exist_ok=True)
        (head / "config.json").write_text(json.dumps(config))
        shared = {name: t for name, t in tensors.items() if "embed" in name or "lm_head" in name}
        save_file(layers | shared, head / "model.safetensors", metadata={"format": "pt"})
        self.layers = tiny._oracle(head).get_decoder()

    @torch.no_grad()
    def run(self, following: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.model.get_input_embeddings()(torch.tensor(following))
        pair = [
            torch.nn.functional.rms_norm(x, x.shape[-1:], norm, self.eps)
            for norm, x in ((self.enorm, embedded), (self.hnorm, hidden))
        ]
        joined = torch.cat(pair, dim=-1) @ self.fc.T
        return self.layers(inputs_embeds=joined[None]).last_hidden_state[0]


Parts = tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]


def _nemotron(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Parts:
    """Returns norms and fc, and a model of the head's two layers."""
    own = {name.removeprefix("mtp.layers."): t for name, t in tensors.items() if name.startswith("mtp.")}
    layers = {f"backbone.layers.{name}": t for name, t in own.items() if "mixer" in name or ".norm." in name}
    layers["backbone.norm_f.weight"] = own["1.final_layernorm.weight"]
    for key in ("num_hidden_layers", "layers_block_type", "mtp_hybrid_override_pattern"):
        config.pop(key, None)
    joins = [own[f"0.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")]
    return joins, layers, config | {"hybrid_override_pattern": "*E"}


def _ernie(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Parts:
    prefix = "model.mtp_block.0."
    layers = {
        name.replace(prefix, "model.layers.0."): t for name, t in tensors.items() if name.startswith(prefix)
    }
    layers["model.norm.weight"] = tensors["model.norm.weight"]
    joins = [tensors[f"model.mtp_{name}.0.weight"] for name in ("emb_norm", "hidden_norm", "linear_proj")]
    dense = dict(architectures=["Ernie4_5ForCausalLM"], model_type="ernie4_5", num_hidden_layers=1)
    dense["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return joins, layers, config | dense

"""Tiny random checkpoints of every supported architecture, and `transformers` in fp32 as the oracle of what
they generate."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 300
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    bos_token_id=256,
    eos_token_id=257,
    tie_word_embeddings=False,
)
ROPES = {
    "llama3": dict(
        rope_type="llama3",
        rope_theta=10000.0,
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=32),
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=3.0),
}
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied-llama3-rope": (
        "LlamaConfig",
        dict(tie_word_embeddings=True, rope_parameters=ROPES["llama3"]),
    ),
    "llama-one-kv-head": ("LlamaConfig", dict(num_key_value_heads=1)),
    "llama-linear-rope": ("LlamaConfig", dict(rope_parameters=ROPES["linear"])),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-yarn": ("Qwen2Config", dict(rope_parameters=ROPES["yarn"])),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    # its heads divide over four ranks, which share its kv heads two by two
    "qwen3-four": (
        "Qwen3Config",
        dict(head_dim=16, hidden_size=64, num_attention_heads=8, num_key_value_heads=2),
    ),
    "qwen3-tied": ("Qwen3Config", dict(head_dim=32, tie_word_embeddings=True)),
    "mistral-window": ("MistralConfig", dict(sliding_window=19)),
    # its layers are two groups, with KV blocks of their own
    "qwen3-windows": (
        "Qwen3Config",
        dict(
            head_dim=16,
            use_sliding_window=True,
            sliding_window=19,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(
            head_dim=8,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            mlp_only_layers=[],
        ),
    ),
    "granite": (
        "GraniteConfig",
        dict(
            embedding_multiplier=3.0,
            attention_multiplier=0.21,  # 1 / sqrt(head_dim) is 0.35
            residual_multiplier=0.4,
            logits_scaling=2.5,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo2-one-kv-head": ("Olmo2Config", dict(num_key_value_heads=1, tie_word_embeddings=True)),
}
LLAMA_LINE = ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Qwen3MoeConfig")
# qwen3 stands for the line above in tests of all the ways in which an engine runs; each other model is tried by itself
UNLIKE_LLAMA = [name for name, (kind, _) in MODELS.items() if kind not in LLAMA_LINE]


def write_tokenizer(folder: Path) -> None:
    """Bytes are tokens 0 to 255; 256 begins and 257 ends a text."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt "
        "%}<assistant>{% endif %}"
    )
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<begin>",
        eos_token="<end>",
        chat_template=template,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(root: Path, name: str, **changes: Any) -> Path:
    """Writes checkpoint `name` under `root` (once) and returns its folder. Weights are wide enough for greedy
    decoding to be decisive. `changes` go over its config's fields."""
    folder = root / name
    if (folder / "complete").exists():
        return folder
    kind, own = MODELS[name]
    torch.manual_seed(len(name) * 31 + ord(name[-1]))
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**COMMON | own | changes)
    ).float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.uniform_(0.6, 1.8)
            elif key.endswith("bias"):
                weight.normal_(0, 0.4)
            elif "embed" in key or "lm_head" in key:
                weight.normal_(0, 0.6)
            else:
                weight.normal_(0, 2.2 / weight.shape[-1] ** 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "complete").touch()
    return folder


def write_changed(folder: Path, target: Path) -> Path:
    """Writes the same model with other weights to `target`, and returns it."""
    target.mkdir()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / file).write_bytes((folder / file).read_bytes())
    weights = {
        name: (w.flip(0) if "o_proj" in name or "embed" in name else w).contiguous()
        for name, w in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@functools.lru_cache(maxsize=4)
def _oracle(folder: Path) -> torch.nn.Module:
    found = model_class(transformers.AutoConfig.from_pretrained(folder))
    model = found.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.float().eval()  # MXFP4 is unpacked to bf16 where there is a GPU


def model_class(config: transformers.PreTrainedConfig) -> Any:
    """...ForConditionalGeneration where the config nests a text model, else ...ForCausalLM."""
    # transformers lists Mistral 4's causal model there
    nests = hasattr(config, "text_config") or config.model_type == "mistral4"
    auto = transformers.AutoModelForImageTextToText if nests else transformers.AutoModelForCausalLM
    return auto._model_mapping[type(config)]


@torch.no_grad()
def logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """[len(ids), V]: log-probabilities of the token after each position."""
    return _oracle(folder)(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@torch.no_grad()
def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[V]: logits of the token after these."""
    return _oracle(folder)(torch.tensor([ids])).logits[0, -1].float()


@torch.no_grad()
def embedding(folder: Path, ids: list[int]) -> torch.Tensor:
    """[D]: the last hidden state after the final norm, of unit length."""
    return torch.nn.functional.normalize(
        _oracle(folder).model(torch.tensor([ids])).last_hidden_state[0, -1].float(), dim=0
    )


@torch.no_grad()
def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The oracle's own cached greedy decoding."""
    model, out, cache = _oracle(folder), [], None
    ids = torch.tensor([prompt])
    for _ in range(count):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        ids = torch.tensor([[out[-1]]])
    return out


@torch.no_grad()
def beams(
    folder: Path, prompt: list[int], eos: list[int] | None, num_beams: int, **options: object
) -> list[tuple[list[int], float]]:
    """The oracle's beam search: (generated ids up to the end-of-text id, score), the best first."""
    found = _oracle(folder).generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        eos_token_id=eos,
        pad_token_id=VOCAB - 1,
        early_stopping=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    ends = [next((i + 1 for i, token in enumerate(row) if token in (eos or ())), len(row)) for row in rows]
    return [(row[:end], score) for row, end, score in zip(rows, ends, found.sequences_scores.tolist())]

"""ModelConfig: what a model is, in one vocabulary for every spelling: config.json old and new, and GGUF
metadata.

Missing optional fields get the defaults of `transformers`' config classes. Whatever this engine can't run is
refused here, by name. No torch; what the rope numbers become is rope.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import CheckpointError

# "architectures" of config.json -> our name (which is transformers' model_type)
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
# What transformers' config classes fill in where they differ from each other. None for num_key_value_heads:
# as many as heads.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
# What a config may claim at most: several times what any published model has. Before the tensors are looked
# at, and for dummy weights at all, nothing else bounds what is made for it.
MOST = {
    "num_hidden_layers": 1 << 12,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "max_position_embeddings": 1 << 28,
    "original_max_position_embeddings": 1 << 28,
}
MOST_COUNT = (1 << 31) - 1  # of any other
LEAST_NUMBER, MOST_NUMBER = 1e-20, 1e12  # float32 takes their products
LEAST_THETA = 2.0  # yarn divides by its logarithm
ROPE_KINDS = ("default", "linear", "yarn", "llama3")
ROPE_THETA = 10000.0
# GGUF key under its architecture's prefix -> config.json's key
GGUF_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. Only the fields of its kind count; `attention_factor` is final (yarn's is computed
    from the rest)."""

    theta: float = ROPE_THETA
    kind: str = "default"  # one of ROPE_KINDS, or "factors": GGUF's table
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()  # each frequency is divided by its own


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Raises CheckpointError, from its two constructors, for what is missing, impossible or not supported."""

    architecture: str  # a value of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    # per layer: how many positions a token sees, itself included; None: all before it
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0  # 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    dtype: str | None = None  # of the checkpoint, as torch names it; None: not said
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def kv_head_replicas(self, tp_size: int) -> int:
        """Ranks that hold the same kv head: more than one where there are more ranks than kv heads."""
        return max(1, tp_size // self.num_kv_heads)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        return self.num_kv_heads * self.kv_head_replicas(tp_size) // tp_size

    def is_moe_layer(self, layer: int) -> bool:
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> ModelConfig:
        """From the content of a config.json; `where` names it in errors."""
        architecture = _architecture(config, where)
        if "num_local_experts" in config:  # transformers 5 writes it so
            config = {"num_experts": config["num_local_experts"], **config}
        fields = _Fields({**DEFAULTS[architecture], **config}, where)
        _refuse_unsupported(fields, where)
        hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
                f"{num_kv_heads}"
            )
        if fields.get("head_dim") is None and hidden_size % num_heads:
            raise CheckpointError(
                f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                "and no head_dim is given"
            )
        head_dim = fields.count("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise CheckpointError(f"{where}: head_dim {head_dim} is odd; rotary embeddings need pairs")
        num_layers, max_position = fields.count("num_hidden_layers"), fields.count("max_position_embeddings")
        num_experts = fields.count("num_experts", least=0) if architecture == "qwen3_moe" else 0
        if num_experts and fields.count("num_experts_per_tok") > num_experts:
            raise CheckpointError(
                f"{where}: num_experts_per_tok {fields.get('num_experts_per_tok')} is "
                f"more than num_experts {num_experts}"
            )
        attention_bias = architecture in ("llama", "qwen3", "qwen3_moe") and fields.flag("attention_bias")
        moe = architecture == "qwen3_moe"
        return cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields, max_position),
            windows=_windows(architecture, fields, num_layers),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
            qkv_bias=attention_bias or architecture == "qwen2",
            o_bias=attention_bias,
            mlp_bias=architecture == "llama" and fields.flag("mlp_bias"),
            num_experts=num_experts,
            num_experts_per_tok=fields.count("num_experts_per_tok") if moe else 0,
            moe_intermediate_size=fields.count("moe_intermediate_size") if moe else 0,
            norm_topk_prob=moe and fields.flag("norm_topk_prob"),
            decoder_sparse_step=fields.count("decoder_sparse_step", 1),
            mlp_only_layers=_mlp_only_layers(fields, num_layers),
            dtype=_dtype(fields),
            bos_token_id=next(iter(fields.ids("bos_token_id")), None),
            eos_token_ids=fields.ids("eos_token_id"),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        where: str,
        rope_factors: tuple[float, ...] = (),
    ) -> ModelConfig:
        """From a GGUF file's metadata, its tensors' shapes (which tell vocabulary, tied head and biases) and
        its rope factors, if any."""
        name = metadata.get("general.architecture")
        if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
            raise CheckpointError(
                f"{where}: GGUF architecture {name!r} is not supported; these are: "
                f"{', '.join(GGUF_ARCHITECTURES)}"
            )
        values = {
            key.removeprefix(f"{name}."): value
            for key, value in metadata.items()
            if key.startswith(f"{name}.")
        }
        if name == "llama" and values.get("expert_count"):
            raise CheckpointError(
                f"{where}: a llama-architecture GGUF with {values['expert_count']} experts (Mixtral) is not "
                "supported"
            )
        config = {hf: values[key] for key, hf in GGUF_KEYS.items() if key in values}
        per_layer = sorted(key for key, value in config.items() if isinstance(value, list))
        if per_layer:
            raise CheckpointError(f"{where}: {per_layer[0]} differs per layer, which is not supported")
        embedding = shapes.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(
                f"{where}: the tensor token_embd.weight is missing; the file is incomplete or not a "
                "language model"
            )
        rotated = values.get("rope.dimension_count")
        head_dim = values.get("attention.key_length", rotated)
        if rotated not in (None, head_dim):
            raise CheckpointError(
                f"{where}: rotates {rotated} of {head_dim} head dimensions; partial rotary embeddings are "
                "not supported"
            )
        config |= {
            "architectures": [GGUF_ARCHITECTURES[name]],
            "vocab_size": embedding[0],
            "head_dim": head_dim,
            "tie_word_embeddings": "output.weight" not in shapes,
            "norm_topk_prob": True,
            "rope_parameters": _gguf_rope(values, where),
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": _gguf_eos(metadata, where),
        }
        parsed = cls.from_hf(config, where)
        rope = parsed.rope
        if rope_factors:
            if len(rope_factors) != parsed.head_dim // 2:
                raise CheckpointError(
                    f"{where}: {len(rope_factors)} rope factors for head_dim {parsed.head_dim}; it needs "
                    "half as many"
                )
            rope = RopeConfig(rope.theta, "factors", factors=rope_factors)
        window = _Fields(values, where).count("attention.sliding_window", 0, least=0) or None
        return replace(
            parsed,
            rope=rope,
            windows=(window,) * parsed.num_layers,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            o_bias="blk.0.attn_output.bias" in shapes,
            mlp_bias="blk.0.ffn_gate.bias" in shapes,
        )


class _Fields:
    """A config's values, checked as they are read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least` and at most MOST; a null or missing one is the default, or an error
        without one."""
        value, most = self._value(key, default), MOST.get(key, MOST_COUNT)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{self.where}: {key} {value!r:.80} is not an integer of at least {least}")
        if value > most:
            raise CheckpointError(
                f"{self.where}: {key} {value!r:.80} is more than {most}, the most that is "
                "taken; is it damaged?"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, neither tiny nor huge."""
        value, least = self._value(key, default), LEAST_THETA if key == "rope_theta" else LEAST_NUMBER
        if type(value) not in (int, float) or not least <= value <= MOST_NUMBER:
            raise CheckpointError(
                f"{self.where}: {key} {value!r:.80} is not a positive number from "
                f"{least:g} to {MOST_NUMBER:g}"
            )
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        return token_ids(self.get(key), f"{self.where}: {key}")

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key} {value!r:.80} is not true or false")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(
                f"{self.where}: {key} is missing; is this the config.json of a language model?"
            )
        return value


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Configs write one id, a list of ids, or null; some write -1 for none. Raises CheckpointError for what
    is none of these."""
    values = value if isinstance(value, list) else [value]
    if not all(v is None or (type(v) is int and v <= MOST_COUNT) for v in values):
        raise CheckpointError(f"{where} {value!r:.80} is neither a token id nor a list of them")
    return tuple(v for v in values if v is not None and v >= 0)


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    model_type = config.get("model_type")
    if not names and isinstance(model_type, str) and model_type in DEFAULTS:
        return model_type
    shown = ", ".join(map(str, names[:4])) if names else model_type
    raise CheckpointError(
        f"{where}: architecture {shown!r:.200} is not supported; these are: {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: _Fields, where: str) -> None:
    activation = fields.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{where}: hidden_act {activation!r:.80} is not supported; only silu is")
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{where}: quant_method {method!r:.80} (quantization_config) is not "
            "supported; use an unquantized checkpoint or a GGUF file"
        )


def _rope(fields: _Fields, max_position: int) -> RopeConfig:
    """Old form: rope_theta, and rope_scaling with "type" or "rope_type". New form: rope_parameters holds all.
    rope_scaling wins if both are there, as in transformers."""
    where = fields.where
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise CheckpointError(f"{where}: rope parameters per layer type are not supported: {given!r:.120}")
    kind = given.get("rope_type") or given.get("type") or "default"
    rope = _Fields(
        {
            "rope_theta": fields.get("rope_theta"),
            "partial_rotary_factor": fields.get("partial_rotary_factor"),
            **{key: value for key, value in given.items() if value is not None},
        },
        f"{where}: rope {kind!s:.80}",
    )
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{where}: rope type {kind!r:.80} is not supported; these are: {', '.join(ROPE_KINDS)}"
        )
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{where}: partial_rotary_factor {rope.get('partial_rotary_factor')} is not supported; only 1.0 "
            "is"
        )
    theta = rope.number("rope_theta", ROPE_THETA)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, factor=rope.number("factor"))
    original = fields.count(
        "original_max_position_embeddings", rope.count("original_max_position_embeddings", max_position)
    )
    if kind == "llama3":
        scaled = RopeConfig(
            theta,
            kind,
            rope.number("factor"),
            original,
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
        )
        if scaled.high_freq_factor <= scaled.low_freq_factor:
            raise CheckpointError(
                f"{where}: rope high_freq_factor {scaled.high_freq_factor} is not above low_freq_factor "
                f"{scaled.low_freq_factor}"
            )
        return scaled
    factor = rope.number("factor", max_position / original)
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: _Fields, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def _windows(architecture: str, fields: _Fields, num_layers: int) -> tuple[int | None, ...]:
    """Mistral: every layer. Qwen: with use_sliding_window, the layers from max_window_layers on, or those
    that layer_types names;
    Qwen3-MoE: all of them."""
    used = architecture == "mistral" or (architecture != "llama" and fields.flag("use_sliding_window"))
    if not used or fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.count("sliding_window")
    if architecture in ("mistral", "qwen3_moe"):
        return (window,) * num_layers
    kinds = fields.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise CheckpointError(f"{fields.where}: layer_types {kinds!r:.80} is no list of texts")
    if kinds is None:
        first = fields.count("max_window_layers", least=0)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise CheckpointError(
            f"{fields.where}: layer_types must name full_attention or sliding_attention for each of "
            f"{num_layers} layers; "
            f"found {unknown[:4] or len(kinds)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mlp_only_layers(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    layers = fields.get("mlp_only_layers") or []
    known = isinstance(layers, list) and len(layers) <= num_layers
    if not known or not all(type(i) is int and 0 <= i < num_layers for i in layers):
        raise CheckpointError(
            f"{fields.where}: mlp_only_layers {layers!r:.80} are no layers from 0 to {num_layers - 1}"
        )
    return tuple(layers)


def _dtype(fields: _Fields) -> str | None:
    value = fields.get("dtype") or fields.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _gguf_rope(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """llama.cpp's rope keys as rope_parameters."""
    rope = {
        "rope_theta": values.get("rope.freq_base"),
        "rope_type": values.get("rope.scaling.type", "none"),
        "factor": values.get("rope.scaling.factor"),
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
    }
    if rope["rope_type"] == "none":
        return {"rope_theta": rope["rope_theta"]}
    # llama.cpp multiplies its attn_factors with yarn's own factor; attention_factor is the product
    if rope["rope_type"] == "yarn":
        given = _Fields(values, where)
        own = _yarn_attention_factor(_Fields({}, where), given.number("rope.scaling.factor"))
        factors = (given.number(f"rope.scaling.{key}", 1.0) for key in ("attn_factor", "yarn_attn_factor"))
        rope["attention_factor"] = math.prod(factors, start=own)
    return rope


def _gguf_eos(metadata: Mapping[str, Any], where: str) -> list[int]:
    """End of text, of turn, of message: each ends an answer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(i for key in keys for i in token_ids(metadata.get(key), f"{where}: {key}")))

"""From the metadata of a GGUF file to a ModelConfig: llama.cpp's keys become a config.json's, and what
a file's tensors show is read off them. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.rope import RopeConfig
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.architecture import Architecture, GGUFNames
from shoal.models.config_json import config_from_json
from shoal.models.configs.fields import ConfigFields, token_ids
from shoal.models.configs.layers import FULL, SLIDING
from shoal.models.configs.rope import yarn_attention_factor
from shoal.models.gguf_names.experts import SIGMOID, UNSAID
from shoal.models.registry import BY_GGUF, BY_NAME

# a key that all architectures share, after the architecture's prefix -> config.json's key
KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
Shapes = Mapping[str, tuple[int, ...]]
LAYER_TENSOR = re.compile(r"blk\.([0-9]{1,9})\.([\w.]+)")  # the number of a layer, and the name in it


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Shapes,
    where: str,
    rope_factors: tuple[float, ...] = (),
    longrope: tuple[tuple[float, ...], tuple[float, ...]] = ((), ()),
) -> ModelConfig:
    """`shapes` belong to the file's tensors; vocabulary, tied head and biases follow from them. `longrope`:
    its short and long factors. `where` names the file in errors. Raises CheckpointError for what is missing,
    impossible or not supported."""
    architecture, names, values = _architecture(metadata, shapes, where)
    shapes = _with_fused(shapes)
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{where}: the tensor token_embd.weight is missing; the file is incomplete or not a "
            "language model"
        )
    config = _shared_fields(values, names, where)
    if config["num_nextn_predict_layers"] and not any(name.startswith("blk.0.") for name in shapes):
        raise CheckpointError(
            f"{where}: the file holds a draft head alone, without the model's layers; name the model's own "
            "file, and this one as speculative_config.model with method 'mtp'"
        )
    if names.layers:
        config["layer_types"] = _layers_by_tensors(shapes, names, config, where)
    elif architecture.layer_types is not None:
        config |= _gguf_layer_types(values)
    config |= {
        **names.values,
        **_shown_by_tensors(shapes),
        "architectures": [architecture.hf_class],
        "vocab_size": embedding[0],
        "rope_parameters": _gguf_rope(values, longrope, where),
        "eos_token_id": _gguf_eos(metadata, where),
    }
    partial = "partial_rotary_factor" in architecture.defaults
    config |= _head_dims(values, config, partial, bool(names.layers), where)
    if names.derived is not None:
        config |= names.derived(ConfigFields(config, where))
    parsed = _with_factors(config_from_json(config, where), rope_factors, names.full_rope_factors, where)
    if parsed.norm == "zero_centred":  # llama.cpp's converter adds the 1
        parsed = replace(parsed, norm="float32")
    if architecture.layer_types is None and isinstance(parsed.attention, AttentionKind):
        window = ConfigFields(values, where).count("attention.sliding_window", 0, least=0) or None
        parsed = parsed.with_attention(window=window)
    return replace(
        parsed,
        qkv_bias=_some_layer_has(shapes, "attn_q.bias"),
        o_bias=_some_layer_has(shapes, "attn_output.bias"),
        mlp_bias=_some_layer_has(shapes, "ffn_gate.bias"),
    )


def _architecture(
    metadata: Mapping[str, Any], shapes: Shapes, where: str
) -> tuple[Architecture, GGUFNames, dict[str, Any]]:
    """The architecture, its names in the file that was opened, and its keys without their prefix."""
    name = metadata.get("general.architecture")
    architecture = BY_GGUF.get(name) if isinstance(name, str) else None
    if architecture is None or architecture.gguf is None:
        raise CheckpointError(
            f"{where}: GGUF architecture {name!r:.80} is not supported; these are: {', '.join(BY_GGUF)}"
        )
    names, prefix = architecture.gguf, f"{name}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if _some_layer_has(shapes, "exp_probs_b.bias"):  # early files of GLM-4.7-Flash don't say it
        values.setdefault("expert_gating_func", SIGMOID)
    for key, unsaid in UNSAID.items():
        if key in names.keys:
            values.setdefault(key, unsaid)
    for key, model in names.refused.items():
        if values.get(key):
            raise CheckpointError(
                f"{where}: a {name}-architecture GGUF with {key} {values[key]!r:.80} ({model}) is not "
                "supported"
            )
    for key, own in names.without.items():
        if key not in values:
            architecture = BY_NAME[own]
    for key, other in names.others.items():
        value: Any = values.get(key)
        found = other if isinstance(other, str) else other.get(value) if isinstance(value, int) else None
        if value and found is not None:
            architecture = BY_NAME[found]
    return architecture, names, values


def _shared_fields(values: Mapping[str, Any], names: GGUFNames, where: str) -> dict[str, Any]:
    """config.json's fields that keys stand for. A file counts the layers that draft among its blocks."""
    config = {key: values[own] for own, key in {**KEYS, **names.keys}.items() if own in values}
    for key, value in config.items():
        if not isinstance(value, list) or key in names.by_layer:
            continue
        of_layers = [
            number for number in value if number or not names.layers
        ]  # 0: the layer has no such part
        if not of_layers or any(number != of_layers[0] for number in of_layers):
            raise CheckpointError(f"{where}: {key} differs per layer, which is not supported")
        config[key] = of_layers[0]
    fields = ConfigFields(config, where)
    num_drafts = fields.count("num_nextn_predict_layers", 0, least=0)
    return config | {
        "num_hidden_layers": fields.count("num_hidden_layers") - num_drafts,
        "num_nextn_predict_layers": num_drafts,
    }


def _layers_by_tensors(shapes: Shapes, names: GGUFNames, config: Mapping[str, Any], where: str) -> list[str]:
    """The type of each layer. Files say it by keys that changed over time; their tensors did not."""
    types = []
    for i in range(ConfigFields(config, where).count("num_hidden_layers")):
        found = next((kind for own, kind in names.layers.items() if f"blk.{i}.{own}" in shapes), None)
        if found is None:
            raise CheckpointError(
                f"{where}: blk.{i} must have one of {', '.join(names.layers)}; the file is incomplete, fetch "
                "it again"
            )
        types.append(found)
    return types


def _shown_by_tensors(shapes: Shapes) -> dict[str, Any]:
    """Fields of config.json that no key says, but the names and shapes of tensors."""
    with_keys, with_values = (
        {name.rpartition(".attn_")[0] for name in shapes if name.endswith(f".attn_{part}.weight")}
        for part in "kv"
    )
    shown = {
        "tie_word_embeddings": "output.weight" not in shapes,
        "use_qk_norm": _some_layer_has(shapes, "attn_q_norm.weight"),
        "attention_k_eq_v": not with_keys <= with_values,
        "gate_rows": _rows_by_layer(shapes, "attn_gate.weight"),
    }
    own = shapes.get("per_layer_token_embd.weight")
    return shown if own is None else {**shown, "vocab_size_per_layer_input": own[0]}


def _rows_by_layer(shapes: Shapes, name: str) -> list[int]:
    """The rows of the layers' tensors of this name, in the order of the layers."""
    found = {
        int(layer[1]): shape[0]
        for own, shape in shapes.items()
        if (layer := LAYER_TENSOR.fullmatch(own)) and layer[2] == name
    }
    return [found[i] for i in sorted(found)]


def _with_fused(shapes: Shapes) -> Shapes:
    """The shapes, where q, k and v that a file holds as one tensor have their names as well."""
    own = {
        name.replace("attn_qkv", f"attn_{part}"): shape
        for name, shape in shapes.items()
        if ".attn_qkv." in name and f"{name.partition('.attn_')[0]}.attn_output.weight" in shapes
        for part in "qkv"
    }
    return {**shapes, **own}


def _some_layer_has(shapes: Shapes, name: str) -> bool:
    return any(own.startswith("blk.") and own.endswith(f".{name}") for own in shapes)


def _head_dims(
    values: Mapping[str, Any], config: Mapping[str, Any], partial: bool, is_hybrid: bool, where: str
) -> dict[str, Any]:
    """The size of a head, and which share of it is rotated. `partial`: the architecture may rotate a part."""
    rotated = values.get("rope.dimension_count")
    # A hybrid's attention has no rope then, and the count means nothing. Elsewhere it is about YaRN.
    if is_hybrid and values.get("rope.scaling.finetuned") is False:
        return {"head_dim": values.get("attention.key_length")}
    if "attention.kv_lora_rank" in values:  # key_length is a latent's
        return {"head_dim": rotated}
    head_dim = values.get("attention.key_length", None if partial else rotated)
    if partial and rotated is not None:
        given = ConfigFields({**config, "head_dim": head_dim}, where)
        size = (
            given.count("hidden_size") // given.count("num_attention_heads")
            if head_dim is None
            else given.count("head_dim")
        )
        share = ConfigFields(values, where).count("rope.dimension_count") / size
        return {"head_dim": head_dim, "partial_rotary_factor": share}
    if rotated not in (None, head_dim):
        raise CheckpointError(
            f"{where}: rotates {rotated} of {head_dim} head dimensions; partial rotary embeddings are "
            "not supported"
        )
    return {"head_dim": head_dim}


def _with_factors(
    config: ModelConfig, factors: tuple[float, ...], full_alone: bool, where: str
) -> ModelConfig:
    """Returns the config with ropes whose frequencies are divided by these, if there are any. `full_alone`:
    layers with a window keep theirs, and the others must have factors."""
    if not factors and not full_alone:
        return config

    def divided(kind: LayerKind) -> LayerKind:
        attention = kind.attention
        if attention is None or attention.rope is None or (full_alone and attention.window is not None):
            return kind
        if len(factors) != attention.head_dim // 2:
            raise CheckpointError(
                f"{where}: the tensor rope_freqs.weight must have {attention.head_dim // 2} numbers, half of "
                f"head_dim {attention.head_dim}, got {len(factors)}"
            )
        return kind.with_attention(rope=RopeConfig(attention.rope.theta, "factors", factors=factors))

    return replace(config, layers=tuple(map(divided, config.layers)))


def _gguf_layer_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """The window, and which layers have it: a flag of each layer, or a number n, if each n-th has none."""
    pattern = values.get("attention.sliding_window_pattern")
    of_layers = {"sliding_window": values.get("attention.sliding_window")}
    if isinstance(pattern, list):
        return of_layers | {"layer_types": [SLIDING if slides else FULL for slides in pattern]}
    return of_layers | ({} if pattern is None else {"sliding_window_pattern": pattern})


def _gguf_rope(
    values: Mapping[str, Any], longrope: tuple[tuple[float, ...], tuple[float, ...]], where: str
) -> dict[str, Any]:
    """llama.cpp's rope keys as rope_parameters. A factor without a type is linear; files of 2023 name
    it rope.scale_linear."""
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
    rope = {
        "rope_theta": values.get("rope.freq_base"),
        "rope_type": values.get("rope.scaling.type", "linear" if factor else "none"),
        "factor": factor,
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
    }
    if any(longrope):
        short, long = map(list, longrope)
        factor = values.get("rope.scaling.attn_factor")
        scaled = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        return rope | scaled | {"attention_factor": factor}
    if rope["rope_type"] == "none":
        return {"rope_theta": rope["rope_theta"]}
    # yarn_attn_factor is the config's attention_factor, if it had one. llama.cpp multiplies yarn's factor by
    # attn_factor.
    if rope["rope_type"] == "yarn":
        given = ConfigFields(values, where)
        all_dims = values.get("rope.scaling.yarn_log_multiplier")
        mscale = ConfigFields({"mscale": 1.0, "mscale_all_dim": all_dims}, where)
        own = yarn_attention_factor(mscale, given.number("rope.scaling.factor"))
        own = given.number("rope.scaling.yarn_attn_factor", own)
        rope["attention_factor"] = own * given.number("rope.scaling.attn_factor", 1.0)
    return rope


def _gguf_eos(metadata: Mapping[str, Any], where: str) -> list[int]:
    """The ids of the end of a text, of a turn and of a message. Each of them ends an answer."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(i for key in keys for i in token_ids(metadata.get(key), f"{where}: {key}")))

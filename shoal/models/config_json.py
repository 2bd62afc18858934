"""From the content of a config.json, old form or new, to a ModelConfig.

Missing optional fields get the defaults of `transformers`' config classes. What this engine can't run is
refused here, by name. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError
from shoal.kinds.recurrent import DeltaKind, Mamba2Kind
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.architecture import Architecture
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import CHUNKED, FULL, WINDOWS, check_length, given_layer_types
from shoal.models.configs.rope import read_ropes
from shoal.models.layouts.registry import read_quantization
from shoal.models.registry import ARCHITECTURES, BY_HF_CLASS, BY_NAME

# an activation's name in configs -> its name in kernels/reference.py
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def config_from_json(config: Mapping[str, Any], where: str) -> ModelConfig:
    """`where` names the file in errors. Raises CheckpointError for what is missing, impossible or not
    supported."""
    architecture, config = architecture_of(config, where), text_config(config, where)
    renamed = {key: config[new] for new, key in architecture.renamed.items() if new in config}
    given = {key: value for key, value in config.items() if key != "rope_parameters" or value is not None}
    fields = ConfigFields({**architecture.defaults, **renamed, **given}, where)
    if architecture.said_otherwise is not None:
        fields = ConfigFields({**fields.values, **architecture.said_otherwise(fields)}, where)
    num_heads, num_kv_heads, head_dim = _heads(fields, where)
    num_layers = fields.count("num_hidden_layers")
    layer_types = _layer_types(architecture, fields, num_layers)
    ropes = read_ropes(
        fields,
        set(layer_types) - set(architecture.other_layers),
        head_dim,
        keyed=architecture.layer_types is not None,
        partial="partial_rotary_factor" in architecture.defaults,
        sliding=architecture.sliding_rope,
    )
    kinds = {
        kind: LayerKind(
            AttentionKind(
                num_heads,
                num_kv_heads,
                head_dim,
                scale=head_dim**-0.5,
                rope=rope,
                window=fields.count(WINDOWS[kind]) if kind in WINDOWS else None,
                in_chunks=kind == CHUNKED,
            )
        )
        for kind, rope in ropes.items()
    } | {kind: read(fields) for kind, read in architecture.other_layers.items() if kind in layer_types}
    if not ropes:
        raise CheckpointError(
            f"{where}: layer_types must have a layer with attention, got {', '.join(sorted({*layer_types}))}"
        )
    shared = ModelConfig(
        architecture=architecture.name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=tuple(kinds[kind] for kind in layer_types),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        activation=_activation(architecture, fields),
        num_draft_layers=fields.count("num_nextn_predict_layers", 0, least=0),
        dtype=_dtype(fields),
        eos_token_ids=fields.ids("eos_token_id"),
        quantization=read_quantization(fields),
    )
    model = architecture.read(shared, fields)
    if model.activation == "gelu_tanh" and any(_needs_silu(kind) for kind in model.layers):
        raise CheckpointError(
            f"{where}: hidden_act must be silu for the experts or recurrent layers of "
            f"{architecture.hf_class}, got "
            f"{fields.get('hidden_act')!r:.80}"
        )
    return model


def _needs_silu(kind: LayerKind) -> bool:
    """Says if the layer's experts, or its convolution and gate, are computed with silu alone."""
    experts = kind.experts is not None and kind.experts.activation.kind == "silu"
    return experts or isinstance(kind.mixer, DeltaKind | Mamba2Kind)


def _heads(fields: ConfigFields, where: str) -> tuple[int, int, int]:
    """Returns the numbers of query heads and of kv heads, and the size of a head. Raises CheckpointError if
    they do not divide each other."""
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
    return num_heads, num_kv_heads, head_dim


def architecture_of(config: Mapping[str, Any], where: str) -> Architecture:
    """Raises CheckpointError if it is not supported."""
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    model_type = _text_model_type(config)
    for name in filter(lambda name: isinstance(name, str), names):
        # Models for embeddings name the class below the head, such as MistralModel, and ERNIE 4.5's first
        # files their own class Ernie4_5_ForCausalLM.
        own_head = name.removesuffix("Model") + "ForCausalLM"
        for hf_class in (name, own_head, name.replace("_ForCausalLM", "ForCausalLM")):
            if hf_class in BY_HF_CLASS:
                return BY_HF_CLASS[hf_class]
        nested = [
            own
            for own in ARCHITECTURES
            if name in own.nested_in and model_type in (own.name, None, *own.also_named)
        ]
        if len(nested) == 1:
            return nested[0]
    if not names and model_type in BY_NAME:
        return BY_NAME[model_type]
    shown = ", ".join(map(str, names[:4])) if names else model_type
    supported = ", ".join(architecture.hf_class for architecture in ARCHITECTURES)
    inside = f" with a text model of type {model_type!r:.80}" if names and "text_config" in config else ""
    raise CheckpointError(
        f"{where}: architecture {shown!r:.200}{inside} is not supported; these are: {supported}"
    )


def _text_model_type(config: Mapping[str, Any]) -> str | None:
    text = config.get("text_config")
    model_type = (text if isinstance(text, dict) else config).get("model_type")
    return model_type if isinstance(model_type, str) else None


def text_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the fields of the text model in a multimodal one's config, and of any other model its own. A
    field that the text model's config lacks, or has as null, may be outside of it. The head is tied if either
    says so, as transformers reads the outer field; files with a head of their own are seen later."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config must be an object, got {text!r:.80}")
    outer = {key: value for key, value in config.items() if text.get(key) is None}
    if config.get(tied := "tie_word_embeddings") is True:
        outer[tied] = True
    return {**text, **outer}


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with these fields in the place of its own. Within a multimodal config they count for
    the text model, too, by themselves or under text_config."""
    text, own = config.get("text_config"), overrides.get("text_config", {})
    if not isinstance(text, dict) or not isinstance(own, dict):
        return {**config, **overrides}
    inner = {**text, **{key: value for key, value in overrides.items() if key in text}, **own}
    return {**config, **overrides, "text_config": inner}


def _layer_types(architecture: Architecture, fields: ConfigFields, num_layers: int) -> tuple[str, ...]:
    """The type of each layer. Where the architecture does not read them they are all of one type, and unknown
    ones are refused all the same."""
    known = (*architecture.known_layer_types, *architecture.other_layers)
    given = given_layer_types(fields, known)
    if architecture.layer_types is None:
        return (FULL,) * num_layers
    if given is not None:
        return check_length(fields, given, num_layers)
    kinds = architecture.layer_types(fields, num_layers)
    checked = given_layer_types(ConfigFields({"layer_types": [*kinds]}, fields.where), known)
    return kinds if checked is None else checked


def _activation(architecture: Architecture, fields: ConfigFields) -> str:
    """The activation of MLPs. Gemma's classes read hidden_activation first, and the others do not read it."""
    reads_other = "hidden_activation" in architecture.defaults
    key = "hidden_activation" if reads_other and fields.get("hidden_activation") else "hidden_act"
    activation = fields.get(key) or "silu"
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{fields.where}: {key} must be {' or '.join(ACTIVATIONS)}, got {activation!r:.80}; other "
            "activations are not supported"
        )
    return ACTIVATIONS[activation]


def _dtype(fields: ConfigFields) -> str | None:
    value = fields.get("dtype") or fields.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None

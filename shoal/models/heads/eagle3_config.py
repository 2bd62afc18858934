"""`Eagle3Config`: what the config.json of an EAGLE-3 checkpoint says, as its authors write it (one Llama or
Qwen3 layer with a draft_vocab_size) or as `speculators` does (that layer as transformer_layer_config).

What this engine can't run is refused here, by name, and so is a head that was made for another model. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import CheckpointError
from shoal.model_config import AttentionKind, ModelConfig
from shoal.models.config_json import config_from_json
from shoal.models.configs.fields import ConfigFields
from shoal.models.configs.layers import FULL, SLIDING
from shoal.models.registry import BY_NAME

NUM_STATES = 3  # hidden states of the target that a head reads
# The architectures of heads, by the class that a config names.
CLASSES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
SPECULATORS = "speculators_model_type"
METHOD = "eagle3"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A head for one model, the target."""

    decoder: ModelConfig  # its layers, and the norms of all of it
    target_size: int  # the target's hidden size
    draft_vocab_size: int  # tokens that it may draft
    state_layers: tuple[int, ...] | None  # it reads the hidden states before these layers; None: the usual
    norm_before_residual: bool = False  # the first residual is the normed hidden state
    norm_before_fc: bool = False  # all hidden states together are normed
    norm_output: bool = False  # the next draft starts with the normed result
    num_drafts: int | None = None  # a step, as its authors advise; None: not said
    made_for: tuple[str, ...] = ()  # the target's class in config.json; empty: not said

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers of a target with `num_layers` before which the head reads hidden states."""
        return self.state_layers or (2, num_layers // 2, num_layers - 3)

    def check_target(self, target: ModelConfig, where: str) -> None:
        """Raises CheckpointError if the head, whose config is `where`, was made for another model."""
        hf_class = BY_NAME[target.architecture].hf_class
        own = {
            "hidden_size": (self.decoder.hidden_size, target.hidden_size),
            "target_hidden_size": (self.target_size, target.hidden_size),
            "vocab_size": (self.decoder.vocab_size, target.vocab_size),
        }
        if self.made_for and hf_class not in self.made_for:
            raise _of_another(where, "verifier architecture", hf_class, ", ".join(self.made_for))
        for name, (found, wanted) in own.items():
            if found != wanted:
                raise _of_another(where, name, wanted, found)
        layers = self.layers_read(target.num_layers)
        if not all(0 <= i < target.num_layers for i in layers):
            raise CheckpointError(
                f"{where}: eagle_aux_hidden_state_layer_ids must be layers of the model, which has "
                f"{target.num_layers}, got {list(layers)}; is it another model's head?"
            )


def _of_another(where: str, name: str, wanted: object, found: object) -> CheckpointError:
    return CheckpointError(
        f"{where}: {name} must be {wanted} as in the model, got {found}; take the head that was made for "
        "this model"
    )


def read_eagle3(config: Mapping[str, Any], where: str) -> Eagle3Config:
    """`where` names the file in errors. Raises CheckpointError."""
    layer, is_wrapped = config, SPECULATORS in config
    if is_wrapped:
        if config[SPECULATORS] != METHOD:
            raise CheckpointError(
                f"{where}: {SPECULATORS} must be {METHOD!r}, got {config[SPECULATORS]!r:.80}"
            )
        layer = _object(config, "transformer_layer_config", where)
    elif config.get("draft_vocab_size") is None:
        raise CheckpointError(
            f"{where}: draft_vocab_size is missing; is this the config.json of an EAGLE-3 head?"
        )
    decoder = config_from_json({**layer, "architectures": [_hf_class(config, layer, where)]}, where)
    if decoder.quantization is not None:
        raise CheckpointError(
            f"{where}: quantization_config must be left out of a draft head; take the head in plain numbers"
        )
    if SLIDING in (layer.get("layer_types") or ()) or any(
        isinstance(kind.mixer, AttentionKind) and kind.mixer.window for kind in decoder.layers
    ):
        raise CheckpointError(
            f"{where}: layer_types must be {FULL} for a draft head, got {layer.get('layer_types')!r:.80}"
        )
    # NVIDIA's heads have some of the fields in an object of their own.
    inner = _object(config, "eagle_config", where) if config.get("eagle_config") else {}
    fields = ConfigFields({**inner, **config}, where)
    for flag in ("fc_norm", "tie_word_embeddings"):
        if fields.flag(flag):
            raise CheckpointError(f"{where}: {flag} must be false for a draft head, got true")
    verifier: Mapping[str, Any] = {}
    num_drafts = None
    if is_wrapped:
        proposal = _object(config, "speculators_config", where)
        verifier, num_drafts = _object(proposal, "verifier", where), _num_drafts(proposal, where)
    classes = verifier.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise CheckpointError(
            f"{where}: the verifier's architectures must be a list of texts, got {classes!r:.80}"
        )
    return Eagle3Config(
        decoder=decoder,
        target_size=fields.count("target_hidden_size", decoder.hidden_size),
        draft_vocab_size=fields.count("draft_vocab_size", decoder.vocab_size),
        state_layers=_state_layers(fields),
        norm_before_residual=fields.flag("norm_before_residual"),
        norm_before_fc=fields.flag("norm_before_fc"),
        norm_output=fields.flag("norm_output"),
        num_drafts=num_drafts,
        made_for=tuple(classes),
    )


def _hf_class(config: Mapping[str, Any], layer: Mapping[str, Any], where: str) -> str:
    """Returns the class of a model with such layers. A head of plain form may be named after any of CLASSES;
    its layers are a Llama's unless it names Qwen3."""
    names = config.get("architectures") or []
    named = [CLASSES[name] for name in names if isinstance(name, str) and name in CLASSES]
    model_type = named[0] if named else layer.get("model_type", "llama")
    if model_type not in CLASSES.values():
        raise CheckpointError(
            f"{where}: model_type of a draft head's layers must be llama or qwen3, got {model_type!r:.80}"
        )
    return BY_NAME[model_type].hf_class


def _state_layers(fields: ConfigFields) -> tuple[int, ...] | None:
    if fields.get("eagle_aux_hidden_state_layer_ids") is None:
        return None
    name = "eagle_aux_hidden_state_layer_ids"
    found = tuple(entry.count(name, least=0) for entry in fields.each(name, NUM_STATES))
    if sorted(set(found)) != list(found):
        raise CheckpointError(
            f"{fields.where}: {name} must be {NUM_STATES} ascending layers, got {list(found)}"
        )
    return found


def _num_drafts(proposal: Mapping[str, Any], where: str) -> int | None:
    """Returns the number of drafts of the method that is the default, or the first one; None: it has none."""
    methods = [method for method in proposal.get("proposal_methods") or () if isinstance(method, dict)]
    usual = proposal.get("default_proposal_method")
    methods.sort(key=lambda method: method.get("proposal_type") != usual)
    if not methods or methods[0].get("speculative_tokens") is None:
        return None
    return ConfigFields(methods[0], where).count("speculative_tokens")


def _object(config: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = config.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} must be an object, got {value!r:.80}")
    return value

"""Checks that a model can be divided over the ranks of a tensor-parallel group."""

from __future__ import annotations

from shoal.errors import ConfigError
from shoal.kinds.recurrent import DeltaKind, Mamba2Kind, RecurrentKind
from shoal.model_config import ModelConfig


def check_parallel(config: ModelConfig, size: int) -> None:
    """Raises ConfigError if the model can't be divided over `size` ranks."""
    for kind in dict.fromkeys(config.layers):
        experts, attention = kind.experts, kind.attention
        widths = {"intermediate_size": config.intermediate_size}
        if attention is not None:
            widths["num_attention_heads"] = attention.num_heads
        elif isinstance(kind.mixer, RecurrentKind):
            widths |= _widths(kind.mixer, size)
        if experts is not None:
            widths["moe_intermediate_size"] = experts.intermediate_size
            if experts.shared is not None:
                widths["shared_expert_intermediate_size"] = experts.shared.intermediate_size
        for name, width in widths.items():
            if width % size:
                raise ConfigError(
                    f"tensor_parallel_size {size} does not divide {name} {width}; choose a divisor of it"
                )
        if attention is not None and attention.num_kv_heads % size and size % attention.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size {size} neither divides nor is a multiple of num_key_value_heads "
                f"{attention.num_kv_heads}; choose a divisor of it"
            )
    if (size - 1) * -(-config.vocab_size // size) >= config.vocab_size:
        raise ConfigError(
            f"tensor_parallel_size {size} leaves a rank without any of vocab_size {config.vocab_size} "
            "tokens; lower it"
        )


def _widths(kind: RecurrentKind, size: int) -> dict[str, int]:
    """The numbers of a recurrent layer that are divided over `size` ranks."""
    if isinstance(kind, DeltaKind):
        return {"linear_num_key_heads": kind.num_key_heads, "linear_num_value_heads": kind.num_value_heads}
    if isinstance(kind, Mamba2Kind):
        # Several ranks may share a group.
        groups = {} if size % kind.num_groups == 0 else {"mamba_n_groups": kind.num_groups}
        return {"mamba_n_heads": kind.num_heads} | groups
    return {"hidden_size": kind.size}

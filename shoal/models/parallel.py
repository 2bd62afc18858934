"""Checks that a model can be divided over the ranks of a tensor-parallel group."""

from __future__ import annotations

from shoal.errors import ConfigError
from shoal.model_config import ModelConfig


def check_parallel(config: ModelConfig, size: int) -> None:
    """Raises ConfigError if the model can't be divided over `size` ranks."""
    for kind in dict.fromkeys(config.layers):
        experts, attention = kind.experts, kind.mixer
        widths = {"num_attention_heads": attention.num_heads, "intermediate_size": config.intermediate_size}
        if experts is not None:
            widths["moe_intermediate_size"] = experts.intermediate_size
            if experts.shared is not None:
                widths["shared_expert_intermediate_size"] = experts.shared.intermediate_size
        for name, width in widths.items():
            if width % size:
                raise ConfigError(
                    f"tensor_parallel_size {size} does not divide {name} {width}; choose a divisor of it"
                )
        if attention.num_kv_heads % size and size % attention.num_kv_heads:
            raise ConfigError(
                f"tensor_parallel_size {size} neither divides nor is a multiple of num_key_value_heads "
                f"{attention.num_kv_heads}"
            )
    if (size - 1) * -(-config.vocab_size // size) >= config.vocab_size:
        raise ConfigError(
            f"tensor_parallel_size {size} leaves a rank without any of vocab_size {config.vocab_size} "
            "tokens; lower it"
        )

"""ConfigFields: the values of a model's config, checked as they are read.

A config comes from a stranger, so that every number has bounds. Each error is a CheckpointError that names
the file, the field and the value. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import CheckpointError

# The most that a config may claim: several times what any published model has. Nothing else bounds what is
# made for a config before the tensors are looked at, nor for dummy weights at all.
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
    "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 8,
    "q_lora_rank": 1 << 16,
    "kv_lora_rank": 1 << 14,
    "qk_nope_head_dim": 1 << 12,
    "qk_rope_head_dim": 1 << 12,
    "v_head_dim": 1 << 12,
    "num_experts_per_tok": 1 << 10,
    "max_position_embeddings": 1 << 28,
    "original_max_position_embeddings": 1 << 28,
}
MOST_COUNT = (1 << 31) - 1  # for any other count
LEAST_NUMBER, MOST_NUMBER = 1e-20, 1e12  # float32 holds the matmuls of such numbers
LEAST_THETA = 2.0  # yarn divides by the logarithm of theta


class ConfigFields:
    """`where` names the file in errors."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str) -> Any:
        """The value as it is; None if it is missing or null."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least` and at most MOST. A value that is null or missing is the default, or
        an error if there is no default."""
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
        value = self._value(key, default)
        least = LEAST_THETA if key.endswith("rope_theta") else LEAST_NUMBER
        if type(value) not in (int, float) or not least <= value <= MOST_NUMBER:
            raise CheckpointError(
                f"{self.where}: {key} {value!r:.80} is not a positive number from "
                f"{least:g} to {MOST_NUMBER:g}"
            )
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """A positive number; None if it is missing or null."""
        return None if self.get(key) is None else self.number(key)

    def each(self, key: str, length: int, name: str | None = None) -> list[ConfigFields]:
        """The values of a list of this length, each as a field of its own, called `name` or like the
        list."""
        values = self._value(key, None)
        if not isinstance(values, list) or len(values) != length:
            raise CheckpointError(
                f"{self.where}: {key} must be a list of {length} values, got {values!r:.80}"
                + (f" ({len(values)} values)" if isinstance(values, list) else "")
            )
        return [
            ConfigFields({name or key: value}, f"{self.where}: {key}[{i}]") for i, value in enumerate(values)
        ]

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
                f"{self.where}: {key} is missing; add it if this is the config of a language model"
            )
        return value


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """The token ids of a field. Configs write one id, a list of ids, or null, and some write -1 for none.
    Raises CheckpointError for any other value."""
    values = value if isinstance(value, list) else [value]
    if not all(v is None or (type(v) is int and v <= MOST_COUNT) for v in values):
        raise CheckpointError(f"{where} {value!r:.80} is neither a token id nor a list of them")
    return tuple(v for v in values if v is not None and v >= 0)


def sliding_window(fields: ConfigFields) -> int | None:
    """The window of layers that have one. None: they have none either."""
    return None if fields.get("sliding_window") is None else fields.count("sliding_window")


def check_fixed(fields: ConfigFields, values: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a field with another value than the only one that is supported. It may be
    absent or null."""
    for name, value in values.items():
        if fields.get(name) not in (None, value):
            raise CheckpointError(
                f"{fields.where}: {name} must be {value!r}, got {fields.get(name)!r:.80}; others are not "
                "supported"
            )

"""The tensors that a checkpoint of a model holds, whole, and how many weights they are: from the config
alone. No torch.

Both are made so that a config which lies costs nothing: shapes come one by one, and the sum is a product.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.model_config import ModelConfig


def checkpoint_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each, under its Hugging Face name."""
    c = config
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)
    queries, keys, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        for name, out, bias in (
            ("q", queries, c.qkv_bias),
            ("k", keys, c.qkv_bias),
            ("v", keys, c.qkv_bias),
            ("o", wide, c.o_bias),
        ):
            yield f"{at}self_attn.{name}_proj.weight", (out, queries if name == "o" else wide)
            if bias:
                yield f"{at}self_attn.{name}_proj.bias", (out,)
        if c.qk_norm:
            yield f"{at}self_attn.q_norm.weight", (c.head_dim,)
            yield f"{at}self_attn.k_norm.weight", (c.head_dim,)
        yield f"{at}input_layernorm.weight", (wide,)
        yield f"{at}post_attention_layernorm.weight", (wide,)
        moe = c.is_moe_layer(i)
        inner = c.moe_intermediate_size if moe else c.intermediate_size
        if moe:
            yield f"{at}mlp.gate.weight", (c.num_experts, wide)
        for e in range(c.num_experts if moe else 1):
            mlp = f"{at}mlp.experts.{e}." if moe else f"{at}mlp."
            for name, shape in (("gate", (inner, wide)), ("up", (inner, wide)), ("down", (wide, inner))):
                yield f"{mlp}{name}_proj.weight", shape
                if c.mlp_bias and not moe:
                    yield f"{mlp}{name}_proj.bias", shape[:1]


def num_weights(config: ModelConfig) -> int:
    """Counts the weights of all matrices; norms and biases are left out."""
    c = config
    num_moe = sum(c.is_moe_layer(i) for i in range(c.num_layers))
    attention = 2 * c.hidden_size * c.head_dim * (c.num_heads + c.num_kv_heads)
    dense = 3 * c.hidden_size * c.intermediate_size
    experts = c.num_experts * c.hidden_size * (1 + 3 * c.moe_intermediate_size)
    vocabulary = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return vocabulary + c.num_layers * attention + (c.num_layers - num_moe) * dense + num_moe * experts

"""Head shapes of attention with the usual scale, for tests and benchmarks of backends."""

from shoal.attention.backend import AttentionShape


def head_shape(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5)

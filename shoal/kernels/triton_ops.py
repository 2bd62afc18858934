"""The ops on a GPU: see ops.py for the list, the reference.py of each room for what each means."""

from shoal.kernels.activation import embed, gate_mul, soft_cap
from shoal.kernels.attention.new_tokens import attend_new_tokens
from shoal.kernels.batch import apply_updates, begin_decode, copy_ints, copy_rows
from shoal.kernels.branches import fork_norms, join_norms
from shoal.kernels.gate import gate_output
from shoal.kernels.latent.store import norm_rope_store as latent_norm_rope_store
from shoal.kernels.matmul.float_linear import float_linear, norm_float_linear
from shoal.kernels.matmul.linear import add_norm_linear, linear, linear_add, linear_gated, norm_linear
from shoal.kernels.moe.moe import moe
from shoal.kernels.norm import add_normed, add_rms_norm, rms_norm
from shoal.kernels.recurrent.conv import causal_conv
from shoal.kernels.recurrent.delta import gated_delta
from shoal.kernels.recurrent.delta_decode import delta_mixer
from shoal.kernels.recurrent.gated_norm import gated_norm
from shoal.kernels.recurrent.mamba import mamba2
from shoal.kernels.recurrent.mamba_decode import mamba_mixer
from shoal.kernels.rope import qk_norm_rope_store
from shoal.kernels.sampling.allowed_tokens_triton import keep_allowed
from shoal.kernels.sampling.bad_words_triton import ban_words
from shoal.kernels.sampling.logit_bias_triton import add_bias
from shoal.kernels.sampling.min_tokens_triton import ban_stops
from shoal.kernels.sampling.penalties_triton import penalize
from shoal.kernels.sampling.reference import keep_bits
from shoal.kernels.sampling.sample import sample
from shoal.kernels.sampling.split_sample_triton import join_parts, sample_parts
from shoal.kernels.sampling.token_history_triton import locate_rows, put_samples, store_tokens, take_rows

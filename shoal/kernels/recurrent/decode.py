"""The parts that the fused decode kernels of recurrent layers share: which steps and memory they take, the
convolution of one token, and the arrival of programs that read the same inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.layer_cache import LayerState
from shoal.kernels.recurrent.chunks import sigmoid
from shoal.kernels.recurrent.sequences import Sequences

MAX_ARRIVALS = 1 << 17  # sequences of a launch times their key heads or groups


def decodes_alone(sequences: Sequences, groups: int) -> bool:
    """Returns whether a step has no prompts. `groups`: of programs that read the same inputs, for each
    sequence."""
    num_seqs = len(sequences.rows_S)
    return sequences.num_decodes == num_seqs and num_seqs * groups <= MAX_ARRIVALS


def checked_memory(
    memory: LayerState, conv_CW: torch.Tensor, norm: torch.Tensor, *inputs_TX: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs of the convolution and the states. Asserts the layout that fused kernels take."""
    inputs_RCW, states_R = memory.conv_RCW, memory.state_R
    assert states_R is not None and inputs_RCW.shape[2] == conv_CW.shape[1] - 1 > 0
    assert conv_CW.is_contiguous() and inputs_RCW[0].is_contiguous() and states_R[0].is_contiguous()
    assert inputs_RCW.dtype == inputs_TX[0].dtype
    assert norm.dtype in (inputs_TX[0].dtype, torch.float32) and all(x.stride(1) == 1 for x in inputs_TX)
    return inputs_RCW, states_R


def kept_inputs(memory: LayerState, sequences: Sequences) -> tuple[torch.Tensor | None, int]:
    """Returns the kept inputs of the convolution, and the numbers from one row to the next."""
    kept_RKC = memory.kept_conv_RKC
    if sequences.drafts is None:
        return None, 0
    assert kept_RKC is not None and kept_RKC[0].is_contiguous() and kept_RKC.dtype == memory.conv_RCW.dtype
    return kept_RKC, kept_RKC.stride(0)


@triton.jit
def apart(x, axis: tl.constexpr):
    """Returns the vector `x` unchanged, but in a layout of its own. Otherwise Triton would compute a vector
    along `axis` of a state in the state's layout, in which every thread computes many of its numbers, and
    other threads the same ones."""
    return tl.sum(tl.expand_dims(x, axis), axis=axis)


@triton.jit
def earlier_inputs(inputs_ptr, weight_ptr, channels, mask, goes_on, W):
    """Returns the inputs of channels before the token, the oldest first, and the weights of all taps. Both
    may be read before earlier kernels of the step are done."""
    earlier = ()
    weights = ()
    for tap in tl.static_range(W - 1):
        at = inputs_ptr + channels * (W - 1) + tap
        earlier += (tl.load(at, mask=mask & goes_on, other=0.0, cache_modifier=".cg"),)
    for tap in tl.static_range(W):
        weights += (tl.load(weight_ptr + channels * W + tap, mask=mask, other=0.0),)
    return earlier, weights


@triton.jit
def convolve(token_ptr, bias_ptr, earlier, weights, channels, mask, W: tl.constexpr):
    """Returns silu(convolution) of a token's channels, rounded to its type, and the inputs that the next
    token takes."""
    x = tl.load(token_ptr + channels, mask=mask, other=0.0)
    sums = x.to(tl.float32) * weights[W - 1].to(tl.float32)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    later = ()
    for tap in tl.static_range(W - 1):
        sums += earlier[tap].to(tl.float32) * weights[tap].to(tl.float32)
        if tap > 0:
            later += (earlier[tap],)  # type: ignore[assignment]
    return (sums * sigmoid(sums)).to(x.dtype).to(tl.float32), later + (x,)


@triton.jit
def store_inputs(inputs_ptr, earlier, channels, mask, W: tl.constexpr):
    """Writes the inputs that the next token takes to the row. All threads that read the old ones must be
    done."""
    for tap in tl.static_range(W - 1):
        tl.store(inputs_ptr + channels * (W - 1) + tap, earlier[tap], mask=mask)

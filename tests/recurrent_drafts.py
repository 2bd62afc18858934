"""Steps with drafts of recurrent layers' kernels, some of which are rejected, against an oracle that takes each token
by itself, for tests on CPU and GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from shoal.kernels.draft_spans import DraftSpans
from shoal.kernels.layer_cache import LayerState
from shoal.kernels.recurrent.sequences import Sequences
from tests.recurrent_steps import MIXERS, Heads, conv_inputs, delta_inputs, mamba_inputs

DRAFTS, DECODES, PROMPT = 3, 3, 5
WIDE = Heads(2, 4, 20, 37)
CHANNELS = Heads(2, 2, 12, 20, has_channel_gates=True)
KEPT = {"inputs_RCW": "kept_RKC", "states_RHNV": "kept_RKX", "states_RHVN": "kept_RKX", "rows_RX": "kept_RKX"}


def plain_sequences(row: int, first: int, tokens: int, device: str) -> Sequences:
    """One sequence of some tokens, which decodes if it has one."""
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    return Sequences(ints(row), ints(0, tokens), ints(*range(first, first + tokens)), int(tokens == 1))


def input_size(inputs: dict[str, Any]) -> int:
    """Returns the numbers of a token that are kept of a draft."""
    if "z_TX" in inputs:  # the convolution's inputs, and its outputs that the rule reads, except the queries
        channels, values = inputs.get("qkv_TC", inputs.get("xbc_TC")).shape[1], inputs["z_TX"].shape[1]
        gates = sum(inputs[name].shape[1] for name in ("a_TH", "b_TH", "dt_TH") if name in inputs)
        return channels + (channels + values) // 2 + gates
    kept = {"x_TC", "k_TKN", "v_THV", "a_TH", "b_TH", "x_THV", "dt_TH", "b_TGN"}
    return sum(math.prod(inputs[name].shape[1:]) for name in kept & inputs.keys())


def draft_cases(
    dtype: torch.dtype, state_dtype: torch.dtype, heads: Heads = WIDE
) -> dict[str, tuple[str, Callable[[Sequences, int], dict[str, Any]]]]:
    """Returns for each op the name of its states, and its inputs."""
    return {
        "causal_conv": ("inputs_RCW", lambda own, rows: conv_inputs(own, rows, 77, 4, True, dtype)),
        "gated_delta": ("states_RHNV", lambda own, rows: delta_inputs(own, rows, heads, dtype, state_dtype)),
        "mamba2": ("states_RHVN", lambda own, rows: mamba_inputs(own, rows, heads, dtype, state_dtype)),
    }


def mixer_case(
    mixer: str, dtype: torch.dtype, state_dtype: torch.dtype, heads: Heads = WIDE
) -> tuple[Callable[..., Callable[..., torch.Tensor]], Callable[[Sequences, int], dict[str, Any]]]:
    """Returns what makes an op of a mixer, and its inputs. The op has one tensor of states in float32, whose rows have
    the inputs of the convolution and the state."""
    make_inputs, _ = MIXERS[mixer]
    values, keys = heads.heads * heads.value_dim, heads.keys * heads.key_dim
    channels = values + 2 * keys

    def make(sequences: Sequences, rows: int) -> dict[str, Any]:
        inputs = make_inputs(sequences, rows, heads, dtype, state_dtype)
        memory = inputs.pop("memory")
        return inputs | {
            "rows_RX": torch.cat([memory.conv_RCW.flatten(1), memory.state_R.flatten(1)], 1).float()
        }

    def with_rows(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def op(rows_RX: torch.Tensor, kept_RKX: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
            last = (heads.key_dim, heads.value_dim)
            shapes = (channels, -1), (heads.heads, *(last if mixer == "delta_mixer" else last[::-1]))
            at = rows_RX.shape[1] - heads.heads * heads.key_dim * heads.value_dim
            parts = rows_RX[:, :at].to(dtype), rows_RX[:, at:].to(state_dtype)
            slots = 0 if kept_RKX is None else kept_RKX.shape[1]
            kept = () if kept_RKX is None else kept_RKX.flatten(1).tensor_split([slots * channels], 1)
            memory = LayerState(
                *(part.unflatten(1, shape) for part, shape in zip(parts, shapes)),
                *(part.unflatten(1, (slots, -1)) for part in kept),
            )
            out = function(memory=memory, **inputs)
            rows_RX.copy_(torch.cat(parts, dim=1))
            return out

        return op

    return with_rows, make


def follow_drafts(
    op: Callable[..., torch.Tensor],
    oracle: Callable[..., torch.Tensor],
    make: Callable[[Sequences, int], dict[str, Any]],
    state: str,
    seed: int,
    num_tokens: int = 24,
    device: str = "cpu",
    prompts: float = 1.0,
    **tolerance: float,
) -> None:
    """`make` returns the inputs of a sequence, and as many rows of states. Each of some sequences decodes its
    tokens; `prompts`: the share of steps in which a prompt begins, too. Compares outputs of all tokens that are kept, and the
    states after each step and after pending inputs are applied."""
    r = random.Random(seed)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    inputs = make(plain_sequences(0, 0, num_tokens, device), DECODES + 2)
    tokens = [name for name in inputs if "_T" in name]
    begun = [r.randint(1, 40) for _ in range(DECODES)]

    # What the oracle says: outputs of each token, and states before and after it
    rows, want, states = inputs[state].clone(), [], []
    for s in range(DECODES):
        want.append([])
        states.append([rows[s].clone()])
        for t in range(num_tokens):
            own = {name: inputs[name][t : t + 1] for name in tokens}
            one = plain_sequences(s, begun[s] + t, 1, device)
            want[s].append(oracle(**inputs | own | {state: rows, "sequences": one})[0])
            states[s].append(rows[s].clone())
    own = {name: inputs[name][:PROMPT] for name in tokens}
    prompt = plain_sequences(DECODES, 0, PROMPT, device)
    prompt_want = oracle(**inputs | own | {state: rows, "sequences": prompt})

    size = input_size(inputs)
    memory = torch.stack([inputs[state]] * 3, dim=1)  # rows are parts of larger ones, as in the engine
    kept = torch.randn(DECODES + 2, 2, DRAFTS, size, device=device).to(inputs[tokens[0]].dtype)[:, 1]
    mine = inputs | {state: memory[:, 1], KEPT[state]: kept}

    def run(index: list[int], sequences: Sequences) -> torch.Tensor:
        # index_select keeps no odd strides of the tensor, as indexing does on a GPU.
        taken = torch.tensor(index, dtype=torch.long, device=device)
        own = {name: inputs[name].index_select(0, taken) for name in tokens}
        return op(**mine | own | {"sequences": sequences})

    def check_states() -> None:
        for s in range(DECODES):
            torch.testing.assert_close(mine[state][s], states[s][done[s] - pending[s]], **tolerance)

    done, pending = [0] * DECODES, [0] * DECODES
    while min(done) < num_tokens:
        queries = r.randint(1, 1 + DRAFTS)
        chosen = [
            s for s in range(DECODES) if done[s] < num_tokens and (r.random() < 0.8 or done[s] == min(done))
        ]
        verified = [min(r.randint(0, queries - 1), num_tokens - 1 - done[s]) for s in chosen]
        accepted = [r.randint(0, count) for count in verified]
        index, positions = [], []
        for s, count, right in zip(chosen, verified, accepted):
            drafts = [done[s] + i if i <= right else r.randrange(num_tokens) for i in range(count + 1)]
            index += [0] * (queries - 1 - count) + drafts
            positions += [-1] * (queries - 1 - count) + [begun[s] + done[s] + i for i in range(count + 1)]
        padded = r.random() < 0.5  # a place for a decode, without one
        spans = DraftSpans(
            ints([begun[s] + done[s] for s in chosen] + [-1] * padded),
            ints(verified + [0] * padded),
            ints([pending[s] for s in chosen] + [0] * padded),
            queries,
        )
        num_decodes, has_prompt = len(chosen) + padded, prompts == 1 or r.random() < prompts
        starts = [*range(0, queries * num_decodes + 1, queries), queries * num_decodes + PROMPT]
        sequences = Sequences(
            ints([*chosen, *[-1] * padded, *[DECODES] * has_prompt]),
            ints(starts[: num_decodes + 1 + has_prompt]),
            ints(positions + [-1] * (queries * padded) + [*range(PROMPT * has_prompt)]),
            num_decodes,
            spans,
        )
        out = run(index + [0] * (queries * padded) + [*range(PROMPT * has_prompt)], sequences)
        if has_prompt:
            torch.testing.assert_close(out[-PROMPT:], prompt_want, **tolerance)
        for b, (s, count, right) in enumerate(zip(chosen, verified, accepted)):
            first = (b + 1) * queries - 1 - count
            for i in range(right + 1):
                torch.testing.assert_close(out[first + i], want[s][done[s] + i], **tolerance)
            done[s], pending[s] = done[s] + 1 + right, right
        check_states()
        if r.random() < 0.4:  # as snapshots are taken
            counts = [r.randint(0, pending[s]) for s in chosen]
            ends = [begun[s] + done[s] - pending[s] + count for s, count in zip(chosen, counts)]
            none = ints([0] * (len(chosen) + 1))
            spans = DraftSpans(ints(ends), none[1:] - 1, ints(counts), 0)
            run([], Sequences(ints(chosen), none, none[:0], len(chosen), spans))
            for s, count in zip(chosen, counts):
                pending[s] -= count
            check_states()
    assert torch.equal(memory[:, 0], inputs[state]) and torch.equal(memory[:, 2], inputs[state])

"""Prepares a rank for its first step: `compile_ahead` (on a GPU), `num_blocks_that_fit` and
`allocate`, in this order. `seconds_per_prompt_token` measures it.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from shoal.attention.step_input import StepInput
from shoal.engine.drafting.step_sizes import draft_rows
from shoal.engine.runner.capture_sizes import decode_ladders, decode_sizes
from shoal.engine.runner.graphs import DecodeGraphs, DecodeKey, StepGraphs
from shoal.engine.runner.packed_step import ALIGNMENT, MixedShape
from shoal.engine.runner.runner import ModelRunner
from shoal.engine.runner.steps import Steps
from shoal.kernels.compilation import compiling_ahead
from shoal.kernels.launching import repeated_launches
from shoal.layers.attention import Attention
from shoal.models.copied_layers import CopiedLayers

# Prompt length used to measure `seconds_per_prompt_token`.
MEASURED_TOKENS = {"cuda": 512, "cpu": 64}
MEASURE_TRIES = 3
# Numbers of tokens. Between two neighbours here, all steps launch the same variants of the kernels (tile
# sizes and the like), so a rehearsal at each of these numbers makes all variants ready.
CUTS = 32, 64, 96, 128, 192, 256, 1024, 2048
# Further numbers of tokens. cuBLAS chooses other kernels for them, which are read from disk when they are
# first launched. What such a step allocates stays with PyTorch for later steps.
LARGE_STEPS = 1500, 1800, 2300, 2800, 3400, 4000, 5000, 6000, 7500, 9000, 11000, 13500
SHORT_PROMPT = 17  # tokens of each sequence of a large step; their sum is odd or even, as in real steps

# The graphs of decode steps, of mixed steps, and of chunks of whole rows.
Graphs = tuple[DecodeGraphs, StepGraphs[MixedShape], StepGraphs[int]]


@torch.inference_mode()
def compile_ahead(runner: ModelRunner) -> None:
    """Compiles the model's kernels side by side if it has not run on this machine yet. One step of each
    kind shows whether any kernel is missing on disk. If one is missing on any rank, all ranks go on to
    the other steps, because they compute together."""
    graphs = () if runner.config.enforce_eager else _new_graphs(runner)
    _prepare_new_tokens(runner)
    with compiling_ahead() as compiled, runner.model.one_layer_of_each_kind():
        rehearse(runner.steps, 1, 1)
        for steps in graphs:
            steps.rehearse(1)
        if runner.tp.all_reduce(torch.tensor(len(compiled), device=runner.device)).item():
            # Kernels of long prompts come first, since they take longest to compile.
            rehearse_eager(runner.steps, runner.config.max_num_seqs, runner.config.max_num_batched_tokens)
            for steps in graphs:
                steps.rehearse()
    runner.state.reset()
    torch.cuda.empty_cache()  # a region may need this memory


def _prepare_new_tokens(runner: ModelRunner) -> None:
    """Begins to compile attention of a few new tokens, which Triton does not."""
    from shoal.kernels.attention import new_tokens

    plain = (layer for layer in runner.model.modules() if isinstance(layer, Attention) and layer.is_plain)
    for shape in {layer.shape for layer in plain}:
        new_tokens.prepare(runner.device, shape.num_heads, shape.num_kv_heads, shape.head_dim)


@torch.inference_mode()
def num_blocks_that_fit(runner: ModelRunner) -> int:
    """Returns how many KV blocks fit into what this rank's share of memory has left. To know what is
    left, it runs the largest step that there can be and one at the end of the longest sequence, on a
    cache of one block, and measures the graphs. One layer of each kind shows the most memory that a step
    takes, because a layer uses the memory of the one before it."""
    if runner.share is None:
        of_rows = runner.states.nbytes
        return (runner.config.kv_cache_memory_bytes - of_rows) // runner.cache.plan.block_bytes
    num_seqs = min(runner.config.max_num_seqs, runner.config.max_num_batched_tokens)
    query_len = min(runner.config.max_num_batched_tokens // num_seqs, runner.config.max_model_len)
    with runner.model.one_layer_of_each_kind():
        logits_SV = rehearse(runner.steps, num_seqs, query_len)
    # The rare requests that ask for log-probabilities must find room too.
    rows_S = torch.arange(num_seqs, device=runner.device)
    runner.sampler.logprobs(logits_SV, rows_S, 1, None, filtered=[*range(num_seqs)])
    del logits_SV
    rehearse_longest(runner.steps, runner.config.max_num_batched_tokens)
    runner.state.reset()
    graph_bytes = 0
    if not runner.config.enforce_eager:
        graph_bytes = sum(graphs.measure() for graphs in _new_graphs(runner))
    block_bytes = runner.cache.plan.block_bytes + runner.whole_rows.bytes_of_block
    return runner.share.room(graph_bytes) // block_bytes


@torch.inference_mode()
def allocate(runner: ModelRunner, num_blocks: int, num_more: int = 0) -> None:
    """Makes the cache and captures the graphs. Every rank must get the same numbers. `num_more`: blocks for
    snapshots alone, after the others. Raises MemoryError or torch.OutOfMemoryError."""
    with runner.regions.holding("kv_cache"):
        runner.cache.allocate(num_blocks + num_more)
        runner.whole_rows.allocate(num_blocks)
    runner.state.reset()
    if runner.device.type == "cuda":
        prepare_steps(runner)
        torch.cuda.synchronize(runner.device)
    if runner.config.sleep_offload == "host":
        runner.regions.prepare_host()


def prepare_steps(runner: ModelRunner) -> None:
    """Captures the graphs, and compiles or loads the kernels of eager steps, so that no request waits for
    them."""
    if not runner.config.enforce_eager:
        # Nothing dead is to hold memory during the captures. What a start leaves is young; a full
        # collection looks at all modules.
        gc.collect(1)
        graphs = _new_graphs(runner)
        pool = runner.regions.graph_pool("kv_cache") or torch.cuda.graph_pool_handle()
        with repeated_launches():
            capture(runner.steps, graphs, pool)
    rehearse_eager(runner.steps, runner.config.max_num_seqs, runner.config.max_num_batched_tokens)
    runner.state.reset()


def _new_graphs(runner: ModelRunner) -> Graphs:
    sizes = decode_sizes(runner.config.cudagraph_capture_sizes, runner.config.max_num_seqs)
    ladders = decode_ladders(sizes, runner.share_from, draft_rows(runner.config))
    return graphs_of(runner.steps, ladders)


def seconds_per_prompt_token(runner: ModelRunner) -> float:
    """Computes a made-up prompt and returns the seconds that each of its tokens took. To be called before
    the first request."""
    most = MEASURED_TOKENS[runner.device.type]
    num_tokens = max(1, min(most, runner.config.max_num_batched_tokens, runner.config.max_model_len // 2))
    seconds = float("inf")
    # The first try loads what it needs, and another program may disturb a later one: the quickest counts.
    for _ in range(MEASURE_TRIES):
        start = time.perf_counter()
        rehearse(runner.steps, 1, num_tokens)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        seconds = min(seconds, time.perf_counter() - start)
    runner.state.reset()
    return seconds / num_tokens


@torch.inference_mode()
def rehearse(steps: Steps, num_seqs: int, query_len: int, cached_len: int = 0) -> torch.Tensor:
    """Made-up prompts of `query_len` tokens after `cached_len` others, sampling included; returns the
    logits of this rank's tokens, [num_seqs, V]. The batch state has to be reset afterwards."""
    tables = steps.state.block_tables
    step = StepInput.rehearsal(num_seqs, query_len, cached_len=cached_len, block_tables=tables)
    last_S = (step.query_starts_S[1:] - 1).long()
    logits_SV = steps.model.logits(steps.model(step, steps.cache.layers, last_S))
    steps.sampler.sample(logits_SV, step.rows_S, step.positions_T[last_S])
    if steps.drafting is not None:
        steps.drafting.rehearse_head(step)
    return logits_SV


@torch.inference_mode()
def rehearse_eager(steps: Steps, max_num_seqs: int, max_num_tokens: int) -> None:
    """Launches whatever kernel an eager step may launch."""
    query_len = min(8, steps.max_model_len // 2)
    for cached_len in (0, query_len):
        rehearse(steps, min(2, max_num_seqs), query_len, cached_len)
    captured = steps.mixed_shapes[-1].tokens if steps.mixed_shapes else 0
    with steps.model.one_layer_of_each_kind():
        for length in CUTS:
            if captured < length <= min(max_num_tokens, steps.max_model_len):
                rehearse(steps, 1, length)
        for num_tokens in LARGE_STEPS:
            query_len = max(SHORT_PROMPT, -(-num_tokens // max_num_seqs))
            if captured < num_tokens <= max_num_tokens and query_len <= steps.max_model_len:
                rehearse(steps, num_tokens // query_len, query_len)
        # Kernels of recurrent layers differ by the number of prompts, up to the next power of two.
        most = min(max_num_seqs, max_num_tokens // 2) if steps.states.layers else 0
        for doublings in range(2, (most - 1).bit_length() + 1):
            rehearse(steps, min(1 << doublings, most), 2)
    steps.whole_rows.rehearse(rehearse(steps, 1, 1))
    rehearse_longest(steps, max_num_tokens)
    flat = steps.state.flat
    steps.ops.apply_updates(flat, *torch.zeros(2, ALIGNMENT, dtype=torch.int32, device=flat.device))
    if steps.drafting is not None:
        steps.drafting.rehearse()
    steps.buffers.rehearse(steps.state.sampled_S[:-1])


@torch.inference_mode()
def rehearse_longest(steps: Steps, max_num_tokens: int) -> None:
    """The last tokens of one sequence of max_model_len tokens, as many as a step may take."""
    query_len = min(max_num_tokens, steps.max_model_len)
    with steps.model.one_layer_of_each_kind():
        rehearse(steps, 1, query_len, steps.max_model_len - query_len)


def graphs_of(steps: Steps, ladders: dict[tuple[int, bool], list[int]]) -> Graphs:
    """The graphs of all kinds, which are not captured yet. `ladders`: of the decode steps
    (capture_sizes.py)."""
    short = steps.model.one_layer_of_each_kind
    copied = CopiedLayers(steps.model, steps.cache.layers)

    def decode(key: DecodeKey) -> tuple[torch.Tensor, ...]:
        of_kind = key.rows, steps.max_model_len, key.sharing
        logits_SV = copied.capture(lambda after: steps.decode(*of_kind, after, queries=key.queries))
        if steps.drafting is None:
            return (logits_SV,)
        return logits_SV, *steps.drafting.capture_end(key, key.rows, key.queries)

    def captured_mixed(shape: MixedShape) -> tuple[torch.Tensor, ...]:
        return copied.capture(lambda after: steps.captured_mixed(shape, after))

    mixed = StepGraphs(captured_mixed, steps.mixed_shapes[::-1], short)
    return DecodeGraphs(decode, ladders, short), mixed, steps.whole_rows.new_graphs()


def capture(steps: Steps, graphs: Graphs, pool: Any) -> None:
    """Captures these graphs, which `launch` uses from then on."""
    steps.decode_graphs, steps.mixed_graphs, whole_rows = graphs
    steps.mixed_graphs.capture(pool)  # first the larger ones, whose memory the others then share
    steps.decode_graphs.capture(pool)
    steps.whole_rows.capture(whole_rows)

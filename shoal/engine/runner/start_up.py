"""Prepares a rank for its first step: `compile_ahead` (on a GPU), `num_blocks_that_fit` and
`allocate`, in this order. `seconds_per_prompt_token` measures it.
"""

from __future__ import annotations

import gc
import time

import torch

from shoal.engine.runner.graphs import decode_sizes
from shoal.engine.runner.runner import ModelRunner
from shoal.engine.runner.steps import Graphs
from shoal.kernels.compilation import compiling_ahead
from shoal.kernels.launching import repeated_launches

# Prompt length used to measure `seconds_per_prompt_token`.
MEASURED_TOKENS = {"cuda": 512, "cpu": 64}
MEASURE_TRIES = 3


@torch.inference_mode()
def compile_ahead(runner: ModelRunner) -> None:
    """Compiles the model's kernels side by side if it has not run on this machine yet. One step of each
    kind shows whether any kernel is missing on disk. If one is missing on any rank, all ranks go on to
    the other steps, because they compute together."""
    graphs = () if runner.config.enforce_eager else _new_graphs(runner)
    with compiling_ahead() as compiled, runner.model.one_layer_of_each_kind():
        runner.steps.rehearse(1, 1)
        for steps in graphs:
            steps.rehearse(1)
        if runner.tp.all_reduce(torch.tensor(len(compiled), device=runner.device)).item():
            for steps in graphs:
                steps.rehearse()
            runner.steps.rehearse_eager(runner.max_num_seqs, runner.max_num_tokens)
    runner.state.reset()
    torch.cuda.empty_cache()  # a region may need this memory


@torch.inference_mode()
def num_blocks_that_fit(runner: ModelRunner) -> int:
    """Returns how many KV blocks fit into what this rank's share of memory has left. To know what is
    left, it runs the largest step that there can be and one at the end of the longest sequence, on a
    cache of one block, and measures the graphs. One layer of each kind shows the most memory that a step
    takes, because a layer uses the memory of the one before it."""
    if runner.share is None:
        return runner.config.kv_cache_memory_bytes // runner.cache.spec.block_bytes
    num_seqs = min(runner.max_num_seqs, runner.max_num_tokens)
    query_len = min(runner.max_num_tokens // num_seqs, runner.max_model_len)
    with runner.model.one_layer_of_each_kind():
        logits_SV = runner.steps.rehearse(num_seqs, query_len)
    # The rare requests that ask for log-probabilities must find room too.
    rows_S = torch.arange(num_seqs, device=runner.device)
    runner.sampler.logprobs(logits_SV, rows_S, 1, None, filtered=[*range(num_seqs)])
    del logits_SV
    runner.steps.rehearse_longest(runner.max_num_tokens)
    runner.state.reset()
    graph_bytes = 0
    if not runner.config.enforce_eager:
        graph_bytes = sum(graphs.measure() for graphs in _new_graphs(runner))
    block_bytes = runner.cache.spec.block_bytes + runner.whole_rows.bytes_of_block(runner.config.block_size)
    return runner.share.room(graph_bytes) // block_bytes


@torch.inference_mode()
def allocate(runner: ModelRunner, num_blocks: int) -> None:
    """Makes the cache and captures the graphs. Every rank must get the same number. Raises MemoryError or
    torch.OutOfMemoryError."""
    with runner.regions.holding("kv_cache"):
        runner.cache.allocate(num_blocks)
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
            runner.steps.capture(graphs, pool)
    runner.steps.rehearse_eager(runner.max_num_seqs, runner.max_num_tokens)
    runner.state.reset()


def _new_graphs(runner: ModelRunner) -> Graphs:
    sizes = decode_sizes(runner.config.cudagraph_capture_sizes, runner.max_num_seqs)
    return runner.steps.new_graphs(sizes, runner.share_from)


def seconds_per_prompt_token(runner: ModelRunner) -> float:
    """Computes a made-up prompt and returns the seconds that each of its tokens took. To be called before
    the first request."""
    most = MEASURED_TOKENS[runner.device.type]
    num_tokens = max(1, min(most, runner.max_num_tokens, runner.max_model_len // 2))
    seconds = float("inf")
    # The first try loads what it needs, and another program may disturb a later one: the quickest counts.
    for _ in range(MEASURE_TRIES):
        start = time.perf_counter()
        runner.steps.rehearse(1, num_tokens)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        seconds = min(seconds, time.perf_counter() - start)
    runner.state.reset()
    return seconds / num_tokens

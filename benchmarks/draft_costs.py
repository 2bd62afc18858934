"""On a GPU, with random weights: what a step costs by its rows and the tokens of each, and what speculation
costs streams of text in which no draft holds. Prints two tables.

    python benchmarks/draft_costs.py qwen3-8b --streams 1,64,256
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from workloads import write_model

CONTEXT = 1000  # tokens before a measured step
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 8}
FIXED = NGRAM | {"enable_adaptive_verification": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", nargs="?", default="qwen3-8b")
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--count", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()

    from shoal import LLM

    folder = write_model(tempfile.mkdtemp(), arguments.shape)
    options: dict[str, Any] = dict(
        load_format="dummy", max_model_len=2048, max_num_seqs=256, gpu_memory_utilization=0.42
    )
    engines = {}
    for name, config in (("none", None), ("auto", {"method": "auto"})):
        begin = time.perf_counter()
        engines[name] = LLM(folder, speculative_config=config, **options)
        taken = time.perf_counter() - begin
        print(f"start with speculation {name}: {taken:.1f} s, {engines[name].stats().num_blocks} blocks")
    print_costs(engines)
    print_streams(engines, [int(number) for number in arguments.streams.split(",")], arguments)


def print_costs(engines: dict[str, Any]) -> None:
    """Milliseconds of the captured steps, at CONTEXT tokens a row."""
    plain = milliseconds(engines["none"])
    found = milliseconds(engines["auto"])
    queries = sorted({queries for _, queries in found})
    print(
        f"\n| rows | none | {' | '.join(f'{n} tokens' for n in queries)} |\n|---|---|{'---|' * len(queries)}"
    )
    for rows in sorted({rows for rows, _ in plain} | {rows for rows, _ in found}):
        base = plain.get((rows, 1))
        cells = [f"{base:.3f} ms" if base else ""]
        for number in queries:
            taken = found.get((rows, number))
            cells.append("" if taken is None else f"{taken:.3f}{f' ({taken / base:.2f})' if base else ''}")
        print(f"| {rows} | {' | '.join(cells)} |")


@torch.inference_mode()
def milliseconds(llm: Any) -> dict[tuple[int, int], float]:
    """Returns the milliseconds of each captured step without sharing, by rows and queries."""
    from shoal.kernels.state import Field

    runner = llm.core.ranks.runner
    state, found = runner.state, {}
    saved = state.flat.clone()
    num_blocks, block_size = runner.cache.blocks.shape[0], runner.cache.plan.groups[0].block_size
    per_row = -(-2 * CONTEXT // block_size)
    for key, graph in runner.steps.decode_graphs.graphs.items():
        if key.sharing:
            continue
        state.active_B.fill_(-1)
        state.active_B[: key.rows] = torch.arange(key.rows, dtype=torch.int32)
        table = state.table[: key.rows]
        table[:, Field.POSITION], table[:, Field.TOKEN], table[:, Field.ROOM] = CONTEXT, 1, 2 * CONTEXT
        table[:, Field.MAX_TOKENS], table[:, Field.NUM_DRAFTS] = key.queries, key.queries - 1
        blocks = torch.arange(key.rows * per_row, dtype=torch.int32, device=table.device) % num_blocks
        state.block_tables[0][: key.rows, :per_row] = blocks.view(key.rows, per_row)
        ready, times = state.flat.clone(), []
        for _ in range(25):
            state.flat.copy_(ready)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        found[key.rows, key.queries] = statistics.median(times[5:])
    state.flat.copy_(saved)
    return found


def print_streams(engines: dict[str, Any], streams: list[int], arguments: argparse.Namespace) -> None:
    """Tokens per second of streams of random text, alternating between the engines."""
    from shoal import SamplingParams

    rng = random.Random(0)
    print(f"\n| streams | {' | '.join(engines)} | ratio |\n|---|{'---|' * (len(engines) + 1)}")
    for number in streams:
        prompts = [[rng.randrange(1000, 30000) for _ in range(100)] for _ in range(number)]
        times: dict[str, list[float]] = {name: [] for name in engines}
        for run in range(arguments.runs + 1):
            params = [
                SamplingParams(
                    temperature=1.0, seed=i, max_tokens=arguments.count, ignore_eos=True, detokenize=False
                )
                for i in range(number)
            ]
            for name, llm in engines.items():
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                if run:  # the first one warms up
                    times[name].append(time.perf_counter() - begin)
        none, auto = (number * arguments.count / min(times[name]) for name in engines)
        print(f"| {number} | {none:.0f} tokens/s | {auto:.0f} | {auto / none:.3f} |", flush=True)


if __name__ == "__main__":
    main()

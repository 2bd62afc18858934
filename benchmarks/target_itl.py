"""Gains and costs of `--target-itl-ms`: gap between tokens, first token and throughput of a served load, by
target.

    python benchmarks/target_itl.py --json target.json --plot target.png       # SmolLM2: minutes on a CPU
    python benchmarks/target_itl.py --model qwen3-8b --concurrency 128 --requests 512 \\
        --input-len 512 --output-len 128 --targets 0,10,20,30,50,100,200 --json target.json --plot target.png

First the same requests go to an engine without a server, which runs as many of them at once: its tokens a
second are what a server could reach at most. Then `shoal serve` is started once for each target and round,
and gets requests of random token ids, `--concurrency` of them at any time, whose streams are read (`shoal
bench serve`). Target 0 is a server without a target. A model is what `shoal serve` takes, or a shape of
benchmarks/workloads.py, with random weights. Targets take turns, so that a busy machine slows all of them; of
the rounds, medians are shown. On a CPU that others use, believe the CPU time that the engine takes for an
output token (prompts and warm-up included) more than the tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from workloads import SHAPES, write_model

from tests.serving import Serve

if TYPE_CHECKING:
    from shoal.bench.serving import ServeBench

FIGURES = {
    "gap_median_ms": "gap, median",
    "gap_p99_ms": "gap, p99",
    "gap_worst_ms": "gap, worst",
    "first_median_ms": "first token, median",
    "first_p99_ms": "first token, p99",
    "tokens_per_s": "output tokens/s",
    "cpu_ms_per_token": "engine's CPU ms a token",
}


def write_served_model(root: str, name: str) -> str:
    """A shape with random weights whose every token has a text of its own, so that each is seen in a
    stream."""
    folder = Path(write_model(root, name))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def measure(model: str, flags: list[str], target: float, arguments: argparse.Namespace) -> dict[str, float]:
    """The figures of one server under the whole load."""
    from shoal.bench.serving import percentile, run

    with tempfile.TemporaryDirectory() as folder:
        server = Serve(Path(folder), model, *flags, "--target-itl-ms", target)
        try:
            server.ready()
            bench = load(arguments, f"http://127.0.0.1:{server.port}")
            before = engine_cpu_s(server)
            result = asyncio.run(run(bench))
            cpu_s = engine_cpu_s(server) - before
        finally:
            server.stop()
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed: {next(filter(None, result['errors']))}")
    gaps = [1e3 * gap for answer in result["itls"] for gap in answer]
    first = [1e3 * seconds for seconds in result["ttfts"]]
    return {
        "gap_median_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_worst_ms": max(gaps),
        "first_median_ms": percentile(first, 50),
        "first_p99_ms": percentile(first, 99),
        "tokens_per_s": result["output_throughput"],
        "cpu_ms_per_token": 1e3 * cpu_s / result["total_output_tokens"],
    }


def load(arguments: argparse.Namespace, base_url: str) -> ServeBench:
    from shoal.bench.serving import ServeBench

    return ServeBench(
        base_url=base_url,
        num_prompts=arguments.requests,
        num_warmups=arguments.concurrency,
        max_concurrency=arguments.concurrency,
        random_input_len=arguments.input_len,
        random_output_len=arguments.output_len,
        random_range_ratio=arguments.range_ratio,
        ignore_eos=True,
        temperature=0.0,
    )


def offline_tokens_per_s(model: str, arguments: argparse.Namespace, options: dict[str, Any]) -> float:
    """Output tokens a second of the same requests without a server. It runs in a process of its own, so that
    the device is free again."""
    from shoal import LLM, SamplingParams
    from shoal.bench.serving import make_requests

    asks = make_requests(load(arguments, "http://nowhere"))
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ask.output_len, detokenize=False)
        for ask in asks
    ]
    llm = LLM(model, max_num_seqs=arguments.concurrency, **options)
    prompts = [list(ask.prompt) for ask in asks]
    warm = arguments.concurrency
    llm.generate([prompt[::-1] for prompt in prompts[:warm]], params[:warm], use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.exit()
    return sum(ask.output_len for ask in asks) / seconds


def engine_cpu_s(server: Serve) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in server.cores())


def table(found: dict[float, dict[str, float]], offline: float) -> str:
    rows = [
        f"| target, ms | {' | '.join(FIGURES.values())} | of the throughput without | of {offline:,.0f} "
        "without a server |",
        "|---" * (len(FIGURES) + 3) + "|",
    ]
    without = found.get(0.0, {}).get("tokens_per_s")
    for target, figures in found.items():
        share = f"{figures['tokens_per_s'] / without:.1%}" if without else "-"
        shares = [share, f"{figures['tokens_per_s'] / offline:.1%}"]
        cells = [f"{target:g}" if target else "none", *(f"{figures[name]:,.0f}" for name in FIGURES), *shares]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def plot(result: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    found: dict[float, dict[str, float]] = result["targets"]
    order = sorted(found, key=lambda target: target or float("inf"))  # none is the longest
    places = range(len(order))
    panels = (
        ("gap between tokens, ms", ("gap_median_ms", "gap_p99_ms"), ("median", "p99")),
        ("first token, ms", ("first_median_ms", "first_p99_ms"), ("median", "p99")),
        ("output tokens a second", ("tokens_per_s",), ("",)),
    )
    for axis, (title, names, labels) in zip(axes, panels, strict=True):
        for name, label, color in zip(names, labels, ("#0b6b74", "#c2571a")):
            axis.plot(places, [found[target][name] for target in order], marker="o", color=color, label=label)
        axis.set(title=title, xlabel="target, ms", ylim=(0, None))
        axis.set_xticks(places, [f"{target:g}" if target else "none" for target in order])
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            axis.legend(frameon=False)
    figure.suptitle(
        f"{result['model']} on {result['machine']}: {result['concurrency']} streams at once, "
        f"{result['input_len']} tokens in, {result['output_len']} out"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--targets", default="0,25,50,100,200", help="milliseconds; 0: none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--range-ratio", type=float, default=0.5, help="lengths vary by this fraction")
    parser.add_argument("--serve", default="", help="more of the server's flags")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores", help="what the plot calls it")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--plot", help="write a PNG to this file")
    arguments = parser.parse_args()
    targets = [float(target) for target in arguments.targets.split(",")]
    runs: dict[float, list[dict[str, float]]] = {target: [] for target in targets}
    with tempfile.TemporaryDirectory() as root:
        model, flags = arguments.model, shlex.split(arguments.serve)
        options: dict[str, Any] = {}
        if model in SHAPES:
            model, flags = write_served_model(root, model), [*flags, "--load-format", "dummy"]
            options = {"load_format": "dummy"}
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            offline = pool.submit(offline_tokens_per_s, model, arguments, options).result()
        print(f"without a server: {offline:,.0f} tokens/s", file=sys.stderr, flush=True)
        for i in range(arguments.rounds):
            for target in targets:
                runs[target].append(measure(model, flags, target, arguments))
                figures = ", ".join(f"{name} {value:,.0f}" for name, value in runs[target][-1].items())
                print(f"round {i + 1}, target {target:g}: {figures}", file=sys.stderr, flush=True)
    found = {
        target: {name: statistics.median(run[name] for run in ran) for name in FIGURES}
        for target, ran in runs.items()
    }
    print(table(found, offline))
    result = {
        "model": arguments.model,
        "machine": arguments.machine,
        "python": platform.python_version(),
        "rounds": arguments.rounds,
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "offline_tokens_per_s": offline,
        "targets": found,
    }
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()

"""Draws what benchmarks/gpu.py measured into docs/performance.md: a table, bars beside vLLM, and a roofline.

python benchmarks/performance.py benchmarks/results/h200.json

A served load and second turns from host memory stand below them, as h200-target-itl.json and
h200-second-turn.json in the same folder have them.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
COLOURS = {"qwen3-0.6b": "#1f77b4", "qwen3-8b": "#d62728"}
BANDWIDTH, ARITHMETIC = 4.28e12, 680e12  # an H200's ceilings, as in benchmarks/gpu.py


def table(rows: list[dict[str, Any]]) -> str:
    titles = [
        "model",
        "workload",
        "seconds, two runs",
        "out tok/s",
        "in tok/s",
        "ms a token",
        "of the floor",
        "GPU idle",
        "vLLM / ours",
        "nano-vllm / ours",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        if row["workload"] == "start-up":
            lines.append(f"| {row['model']} | start-up | {row['seconds']:.2f} | | | | | | | |")
            continue
        runs = ", ".join(f"{seconds:.3f}" for seconds in row["runs"][1:])
        cells = [
            runs,
            f"{row['out_tokens_per_s']:,.0f}",
            f"{row['in_tokens_per_s']:,.0f}",
            f"{row['ms_per_token']:.3f}",
            _or_dash(row["floor"], ".0%"),
            _or_dash(row["idle"], ".1%"),
            *(_or_dash(row[name], ".2f") for name in ("vs_vllm", "vs_nano")),
        ]
        lines.append(f"| {row['model']} | {row['workload']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def served(measured: dict[str, Any]) -> str:
    """The table of what benchmarks/target_itl.py measured."""
    lines = [
        "| target gap, ms | gap, median and p99, ms | first token, median and p99, ms | output tokens/s "
        "| of those without a target | of those without a server |",
        "|---" * 6 + "|",
    ]
    without, offline = measured["targets"]["0.0"]["tokens_per_s"], measured["offline_tokens_per_s"]
    for target, found in sorted(measured["targets"].items(), key=lambda item: float(item[0])):
        cells = [
            f"{float(target):g}" if float(target) else "none",
            f"{found['gap_median_ms']:.1f}, {found['gap_p99_ms']:.0f}",
            f"{found['first_median_ms']:.0f}, {found['first_p99_ms']:,.0f}",
            f"{found['tokens_per_s']:,.0f}",
            f"{found['tokens_per_s'] / without:.1%}",
            f"{found['tokens_per_s'] / offline:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def second_turns(rows: list[dict[str, Any]]) -> str:
    """The table of what `benchmarks/offload.py second-turn` measured."""
    parts = {
        "median_ttft_s": "first token, median",
        "max_ttft_s": "worst",
        "before_s": "before the fetch",
        "fetching_s": "the fetch",
        "after_s": "behind it",
    }
    lines = [f"| engine | {' | '.join(parts.values())} | turns fetched |", "|---" * 7 + "|"]
    for row in rows:
        cells = [f"{row[name] * 1e3:.1f}" for name in parts]
        lines.append(f"| {row['run'] + 1} | {' | '.join(cells)} | {row['fetched']} of 24 |")
    medians = [f"{statistics.median(row[name] for row in rows) * 1e3:.1f}" for name in parts]
    lines.append(f"| median | {' | '.join(medians)} | |")
    return "\n".join(lines)


def _or_dash(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def draw_bars(rows: list[dict[str, Any]], path: Path) -> None:
    compared = [row for row in rows if row.get("vs_vllm")]
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.bar(
        range(len(compared)),
        [row["vs_vllm"] for row in compared],
        color=[COLOURS.get(row["model"], "grey") for row in compared],
    )
    for i, row in enumerate(compared):
        axes.text(i, row["vs_vllm"], f"{row['vs_vllm']:.2f}", ha="center", va="bottom")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(compared)), [f"{row['workload']}\n{row['model']}" for row in compared], fontsize=8
    )
    axes.set_ylabel("times as fast as vLLM 0.24")
    figure.savefig(path, dpi=110)


def draw_roofline(rows: list[dict[str, Any]], path: Path) -> None:
    """Work a byte against work a second: what a workload could reach at most lies on the line above it."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    xs = [1.0, ARITHMETIC / BANDWIDTH, 1e4]
    axes.plot(xs, [min(x * BANDWIDTH, ARITHMETIC) / 1e12 for x in xs], color="black", linewidth=1)
    for model, colour in COLOURS.items():
        axes.scatter([], [], color=colour, label=model)
    for row in rows:
        if row.get("floor"):
            x, y = row["operations"] / row["bytes_moved"], row["operations"] / row["seconds"] / 1e12
            axes.scatter([x], [y], color=COLOURS.get(row["model"], "grey"))
            axes.annotate(row["workload"], (x, y), fontsize=8, xytext=(4, -9), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def main() -> None:
    measured = json.loads(Path(sys.argv[1]).read_text())
    rows = measured["rows"]
    images = ROOT / "docs" / "images"
    draw_bars(rows, images / "performance-bars.png")
    draw_roofline(rows, images / "performance-roofline.png")
    folder = Path(sys.argv[1]).parent
    load = json.loads((folder / "h200-target-itl.json").read_text())
    turns = json.loads((folder / "h200-second-turn.json").read_text())["rows"]
    (ROOT / "docs" / "performance.md").write_text(f"""# Performance

{measured["gpu"]}, torch {measured["torch"]}, commit {measured["commit"][:10]}, {measured["date"]}:
`{measured["command"]}`.
Drawn by `make bench-gpu`. bf16, random weights, temperature 0.6, `ignore_eos`, token ids, an empty prefix
cache before each run; the better of two runs after a warm-up counts. Workloads and peers' figures:
`benchmarks/workloads.py`, `benchmarks/gpu.py`; the floor: `shoal/bench/floor.py`; the GPU's idle time is
what lies between steps, in a run of its own. [More](../benchmarks/results/README.md).

{table(rows)}

![Beside vLLM](images/performance-bars.png)

Each point is a whole workload; the line is what the GPU could do with that many operations a byte. A point's
distance to it is what is left to gain.

![Roofline](images/performance-roofline.png)

## A served load

`shoal serve`, {load["model"]}, {load["concurrency"]} streams at any time, {load["requests"]} requests of
about {load["input_len"]} tokens in and {load["output_len"]} out (`benchmarks/target_itl.py`), by
`--target-itl-ms`, whose default is 50. Without a server an engine that runs
{load["concurrency"]} at once gives {load["offline_tokens_per_s"]:,.0f} output tokens a second for the same
requests.

{served(load)}

Before there was a target, the gap was 8 ms in the median and 180 to 280 ms at p99, the first token came after
0.8 s in the median and 1.45 s at p99, and the server gave 92 % of what it gives offline. A target below what
a decode step of all streams takes (8 ms here) leaves prompts little room: they wait, and so does the batch.

![Gap, first token and throughput by target](images/target-itl-h200.png)

## Second turns from host memory

Ten engines on a machine just started, the first thing that it does: 24 conversations of 9,000 tokens of
qwen3-8b, then the second turn of each, one at a time (`benchmarks/offload.py second-turn`). Milliseconds:

{second_turns(turns)}
""")


if __name__ == "__main__":
    main()

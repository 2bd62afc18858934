"""Draws what benchmarks/gpu.py measured into docs/performance.md: a table, bars beside vLLM, and a roofline.

python benchmarks/performance.py benchmarks/results/h200.json

Other files in the same folder have what stands below it: h200-2026.json the shapes of 2026, h200-turns.json a
conversation, h200-target-itl.json a served load, and h200-second-turn.json second turns from host memory.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import speculation
from matplotlib.figure import Figure
from workloads import SHAPES

from shoal.bench.floor import Ceilings, Floor
from shoal.models.config_json import config_from_json

ROOT = Path(__file__).parents[1]
COLOURS = {"qwen3-0.6b": "#1f77b4", "qwen3-8b": "#d62728"}
BANDWIDTH, ARITHMETIC = 4.28e12, 680e12  # an H200's ceilings, as in benchmarks/gpu.py


# The aims: shares of the floor, and times as fast as vLLM, for models without and with experts.
FLOOR_AIMS = {"single": (0.7, 0.55), "nano": (0.8, 0.8), "decode": (0.8, 0.8), "prefill": (0.75, 0.6)}
VLLM_AIMS = {"single": (1.0, 1.5), "nano": (1.1, 1.1), "decode": (1.1, 1.1), "prefill": (1.0, 1.0)}

# What benchmarks/workloads.py and gpu.py make: requests, tokens in and out of each, and what it stands for.
WORKLOADS = {
    "single": ("1", "1,024", "512", "one stream: what a person waits for"),
    "four": ("4", "1,024", "256", "a few streams"),
    "service": ("32", "512", "256", "a small service"),
    "nano": ("256", "100 to 1,024", "100 to 1,024", "mixed lengths; nano-vllm's published benchmark"),
    "decode": ("256", "256", "512", "a full batch that writes"),
    "prefill": ("32", "4,096", "1", "prompts alone"),
    "shared": ("256", "2,048 + 128", "64", "one long prefix that all share"),
    "tree": ("128", "2,048 + 64", "64", "prefixes that branch: 2 of 1,024 tokens, 4 more under each"),
    "tiny": ("2,000", "8 to 40", "1 to 12", "many very short requests"),
    "long": ("8", "30,000", "64", "long contexts"),
}


def workloads() -> str:
    lines = ["| workload | requests | tokens in | tokens out | what it stands for |", "|---" * 5 + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in WORKLOADS.items()]
    return "\n".join(lines)


def tables(rows: list[dict[str, Any]]) -> str:
    """A table for each model. The columns that compare stand first, so that no screen cuts them off."""
    titles = [
        "workload",
        "seconds",
        "vLLM takes",
        "nano-vllm takes",
        "out tok/s",
        "in tok/s",
        "ms a token",
        "of the floor",
        "GPU idle",
    ]
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
        of_model = {row["workload"]: row for row in rows if row["model"] == model}
        for name in [name for name in WORKLOADS if name in of_model]:
            row = of_model[name]
            cells = [
                f"{row['seconds']:.3f}",
                *(_or_dash(row[peer], ".2f", "×") for peer in ("vs_vllm", "vs_nano")),
                f"{row['out_tokens_per_s']:,.0f}",
                f"{row['in_tokens_per_s']:,.0f}",
                f"{row['ms_per_token']:.3f}",
                _or_dash(row["floor"], ".0%"),
                _or_dash(row["idle"], ".1%"),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        start = of_model["start-up"]["seconds"]
        parts.append(f"### {model}\n\nIt starts in {start:.2f} s.\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def missed(rows: list[dict[str, Any]]) -> str:
    """The table of the rows that are below an aim."""
    lines = ["| model | workload | of the floor | aim | vLLM takes | aim |", "|---|---" + "|---:" * 4 + "|"]
    for row in rows:
        model, workload = row["model"], row["workload"]
        if workload not in FLOOR_AIMS or row["floor"] is None:
            continue
        shape = config_from_json(SHAPES[model.partition(" ")[0]], model)
        has_experts = any(kind.experts for kind in shape.layers)
        floor_aim, vllm_aim = FLOOR_AIMS[workload][has_experts], VLLM_AIMS[workload][has_experts]
        cells = [
            f"{row['floor']:.1%}",
            f"{floor_aim:.0%}",
            _or_dash(row["vs_vllm"], ".2f", "×"),
            f"{vllm_aim:.1f}×",
        ]
        if row["floor"] < floor_aim or (row["vs_vllm"] or vllm_aim) < vllm_aim:
            lines.append(f"| {model} | {workload} | {' | '.join(cells)} |")
    return "\n".join(lines)


def conversation(rows: list[dict[str, Any]]) -> str:
    """The table of what benchmarks/turns.py measured."""
    titles = [
        "turn",
        "tokens so far",
        "found",
        "first token, ms",
        "times the turn alone",
        "of the floor",
        "without a cache, ms",
    ]
    model = config_from_json(SHAPES[rows[0]["model"]], rows[0]["model"])
    floor = Floor(model, Ceilings(BANDWIDTH, ARITHMETIC))
    lines = [f"| {' | '.join(titles)} |", "|---:" * len(titles) + "|"]
    for row in rows:
        cells = [
            f"{row['turn']}",
            f"{row['prompt']:,}",
            f"{row['cached']:,}",
            f"{row['seconds'] * 1e3:.0f}",
            f"{row['seconds'] / row['alone']:.2f}×",
            f"{floor.prefill(row['prompt'] - row['cached'], row['cached']).seconds / row['seconds']:.0%}",
            f"{row['no_cache'] * 1e3:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
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
        "after_s": "after it",
    }
    lines = [f"| engine | {' | '.join(parts.values())} | turns fetched |", "|---" * 7 + "|"]
    for row in rows:
        cells = [f"{row[name] * 1e3:.1f}" for name in parts]
        lines.append(f"| {row['run'] + 1} | {' | '.join(cells)} | {row['fetched']} of 24 |")
    medians = [f"{statistics.median(row[name] for row in rows) * 1e3:.1f}" for name in parts]
    lines.append(f"| median | {' | '.join(medians)} | |")
    return "\n".join(lines)


def drafts(folder: Path, images: Path) -> str:
    """Draws what `benchmarks/speculation.py` measured on a CPU and on a GPU, as far as there are files, and
    returns the section about it."""
    parts = []
    for device in ("cpu", "gpu"):
        if not (file := folder / f"speculation-{device}.json").exists():
            continue
        measured = json.loads(file.read_text())
        speculation.draw(measured, str(images / f"speculation-{device}.png"))
        kinds = list(speculation.KINDS)
        lines = [f"| text | sequences | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
        for row in measured["rows"]:
            cells = [f"{row['base']:.0f} tokens/s", *(f"{row['ratios'][kind]:.2f}" for kind in kinds[1:])]
            lines.append(f"| {row['text']} | {row['batch']} | {' | '.join(cells)} |")
        parts += [
            f"{measured['model']} on {measured['machine']}, {measured['date']}: `{measured['command']}`.",
            "\n".join(lines),
            f"![Tokens per second by number of drafts and batch size](images/speculation-{device}.png)",
        ]
    return "\n\n".join(parts)


def _or_dash(value: float | None, style: str, unit: str = "") -> str:
    return "-" if value is None else format(value, style) + unit


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
    measured = [row for row in rows if row.get("floor")]
    points = [
        (row["operations"] / row["bytes_moved"], row["operations"] / row["seconds"] / 1e12)
        for row in measured
    ]
    for row, (x, y) in zip(measured, points):
        axes.scatter([x], [y], color=COLOURS.get(row["model"], "grey"))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.legend(loc="lower right")
    figure.draw_without_rendering()
    taken: list[Any] = []  # the boxes of labels
    for row, point in zip(measured, points):
        _label(axes, row["workload"], point, taken)
    figure.savefig(path, dpi=110)


def _label(axes: Any, text: str, point: tuple[float, float], taken: list[Any]) -> None:
    """Writes it beside its point, where no other label is."""
    for side, offset in (("left", (5, -9)), ("left", (5, 4)), ("right", (-5, 4)), ("right", (-5, -9))):
        label = axes.annotate(text, point, fontsize=8, xytext=offset, textcoords="offset points", ha=side)
        box = label.get_window_extent()
        if not any(box.overlaps(other) for other in taken):
            taken.append(box)
            return
        label.remove()
    raise AssertionError(f"no room for the label {text}")


def main() -> None:
    measured = json.loads(Path(sys.argv[1]).read_text())
    rows = measured["rows"]
    images = ROOT / "docs" / "images"
    draw_bars(rows, images / "performance-bars.png")
    draw_roofline(rows, images / "performance-roofline.png")
    folder = Path(sys.argv[1]).parent
    load = json.loads((folder / "h200-target-itl.json").read_text())
    second = json.loads((folder / "h200-second-turn.json").read_text())["rows"]
    shapes = json.loads((folder / "h200-2026.json").read_text())
    turns = json.loads((folder / "h200-turns.json").read_text())
    (ROOT / "docs" / "performance.md").write_text(f"""# Performance

One {measured["gpu"]}, {measured["date"]}, torch {measured["torch"]}, commit {measured["commit"][:10]}:
{measured["command"]}.

`make bench-gpu` measures this and draws the page. Weights are random and in bf16, prompts are token ids,
nothing is cached at the start of a run, and the better of two runs after a warm-up counts. Figures of other
days and machines are in [measured](../benchmarks/results/README.md).

## Workloads

{workloads()}

All requests of a workload are there at its start, and no answer ends early (`ignore_eos`); temperature 0.6.

## Offline

| column | meaning |
|---|---|
| seconds | until the last answer is complete |
| vLLM takes, nano-vllm takes | n times as long, for the same requests on such a card (vLLM 0.24) |
| ms a token | the whole time, by the tokens of the longest answer |
| of the floor | how near that is to what the card's memory and arithmetic allow (`shoal/bench/floor.py`) |
| GPU idle | the share of the time between steps, in a run of its own |

{tables(rows)}

![Beside vLLM](images/performance-bars.png)

Each point is a whole workload; the line is what the GPU could do with that many operations a byte. A point's
distance to it is what is left to gain.

![Roofline](images/performance-roofline.png)

## Shapes of 2026

One {shapes["gpu"]}, {shapes["date"]}, commit {shapes["commit"][:10]}:
{shapes["command"]}.
The floor of a model with recurrent layers counts its states, which each step reads and writes. In fp8 the
ceiling of matmuls counts twice. Routers spread tokens over all experts.

{tables(shapes["rows"])}

## Below the aims

In decode and nano the aim is 80 % of the floor and 1.1 times vLLM's speed, in prefill 75 % (60 % with
experts) and vLLM's speed, for one stream 70 % and vLLM's speed (with experts 55 % and 1.5 times). Of the
tables above these rows are below one of them:

{missed([*rows, *shapes["rows"]])}

Other aims are missed as well: the speed of one stream of qwen3-0.6b, of 4 bits and fp8 against bf16, and of
two GPUs; the memory that sleep leaves and the time to wake; second turns from host memory and second starts.
[One table](../benchmarks/results/README.md#qwen3-in-one-visit-two-h200s-2026-11-29-commit-efd59a3b) has what
was measured and what was aimed at. 4 bits cannot reach their aim in decode, 1.3 times bf16: in bf16
arithmetic the matmuls of 256 rows take 100 us a layer at the card's peak, which leaves at most 1.17.

## A conversation

{turns["rows"][0]["model"]} on one {turns["gpu"]}, {turns["date"]}, commit {turns["commit"][:10]}:
{turns["command"]}.
Each turn has 8,000 new tokens. Keys, values and recurrent states of earlier ones are found and not computed
again; a turn takes longer than the first one by the attention of its tokens to all tokens before. The floor
is the arithmetic of the turn's own tokens with that attention: of the tenth turn it is 1.66 times the first
one's.

{conversation(turns["rows"])}

## A served load

`shoal serve`, {load["model"]}, {load["concurrency"]} streams at any time, {load["requests"]} requests of
about {load["input_len"]} tokens in and {load["output_len"]} out (`benchmarks/target_itl.py`), by
`--target-itl-ms`, whose default is 50. Without a server an engine that runs
{load["concurrency"]} at once gives {load["offline_tokens_per_s"]:,.0f} output tokens a second for the same
requests.

{served(load)}

A target below what a decode step of all streams takes (8 ms here) leaves prompts little room: they wait, and
so does the batch.

![Gap, first token and throughput by target](images/target-itl-h200.png)

## Second turns from host memory

Ten engines on a machine just started, the first thing that it does: 24 conversations of 9,000 tokens of
qwen3-8b, then the second turn of each, one at a time (`benchmarks/offload.py second-turn`). Milliseconds:

{second_turns(second)}

## Drafts

Tokens per second without drafts, and multiples of it with a fixed number of [drafts](speculation.md) in each
step, and with the number that measured costs and acceptance choose. A ratio is the median of pairs of runs.

{drafts(folder, images)}
""")


if __name__ == "__main__":
    main()

"""Which thresholds of the planner's rules by load are best for a load: a sweep in the simulator.

    python benchmarks/sim_thresholds.py [--json benchmarks/results/sim-thresholds.json] [--images docs/images]

Loads are the sine of NVIDIA Dynamo's planner benchmark (prompts of 3,000 tokens, answers of 150, 5 to 20
requests/s in 150 s) and a step from 5 to 20 and back, on H200s with qwen3-32b. Workers wake in 2 s.
Each pair of decode_kv_scale_up_threshold and decode_kv_scale_down_threshold is a run; fixed
fleets stand beside them. Targets are 1 s to the first token and 100 ms between tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.fleet.planner_config import PlannerConfig
from shoal.fleet.sim_config import SimConfig, SimWorkers
from shoal.fleet.sim_trace import Trace, make_sine, merge_traces
from shoal.fleet.simulator import Simulation

TARGETS: dict[str, Any] = {"ttft": 1.0, "itl": 0.1}
BUDGET, WAKE_S = 12, 2.0
UP = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
DOWN = (0.3, 0.6)  # of the threshold above which a worker is added
REFERENCE = (0.9, 0.5)
FIXED = (7, 8)
INTERVAL_S = 5.0
LOW, HIGH = 5.0, 20.0  # requests a second


def step() -> Trace:
    """The low rate, as long the high one, and as long the low one again."""
    parts = []
    for seed, (begin_s, seconds, rate) in enumerate(
        [(0.0, 75.0, LOW), (75.0, 75.0, HIGH), (150.0, 75.0, LOW)]
    ):
        part = make_sine(seconds, low_rate=rate, high_rate=rate, seed=seed)
        moved = [dataclasses.replace(one, timestamp_s=one.timestamp_s + begin_s) for one in part.requests]
        parts.append(dataclasses.replace(part, requests=moved))
    return merge_traces(*parts)


LOADS = {"sine": make_sine(300.0, low_rate=LOW, high_rate=HIGH), "step": step()}


def run(load: str, count: int, planner: dict[str, Any]) -> dict[str, Any]:
    config = SimConfig(
        "qwen3-32b",
        workers=[SimWorkers(count)],
        worker_start_s=WAKE_S,
        planner=PlannerConfig(**TARGETS, **planner),
    )
    result = Simulation(config, LOADS[load]).run()
    names = ("workers", "gpu_hours", "good_share", "goodput", "ttft_p50", "ttft_p90", "itl_p99")
    return {"load": load, **{name: getattr(result, name) for name in names}}


def sweep() -> list[dict[str, Any]]:
    rows = []
    pairs = [(up, round(up * share, 4)) for up in UP for share in DOWN] + [REFERENCE]
    for load in LOADS:
        for count in FIXED:
            rows.append({"fleet": f"fixed, {count}", **run(load, count, {})})
            print(rows[-1], file=sys.stderr, flush=True)
        for up, down in pairs:
            planner = {
                "enabled": True,
                "max_gpu_budget": BUDGET,
                "adjustment_interval": INTERVAL_S,
                "decode_kv_scale_up_threshold": up,
                "decode_kv_scale_down_threshold": down,
            }
            rows.append({"fleet": f"{up:g}, {down:g}", "up": up, "down": down, **run(load, 4, planner)})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| load | up, down | workers | GPU hours | within targets | goodput, requests/s | TTFT p90, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["load"], row["fleet"], f"{row['workers']:.2f}", f"{row['gpu_hours']:.2f}"]
        cells += [f"{row['good_share']:.0%}", f"{row['goodput']:.2f}", f"{row['ttft_p90']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(LOADS), figsize=(11, 4.4), sharey=True)
    for axis, load in zip(axes, LOADS):
        for row in (row for row in rows if row["load"] == load):
            at = (row["workers"], 100 * row["good_share"])
            axis.plot(*at, "s" if "up" not in row else "*" if (row["up"], row["down"]) == REFERENCE else "o")
            axis.annotate(row["fleet"], at, fontsize=7, xytext=(3, 3), textcoords="offset points")
        axis.set(xlabel="workers in the mean", title=load)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("% of requests within the targets")
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--images", type=Path, help="draw the plot into this folder")
    arguments = parser.parse_args()
    rows = sweep()
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.images is not None:
        plot(rows, arguments.images / "sim-thresholds.png")


if __name__ == "__main__":
    main()

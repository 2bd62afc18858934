"""Finds the best thresholds of the planner's rules by load for a load: a sweep in the simulator.

    python benchmarks/sim_thresholds.py [--json benchmarks/results/sim-thresholds.json] [--images docs/images]

Loads are the sine of NVIDIA Dynamo's planner benchmark (prompts of 3,000 tokens, answers of 150, 5 to 20
requests/s in 150 s) and a step from 5 to 20 and back, on H200s with qwen3-32b. Workers wake in 2 s.
Each pair of decode_kv_scale_up_threshold and decode_kv_scale_down_threshold is a run; fixed
fleets stand beside them. Targets are 1 s to the first token and 100 ms between tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sim_report import BUDGET, note, parser_of, save, sized_fleet, subplots, table, write

from shoal.fleet.simulator.simulator import Simulation
from shoal.fleet.simulator.trace import Trace, make_sine, merge_traces

WAKE_S = 2.0
UP = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
DOWN = (0.3, 0.6)  # as shares of the threshold above which a worker is added
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
    result = Simulation(sized_fleet(count, WAKE_S, planner), LOADS[load]).run()
    names = ("workers", "gpu_hours", "good_share", "goodput", "ttft_p50", "ttft_p90", "itl_p99")
    return {"load": load, **{name: getattr(result, name) for name in names}}


def sweep() -> list[dict[str, Any]]:
    rows = []
    pairs = [(up, round(up * share, 4)) for up in UP for share in DOWN] + [REFERENCE]
    for load in LOADS:
        for count in FIXED:
            rows.append({"fleet": f"fixed, {count}", **run(load, count, {})})
            note(rows[-1])
        for up, down in pairs:
            planner = {
                "enabled": True,
                "max_gpu_budget": BUDGET,
                "adjustment_interval": INTERVAL_S,
                "decode_kv_scale_up_threshold": up,
                "decode_kv_scale_down_threshold": down,
            }
            rows.append({"fleet": f"{up:g}, {down:g}", "up": up, "down": down, **run(load, 4, planner)})
            note(rows[-1])
    return rows


def runs(rows: list[dict[str, Any]]) -> str:
    """A table."""
    head = ["load", "up, down", "workers", "GPU hours", "within targets", "goodput, requests/s"]
    head.append("TTFT p90, s")
    lines = []
    for row in rows:
        cells = [row["load"], row["fleet"], f"{row['workers']:.2f}", f"{row['gpu_hours']:.2f}"]
        cells += [f"{row['good_share']:.0%}", f"{row['goodput']:.2f}", f"{row['ttft_p90']:.2f}"]
        lines.append(cells)
    return table(head, lines)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    figure, axes = subplots(len(LOADS), 11, 4.4, sharey=True)
    for axis, load in zip(axes, LOADS):
        for row in (row for row in rows if row["load"] == load):
            at = (row["workers"], 100 * row["good_share"])
            axis.plot(*at, "s" if "up" not in row else "*" if (row["up"], row["down"]) == REFERENCE else "o")
            axis.annotate(row["fleet"], at, fontsize=7, xytext=(3, 3), textcoords="offset points")
        axis.set(xlabel="workers in the mean", title=load)
    axes[0].set_ylabel("% of requests within the targets")
    save(figure, file)


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    rows = sweep()
    print(runs(rows))
    write(arguments.json, rows)
    if arguments.images is not None:
        plot(rows, arguments.images / "sim-thresholds.png")


if __name__ == "__main__":
    main()

"""Planners, roles and a host tier in simulated fleets: tables and plots of benchmarks/results/simulated.md.

    python benchmarks/sim_planner.py [--json benchmarks/results/sim-planner.json] [--images docs/images]

"Sine" is the load of NVIDIA Dynamo's planner benchmark (prompts of 3,000 tokens, answers of 150, 5 to 20
requests/s, a period of 150 s) over ten periods, on H200s with qwen3-32b; a peak needs nine of them.
Fixed fleets stand beside planners whose workers start within 30 s (a process) or 2 s (one that wakes up).
"Fleets" are questions of 1,200 tokens behind 60 customers' contexts of 6,000, as eight workers serve them, of
one role or of two, with and without host memory behind caches of 80,000 tokens. Targets are 1 s to the first
token and 100 ms between tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sim_report import BUDGET, TARGETS, note, parser_of, save, sized_fleet, subplots, table, write

from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.simulator.config import SimConfig, SimWorkers
from shoal.fleet.simulator.simulator import Simulation
from shoal.fleet.simulator.trace import make_customers, make_sine

PERIOD_S, NUM_PERIODS = 150.0, 10
SLA: dict[str, Any] = {"enabled": True, "mode": "sla", "max_gpu_budget": BUDGET, "load_season": PERIOD_S}
LOAD: dict[str, Any] = {"enabled": True, "mode": "load", "max_gpu_budget": BUDGET}
SEASONAL = {**SLA, "load_predictor": "holt_winters"}
# name -> workers at the beginning, seconds of a start, planner
SINE: dict[str, tuple[int, float, dict[str, Any]]] = {
    **{f"fixed, {count}": (count, 0.0, {}) for count in (6, 7, 8, 9)},
    "sla, holt_winters, 2 s": (4, 2.0, {**SEASONAL, "startup_time": 2.0}),
    "sla, linear, 2 s": (4, 2.0, {**SLA, "startup_time": 2.0}),
    "load, 2 s": (4, 2.0, LOAD),
    "sla, holt_winters, 30 s": (4, 30.0, {**SEASONAL, "startup_time": 30.0}),
    "load, 30 s": (4, 30.0, LOAD),
}
HOST_BYTES = 200 << 30
FLEETS: dict[str, list[SimWorkers]] = {
    "8 both": [SimWorkers(8)],
    "8 both, 200 GiB of host memory each": [SimWorkers(8, kv_host_bytes=HOST_BYTES)],
    **{
        f"{prefill} prefill, {8 - prefill} decode": [
            SimWorkers(prefill, role="prefill"),
            SimWorkers(8 - prefill, role="decode"),
        ]
        for prefill in (3, 4, 5)
    },
}


def sine() -> list[dict[str, Any]]:
    trace = make_sine(PERIOD_S * NUM_PERIODS, period_s=PERIOD_S)
    rows = []
    for name, (count, start_s, planner) in SINE.items():
        result = Simulation(sized_fleet(count, start_s, planner), trace).run()
        rows.append({"fleet": name, **dataclasses.asdict(result)})
        note(rows[-1])
    return rows


def fleets() -> list[dict[str, Any]]:
    rows = []
    for rate in (10, 20, 40):
        trace = make_customers(rate * 60, rate, num_customers=60)
        for name, workers in FLEETS.items():
            config = SimConfig(
                "qwen3-8b",
                workers=workers,
                cache_tokens=80_000,
                planner=PlannerConfig(**TARGETS),
                max_prefill_queue_size=16,
            )
            rows.append({"fleet": name, "rate": rate, **dataclasses.asdict(Simulation(config, trace).run())})
            note(rows[-1])
    return rows


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    figure, axis = subplots(1, 7, 4.2)
    for row in rows:
        name, at = row["fleet"], (row["workers"], row["goodput"])
        axis.plot(*at, "o" if name.startswith("fixed") else "s" if name.startswith("sla") else "^")
        axis.annotate(name, at, fontsize=8, xytext=(4, 4), textcoords="offset points")
    axis.set(xlabel="workers in the mean", ylabel="requests/s within the targets", title="sine load")
    save(figure, file)


def runs(rows: list[dict[str, Any]]) -> str:
    """A table."""
    with_rate = "rate" in rows[0]
    head = ["fleet", *(["requests/s"] if with_rate else []), "workers", "GPU hours", "within targets"]
    head += ["goodput, requests/s", "TTFT p50, s", "TTFT p90, s", "ITL p99, ms"]
    head += ["found in a cache", "of these in host memory"]
    lines = []
    for row in rows:
        cells = [row["fleet"], *([str(row["rate"])] if with_rate else [])]
        cells += [f"{row['workers']:.2f}", f"{row['gpu_hours']:.2f}", f"{row['good_share']:.0%}"]
        cells += [f"{row['goodput']:.2f}", f"{row['ttft_p50']:.2f}", f"{row['ttft_p90']:.2f}"]
        cells += [f"{row['itl_p99'] * 1000:.0f}", f"{row['hit_rate']:.0%}", f"{row['host_hit_rate']:.0%}"]
        lines.append(cells)
    return table(head, lines)


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    asked = fleets()
    print(runs(asked))
    rows = sine()
    print(runs(rows))
    write(arguments.json, {"sine": rows, "fleets": asked})
    if arguments.images is not None:
        plot(rows, arguments.images / "sim-planner.png")


if __name__ == "__main__":
    main()

"""Routing policies on a fleet of eight simulated H200s: figures and plots of
benchmarks/results/simulated.md.

    python benchmarks/sim_policies.py [--trace conversation_trace.jsonl] [--json FILE] [--images docs/images]

Two loads. "Conversations": the Mooncake project's trace of an hour, which is not part of this repository; it
is skipped without --trace. "Customers": 150 customers with a context of 6,000 tokens each; a request is one
customer's context with a fresh question of 1,200 tokens behind it and is answered with 200 tokens. The
workers' caches are made so large that the contexts, with five open questions for each customer, are 73 % of
what they hold together, as in llm-d's "KV-cache wins you can see". The request rate rises until a policy's
TTFT p90 is beyond a limit. Times are simulated, so a busy machine changes none of them but the seconds that a
run took.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sim_report import note, parser_of, save, subplots, table, write

from shoal.fleet.routing.policy import POLICIES, RouterWeights
from shoal.fleet.simulator.config import SimConfig, SimWorkers
from shoal.fleet.simulator.simulator import Simulation
from shoal.fleet.simulator.trace import Trace, make_customers, read_trace

MODEL, NUM_WORKERS = "qwen3-8b", 8
CUSTOMERS, CONTEXT, QUESTION, OPEN_QUESTIONS, ANSWER = 150, 6000, 1200, 5, 200
DEMAND = 0.73  # tokens of all conversations, as a share of the fleet's cache
CACHE_TOKENS = round(CUSTOMERS * (CONTEXT + OPEN_QUESTIONS * QUESTION) / DEMAND / NUM_WORKERS)
RATES = (20, 25, 30, 35, 40, 45, 50, 55, 60, 70, 80, 90, 100, 110, 120)  # requests a second
SHOWN_RATE = 60
SECONDS = 40  # at each rate
SLO_TTFT_P90_S = 1.0
BEYOND_S = 5.0  # a TTFT p90 at which a policy's sweep ends
DYNAMO = RouterWeights(prefill_load_scale=1, overlap_score_credit=1, recent_prefill_weight=0.1)
SERIES = {name: (name, RouterWeights()) for name in POLICIES} | {"kv, Dynamo's weights": ("kv", DYNAMO)}


def simulate(series: str, trace: Trace, cache_tokens: int | None) -> dict[str, Any]:
    policy, weights = SERIES[series]
    config = SimConfig(
        MODEL, workers=[SimWorkers(NUM_WORKERS)], policy=policy, weights=weights, cache_tokens=cache_tokens
    )
    start = time.process_time()
    result = Simulation(config, trace).run()
    row = {"policy": series, **dataclasses.asdict(result), "cpu_s": round(time.process_time() - start, 2)}
    note(row)
    return row


def sweep(series: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rate in RATES:
        beyond = bool(rows) and rows[-1]["ttft_p90"] > BEYOND_S
        if beyond and rate != SHOWN_RATE:
            continue
        trace = make_customers(
            rate * SECONDS,
            rate,
            num_customers=CUSTOMERS,
            context_tokens=CONTEXT,
            question_tokens=QUESTION,
            output_tokens=ANSWER,
        )
        rows.append({"rate": rate, **simulate(series, trace, CACHE_TOKENS)})
    return rows


def best_rate(rows: list[dict[str, Any]]) -> int:
    """The highest rate up to which every rate kept the limit; 0 if none did."""
    best = 0
    for row in rows:
        if row["ttft_p90"] > SLO_TTFT_P90_S:
            break
        best = row["rate"]
    return best


def plot_customers(sweeps: dict[str, list[dict[str, Any]]], file: Path) -> None:
    figure, (left, right) = subplots(2, 11, 4.2)
    for name, rows in sweeps.items():
        rates = [row["rate"] for row in rows]
        left.plot(rates, [row["ttft_p90"] for row in rows], marker=".", label=name)
        right.plot(rates, [row["hit_rate"] for row in rows], marker=".", label=name)
    left.axhline(SLO_TTFT_P90_S, color="gray", linestyle=":")
    left.set(yscale="log", ylabel="TTFT p90, s", xlabel="requests/s", title="150 customers")
    right.set(ylabel="prompt tokens found in a cache", xlabel="requests/s", ylim=(0, 1))
    right.axhline(CONTEXT / (CONTEXT + QUESTION), color="gray", linestyle=":")
    right.legend(fontsize=8)
    save(figure, file)


def plot_conversations(rows: list[dict[str, Any]], file: Path) -> None:
    figure, axes = subplots(2, 11, 3.8)
    names = [row["policy"] for row in rows][::-1]
    for axis, key, title in zip(axes, ("ttft_p90", "hit_rate"), ("TTFT p90, s", "found in a cache")):
        axis.barh(names, [row[key] for row in rows][::-1])
        axis.set(title=title)
    save(figure, file)


def policies(rows: list[dict[str, Any]], best: dict[str, int] | None = None) -> str:
    """A table; with the best rate of each policy, where there is one."""
    head = ["policy", "output tokens/s", "TTFT p50, s", "TTFT p90, s", "ITL p99, ms", "hit rate"]
    if best:
        head.append("requests/s at TTFT p90 <= 1 s")
    lines = []
    for row in rows:
        cells = [
            row["policy"],
            f"{row['throughput']:,.0f}",
            f"{row['ttft_p50']:.2f}",
            f"{row['ttft_p90']:.2f}",
            f"{row['itl_p99'] * 1000:.0f}",
            f"{row['hit_rate']:.0%}",
        ]
        if best:
            cells.append(str(best[row["policy"]]))
        lines.append(cells)
    return table(head, lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation_trace.jsonl")
    arguments = parser.parse_args()
    sweeps = {name: sweep(name) for name in SERIES}
    best = {name: best_rate(rows) for name, rows in sweeps.items()}
    shown = [row for rows in sweeps.values() for row in rows if row["rate"] == SHOWN_RATE]
    print(f"150 customers, {SHOWN_RATE} requests/s:\n\n{policies(shown, best)}\n")
    conversations: list[dict[str, Any]] = []
    if arguments.trace is None:
        print("the conversation trace is skipped: give its file by --trace")
    else:
        trace = read_trace(arguments.trace)
        conversations = [simulate(name, trace, None) for name in SERIES]
        print(f"conversations, ideal hit rate {trace.ideal_hit_rate:.1%}:\n\n{policies(conversations)}")
    write(arguments.json, {"customers": sweeps, "best_rate": best, "conversations": conversations})
    if arguments.images is not None:
        plot_customers(sweeps, arguments.images / "sim-customers.png")
        if conversations:
            plot_conversations(conversations, arguments.images / "sim-conversations.png")


if __name__ == "__main__":
    main()

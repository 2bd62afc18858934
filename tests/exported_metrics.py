"""Every metric that Shoal exports, from collectors whose books have something of everything. It writes the table of
docs/metrics.md: `python -m tests.exported_metrics`."""

import re
from pathlib import Path

from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.config import FleetConfig
from shoal.fleet.planner.observation import DecodeLoad, Observation
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.pool.metrics import planner_metrics
from shoal.fleet.pool.model_pool import ModelPool
from shoal.fleet.scaling.counts import PlannerCounts
from shoal.fleet_views import PlannerView
from shoal.stats import KvGroupStats, KvLoans, KvTierStats, KvTransferStats, Stats
from shoal.telemetry.metrics import HttpMetrics, ModelMetrics

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
HEAD_OF_TABLE = "| metric | type | labels | of | what |"
OF_HISTOGRAMS = ("_bucket", "_count", "_sum")


class _NoPeers:
    num_routers = num_sent = num_received = 0


def of_a_server():
    stats = Stats(
        num_blocks=1,
        num_snapshots=1,
        kv_groups=[KvGroupStats()],
        kv_tiers={"host": KvTierStats()},
        kv_loans=KvLoans(ended={"done": 1}),
        kv_transfers={"nixl": KvTransferStats()},
        kv_transfer_failures={"lost": 1},
    )
    yield from ModelMetrics("m", 1024, {}, most_drafts=1).collect(stats, None, 0)
    http = HttpMetrics()
    http.observe("GET", "/health", 200, 0.1)
    yield from http.collect()


def of_a_router():
    async def collected():
        fleet = Fleet(FleetConfig(), LoopClock())
        fleet._all.append(ModelPool("m", True, FleetConfig(), fleet.clock))
        fleet.replica_sync = _NoPeers()
        return list(fleet.metrics())

    return run_virtual(collected())


def of_a_planner():
    counts = PlannerCounts()
    counts.looked("m", Observation(at=0, decode=[DecodeLoad(0.5)]))
    return planner_metrics(PlannerView("load", "", {}, False, models=counts.models))


def families():
    """Each once, with the process that has it and the name under which Prometheus stores it."""
    seen = set()
    for of, source in (("server", of_a_server), ("router", of_a_router), ("planner", of_a_planner)):
        for family in source():
            name = family.name + ("_total" if family.type == "counter" else "")
            if name not in seen:
                seen.add(name)
                yield of, name, family


def names():
    """Returns the names of all series, with the endings of histograms and what Prometheus adds."""
    found = {"up"}
    for _, name, family in families():
        found |= {name + ending for ending in OF_HISTOGRAMS} if family.type == "histogram" else {name}
    return found


METRIC = re.compile(r"\b(?:(?:vllm|shoal):\w+|(?:dynamo|http)_\w+)")


def named_in(expression):
    """Returns the metrics of Shoal that an expression of PromQL names."""
    return set(METRIC.findall(expression))


# The table of docs/metrics.md


def table():
    rows = [HEAD_OF_TABLE, "|---|---|---|---|---|"]
    for of, name, family in families():
        labels = ", ".join(f"`{label}`" for label in family._labelnames)
        rows.append(f"| `{name}` | {family.type} | {labels} | {of} | {family.documentation} |")
    return "\n".join(rows)


def page_with(text):
    """The page, with its table written anew."""
    before, _, rest = text.partition(HEAD_OF_TABLE)
    _, _, after = rest.partition("\n\n")
    return f"{before}{table()}\n\n{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text()))

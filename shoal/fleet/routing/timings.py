"""`RouteTimes`: one model's histograms of routing: hashing, index look-up, choice, queue wait, expected
overlap. The dispatcher (dispatcher.py) fills them, and pool/metrics.py exports them."""

from __future__ import annotations

from shoal.telemetry.metrics import Histogram

# Milliseconds, as in NVIDIA Dynamo's metrics of the same names.
BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LABELS = ("model_name",)


def _part(name: str, text: str) -> Histogram:
    return Histogram(name, text, BUCKETS, LABELS, prefix="dynamo_router_overhead_")


class RouteTimes:
    """Routing latency histograms of one model."""

    def __init__(self) -> None:
        self.hash = _part("block_hashing_ms", "Milliseconds to hash a prompt's blocks.")
        self.find = _part(
            "indexer_find_matches_ms", "Milliseconds to look up which workers have a prompt's prefix."
        )
        self.choose = _part("scheduling_ms", "Milliseconds to choose among the workers.")
        self.total = _part("total_ms", "Milliseconds of all of these.")
        self.queue = Histogram(
            "router_queue_seconds", "Seconds a request waited for a worker.", QUEUE_SECONDS, LABELS, "shoal:"
        )
        self.overlap = Histogram(
            "router_overlap_ratio",
            "Share of a prompt expected in the chosen worker's cache.",
            SHARES,
            LABELS,
            "shoal:",
        )

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return self.hash, self.find, self.choose, self.total, self.queue, self.overlap

    def observe(self, hash_s: float, find_s: float, choose_s: float) -> None:
        self.hash.observe(1000 * hash_s)
        self.find.observe(1000 * find_s)
        self.choose.observe(1000 * choose_s)
        self.total.observe(1000 * (hash_s + find_s + choose_s))

"""`RayMetrics`: publishes a worker's metrics among Ray's own, from its /metrics to its node's Ray agent.
ray_worker.py starts it with the worker.

Users of Ray find them at each node's metrics port, which Prometheus finds by Ray's service discovery. A
metric's name gets Ray's prefix and an underscore for the colon, which Ray does not accept:
`vllm:num_requests_running` becomes `ray_vllm_num_requests_running`, as in vLLM on Ray, with `worker` as an
additional label.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from ray.util.metrics import Gauge

from shoal.tasks import start, stop

INTERVAL_S = 5.0  # the reporting interval of Ray's agents
OF_WORKERS = ("vllm:", "shoal:")  # metrics of the process are in Ray's own already


class RayMetrics:
    """Gauges by name. Counters and histogram buckets become gauges of their present values, since Ray's own
    kinds accept only increments; `rate` and `histogram_quantile` read both."""

    def __init__(self, worker_id: str) -> None:
        self._id = worker_id
        self._gauges: dict[str, Gauge] = {}

    def publish(self, page: str) -> None:
        """Sets the gauges from `page`, in Prometheus' text format."""
        for family in text_string_to_metric_families(page):
            if not family.name.startswith(OF_WORKERS):
                continue
            for sample in family.samples:
                name = sample.name.replace(":", "_")
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, family.documentation, (*sample.labels, "worker"))
                self._gauges[name].set(sample.value, {**sample.labels, "worker": self._id})


@contextlib.asynccontextmanager
async def publishing(worker_id: str, port: int) -> AsyncIterator[None]:
    """Publishes the metrics of the worker with this HTTP port until the block is left."""
    task = start(_publish(RayMetrics(worker_id), f"http://127.0.0.1:{port}/metrics"))
    try:
        yield
    finally:
        await stop([task])


async def _publish(metrics: RayMetrics, url: str) -> None:
    """Runs until it is cancelled. A worker that does not answer is asked again."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=INTERVAL_S)) as session:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                async with session.get(url) as answer:
                    metrics.publish(await answer.text())
            except (aiohttp.ClientError, TimeoutError):
                continue  # the worker is starting, or busy

"""A worker's metrics among Ray's own: read from its /metrics and handed to the Ray agent of its node.

So they are where users of Ray look: behind each node's metrics port, found by Prometheus by Ray's service
discovery. A name keeps what follows Ray's prefix, with an underscore for the colon that Ray does not take:
`vllm:num_requests_running` is `ray_vllm_num_requests_running` there, as vLLM on Ray has it, with the label
`worker` beside its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from ray.util.metrics import Gauge

from shoal.fleet.tasks import start, stop

INTERVAL_S = 5.0  # as often as Ray's agents report
OF_WORKERS = ("vllm:", "shoal:")  # the names of ours; those of the process are in Ray's metrics already


class RayMetrics:
    """Gauges by name. Counters and the parts of histograms are gauges of what they have come to, since Ray's
    own kinds take only new events; `rate` and `histogram_quantile` read them alike."""

    def __init__(self, worker_id: str) -> None:
        self._id = worker_id
        self._gauges: dict[str, Gauge] = {}

    def publish(self, page: str) -> None:
        """page: in Prometheus' text format."""
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
    """Inside of the block the metrics of the worker with this HTTP port are passed on."""
    task = start(_publish(RayMetrics(worker_id), f"http://127.0.0.1:{port}/metrics"))
    try:
        yield
    finally:
        await stop([task])


async def _publish(metrics: RayMetrics, url: str) -> None:
    """Runs until it is cancelled. A worker that does not answer yet is asked again."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=INTERVAL_S)) as session:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                async with session.get(url) as answer:
                    metrics.publish(await answer.text())
            except (aiohttp.ClientError, TimeoutError):
                continue  # it is starting, or busy

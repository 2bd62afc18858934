"""What the server is doing, as a line in the log every ten seconds while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.api import Stats
from shoal.errors import ShoalError
from shoal.logs import Event
from shoal.server.model import ServedModel

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0
WORK_TOKENS_PER_SECOND = 1.0  # what is less is no work; a router's probe is two tokens in ten seconds


@dataclass(slots=True)
class _Counts:
    """What a model's counters said at some moment."""

    prompt_tokens: int
    generation_tokens: int
    queries: int  # tokens looked up in the prefix cache
    hits: int  # tokens found there
    when: float  # by time.perf_counter, in seconds


async def report_throughput(models: Iterable[ServedModel], interval: float = INTERVAL_SECONDS) -> None:
    """Runs until it is cancelled. interval: seconds between two lines of a model."""
    before = {model.name: _counts(model, model.last_stats) for model in models}
    while True:
        await asyncio.sleep(interval)
        for model in models:
            try:
                stats = await model.stats()
            except ShoalError:  # a dead engine, which is told elsewhere
                continue
            now = _counts(model, stats)
            event = _event(model.name, stats, before[model.name], now)
            before[model.name] = now
            if event is not None:
                logger.info(event)


def _counts(model: ServedModel, stats: Stats) -> _Counts:
    metrics = model.metrics
    return _Counts(
        metrics.prompt_tokens,
        metrics.generation_tokens,
        stats.prefix_cache_queries,
        stats.prefix_cache_hits,
        time.perf_counter(),
    )


def _event(name: str, stats: Stats, before: _Counts, now: _Counts) -> Event | None:
    """The line of a model. None if it had no work: a router's probes of an idle worker are none."""
    seconds = now.when - before.when
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generation = (now.generation_tokens - before.generation_tokens) / seconds
    is_idle = max(prompt, generation) < WORK_TOKENS_PER_SECOND
    if is_idle and not (stats.num_running or stats.num_waiting):
        return None
    queries = now.queries - before.queries
    fields = {
        "model": name,
        "prompt_tokens_per_second": round(prompt, 1),
        "generation_tokens_per_second": round(generation, 1),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_cache_usage": round(stats.kv_cache_usage, 4),
        "prefix_cache_hit_rate": round((now.hits - before.hits) / queries, 4) if queries > 0 else None,
    }
    hits = f"{fields['prefix_cache_hit_rate']:.1%}" if queries > 0 else "-"
    text = (
        f"{name}: prompt {prompt:.1f} tokens/s, generation {generation:.1f} tokens/s, "
        f"running {stats.num_running}, waiting {stats.num_waiting}, "
        f"KV cache {stats.kv_cache_usage:.1%}, prefix cache hits {hits}"
    )
    return Event(text, fields)

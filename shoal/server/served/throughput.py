"""A log line with the throughput of each model every ten seconds while it has work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from shoal.errors import ShoalError
from shoal.server.served.model import ServedModel
from shoal.server.served.monitoring import RATES_S, Monitor
from shoal.stats import Stats
from shoal.telemetry.logs import Event
from shoal.telemetry.served import RecentRates

logger = logging.getLogger(__name__)

WORK_TOKENS_PER_SECOND = 1.0  # less is idle: a router's probe is two tokens in ten seconds


async def report_throughput(
    models: Iterable[ServedModel], monitor: Monitor, interval: float = RATES_S
) -> None:
    """Runs until it is cancelled. monitor: samples these models. interval: seconds between two lines of a
    model."""
    while True:
        await asyncio.sleep(interval)
        for model in list(models):
            try:
                stats = await model.stats()
            except ShoalError:  # a dead engine is reported elsewhere
                continue
            event = _event(model.name, stats, monitor.recent(model.name))
            if event is not None:
                logger.info(event)


def _event(name: str, stats: Stats, recent: RecentRates) -> Event | None:
    """Returns the line of a model. None if it had no work; a router's probes of an idle worker do not
    count."""
    prompt, generation, hit_rate = recent.prompt_tokens_s, recent.output_tokens_s, recent.hit_rate
    is_idle = max(prompt, generation) < WORK_TOKENS_PER_SECOND
    if is_idle and not (stats.num_running or stats.num_waiting):
        return None
    fields = {
        "model": name,
        "prompt_tokens_per_second": prompt,
        "generation_tokens_per_second": generation,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_cache_usage": round(stats.kv_cache_usage, 4),
        "prefix_cache_hit_rate": hit_rate,
    }
    hits = "-" if hit_rate is None else f"{hit_rate:.1%}"
    text = (
        f"{name}: prompt {prompt:.1f} tokens/s, generation {generation:.1f} tokens/s, "
        f"running {stats.num_running}, waiting {stats.num_waiting}, "
        f"KV cache {stats.kv_cache_usage:.1%}, prefix cache hits {hits}"
    )
    if recent.acceptance is not None:
        fields |= {"draft_acceptance": recent.acceptance, "tokens_per_draft": recent.tokens_a_draft}
        text += f", drafts accepted {recent.acceptance:.1%} ({recent.tokens_a_draft:.2f} tokens a step)"
    return Event(text, fields)

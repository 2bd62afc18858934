"""Metrics for Prometheus. They have vLLM's names, labels and buckets, as far as these apply.

Tokens are counted by plain additions, because this is done for every chunk of every stream. prometheus_client
only writes the sums at a scrape.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from shoal.api import Drafted, FinishReason, Request
from shoal.stats import STEP_TOKENS, Stats


def _bounds(text: str) -> tuple[float, ...]:
    """Returns upper bounds of a histogram's buckets, in seconds, from text."""
    return tuple(map(float, text.split()))


FIRST_TOKEN_SECONDS = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 "
    "640.0 2560.0"
)
TOKEN_SECONDS = _bounds(
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
)
REQUEST_SECONDS = _bounds(
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
)
# Times are counted in 20 buckets per decade, for quantiles of the last minute. Prometheus
# gets only vLLM's bounds, which are among these.
LATENCY_SECONDS = tuple(
    sorted({*(float(f"{10 ** (n / 20):.3g}") for n in range(-80, 61)), *FIRST_TOKEN_SECONDS, *TOKEN_SECONDS})
)
ANSWERS = (1, 2, 5, 10, 20)
LABELS = ("model_name", "engine")
# A field of KvTierStats -> the text of its metric
TIER_GAUGES = {
    "used_bytes": "Bytes of the tier that are in use.",
    "capacity_bytes": "Bytes that the tier has room for; 0: unknown.",
    "fetch_seconds_per_block": "Seconds to fetch a KV block to the device, as measured lately.",
    "store_seconds_per_block": "Seconds to store a KV block, as measured lately; 0: nothing was stored yet.",
}
TIER_COUNTERS = {
    "stored_blocks": "KV blocks that came from above.",
    "stored_bytes": "Bytes of KV blocks that came from above.",
    "fetched_blocks": "KV blocks brought back to the device.",
    "fetched_bytes": "Bytes of KV blocks brought back to the device.",
    "failed_blocks": "KV blocks whose transfer failed.",
    "trial_fetches": "Fetches of a few blocks to measure a tier that looked slower than computing.",
}
# The methods and buckets of prometheus-fastapi-instrumentator, which vLLM's server uses.
HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
HTTP_SECONDS = (0.1, 0.5, 1.0)
HTTP_SECONDS_FINE = _bounds(
    "0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1.0 1.5 2.0 2.5 3.0 3.5 4.0 4.5 5.0 7.5 10.0 30.0 60.0"
)


Row = tuple[Sequence[str], float]  # the values of the labels, and the number


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


class Histogram:
    """Counts of observed values by bucket, and their sum. `buckets` are the upper bounds that Prometheus
    sees; values are counted by `bounds`, which has all of them."""

    def __init__(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        label_names: Sequence[str] = LABELS,
        prefix: str = "vllm:",
        bounds: Sequence[float] | None = None,
    ) -> None:
        self.name, self.text, self.buckets, self.label_names = prefix + name, text, buckets, label_names
        self.bounds = buckets if bounds is None else bounds
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def family(self, labels: Sequence[str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.name, self.text, labels=self.label_names)
        self.add_to(family, labels)
        return family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        sums, shown = list(itertools.accumulate(self.counts)), set(self.buckets)
        pairs = [(repr(float(bound)), total) for bound, total in zip(self.bounds, sums) if bound in shown]
        family.add_metric(labels, [*pairs, ("+Inf", sums[-1])], self.sum)


class ModelMetrics:
    """The metrics of one model. `begin` gives each sequence its RequestTimes."""

    def __init__(
        self, model_name: str, max_model_len: int, cache_config: Mapping[str, str], most_drafts: int = 0
    ) -> None:
        """`cache_config` has the labels of vllm:cache_config_info and their values. `most_drafts`: of a
        sequence in a step; 0: none are made."""
        self.labels, self.cache_config = (model_name, "0"), dict(cache_config)
        self.drafts = DraftCounts(most_drafts)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        sizes = _one_two_five(max_model_len)
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "Seconds from arrival to the first token.",
            FIRST_TOKEN_SECONDS,
            bounds=LATENCY_SECONDS,
        )
        self.between_tokens = Histogram(
            "inter_token_latency_seconds",
            "Seconds between tokens of an answer.",
            TOKEN_SECONDS,
            bounds=LATENCY_SECONDS,
        )
        self.per_token = Histogram(
            "request_time_per_output_token_seconds", "Mean seconds a token after the first.", TOKEN_SECONDS
        )
        self.whole = Histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the last token.", REQUEST_SECONDS
        )
        self.queue = Histogram(
            "request_queue_time_seconds", "Seconds a request waited for its first step.", REQUEST_SECONDS
        )
        self.prefill = Histogram(
            "request_prefill_time_seconds", "Seconds from the first step to the first token.", REQUEST_SECONDS
        )
        self.inference = Histogram(
            "request_inference_time_seconds",
            "Seconds from the first step to the last token.",
            REQUEST_SECONDS,
        )
        self.decode = Histogram(
            "request_decode_time_seconds", "Seconds from the first to the last token.", REQUEST_SECONDS
        )
        self.prompt_sizes = Histogram("request_prompt_tokens", "Prompt tokens, by request.", sizes)
        self.answer_sizes = Histogram("request_generation_tokens", "Generated tokens, by request.", sizes)
        self.max_tokens = Histogram("request_params_max_tokens", "max_tokens, by request.", sizes)
        self.answers = Histogram("request_params_n", "n, by request.", ANSWERS)
        self.longest = Histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of n answers, by prompt.", sizes
        )
        self.histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]

    def begin(self, request: Request) -> RequestTimes:
        return RequestTimes(self, request)

    def end(self, answers: Sequence[RequestTimes]) -> None:
        """Counts a prompt whose answers have all ended."""
        if all(one.reason in (FinishReason.STOP, FinishReason.LENGTH) for one in answers):
            self.longest.observe(max(one.count for one in answers))

    def collect(
        self, stats: Stats, sleeping_level: int | None, refused: int, is_up: bool = True
    ) -> Iterable[Metric]:
        """Yields the metrics of a scrape. `sleeping_level`: None while the engine is awake. `refused`
        counts requests refused by a full queue. `is_up`: the engine is alive."""
        yield from self._load(stats, is_up)
        yield from self._state(stats, sleeping_level)
        yield from self._counts(stats, refused)
        yield from self.drafts.collect(self.labels)
        if stats.kv_tiers:
            yield from self._tiers(stats)
        yield from self._peers(stats)
        yield from self._requests(stats)

    def _load(self, stats: Stats, is_up: bool) -> Iterable[Metric]:
        yield self._gauge("shoal:engine_up", "1 while the engine lives, 0 once it died.", float(is_up))
        for name, text, value in (
            ("num_requests_running", "Requests that are being computed.", stats.num_running),
            ("num_requests_waiting", "Requests that wait for their turn.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", stats.kv_cache_usage),
        ):
            yield self._gauge("vllm:" + name, text, value)
        if stats.kv_groups:
            windows = ["full" if group.window is None else str(group.window) for group in stats.kv_groups]
            shares = [group.used_blocks / stats.num_blocks for group in stats.kv_groups]
            yield gauge(
                "shoal:kv_cache_usage_perc_by_group",
                "Share of the KV cache that holds blocks of this group of layers.",
                (*LABELS, "group", "window"),
                [((*self.labels, str(g), windows[g]), share) for g, share in enumerate(shares)],
            )
        if stats.num_snapshots or stats.num_free_snapshots:
            yield self._gauges(
                "shoal:state_snapshots",
                "Snapshots of states that prompts may continue from (kept); as many as there is room for if "
                "nothing else is cached (room).",
                "which",
                {"kept": stats.num_snapshots, "room": stats.num_free_snapshots},
            )
        yield self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for room (capacity), or for a grammar, a store or a "
            "model that sleeps (deferred).",
            "reason",
            {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred},
        )

    def _state(self, stats: Stats, sleeping_level: int | None) -> Iterable[Metric]:
        """Yields the settings, the estimates and the sleep of the engine."""
        yield gauge(
            "vllm:cache_config_info",
            "The KV cache's settings, in labels.",
            (*LABELS, *self.cache_config),
            [((*self.labels, *self.cache_config.values()), 1.0)],
        )
        yield self._gauge(
            "shoal:decode_step_seconds_estimate",
            "Seconds a step with the decodes of now takes, as measured; 0: no target_itl_ms.",
            stats.decode_step_s,
        )
        yield self._gauge(
            "shoal:prompt_token_seconds_estimate",
            "Seconds a prompt token adds to such a step, as measured; 0: no target_itl_ms.",
            stats.prompt_token_s,
        )
        levels = {"awake": (None, 0), "weights_offloaded": (1,), "discard_all": (2,)}
        yield self._gauges(
            "vllm:engine_sleep_state",
            "Whether the engine is awake, or asleep at level 1 or 2.",
            "sleep_state",
            {name: int(sleeping_level in own) for name, own in levels.items()},
        )

    def _counts(self, stats: Stats, refused: int) -> Iterable[Metric]:
        for name, text, value in (
            (
                "num_preemptions",
                "Sequences that lost their blocks and were computed again.",
                stats.num_preemptions,
            ),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_cache_hits),
            ("prompt_tokens", "Prompt tokens taken in.", self.prompt_tokens),
            (
                "prompt_tokens_cached",
                "Prompt tokens taken in that the prefix cache held.",
                self.cached_tokens,
            ),
            (
                "external_prefix_cache_queries",
                "Prompt tokens looked up in the tiers below the device.",
                stats.external_prefix_cache_queries,
            ),
            (
                "external_prefix_cache_hits",
                "Prompt tokens fetched from there.",
                stats.external_prefix_cache_hits,
            ),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            ("admission_rejections", "Requests refused as the queue was full.", refused),
        ):
            yield self._counter("vllm:" + name, text, value)

    def _requests(self, stats: Stats) -> Iterable[Metric]:
        """Yields how requests ended, their times and lengths, and the lengths of steps."""
        ended = {str(reason): count for reason, count in self.finished.items()}
        yield self._counters(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason", ended
        )
        for histogram in self.histograms:
            yield histogram.family(self.labels)
        steps = Histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)
        steps.counts, steps.sum = stats.steps_by_tokens, stats.step_tokens
        yield steps.family(self.labels)

    def _tiers(self, stats: Stats) -> Iterable[Metric]:
        """Yields the metrics of KV blocks below the device."""
        yield self._counter(
            "shoal:kv_dropped_blocks",
            "KV blocks that left the device and are kept nowhere.",
            stats.kv_dropped_blocks,
        )
        yield self._gauge(
            "shoal:kv_compute_seconds_per_block",
            "Seconds to compute a KV block of a prompt, as measured lately.",
            stats.kv_compute_seconds_per_block,
        )
        for made, texts in ((self._gauges, TIER_GAUGES), (self._counters, TIER_COUNTERS)):
            for name, text in texts.items():
                values = {tier: getattr(one, name) for tier, one in stats.kv_tiers.items()}
                yield made("shoal:kv_tier_" + name, text, "tier", values)

    def _peers(self, stats: Stats) -> Iterable[Metric]:
        """Yields the metrics of KV blocks that are exchanged with other workers, if any are."""
        loans, reads = stats.kv_loans, stats.kv_transfers
        if loans is not None:
            for made, name, text, value in (
                (self._gauge, "offers", "Prompts whose KV blocks are held for other workers.", loans.offers),
                (self._gauge, "held_blocks", "KV blocks that are held for other workers.", loans.held_blocks),
                (
                    self._counter,
                    "blocks_out",
                    "KV blocks that other workers have read here.",
                    loans.blocks_out,
                ),
                (
                    self._counter,
                    "bytes_out",
                    "Bytes of KV blocks that other workers have read here.",
                    loans.bytes_out,
                ),
            ):
                yield made("shoal:kv_loan_" + name, text, value)
            text = "Prompts no longer held for other workers, by how."
            yield self._counters("shoal:kv_loan_ended", text, "how", loans.ended)
        if reads:
            for name, text, values in (
                ("blocks", "KV blocks read from other workers.", {k: one.blocks for k, one in reads.items()}),
                ("bytes", "Bytes of these.", {k: one.num_bytes for k, one in reads.items()}),
                ("seconds", "Seconds that the reads took.", {k: one.seconds for k, one in reads.items()}),
            ):
                yield self._counters("shoal:kv_transfer_" + name, text, "transport", values)
        if stats.kv_transfer_failures:
            text = "Requests that computed KV blocks which another worker had, by what went wrong."
            yield self._counters("shoal:kv_transfer_failures", text, "kind", stats.kv_transfer_failures)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return gauge(name, text, LABELS, [(self.labels, value)])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return counter(name, text, LABELS, [(self.labels, value)])

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """A value for each value of a label."""
        return gauge(name, text, (*LABELS, label), [((*self.labels, k), v) for k, v in values.items()])

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """A count for each value of a label."""
        return counter(name, text, (*LABELS, label), [((*self.labels, k), v) for k, v in values.items()])


class DraftCounts:
    """Counts of drafts, which are exported only if there may be any. An accepted draft is a token of an
    answer."""

    def __init__(self, most: int) -> None:
        """most: the most drafts of a sequence in a step."""
        self.num_steps = self.num_verified = 0
        self.by_place = [0] * most  # accepted ones

    @property
    def num_accepted(self) -> int:
        return sum(self.by_place)

    def set_most(self, most: int) -> None:
        """The model has changed. Counts stay."""
        self.by_place += [0] * (most - len(self.by_place))

    def add(self, drafted: Drafted) -> None:
        self.num_steps += drafted.num_steps
        self.num_verified += drafted.num_verified
        self.set_most(max(drafted.places, default=0))
        for place in drafted.places:
            if place:
                self.by_place[place - 1] += 1

    def collect(self, labels: Sequence[str]) -> Iterable[Metric]:
        if not self.by_place:
            return
        for name, text, value in (
            ("drafts", "Steps that verified drafts of a sequence, summed over sequences.", self.num_steps),
            ("draft_tokens", "Drafts that were verified.", self.num_verified),
            ("accepted_tokens", "Drafts that became tokens of answers.", self.num_accepted),
        ):
            yield counter("vllm:spec_decode_num_" + name, text, LABELS, [(labels, value)])
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that became tokens of answers, by their place among the drafts of a step.",
            (*LABELS, "position"),
            [((*labels, str(position)), count) for position, count in enumerate(self.by_place)],
        )


class RequestTimes:
    """The times of one sequence: arrival, first token, last token."""

    __slots__ = ("arrival", "count", "ended", "first", "last", "metrics", "queued", "reason", "request")

    def __init__(self, metrics: ModelMetrics, request: Request) -> None:
        self.metrics, self.request = metrics, request
        self.arrival = time.perf_counter()
        self.first = self.last = self.queued = 0.0
        self.count = 0
        self.ended = False
        self.reason: FinishReason | None = None  # None: running, or refused by the engine

    def tokens(self, count: int, num_cached: int, queued: float) -> None:
        """Counts `count` tokens, possibly 0, that arrived now. `queued`: seconds for which the request waited
        for its first step; only the first call reads it."""
        now, metrics = time.perf_counter(), self.metrics
        if not self.first:
            self.first, self.queued = now, queued
            metrics.first_token.observe(now - self.arrival)
            metrics.prompt_tokens += len(self.request.prompt_token_ids)
            metrics.cached_tokens += num_cached
        elif count:
            metrics.between_tokens.observe((now - self.last) / count, count)
        self.last = now
        self.count += count
        metrics.generation_tokens += count

    def drafted(self, drafted: Drafted) -> None:
        """Counts verified drafts, once the answer is cut at its end."""
        self.metrics.drafts.add(drafted)

    def forget(self) -> None:
        """Removes a request that the engine refused from all counts."""
        self.ended = True

    def finish(self, reason: FinishReason) -> None:
        """Counts the end of the sequence. Further calls have no effect."""
        if self.ended:
            return
        self.ended = True
        self.reason = reason
        metrics = self.metrics
        metrics.finished[reason] += 1
        if not self.first or reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        metrics.whole.observe(self.last - self.arrival)
        metrics.queue.observe(self.queued)
        metrics.prefill.observe(self.first - self.arrival - self.queued)
        metrics.inference.observe(self.last - self.arrival - self.queued)
        metrics.decode.observe(self.last - self.first)
        metrics.prompt_sizes.observe(len(self.request.prompt_token_ids))
        metrics.answer_sizes.observe(self.count)
        if self.request.params.max_tokens is not None:
            metrics.max_tokens.observe(self.request.params.max_tokens)
        if self.count > 1:
            metrics.per_token.observe((self.last - self.first) / (self.count - 1))


class HttpMetrics:
    """The metrics of one port. They have the names and labels of prometheus-fastapi-instrumentator, which
    vLLM's server uses.

    Labels have few values, whatever clients send: a handler is a route's path or "none", a status "2xx" or
    similar.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}  # by method, status and handler
        self._by_handler: dict[tuple[str, str], Histogram] = {}  # by method and handler
        self._all = Histogram(
            "http_request_duration_highr_seconds",
            "Seconds a request took, with many buckets.",
            HTTP_SECONDS_FINE,
            (),
            prefix="",
        )

    def observe(self, method: str, handler: str, status: int, seconds: float) -> None:
        method = method if method in HTTP_METHODS else "none"
        key = (method, f"{status // 100}xx", handler)
        self._requests[key] = self._requests.get(key, 0) + 1
        if (method, handler) not in self._by_handler:
            self._by_handler[method, handler] = Histogram("", "", HTTP_SECONDS)
        self._by_handler[method, handler].observe(seconds)
        self._all.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        yield counter(
            "http_requests",
            "Requests, by method, status and handler.",
            ("method", "status", "handler"),
            self._requests.items(),
        )
        durations = HistogramMetricFamily(
            "http_request_duration_seconds",
            "Seconds a request took, by method and handler.",
            labels=("method", "handler"),
        )
        for labels, histogram in self._by_handler.items():
            histogram.add_to(durations, labels)
        yield durations
        yield self._all.family(())


class Snapshot:
    """A collector of finished metrics. prometheus_client collects synchronously, and engines answer
    asynchronously, so their metrics are built before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families

    def describe(self) -> Iterable[Metric]:
        return []


def exposition(families: Iterable[Metric]) -> bytes:
    """Returns the metrics in Prometheus' text format, and metrics of the process (memory, file
    descriptors, Python)."""
    merged: dict[str, Metric] = {}
    for family in families:  # With several models, each family comes once and has the samples of all.
        if family.name in merged:
            merged[family.name].samples += family.samples
        else:
            merged[family.name] = family
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(Snapshot(list(merged.values())))
    return generate_latest(registry)


def _one_two_five(most: int) -> list[int]:
    """Returns 1, 2, 5, 10, 20, 50, ... up to `most`."""
    found, power = [], 1
    while power <= most:
        found += [power * m for m in (1, 2, 5) if power * m <= most]
        power *= 10
    return found

"""Metrics of a router, in Prometheus' form: its choices, its queues, its workers and its planner. The counts
are kept by the dispatcher, the workers and the planner; fleet.py asks for the page.

Names are vLLM's where one exists, else NVIDIA Dynamo's, else Shoal's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import Metric

from shoal.fleet.external.forwarder import ExternalForwarder
from shoal.fleet.index.event_feed import EventFeed
from shoal.fleet.pool.model_pool import ModelPool
from shoal.fleet.worker import Worker
from shoal.fleet_views import PlannerView, WorkerState, WorkerView
from shoal.telemetry.metrics import Row, counter, gauge

OF_MODEL = ("model_name",)
OF_WORKER = ("worker_id", "model_name")


def of_models(models: Iterable[ModelPool]) -> Iterable[Metric]:
    models = list(models)
    yield from _of_requests(models)
    yield from _of_prefills_and_loans(models)
    # For models of our own workers, the engine's figures are among the model's metrics already.
    yield from _of_external([model for model in models if model.is_external])
    yield gauge(
        "shoal:router_index_blocks",
        "KV blocks in the index, over all workers.",
        OF_MODEL,
        [([model.name], model.index.num_blocks()) for model in models],
    )


def _of_requests(models: Sequence[ModelPool]) -> Iterable[Metric]:
    for number, _ in enumerate(models[0].dispatcher.times.histograms if models else ()):
        first = models[0].dispatcher.times.histograms[number].family([models[0].name])
        for model in models[1:]:
            model.dispatcher.times.histograms[number].add_to(first, [model.name])
        yield first
    yield gauge(
        "shoal:router_ready_workers",
        "Workers that generate and take requests now.",
        OF_MODEL,
        [
            ([model.name], sum(worker.takes_requests for worker in model.dispatcher.workers.values()))
            for model in models
        ],
    )
    yield gauge(
        "dynamo_frontend_queued_requests",
        "Requests that wait for a worker with room.",
        OF_MODEL,
        [([model.name], model.dispatcher.queue.length) for model in models],
    )
    yield gauge(
        "shoal:router_queue_oldest_seconds",
        "Seconds that the oldest waiting request has waited.",
        OF_MODEL,
        [([model.name], model.dispatcher.queue.oldest_s) for model in models],
    )
    yield counter(
        "dynamo_frontend_model_rejection",
        "Requests refused as the queue was full.",
        OF_MODEL,
        [([model.name], model.dispatcher.num_refused) for model in models],
    )
    migrations: list[Row] = []
    for model in models:
        if model.sender is not None:
            migrations.append(([model.name, "ongoing_request"], model.sender.num_migrations))
            migrations.append(([model.name, "new_request"], model.sender.num_retries))
    yield counter(
        "dynamo_frontend_model_migration",
        "Requests that continued at another worker, with tokens (ongoing) or without (new).",
        (*OF_MODEL, "migration_type"),
        migrations,
    )


def _of_prefills_and_loans(models: Sequence[ModelPool]) -> Iterable[Metric]:
    yield counter(
        "shoal:router_remote_prefills",
        "Prompts computed by a prefill worker for a decode worker.",
        OF_MODEL,
        [([model.name], model.prefills.num_done) for model in models],
    )
    yield counter(
        "shoal:router_prefill_fallbacks",
        "Prompts that a prefill worker was to compute and a decode worker did: it failed, refused, was late, "
        "or gave no ticket for the blocks.",
        (*OF_MODEL, "reason"),
        [
            ([model.name, reason], count)
            for model in models
            for reason, count in model.prefills.fall_backs.items()
        ],
    )
    yield counter(
        "shoal:router_kv_loans",
        "Tickets for KV blocks from workers, for a stream that moves or a prefix in another worker's cache.",
        (*OF_MODEL, "reason"),
        [
            ([model.name, reason], count)
            for model in models
            for reason, count in model.kv_transfers.num_leases.items()
        ],
    )
    yield counter(
        "shoal:router_kv_loan_refusals",
        "Workers that were asked for KV blocks and gave no ticket.",
        OF_MODEL,
        [([model.name], model.kv_transfers.num_refusals) for model in models],
    )
    yield gauge(
        "shoal:router_prefill_queue",
        "Prompts that wait for a prefill worker.",
        OF_MODEL,
        [([model.name], model.prefills.dispatcher.queue.length) for model in models],
    )
    yield gauge(
        "shoal:router_prefill_queue_oldest_seconds",
        "Seconds that the oldest waiting request has waited.",
        OF_MODEL,
        [([model.name], model.prefills.dispatcher.queue.oldest_s) for model in models],
    )


def _of_external(models: Sequence[ModelPool]) -> Iterable[Metric]:
    engine = (*OF_MODEL, "engine")
    yield gauge(
        "vllm:num_requests_running",
        "Requests that are being computed.",
        engine,
        [
            ([model.name, "0"], sum(worker.active for worker in model.dispatcher.workers.values()))
            for model in models
        ],
    )
    yield gauge(
        "vllm:num_requests_waiting",
        "Requests that wait for their turn.",
        engine,
        [([model.name, "0"], model.dispatcher.queue.length) for model in models],
    )
    counts = [
        (model.name, model.sender.token_counts)
        for model in models
        if isinstance(model.sender, ExternalForwarder)
    ]
    for name, text, field in (
        ("vllm:prompt_tokens", "Prompt tokens accepted.", "prompt"),
        ("vllm:prompt_tokens_cached", "Prompt tokens accepted that were in the prefix cache.", "cached"),
        ("vllm:generation_tokens", "Tokens generated.", "generated"),
    ):
        yield counter(name, text, engine, [([model, "0"], getattr(found, field)) for model, found in counts])


def of_workers(workers: Iterable[tuple[Worker[Any], WorkerView, int]]) -> Iterable[Metric]:
    """`workers`: each with its view, and the prompt tokens in flight there."""
    found = [(worker, view, tokens, [view.id, view.model]) for worker, view, tokens in workers]
    yield gauge(
        "shoal:worker_state",
        "1 for the state that the worker is in.",
        (*OF_WORKER, "state"),
        [
            ([*labels, state.value], float(state == view.state))
            for _, view, _, labels in found
            for state in WorkerState
            if state != WorkerState.GONE
        ],
    )
    for name, text, values in (
        (
            "dynamo_frontend_worker_active_decode_blocks",
            "KV blocks of requests in flight.",
            [view.active_blocks for _, view, _, _ in found],
        ),
        (
            "dynamo_frontend_worker_active_prefill_tokens",
            "Tokens of prompts without a first token yet.",
            [tokens for _, _, tokens, _ in found],
        ),
        (
            "shoal:worker_active_requests",
            "Requests in flight.",
            [view.active_requests for _, view, _, _ in found],
        ),
        (
            "shoal:worker_cached_blocks",
            "KV blocks that the worker is known to have.",
            [view.cached_blocks for _, view, _, _ in found],
        ),
        (
            "dynamo_component_router_kv_hit_rate",
            "Share of prompt tokens that the worker had cached, since the router's start.",
            [view.hit_rate for _, view, _, _ in found],
        ),
    ):
        yield gauge(name, text, OF_WORKER, [(labels, value) for (*_, labels), value in zip(found, values)])
    for name, text, values in (
        (
            "shoal:worker_requests",
            "Requests sent to the worker.",
            [worker.num_requests for worker, *_ in found],
        ),
        (
            "shoal:worker_breaks",
            "Times that the worker failed, was absent or hung, and got no requests until a probe succeeded.",
            [worker.num_breaks for worker, *_ in found],
        ),
    ):
        yield counter(name, text, OF_WORKER, [(labels, value) for (*_, labels), value in zip(found, values)])


def of_feeds(feeds: Iterable[tuple[str, EventFeed]]) -> Iterable[Metric]:
    """`feeds`: with the ids of their workers."""
    sums: dict[str, list[int]] = {}
    for worker_id, feed in feeds:
        of_worker = sums.setdefault(worker_id, [0, 0, 0])
        for number, count in enumerate((feed.num_batches, feed.num_lost, feed.num_unreadable)):
            of_worker[number] += count
    for number, (name, text) in enumerate(
        (
            ("dynamo_component_kv_cache_events_applied", "Batches of KV events applied to the index."),
            ("shoal:kv_events_lost", "Gaps in a worker's KV events that no replay could fill."),
            ("shoal:kv_events_unreadable", "KV events that could not be read."),
        )
    ):
        rows: list[Row] = [([worker_id], counts[number]) for worker_id, counts in sums.items()]
        yield counter(name, text, ("worker_id",), rows)


def one_gauge(name: str, text: str, value: float) -> Metric:
    return gauge(name, text, (), [([], value)])


def one_counter(name: str, text: str, value: float) -> Metric:
    return counter(name, text, (), [([], value)])


def planner_metrics(view: PlannerView) -> Iterable[Metric]:
    models = view.models.items()

    def by(label: str, field: str) -> tuple[tuple[str, str], list[Row]]:
        rows: list[Row] = [
            ([name, key], n) for name, found in models for key, n in getattr(found, field).items()
        ]
        return (*OF_MODEL, label), rows

    yield gauge("shoal:planner_workers", "Workers that are ready.", *by("role", "workers"))
    yield gauge("shoal:planner_desired_workers", "Workers as last decided.", *by("role", "desired"))
    yield gauge(
        "shoal:planner_pending_workers",
        "Workers that are starting or ending, or restart after a death.",
        OF_MODEL,
        [([name], found.pending) for name, found in models],
    )
    yield counter(
        "shoal:planner_decisions",
        "Decisions: to add, remove or move (to another role) workers, none, or held as workers came or went.",
        *by("kind", "decisions"),
    )
    yield counter(
        "shoal:planner_changes",
        "Workers that the planner has added, removed or moved.",
        *by("kind", "changes"),
    )
    yield counter(
        "shoal:planner_failures",
        "Workers that the planner could not add, remove or move.",
        *by("kind", "failures"),
    )
    yield one_gauge("shoal:planner_max_gpus", "GPUs that all workers may have together.", view.max_gpus)

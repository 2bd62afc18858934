"""The dashboards for Grafana, made from the lists below: `python deploy/grafana/dashboards.py` writes the
JSON files beside this one, and a test holds that they are up to date.

A row has a title and panels; a panel has a title, a unit of Grafana's, and expressions of PromQL by legend.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 24, 8  # the columns of Grafana's grid, and the rows of a panel
QUANTILES = (0.5, 0.95, 0.99)
OF_SERVER = 'instance=~"$instance", model_name=~"$model"'
SERVER = "instance, model_name"


@dataclass(frozen=True)
class Panel:
    """`most`: the upper end of its axis; None: as the data has it. `text`: what stands behind its `i`."""

    title: str
    unit: str
    queries: dict[str, str]  # by legend
    text: str = ""
    most: float | None = None


def lines(
    title: str,
    unit: str,
    of: Callable[[str, str], str],
    metric: str,
    by: str = SERVER,
    text: str = "",
    most: float | None = None,
) -> Panel:
    """One expression, with a line for each value of these labels."""
    return Panel(title, unit, {legend(by): of(metric, by)}, text, most)


def legend(labels: str) -> str:
    return ", ".join(f"{{{{{label}}}}}" for label in labels.split(", "))


def latency(title: str, metric: str, text: str = "") -> Panel:
    return Panel(
        title,
        "s",
        {
            f"p{round(100 * q)}": f"histogram_quantile({q}, {rate(metric + '_bucket', 'le')})"
            for q in QUANTILES
        },
        text,
    )


def rate(metric: str, by: str = SERVER) -> str:
    return f"sum by ({by}) (rate({metric}{{{OF_SERVER}}}[$__rate_interval]))"


def gauge(metric: str, by: str = SERVER) -> str:
    return f"sum by ({by}) ({metric}{{{OF_SERVER}}})"


def average(metric: str, by: str) -> str:
    """The mean of what several routers say of one thing."""
    return f"avg by ({by}) ({metric}{{{OF_SERVER}}})"


def ratio(part: str, whole: str, by: str = SERVER) -> str:
    return f"{rate(part, by)} / {rate(whole, by)}"


def mean(histogram: str, by: str = "model_name") -> str:
    return ratio(f"{histogram}_sum", f"{histogram}_count", by)


def lately(counter: str, by: str) -> str:
    """Returns the expression for the growth of a counter in five minutes."""
    return f"sum by ({by}) (increase({counter}{{{OF_SERVER}}}[5m]))"


def oldest(metric: str) -> str:
    return f"max by (model_name) ({metric}{{{OF_SERVER}}})"


def of_instance(metric: str) -> str:
    """The selector of a metric that has no model."""
    return f'{metric}{{instance=~"$instance"}}'


def total(counter: str) -> str:
    return f"sum (rate({of_instance(counter)}[$__rate_interval]))"


BY_SERVER = legend(SERVER)

ENGINE = {
    "What clients see": [
        latency("Time to the first token", "vllm:time_to_first_token_seconds"),
        latency("Between two tokens", "vllm:inter_token_latency_seconds"),
        latency("Whole request", "vllm:e2e_request_latency_seconds"),
        lines("Requests by how they ended", "reqps", rate, "vllm:request_success_total", "finished_reason"),
        Panel(
            "HTTP answers by status",
            "reqps",
            {"{{status}}": f"sum by (status) (rate({of_instance('http_requests_total')}[$__rate_interval]))"},
        ),
        lines("Requests refused, the queue being full", "reqps", rate, "vllm:admission_rejections_total"),
    ],
    "Work": [
        Panel(
            "Tokens",
            "none",
            {
                "prompt, {{model_name}}": rate("vllm:prompt_tokens_total", "model_name"),
                "generated, {{model_name}}": rate("vllm:generation_tokens_total", "model_name"),
            },
            "Tokens a second.",
        ),
        Panel(
            "Requests under way",
            "none",
            {
                f"running, {BY_SERVER}": gauge("vllm:num_requests_running"),
                f"waiting, {BY_SERVER}": gauge("vllm:num_requests_waiting"),
            },
        ),
        lines(
            "Waiting, by reason",
            "none",
            gauge,
            "vllm:num_requests_waiting_by_reason",
            "reason",
            "Capacity: for blocks. Deferred: for a grammar, a tier, another worker or a sleeping model.",
        ),
        latency("In the queue", "vllm:request_queue_time_seconds"),
        latency("Prefill", "vllm:request_prefill_time_seconds"),
        Panel(
            "Tokens in a step",
            "none",
            {"mean": mean("vllm:iteration_tokens_total")},
            "Many are good for throughput, few for latency.",
        ),
    ],
    "KV cache": [
        lines("KV cache in use", "percentunit", gauge, "vllm:kv_cache_usage_perc", most=1.0),
        Panel(
            "Share of prompt tokens found",
            "percentunit",
            {
                "in the cache": ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
                "in tiers below": ratio(
                    "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
                ),
            },
            most=1.0,
        ),
        Panel(
            "Drafts accepted",
            "percentunit",
            {
                "share": ratio(
                    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"
                )
            },
            "The share of verified drafts that became tokens of answers.",
            most=1.0,
        ),
        lines("Preemptions", "none", rate, "vllm:num_preemptions_total", text="A second."),
        lines("Tiers: in use", "bytes", gauge, "shoal:kv_tier_used_bytes", "tier, instance"),
        Panel(
            "Tiers: traffic",
            "Bps",
            {
                "stored, {{tier}}": rate("shoal:kv_tier_stored_bytes_total", "tier"),
                "fetched, {{tier}}": rate("shoal:kv_tier_fetched_bytes_total", "tier"),
            },
        ),
        lines("Tiers: failed blocks", "none", rate, "shoal:kv_tier_failed_blocks_total", "tier, instance"),
    ],
    "Blocks from other workers": [
        lines("Read", "Bps", rate, "shoal:kv_transfer_bytes_total", "transport, instance"),
        Panel(
            "Bandwidth while reading",
            "Bps",
            {
                "{{transport}}": ratio(
                    "shoal:kv_transfer_bytes_total", "shoal:kv_transfer_seconds_total", "transport"
                )
            },
        ),
        lines("Failures by kind", "none", rate, "shoal:kv_transfer_failures_total", "kind"),
    ],
    "Process": [
        Panel(
            "Engine lives",
            "none",
            {BY_SERVER: f"min by (instance, model_name) (shoal:engine_up{{{OF_SERVER}}})"},
            most=1.0,
        ),
        Panel("Memory", "bytes", {"{{instance}}": of_instance("process_resident_memory_bytes")}),
        Panel(
            "Open files",
            "percentunit",
            {"{{instance}}": f"{of_instance('process_open_fds')} / {of_instance('process_max_fds')}"},
            most=1.0,
        ),
    ],
}

ROUTER = {
    "Requests": [
        latency(
            "Time to the first token", "vllm:time_to_first_token_seconds", "As this router's clients see it."
        ),
        latency("Waiting for a worker", "shoal:router_queue_seconds"),
        Panel(
            "Waiting now",
            "none",
            {
                "{{model_name}}": gauge("dynamo_frontend_queued_requests", "model_name"),
                "prefill, {{model_name}}": gauge("shoal:router_prefill_queue", "model_name"),
            },
        ),
        Panel(
            "The longest waiting one",
            "s",
            {
                "{{model_name}}": oldest("shoal:router_queue_oldest_seconds"),
                "prefill, {{model_name}}": oldest("shoal:router_prefill_queue_oldest_seconds"),
            },
        ),
        lines(
            "Refused, the queue being full",
            "reqps",
            rate,
            "dynamo_frontend_model_rejection_total",
            "model_name",
        ),
        lines(
            "Went on at another worker",
            "reqps",
            rate,
            "dynamo_frontend_model_migration_total",
            "migration_type",
            "With tokens (ongoing), or before the first one (new).",
        ),
    ],
    "The choice": [
        lines("Decisions", "ops", rate, "dynamo_router_overhead_total_ms_count", "model_name"),
        Panel(
            "Overlap with the chosen worker",
            "percentunit",
            {"{{model_name}}": mean("shoal:router_overlap_ratio")},
            "The mean share of a prompt that the worker was thought to have cached.",
            most=1.0,
        ),
        Panel(
            "What a decision costs",
            "ms",
            {
                part: mean(f"dynamo_router_overhead_{name}_ms")
                for part, name in (
                    ("hashing", "block_hashing"),
                    ("index", "indexer_find_matches"),
                    ("choice", "scheduling"),
                    ("all", "total"),
                )
            },
        ),
        lines("Blocks in the index", "none", gauge, "shoal:router_index_blocks", "model_name"),
        Panel(
            "KV events",
            "none",
            {
                "batches": total("dynamo_component_kv_cache_events_applied_total"),
                "lost": total("shoal:kv_events_lost_total"),
                "unreadable": total("shoal:kv_events_unreadable_total"),
            },
            "A second.",
        ),
        Panel(
            "Prefill apart",
            "ops",
            {
                "by prefill workers": rate("shoal:router_remote_prefills_total", "model_name"),
                "fell back: {{reason}}": rate("shoal:router_prefill_fallbacks_total", "reason"),
            },
        ),
    ],
    "Workers": [
        Panel(
            "Workers by state",
            "none",
            {"{{state}}": f"sum by (state) ({average('shoal:worker_state', 'state, worker_id')})"},
        ),
        lines("Requests under way", "none", gauge, "shoal:worker_active_requests", "worker_id"),
        lines("Requests sent", "reqps", rate, "shoal:worker_requests_total", "worker_id"),
        lines(
            "Blocks of requests under way",
            "none",
            gauge,
            "dynamo_frontend_worker_active_decode_blocks",
            "worker_id",
        ),
        lines(
            "Prompt tokens under way",
            "none",
            gauge,
            "dynamo_frontend_worker_active_prefill_tokens",
            "worker_id",
        ),
        lines(
            "Share of prompt tokens cached",
            "percentunit",
            average,
            "dynamo_component_router_kv_hit_rate",
            "worker_id",
            most=1.0,
        ),
        lines("Breaks", "none", rate, "shoal:worker_breaks_total", "worker_id", "A second."),
    ],
}

PLANNER = {
    "Workers": [
        Panel(
            "As they are, and as decided",
            "none",
            {
                "{{model_name}}, {{role}}": gauge("shoal:planner_workers", "model_name, role"),
                "{{model_name}}, {{role}}: decided": gauge(
                    "shoal:planner_desired_workers", "model_name, role"
                ),
            },
        ),
        lines("Coming or going", "none", gauge, "shoal:planner_pending_workers", "model_name"),
        Panel("GPUs that all may have", "none", {"budget": f"max ({of_instance('shoal:planner_max_gpus')})"}),
    ],
    "Decisions": [
        lines(
            "Decisions by kind",
            "none",
            lately,
            "shoal:planner_decisions_total",
            "kind, model_name",
            "In five minutes. Held: workers came or went, so nothing was decided.",
        ),
        lines(
            "Workers added and removed",
            "none",
            lately,
            "shoal:planner_changes_total",
            "kind, model_name",
            "In five minutes.",
        ),
        lines(
            "Failures",
            "none",
            lately,
            "shoal:planner_failures_total",
            "kind, model_name",
            "In five minutes: workers that did not start or did not end. The router's log says why.",
        ),
    ],
    "What it looks at": [
        latency("Time to the first token", "vllm:time_to_first_token_seconds"),
        latency("Between two tokens", "vllm:inter_token_latency_seconds"),
        lines("Waiting for a worker", "none", gauge, "dynamo_frontend_queued_requests", "model_name"),
        lines("Prompts waiting for prefill", "none", gauge, "shoal:router_prefill_queue", "model_name"),
        lines("KV cache in use", "percentunit", gauge, "vllm:kv_cache_usage_perc", most=1.0),
    ],
}

DASHBOARDS = {
    "shoal-engine": ("Shoal: engines", ENGINE),
    "shoal-router": ("Shoal: router", ROUTER),
    "shoal-planner": ("Shoal: planner", PLANNER),
}
# Where the variables of a dashboard find their values.
ANCHORS = {
    "shoal-engine": "vllm:num_requests_running",
    "shoal-router": "shoal:router_queue_oldest_seconds",
    "shoal-planner": "shoal:planner_workers",
}


def dashboard(uid: str) -> dict[str, Any]:
    """As Grafana's export has it, for an import by hand or by provisioning."""
    title, rows = DASHBOARDS[uid]
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in rows.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
                "panels": [],
            }
        )
        y += 1
        for number, panel in enumerate(members):
            place = {
                "h": HEIGHT,
                "w": WIDTH // 3,
                "x": number % 3 * (WIDTH // 3),
                "y": y + number // 3 * HEIGHT,
            }
            panels.append(_panel(panel, len(panels) + 1, place))
        y += -(-len(members) // 3) * HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["shoal"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "tags": ["shoal"], "title": "Shoal", "asDropdown": False, "keepTime": True}
        ],
        "templating": {"list": _variables(ANCHORS[uid])},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {"fillOpacity": 8, "showPoints": "never"},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
            }
            for i, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _variables(anchor: str) -> list[dict[str, Any]]:
    def values(name: str, label: str, of: str) -> dict[str, Any]:
        query = f"label_values({anchor}, {of})"
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": f"variable-{name}"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return [source, values("instance", "Instance", "instance"), values("model", "Model", "model_name")]


def text_of(uid: str) -> str:
    return json.dumps(dashboard(uid), indent=2) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text_of(name))

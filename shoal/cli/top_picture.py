"""The picture of `shoal top`: a view of a server or fleet as text and tables of Rich. No I/O.

Text from a server is not trusted: it is never read as markup, and control characters are left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shoal.fleet_views import FleetView, Point, TierView, WorkerView
from shoal.telemetry.served import Quantiles, RecentRates

TIERS = {"device": "dev", "host": "host", "disk": "disk", "store": "store"}
STYLES = {"ready": "green", "draining": "yellow", "broken": "bold red", "gone": "red"}
BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = ".:-=+*#@"  # for terminals without block characters
SHOWN_DECISIONS = 3
WIDE = 100  # columns from which more of each worker is shown


@dataclass
class Picture:
    """The whole picture. `selected` is an id; `is_detailed`: only that worker, with `past` as its history."""

    url: str
    view: FleetView | None = None
    past: deque[Point] = field(default_factory=lambda: deque(maxlen=300))
    trouble: str = ""  # the reason why there is no newer view
    seen_at: float = 0.0  # time.monotonic of the view
    selected: str = ""
    is_detailed: bool = False
    keys: str = ""  # the line about the keys, if there are any

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, bars = self.view, BARS if console.encoding.startswith("utf") else PLAIN_BARS
        yield self._title(view)
        if self.trouble:
            age = f"the picture is {duration(time.monotonic() - self.seen_at)} old; " if view else ""
            yield Text(clean(f"no answer: {self.trouble}; {age}trying again"), style="bold red")
        if view is not None:
            worker = next((one for one in view.workers if one.id == self.selected), None)
            if self.is_detailed and worker is not None:
                yield _detail(worker, self.past, bars, options.max_width)
            else:
                yield _whole(view, self.past, bars, options.max_width, self.selected)
        if self.keys:
            yield Text(self.keys, style="dim")

    def _title(self, view: FleetView | None) -> Text:
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append("shoal top ", style="bold")
        title.append(clean(self.url))
        if view is not None:
            ready = sum(one.state == "ready" for one in view.workers)
            kind = f"policy {view.policy}" if view.policy else "one server"
            now = time.strftime("%H:%M:%S", time.localtime(view.at))
            title.append(clean(f"  {kind}  {ready} of {len(view.workers)} ready  {view.version}  {now}"))
        return title


def _whole(view: FleetView, past: Iterable[Point], bars: str, width: int, selected: str) -> Group:
    parts: list[RenderableType] = [_totals(view, list(past), bars, width)]
    if len(view.models) > 1:
        parts.append(_models(view))
    parts.append(_workers(view.workers, width, selected))
    if view.planner is not None:
        parts.append(_planner(view))
    for one in view.workers:
        if one.why:
            parts.append(Text(clean(f"{one.id}: {one.why}"), style="red", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _totals(view: FleetView, past: Sequence[Point], bars: str, width: int) -> Table:
    """Returns rates over all workers, with a short history of each."""
    recent, room = view.recent, max(8, width - 68)
    failed, refused = sum(one.failed for one in view.models), sum(one.refused for one in view.models)
    running, at_workers = sum(one.running for one in view.workers), sum(one.waiting for one in view.workers)
    # On a single server, the queue has the requests that wait in its engine.
    queues = [(view.queue, "for a worker"), (view.prefill_queue, "for prefill")] if view.policy else []
    waiting = at_workers + sum(one.length for one, _ in queues)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=width - room - 12)
    table.add_column(no_wrap=True, style="cyan")
    table.add_row(
        "requests",
        f"{running} running, {waiting} waiting, {failed} failed, {refused} refused",
        sparkline([p.running + p.waiting for p in past], bars, room),
    )
    if view.policy:
        waiting_at = [f"{at_workers} at workers"] if at_workers else []
        waiting_at += [f"{one.length} {what}, {duration(one.oldest_s)}" for one, what in queues if one.length]
        table.add_row("queue", "; ".join(waiting_at) or "nothing waits")
    table.add_row(
        "tokens/s",
        f"output {rate(recent.output_tokens_s)}, prompt {rate(recent.prompt_tokens_s)}, "
        f"cached {share(recent.hit_rate)}{_drafts(recent)}",
        sparkline([p.output_tokens_s for p in past], bars, room),
    )
    for name, field_ in (("TTFT", "ttft"), ("ITL", "itl")):
        table.add_row(
            name,
            f"p50 {quantile(getattr(recent, field_), 'p50')}, p99 {quantile(getattr(recent, field_), 'p99')}",
            sparkline([p.p50 if (p := getattr(one, field_)) else None for one in past], bars, room),
        )
    moved, failures = sum(one.blocks_in for one in view.workers), sum(map(_failures, view.workers))
    if moved or failures:
        table.add_row(
            "KV moved",
            f"{moved:,} blocks, {size(sum(one.bytes_in for one in view.workers))}, {failures} failed",
            sparkline([p.transfer_bytes_s for p in past], bars, room),
        )
    return table


def _drafts(recent: RecentRates) -> str:
    """Returns the share of accepted drafts, if there are drafts."""
    return "" if recent.acceptance is None else f", drafts accepted {share(recent.acceptance)}"


def _models(view: FleetView) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column("model", no_wrap=True, overflow="ellipsis", max_width=30)
    for name in ("active", "out/s", "TTFT", "ITL", "hit", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in view.models:
        recent = one.recent
        table.add_row(
            Text(clean(one.name)),
            str(one.active_requests),
            rate(recent.output_tokens_s),
            brief(recent.ttft, "p50"),
            brief(recent.itl, "p50"),
            share(recent.hit_rate),
            str(one.failed),
        )
    return table


def _workers(workers: Sequence[WorkerView], width: int, selected: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False, safe_box=True)
    columns: list[tuple[str, Callable[[WorkerView], str]]] = [
        ("run", lambda one: str(one.running)),
        ("wait", lambda one: str(one.waiting)),
    ]
    for tier, name in TIERS.items():
        if tier == "device" or any(tier in one.kv for one in workers):
            columns.append((name, lambda one, tier=tier: _usage(one.kv.get(tier))))  # type: ignore[misc]
    columns += [
        ("hit", lambda one: share(one.recent.hit_rate)),
        ("out/s", lambda one: rate(one.recent.output_tokens_s)),
        ("TTFT", lambda one: brief(one.recent.ttft, "p50")),
        ("ITL", lambda one: brief(one.recent.itl, "p50")),
    ]
    if width >= WIDE:
        columns.insert(-2, ("in/s", lambda one: rate(one.recent.prompt_tokens_s)))
        columns.append(("p99", lambda one: brief(one.recent.itl, "p99")))
        columns.append(("failed", lambda one: str(one.failed)))
        if any(one.blocks_in or one.blocks_out for one in workers):
            columns.append(("KV in", lambda one: size(one.bytes_in)))
            columns.append(("KV out", lambda one: size(one.bytes_out)))
    has_roles = any(one.role != "both" for one in workers)
    table.add_column("worker", min_width=8)  # the column that is narrowed first
    if has_roles:
        table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for one in workers:
        marker = ">" if one.id == selected else " "
        label = Text(marker + clean(one.id), no_wrap=True, overflow="ellipsis")
        cells = [label, *([Text(clean(one.role))] if has_roles else []), _state(one)]
        style = "reverse" if one.id == selected else None
        table.add_row(*cells, *(cell(one) for _, cell in columns), style=style)
    return table


def _planner(view: FleetView) -> Text:
    planner = view.planner
    assert planner is not None
    wanted = ", ".join(f"{count} {role}" for role, count in planner.desired.items())
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("planner ", style="bold")
    text.append(clean(f"{planner.mode}: wants {wanted or 'nothing yet'}"))
    text.append(clean(f"; {planner.last_decision}" if planner.last_decision else ""))
    if planner.changing:
        text.append(" (changing)", style="yellow")
    for one in reversed(planner.decisions[-SHOWN_DECISIONS:]):
        text.append("\n" + clean(f"  {duration(one.age_s)} ago  {one.what}  {one.model}: {one.reason}"))
    return text


def _detail(one: WorkerView, past: Iterable[Point], bars: str, width: int) -> Table:
    points, room, recent = list(past), max(8, width - 40), one.recent
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, text: str, values: Sequence[float | None] = ()) -> None:
        line = Text(clean(text))
        if values:
            line.append("  " + sparkline(values, bars, room), style="cyan")
        table.add_row(name, line)

    table.add_row("worker", Text(clean(one.id)))
    table.add_row("state", _state(one))
    for name, text in (
        ("why", one.why),
        ("model", one.model),
        ("role", one.role),
        ("address", one.url),
        ("process", str(one.pid or "")),
        ("tags", ", ".join(one.tags)),
    ):
        if text:
            row(name, text)
    row("requests", f"{one.running} running, {one.waiting} waiting", [p.running + p.waiting for p in points])
    row("output/s", rate(recent.output_tokens_s), [p.output_tokens_s for p in points])
    row("prompt/s", rate(recent.prompt_tokens_s), [p.prompt_tokens_s for p in points])
    for name, found, values in (
        ("TTFT", recent.ttft, [p.ttft.p50 if p.ttft else None for p in points]),
        ("ITL", recent.itl, [p.itl.p50 if p.itl else None for p in points]),
    ):
        row(name, f"p50 {quantile(found, 'p50')}, p99 {quantile(found, 'p99')}", values)
    row("cached", f"{share(recent.hit_rate)} lately, {share(one.hit_rate)} since the start")
    if recent.acceptance is not None:
        row("drafts", f"{share(recent.acceptance)} accepted, {recent.tokens_a_draft} tokens a step")
    for tier, place in one.kv.items():
        moved = f", {place.stored_blocks:,} stored, {place.fetched_blocks:,} fetched"
        row(
            f"KV {tier}",
            f"{_usage(place)}, {place.used_blocks:,} blocks"
            + (f" of {place.total_blocks:,}" if place.total_blocks else "")
            + (moved if tier != "device" else "")
            + (f", {place.failed_blocks:,} failed" if place.failed_blocks else ""),
        )
    if one.blocks_in or one.blocks_out or one.transfer_failures:
        row(
            "KV moved",
            f"{one.blocks_in:,} blocks ({size(one.bytes_in)}) read at {one.transfer_GB_s:.2f} GB/s, "
            f"{one.blocks_out:,} ({size(one.bytes_out)}) read by others",
        )
    for kind, count in one.transfer_failures.items():
        row("KV failed", f"{count} {kind}")
    row(
        "since start",
        f"{one.requests:,} requests, {one.failed} failed, {one.preemptions} preempted, {one.breaks} breaks, "
        f"{one.prefills_done} prompts for others, weights version {one.weights_version}",
    )
    return table


def _state(one: WorkerView) -> Text:
    asleep = one.asleep and one.state == "ready"
    return Text("asleep" if asleep else str(one.state), style="blue" if asleep else STYLES[one.state])


def _usage(tier: TierView | None) -> str:
    return "-" if tier is None else share(tier.usage)


def _failures(one: WorkerView) -> int:
    return sum(one.transfer_failures.values())


# Numbers and words


def clean(text: str) -> str:
    """Returns the text without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def sparkline(values: Sequence[float | None], bars: str, room: int) -> str:
    """Returns the last values as bars between 0 and the largest one, averaged if there are more than
    `room`."""
    step = max(1, -(-len(values) // room))
    groups = [values[i : i + step] for i in range(0, len(values), step)]
    means = [sum(known) / len(known) if (known := [v for v in g if v is not None]) else None for g in groups]
    top = max((mean for mean in means if mean is not None), default=0.0) or 1.0
    return "".join(" " if mean is None else bars[round(mean / top * (len(bars) - 1))] for mean in means)


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def quantile(found: Quantiles | None, name: str) -> str:
    return "-" if found is None else duration(getattr(found, name))


def brief(found: Quantiles | None, name: str) -> str:
    return "-" if found is None else duration(getattr(found, name), 2)


def duration(seconds: float, digits: int = 3) -> str:
    """Returns a duration with `digits` digits and a unit."""
    if seconds < 0.995:
        return f"{float(f'{1000 * seconds:.{digits}g}'):g}ms"
    if seconds < 99.5:
        return f"{float(f'{seconds:.{digits}g}'):g}s"
    return f"{seconds / 60:.0f}min" if seconds < 7200 else f"{seconds / 3600:.0f}h"


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g}{unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g}TB"

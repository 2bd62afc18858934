"""Draws the figures of docs/architecture.md: `python docs/images/draw.py` writes the SVG files beside itself.
They have a background of their own, so they are legible on a light and on a dark page, and load nothing."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = """
    .page { fill: #ffffff; stroke: #d0d7de; }
    .box { fill: #eef3fb; stroke: #6b8cc4; }
    .base { fill: #f3f0e6; stroke: #b39b53; }
    .line { stroke: #9aa4b2; stroke-dasharray: 3 4; }
    .process { stroke: #c2410c; stroke-dasharray: 8 5; stroke-width: 1.5; }
    .arrow { stroke: #24476f; stroke-width: 1.4; fill: none; }
    .head { fill: #24476f; }
    .dot { fill: #24476f; }
    text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 12px; fill: #1f2328; }
    .name { font-weight: 600; font-size: 12.5px; }
    .small { font-size: 10.5px; fill: #57606a; }
    .warm { font-size: 11px; fill: #c2410c; }
    .number { fill: #ffffff; font-size: 10px; font-weight: 600; }
    .halo { stroke: #ffffff; stroke-width: 5px; stroke-linejoin: round; paint-order: stroke; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161b22; stroke: #3d444d; }
      .box { fill: #1c2a41; stroke: #5b7fb8; }
      .base { fill: #2e2a1a; stroke: #a08a45; }
      .line { stroke: #4c5663; }
      .process { stroke: #f0883e; }
      .arrow { stroke: #9dc1f0; }
      .head, .dot { fill: #9dc1f0; }
      text { fill: #e6edf3; }
      .small { fill: #9aa4b2; }
      .warm { fill: #f0883e; }
      .number { fill: #161b22; }
      .halo { stroke: #161b22; }
    }
"""


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n  <title>{escape(title)}</title>\n  <style>{STYLE}  </style>\n'
        '  <defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>\n'
        f'  <rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        f"  {body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, name: str, below: str = "", kind: str = "box"
) -> str:
    middle = x + width / 2
    parts = [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>']
    parts.append(text(middle, y + (height / 2 + 5 if not below else 19), name, "name", "middle"))
    for i, line in enumerate(below.split("\n") if below else ()):
        parts.append(text(middle, y + 35 + 14 * i, line, "small", "middle"))
    return "".join(parts)


# A walk: lanes from left to right, steps from top to bottom


@dataclass(frozen=True)
class Step:
    """An arrow between two lanes, or a thing that one lane does."""

    at: int
    to: int
    words: str


@dataclass(frozen=True)
class Note:
    """A line across, which parts the walk in two."""

    words: str


LANE, TOP, ROW, MARGIN = 124, 70, 35, 14


def walk(
    title: str, lanes: list[tuple[str, str]], steps: list[Step | Note], process: int | None = None
) -> str:
    """`process`: the lane before which another process begins."""
    width = 2 * MARGIN + LANE * len(lanes)
    height = TOP + ROW * len(steps) + 40
    centers = [MARGIN + LANE * i + LANE / 2 for i in range(len(lanes))]
    parts = []
    for center, (name, file) in zip(centers, lanes, strict=True):
        parts.append(f'<path class="line" d="M{center:g},{TOP - 8} V{height - 16}"/>')
        parts.append(box(center - LANE / 2 + 4, 14, LANE - 8, 44, name, file))
    if process is not None:
        x = MARGIN + LANE * process
        parts.append(f'<path class="process" d="M{x},10 V{height - 10}"/>')
        parts.append(text(x - 6, height - 12, "one process", "warm", "end"))
        parts.append(text(x + 6, height - 12, "another", "warm"))
    number = 0
    for i, step in enumerate(steps):
        y = TOP + ROW * i + 30
        if isinstance(step, Note):
            parts.append(f'<path class="line" d="M{MARGIN},{y} H{width - MARGIN}"/>')
            parts.append(text(width / 2, y - 6, step.words, "warm halo", "middle"))
            continue
        number += 1
        start, end = centers[step.at], centers[step.to]
        if step.at == step.to:
            parts.append(f'<circle class="dot" cx="{start:g}" cy="{y - 5}" r="4"/>')
            left, y_text = start + 28, y - 1
            if left + len(step.words) * 6.4 > width - MARGIN:
                left = start - 14 - len(step.words) * 6.4
        else:
            gap = 3 if end > start else -3
            parts.append(f'<path class="arrow" d="M{start:g},{y} H{end - gap:g}" marker-end="url(#to)"/>')
            # Beside an arrow's head, not on it.
            left, y_text = min(start, end) + (28 if end > start else 40), y - 7
            left = min(left, width - MARGIN - len(step.words) * 6.4)
        parts.append(text(left, y_text, step.words, "halo"))
        parts.append(f'<circle class="dot" cx="{left - 13:g}" cy="{y_text - 4:g}" r="8"/>')
        parts.append(text(left - 13, y_text - 0.5, str(number), "number", "middle"))
    return svg(width, height, title, parts)


def rooms() -> str:
    """Rooms, each above the rooms that it may import. As tests/cpu/test_import_rules.py has it."""
    parts = [
        box(40, 20, 640, 44, "cli · doctor · bench", "the command, checks of a machine, measurements"),
        box(40, 84, 640, 44, "apps", "what a command puts together: serve, join, route, fleet, plan"),
        box(40, 160, 110, 56, "server", "HTTP"),
        box(165, 160, 110, 56, "fleet", "many workers"),
        box(290, 160, 390, 44, "engine", "schedules, steps, starts ranks, sleeps, offloads"),
        box(290, 218, 390, 44, "kv", "blocks, tiers, transfer, events"),
        box(290, 276, 390, 44, "memory", "device memory that can be released and restored"),
        box(290, 334, 390, 44, "weights", "checkpoints"),
        box(290, 392, 390, 44, "models", "the decoder"),
        box(290, 450, 390, 44, "layers", "linear, norm, attention, mlp"),
        box(290, 508, 390, 44, "attention", "backends"),
        box(290, 566, 390, 44, "kernels", "Triton, C, and the plain PyTorch of each"),
        box(
            40,
            642,
            640,
            44,
            "text · telemetry · files · kinds · options",
            "tokenizer, formats, grammars; metrics; stores; parts of configs; flags",
            "base",
        ),
        box(40, 704, 640, 44, "shoal/*.py", "requests, engines, options, errors, messages", "base"),
    ]
    for x, start, end in [
        (360, 64, 82),
        (95, 128, 158),
        (220, 128, 158),
        (485, 128, 158),
        (485, 204, 216),
        (485, 262, 274),
        (485, 320, 332),
        (485, 378, 390),
        (485, 436, 448),
        (485, 494, 506),
        (485, 552, 564),
        (485, 610, 640),
        (95, 216, 640),
        (220, 216, 640),
    ]:
        parts.append(f'<path class="arrow" d="M{x},{start} V{end}" marker-end="url(#to)"/>')
    parts.append(text(158, 420, "nothing but the rooms below", "small halo", "middle"))
    parts.append(text(700, 360, "each may", "small"))
    parts.append(text(700, 375, "import all", "small"))
    parts.append(text(700, 390, "below it", "small"))
    return svg(780, 768, "Rooms of Shoal, and who may import whom", parts)


def offline() -> str:
    lanes = [
        ("LLM", "engine/llm.py"),
        ("EngineCore", "engine/core.py"),
        ("Scheduler", "scheduling/"),
        ("BlockPool", "kv/blocks.py"),
        ("BatchBuilder", "runner/batch.py"),
        ("ModelRunner", "runner/runner.py"),
        ("model, kernels", "models/ ... kernels/"),
    ]
    steps: list[Step | Note] = [
        Step(0, 0, "tokenizes, gives each answer a request and a seed"),
        Step(0, 1, "add(Request)"),
        Note("then again and again, until nothing is left: step()"),
        Step(1, 2, "schedule()"),
        Step(2, 3, "which blocks of the prefix are cached? new blocks for the rest"),
        Step(2, 1, "StepPlan"),
        Step(1, 4, "build(plan): what differs from the device's rows, packed into one buffer"),
        Step(1, 5, "step(packed), to every rank"),
        Step(5, 6, "replays a CUDA graph, or runs eagerly"),
        Step(6, 6, "writes K and V into blocks, draws a token into its row"),
        Step(1, 1, "plans and launches step n+1 while step n runs"),
        Step(5, 1, "StepResult.wait(): the tokens of step n"),
        Step(1, 2, "update(plan, tokens): stop rules, finished sequences"),
        Step(2, 3, "full blocks get findable, finished ones are released"),
        Step(1, 0, "Outputs: new token ids"),
        Step(0, 0, "detokenizes; a stop string ends the request in the core"),
    ]
    return walk("A request offline", lanes, steps)


def over_http() -> str:
    lanes = [
        ("client", "any OpenAI client"),
        ("App", "server/app.py"),
        ("an endpoint", "server/apis/chat.py ..."),
        ("Generation", "server/served/generation.py"),
        ("AsyncLLM", "process/"),
        ("core_main", "process/"),
        ("EngineCore", "engine/core.py"),
    ]
    steps: list[Step | Note] = [
        Step(0, 1, "POST /v1/chat/completions"),
        Step(1, 1, "limits on heads and bodies, the key, the route"),
        Step(1, 2, "the exchange: one HTTP request and its answer"),
        Step(2, 2, "checks fields; template and tokenizer, in threads"),
        Step(2, 3, "prompts and parameters"),
        Step(3, 3, "admission: a bounded queue; a deadline"),
        Step(3, 4, "generate(Request)"),
        Step(4, 5, "Add, as msgpack over ZMQ"),
        Step(5, 6, "add, then step after step"),
        Step(6, 5, "the Outputs of a step"),
        Step(5, 4, "one message a step"),
        Step(4, 3, "what a slow reader has left lying comes merged"),
        Step(3, 3, "token ids to text; stop strings; metrics"),
        Step(3, 2, "deltas"),
        Step(2, 0, "data: {...}, a chunk for what is new; the first carries the status"),
        Note("the client leaves, or the deadline is over"),
        Step(3, 6, "Abort: row and blocks are free again"),
    ]
    return walk("A request over HTTP", lanes, steps, process=5)


def sleep() -> str:
    lanes = [
        ("operator", "or a trainer"),
        ("admin port", "server/operator/admin.py"),
        ("Sleeper", "lifecycle/sleep.py"),
        ("step loop", "engine/core.py"),
        ("Scheduler", "and the tiers"),
        ("every rank", "runner/"),
        ("Regions", "memory/regions.py"),
    ]
    steps: list[Step | Note] = [
        Step(0, 1, "POST /sleep?level=1"),
        Step(1, 2, "sleep(level, tags, mode), between two steps"),
        Step(2, 3, "drain: steps in flight complete"),
        Step(2, 4, "copies of blocks to and from the device end"),
        Step(2, 5, "release memory: tags, and which of them are kept"),
        Step(5, 6, "weights are copied to host memory; pieces unmapped"),
        Step(6, 6, "addresses stay reserved"),
        Step(2, 4, "requests are aborted, or wait; the prefix cache is emptied"),
        Step(2, 0, "MemoryReport: bytes given back, kept, in use"),
        Note("asleep: the memory is another program's; requests are refused"),
        Step(0, 2, "POST /wake_up"),
        Step(2, 5, "take memory"),
        Step(5, 6, "new pieces at the old addresses; weights copied back"),
        Step(5, 5, "graphs and tensors are valid as they are"),
        Step(2, 3, "the next step schedules again"),
    ]
    return walk("A sleep and a wake-up", lanes, steps)


def blocks() -> str:
    lanes = [
        ("Scheduler", "scheduling/"),
        ("Offloader", "offload/"),
        ("Writer, Fetcher", "offload/"),
        ("RankTransfers", "offload/transfers.py"),
        ("every rank", "runner/"),
        ("host slab", "kv/tiers/host.py"),
        ("disk, store", "kv/tiers/disk.py ..."),
    ]
    steps: list[Step | Note] = [
        Note("down"),
        Step(0, 1, "a full block is findable; later nobody uses it"),
        Step(1, 1, "after a step: which are coldest, and nowhere below?"),
        Step(1, 3, "copy_out(blocks, host blocks): a ticket"),
        Step(3, 4, "to each rank"),
        Step(4, 5, "copied on a stream of its own, beside the steps"),
        Step(3, 1, "the ticket has ended on every rank: the host tier has the block"),
        Step(2, 3, "write(tier, contents, host blocks), ahead of eviction from the slab"),
        Step(4, 6, "by threads: to a file or object, with a checksum"),
        Note("up"),
        Step(0, 1, "a new prompt: how many of these keys are worth a fetch?"),
        Step(0, 1, "begin(Fetch): the sequence has row and blocks, and waits as FETCHING"),
        Step(1, 2, "a job: some blocks lie in the slab, some are to be read"),
        Step(2, 6, "read into host blocks, a few at a time; a bad checksum ends the run"),
        Step(2, 4, "copy_in(host blocks, blocks), while the next are read"),
        Step(5, 4, "copied to the device"),
        Step(2, 0, "fetched(fetch, how many came): the rest is computed"),
    ]
    return walk("A block down and up", lanes, steps)


FIGURES = {
    "rooms.svg": rooms,
    "walk-offline.svg": offline,
    "walk-http.svg": over_http,
    "walk-sleep.svg": sleep,
    "walk-block.svg": blocks,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (Path(__file__).parent / name).write_text(draw())

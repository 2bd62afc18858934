"""Takes the pictures of docs/watching.md, of a fleet that works: `python docs/images/draw_watching.py` starts one
worker for prompts and two that generate, with the small default model on the CPU, has clients talk to them,
drains a worker while it answers, and writes top.svg, dashboard.png and time-line.png beside itself.

It takes some minutes, and needs Chromium and what the tests need.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from playwright.sync_api import Page, expect, sync_playwright
from rich.console import Console

from shoal.cli.top import Source
from shoal.cli.top_picture import Picture
from tests.fleet_up import Fleet
from tests.web_pages import CHROMIUM, FLAGS, WAIT_MS

HERE = Path(__file__).parent
FLEET = """
model = "smollm2"
[plane]
[[workers]]
role = "prefill"
options = { device = "cpu", dtype = "float32", max_model_len = 2048, kv_cache_memory_bytes = 200_000_000 }
[[workers]]
role = "decode"
count = 2
options = { device = "cpu", dtype = "float32", max_model_len = 2048, kv_cache_memory_bytes = 200_000_000 }
[router]
max_local_prefill_length = 200
"""
STORY = "Every morning the fishermen went down to the harbour, looked at the sky and talked of the wind. "
CLIENTS = 4
MINUTES = 3
WIDTH = 96  # columns of the terminal
# Rich's own template loads a font from elsewhere; this one takes the reader's.
TERMINAL = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


class Clients:
    """Clients that talk with the fleet until the block ends: short questions, and long ones that begin alike."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._ended = fleet, threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(n,), daemon=True) for n in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _talk(self, number: int) -> None:
        for turn in itertools.count():
            if self._ended.wait(1.0 + number):
                return
            text = STORY * (20 if turn % 2 else 1) + f"What happened on day {turn % 5} of client {number}?"
            with contextlib.suppress(OSError):
                ask(self._fleet, text, 80)


def ask(fleet: Fleet, text: str, max_tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{fleet.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def migrated(fleet: Fleet) -> str:
    """The id of a long request whose worker was drained while it answered."""
    for turn in range(10):
        asking = threading.Thread(target=ask, args=(fleet, STORY * 20 + f"Tell me all of it, {turn}.", 160))
        asking.start()
        found = until(lambda: next((one for one in running(fleet) if one["output_tokens"] > 40), None))
        at = found["workers"][-1]
        fleet.operate(f"/fleet/drain/{at}")
        asking.join(300)
        fleet.operate(f"/fleet/resume/{at}")
        spans = fleet.json(f"/requests/{found['id']}")["spans"]
        if any(span["name"] == "migration" for span in spans):
            return found["id"]
    raise RuntimeError("no request moved to another worker")


def running(fleet: Fleet) -> list[dict]:
    return [one for one in fleet.json("/requests")["requests"] if one["status"] == "running"]


def until(condition: Callable[[], object], patience_s: float = 120.0):
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("it never came true")
        time.sleep(0.05)
    return found


def draw_top(url: str) -> None:
    source = Source(url, None)
    view = source.get()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Picture("http://127.0.0.1:8000", view, deque(view.history), selected=view.workers[0].id))
    (HERE / "top.svg").write_text(
        console.export_svg(title="shoal top", code_format=TERMINAL, unique_id="top")
    )


def draw_pages(page: Page, url: str, request_id: str) -> None:
    page.goto(f"{url}/dashboard")
    expect(page.locator("#requests tbody tr").first).to_be_visible(timeout=WAIT_MS)
    page.wait_for_timeout(2500)
    page.screenshot(path=HERE / "dashboard.png", clip={"x": 0, "y": 0, "width": 1200, "height": 900})
    page.goto(f"{url}/dashboard#request={request_id}")
    page.reload()  # an address that differs in its fragment alone loads nothing
    expect(page.locator(".token").first).to_be_attached(timeout=WAIT_MS)
    page.set_viewport_size({"width": 1200, "height": 1120})  # all of it
    page.evaluate("document.activeElement.blur()")
    page.locator("#line").screenshot(path=HERE / "time-line.png")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), FLEET) as fleet:
        fleet.ready(3)
        url = f"http://127.0.0.1:{fleet.port}"
        with Clients(fleet), sync_playwright() as playwright:
            time.sleep(60 * MINUTES)
            request_id = migrated(fleet)
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            draw_pages(page, url, request_id)
            draw_top(url)
            browser.close()


if __name__ == "__main__":
    main()

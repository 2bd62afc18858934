"""`shoal top`: a live view of a server or a fleet in a terminal. Torch-free.

A thread polls the server, so that keys work at once even if the server does not answer.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import select
import sys
import termios
import time
import tty
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from rich.console import Console
from rich.live import Live

from shoal.cli.address import ask, key_header, parts_of
from shoal.cli.top_picture import Picture
from shoal.errors import UnavailableError
from shoal.fleet_views import FleetView

INTERVAL_S = 2.0
TIMEOUT_S = 5.0
KEYS = "up/down select   enter one worker   esc all   q quit"
UP, DOWN, ENTER, ESCAPE, QUIT = (
    ("\x1b[A", "\x1bOA", "k"),
    ("\x1b[B", "\x1bOB", "j"),
    ("\r", "\n"),
    "\x1b",
    "q",
)


def top(url: str, api_key: str | None, once: bool) -> int:
    """Shows the view until `q` or Ctrl-C; returns the exit code. Raises ConfigError for a malformed address
    or key, and UnavailableError if `once`, or the first request without a screen, gets no answer."""
    source = Source(url, api_key)
    console = Console(highlight=False, markup=False, emoji=False)
    if once:
        view = source.get()
        console.print(Picture(source.url, view, deque(view.history)))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty():
            _Screen(source, console).run()
        else:
            _print_on(source, console)
    return 0


class Source:
    """GET /fleet of a server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """url: with or without /v1. Raises ConfigError for a malformed URL or key."""
        parts_of(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = key_header(api_key)

    def get(self, since: float | None = 0.0, worker_id: str = "") -> FleetView:
        """Returns the view with the history after `since`; of one worker if it is named. Raises
        UnavailableError."""
        query = {"since": str(since)} | ({"worker": worker_id} if worker_id else {})
        request = urllib.request.Request(
            f"{self.url}/fleet?{urllib.parse.urlencode(query)}", headers=self._headers
        )
        try:
            with ask(request, TIMEOUT_S) as answer:
                return msgspec.json.decode(answer.read(), type=FleetView)
        except urllib.error.HTTPError as error:
            raise UnavailableError(self._refusal(error.code)) from None
        except msgspec.MsgspecError as error:
            raise UnavailableError(f"{self.url} must answer with a view of a fleet: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UnavailableError(f"no server answers at {self.url} ({reason}); is it up?") from None

    def _refusal(self, status: int) -> str:
        if status in (401, 403):
            return f"{self.url} wants a key ({status}); give --api-key, or set SHOAL_API_KEY"
        if status == 404:
            return f"{self.url} has no /fleet (404); is it a server of Shoal?"
        return f"{self.url} cannot answer now ({status})"


class _Screen:
    """A terminal with keys."""

    def __init__(self, source: Source, console: Console) -> None:
        self._source, self._console = source, console
        self._picture = Picture(source.url, trouble="not asked yet", keys=KEYS)
        self._thread = ThreadPoolExecutor(1)
        self._asked: Future[FleetView] | None = None  # the pending answer
        self._due = 0.0  # time.monotonic of the next request

    def run(self) -> None:
        picture, size = self._picture, None
        try:
            with _keys() as keyboard, Live(console=self._console, screen=True, auto_refresh=False) as live:
                while True:
                    changed = self._ask()
                    for key in _pressed(keyboard, 0.1):
                        if key == QUIT:
                            return
                        self._press(key)
                        changed = True
                    if changed or self._console.size != size:
                        size = self._console.size
                        live.update(picture, refresh=True)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> bool:
        """Polls the server when it is time, and applies its answer. Returns True if there was one."""
        picture, now = self._picture, time.monotonic()
        if self._asked is None:
            if now >= self._due:
                self._due = now + INTERVAL_S
                since = picture.past[-1].at if picture.past else 0.0
                whose = picture.selected if picture.is_detailed else ""
                self._asked = self._thread.submit(self._source.get, since, whose)
            return False
        if not self._asked.done():
            return False
        answer, self._asked = self._asked, None
        try:
            view = answer.result()
        except UnavailableError as error:
            picture.trouble = str(error)
            return True
        picture.view, picture.trouble, picture.seen_at = view, "", now
        picture.past.extend(view.history)
        ids = [one.id for one in view.workers]
        if picture.selected not in ids:
            self._show(ids[0] if ids else "", False)
        return True

    def _press(self, key: str) -> None:
        picture = self._picture
        ids = [one.id for one in picture.view.workers] if picture.view else []
        if not ids:
            return
        at = ids.index(picture.selected)
        if key in UP:
            self._show(ids[max(0, at - 1)], picture.is_detailed)
        elif key in DOWN:
            self._show(ids[min(len(ids) - 1, at + 1)], picture.is_detailed)
        elif key in ENTER:
            self._show(picture.selected, True)
        elif key == ESCAPE:
            self._show(picture.selected, False)

    def _show(self, selected: str, is_detailed: bool) -> None:
        """Selects a worker, or all. If that changes the history, it is requested at once."""
        picture = self._picture
        was = picture.selected if picture.is_detailed else ""
        picture.selected, picture.is_detailed = selected, is_detailed
        if was != (selected if is_detailed else ""):
            picture.past.clear()
            self._asked, self._due = None, 0.0


def _print_on(source: Source, console: Console) -> None:
    """Prints one picture after another, for output without a screen: a file, a pipe, a plain terminal. Raises
    UnavailableError if the first request fails, so that a script notices it."""
    picture = Picture(source.url)
    while True:
        try:
            picture.view = source.get(picture.past[-1].at if picture.past else 0.0)
            picture.past.extend(picture.view.history)
            picture.trouble, picture.seen_at = "", time.monotonic()
        except UnavailableError as error:
            if picture.view is None:
                raise
            picture.trouble = str(error)
        console.print(picture)
        console.print()
        time.sleep(INTERVAL_S)


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Makes the terminal deliver keys at once and without echo inside the block. Yields their file number."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _pressed(keyboard: int, patience_s: float) -> list[str]:
    """Yields the pressed keys, and waits for one for `seconds`. A closed keyboard quits."""
    if not select.select([keyboard], [], [], patience_s)[0]:
        return []
    data = os.read(keyboard, 1024).decode(errors="replace")
    return re.findall(r"\x1b[\[O][A-Z]|.", data, re.DOTALL) if data else [QUIT]

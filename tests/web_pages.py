"""The server's pages in headless Chromium: what the tests of all of them need. A test file imports the fixtures
chromium and browser by name."""

import contextlib
import os
import re
import shutil
import subprocess

import pytest
from playwright.sync_api import sync_playwright

from shoal.server.operator.web_page import web_page

CHROMIUM = "/usr/bin/chromium"
# Without these the browser calls home.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 60_000  # the machine may be busy


@pytest.fixture(scope="session")
def chromium():
    """Debian's Chromium, installed if we may."""
    if not os.path.exists(CHROMIUM):
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(f"needs {CHROMIUM}: apt-get install chromium (only root on Debian may)")
        for command in (
            ["apt-get", "update"],
            ["apt-get", "install", "-y", "--no-install-recommends", "chromium"],
        ):
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            )
            if done.returncode:
                pytest.skip(f"{' '.join(command)} failed: {done.stderr[-300:]}")
    return CHROMIUM


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def pages_of(browser):
    """Yields new_page(origin, width, height, **options) -> an empty page in a fresh profile, for the server at
    `origin`. At its end, fails the test if a page called elsewhere, broke, or was refused something by its
    policy."""
    contexts, requested, broken, origins = [], [], [], set()

    def heard(message):
        if "Content Security Policy" in message.text:
            broken.append(message.text)

    def new_page(origin, width, height, **options):
        origins.add(origin)
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.on("console", heard)
        return page

    yield new_page
    for context in contexts:
        context.close()
    assert requested and all(url.startswith((*origins, "data:")) for url in requested), requested
    assert not broken


def brightness(page):
    """The brightness of its background: 0 is black, 765 is white."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def check_names(page, kinds):
    """All elements of these kinds say what they are, also to a reader who does not see them."""
    for element in page.locator(kinds).all():
        name = element.evaluate(
            "e => (e.ariaLabel || e.textContent || [...(e.labels || [])].map(l => l.textContent).join('')).trim()"
        )
        assert name, element.evaluate("e => e.outerHTML")


def check_small_and_strict(name, most_bytes, num_inlined):
    """num_inlined: the scripts, libraries included, and styles whose hashes the page's policy names."""
    page, headers = web_page(name)
    policy = headers["content-security-policy"]
    assert len(page) < most_bytes and not re.search(rb"<[^>]+ style=", page)
    assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("'sha256-") == num_inlined

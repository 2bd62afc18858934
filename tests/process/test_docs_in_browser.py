"""/docs in headless Chromium: on a phone and on a desk, in light and dark, by keyboard."""

import re

import pytest
from playwright.sync_api import expect

from tests.fake_server import FakeServer
from tests.web_pages import WAIT_MS, browser, chromium  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def url():
    with FakeServer() as server:
        yield server.url


@pytest.fixture
def open_docs(browser, url):  # noqa: F811 - the fixture
    """open_docs(width=..., color_scheme=...) -> the page. It asks for nothing else and keeps its policy."""
    contexts, requested, broken = [], [], []

    def open_docs(width=1100, height=760, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: requested.append(request.url))
        page.on("console", lambda message: broken.append(message.text))
        page.goto(url + "/docs")
        return page

    yield open_docs
    for context in contexts:
        context.close()
    assert set(requested) <= {url + "/docs", url + "/favicon.ico"}
    assert not [text for text in broken if "favicon" not in text and "404" not in text], broken


def test_an_endpoint_opens_to_its_fields_and_example(open_docs):
    page = open_docs()
    endpoint = page.locator("details", has_text="/v1/chat/completions").first
    expect(endpoint.locator("pre")).not_to_be_visible()
    endpoint.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(endpoint.locator("pre")).to_contain_text('"model": "tiny"')
    expect(endpoint.get_by_text("temperature", exact=True)).to_be_visible()
    endpoint.get_by_role("link", name="StreamOptions").first.click()
    assert page.url.endswith("#StreamOptions")
    expect(page.locator("#StreamOptions summary")).to_be_in_viewport()


def test_a_phone_needs_no_sideways_scrolling(open_docs):
    page = open_docs(360, 640, has_touch=True, is_mobile=True, device_scale_factor=2)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert all(one.bounding_box()["height"] >= 40 for one in page.locator("summary").all()[:5])


def test_light_and_dark_follow_the_system(open_docs):
    def brightness(page):
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", color)[:3])

    assert brightness(open_docs(color_scheme="light")) > 600
    assert brightness(open_docs(color_scheme="dark")) < 150

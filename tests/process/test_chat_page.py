"""The chat page in headless Chromium, against the real server over a fake engine.

python -m tests.process.test_chat_page http://127.0.0.1:8000 docs/images/chat.png    makes the picture in the docs, of a server that runs.
"""

import argparse
import os
import re
import shutil
import subprocess

import pytest
from playwright.sync_api import expect, sync_playwright

from shoal.fake import FakeEngine
from shoal.server.chat_page import chat_page
from tests.fake_server import FakeServer, eventually

CHROMIUM = "/usr/bin/chromium"
# Without these the browser calls home.
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
WAIT_MS = 60_000    # the machine may be busy
TEXT = """# Tides
Tides are the **slow** breathing of the *sea*. Twice a day the water comes up the beach, and twice a day it goes back.

1. The moon pulls at the water, and the side that faces it bulges.
2. The earth turns under the bulge:
   - where the bulge is, it is high tide
   - in between, it is low tide

```python
print("high & low")
```"""


class Served(FakeServer):
    def say(self, text, token_seconds=0.002):
        super().say(text, token_seconds)

    def wait_until_idle(self):
        eventually(lambda: not self.metric("vllm:num_requests_running"))


@pytest.fixture(scope="module")
def served():
    with Served(FakeEngine(300, ends=True), model={"max_model_len": 8192}) as server:
        yield server


@pytest.fixture(scope="session")
def chromium():
    """Debian's Chromium, installed if we may."""
    if not os.path.exists(CHROMIUM):
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(f"needs {CHROMIUM}: apt-get install chromium (only root on Debian may)")
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
            if done.returncode:
                pytest.skip(f"{' '.join(command)} failed: {done.stderr[-300:]}")
    return CHROMIUM


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, served):
    """open_page(width=..., color_scheme=...) -> a page in a fresh profile. Fails the test if the page called elsewhere or broke."""
    contexts, requested, broken, origins = [], [], [], set()

    def open_page(width=1100, height=760, server=served, num_models=1, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: broken.append(str(error)))
        page.on("console", lambda message: broken.append(message.text) if "Content Security Policy" in message.text else None)
        page.goto(server.url + "/")
        origins.add(server.url)
        expect(page.locator("#model option")).to_have_count(num_models, timeout=WAIT_MS)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert requested and all(url.startswith((*origins, "data:")) for url in requested), requested
    assert not broken


def ask(page, text, wait=True):
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    if wait:
        expect(page.locator(".turn.assistant").last).to_have_attribute("aria-busy", "false", timeout=WAIT_MS)
    return page.locator(".turn.assistant").last


def test_an_answer_streams_in_with_its_speed(open_page, served):
    served.say(TEXT)
    page = open_page()
    turn = ask(page, "Explain tides to a child")
    expect(turn.locator(".foot span")).to_have_text(re.compile(r"^\d+\.\d\d s to first token · [\d.]+ tokens/s · \d+ tokens"))
    assert [m.inner_text() for m in page.locator(".turn.user").all()] == ["Explain tides to a child"]
    assert turn.locator(".body h3").inner_text() == "Tides" and turn.locator(".body strong").inner_text() == "slow"
    assert turn.locator(".body li").count() == 4 and turn.locator(".body li li").count() == 2
    assert turn.locator(".body pre code").inner_text() == 'print("high & low")'


def test_text_is_never_read_as_html(open_page, served):
    served.say('<img src=x onerror="document.title=1"> **<b>x</b>** [a](javascript:alert(1)) [b](https://example.com/?q=<script>) `<i>`')
    page = open_page()
    turn = ask(page, '<script>document.title = "broken"</script>')
    assert page.title() == "Shoal" and turn.locator("img, b, i, script").count() == 0
    assert '<img src=x onerror="document.title=1">' in turn.locator(".body").inner_text()
    assert all(a.get_attribute("href").startswith("https://") for a in turn.locator("a").all())
    assert page.locator(".turn.user").inner_text() == '<script>document.title = "broken"</script>'


def test_stop_ends_the_request_in_the_engine(open_page, served):
    served.say("and so on " * 1000, token_seconds=0.05)
    page = open_page()
    turn = ask(page, "Go on for ever", wait=False)
    expect(turn.locator(".body")).to_contain_text("and so on", timeout=WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    expect(turn.locator(".foot span")).to_have_text(re.compile("about .* stopped"), timeout=WAIT_MS)
    served.wait_until_idle()    # long before the 2,000 tokens would be out
    served.say("Fine.")
    assert ask(page, "And now?").locator(".body").inner_text() == "Fine."    # the conversation goes on
    assert "and so on" in served.last_prompt()


def test_settings_reach_the_request_and_are_kept(open_page, served):
    served.say("Yes.")
    page = open_page()
    page.get_by_role("button", name="Settings").click()
    for label, value in (("System prompt", "Be brief."), ("Temperature", "0.25"), ("Top p", "0.5"), ("Top k", "7"), ("Min p", "0.125"),
                         ("Max tokens", "33"), ("Seed", "11"), ("Repetition penalty", "1.5"), ("Presence penalty", "-1"),
                         ("Frequency penalty", "2"), ("Stop strings", "END\nFIN")):
        page.get_by_label(label).fill(value)
    page.keyboard.press("Escape")
    ask(page, "Really?")
    params = served.last_request().params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens, params.seed) == (0.25, 0.5, 7, 0.125, 33, 11)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, -1, 2)
    assert params.stop == ["END", "FIN"] and "Be brief." in served.last_prompt()
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").input_value() == "0.25" and page.get_by_label("System prompt").input_value() == "Be brief."


def test_errors_are_shown_and_the_question_can_be_asked_again(open_page, served):
    served.say("Better.")
    page = open_page()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("999999")
    page.get_by_role("button", name="Close").click()
    turn = ask(page, "Too much?")
    expect(turn.get_by_role("alert")).to_have_text(re.compile(r"999999.*\(400, "))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".turn.assistant .body")).to_have_text("Better.", timeout=WAIT_MS)
    assert page.locator(".turn").count() == 2 and page.get_by_role("alert").count() == 0


def test_thoughts_are_folded(open_page):
    with Served(FakeEngine(300, ends=True), model={"max_model_len": 8192, "reasoning_parser": "qwen3"}) as server:
        server.say("<think>\nLet me see.\n</think>\n\nIt is four.")
        page = open_page(server=server)
        turn = ask(page, "Two and two?")
        assert turn.locator(".body").inner_text() == "It is four." and not turn.get_by_text("Let me see.").is_visible()
        turn.get_by_text("Thoughts").click()
        assert turn.get_by_text("Let me see.").is_visible()
        ask(page, "Sure?")
        assert "four" in server.last_prompt() and "Let me see" not in server.last_prompt()


def test_a_key_is_asked_for_and_kept_with_the_tab(open_page):
    with Served(FakeEngine(300, ends=True), api_key=["sesame"]) as server:
        server.say("Open.")
        page = open_page(server=server, num_models=0)
        expect(page.get_by_role("alert")).to_have_text(re.compile("401.*Settings"))
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Close").click()
        expect(page.locator("#model option")).to_have_count(1, timeout=WAIT_MS)
        assert ask(page, "Open?").locator(".body").inner_text() == "Open." and not page.get_by_role("alert").is_visible()
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)") and "sesame" in page.evaluate("JSON.stringify(sessionStorage)")


def test_keys_write_lines_and_send(open_page, served):
    served.say("Ok.")
    page = open_page()
    message = page.get_by_label("Message")
    message.press_sequentially("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    message.press("Enter")
    expect(page.locator(".turn.assistant .body")).to_have_text("Ok.", timeout=WAIT_MS)
    assert page.locator(".turn.user").inner_text() == "one\ntwo" and message.input_value() == ""
    message.press("Enter")    # nothing to send
    assert page.locator(".turn").count() == 2
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0
    page.reload()
    expect(page.get_by_text("What would you like to know?")).to_be_visible()


def test_a_phone_needs_no_sideways_scrolling(open_page, served):
    served.say(TEXT + "\n\n```\n" + "long " * 80 + "\n```\n" + "x" * 300)
    page = open_page(360, 640, has_touch=True, is_mobile=True, device_scale_factor=2)
    ask(page, "y" * 200)
    fits = "document.documentElement.scrollWidth <= innerWidth && scroll.scrollWidth <= scroll.clientWidth"
    assert page.evaluate(fits)
    box = page.get_by_role("button", name="Send").bounding_box()
    assert box["x"] + box["width"] <= 360 and box["y"] + box["height"] <= 640 and min(box["width"], box["height"]) >= 40
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(fits)
    dialog = page.locator("dialog").bounding_box()
    assert dialog["x"] >= 0 and dialog["width"] <= 360


def test_light_and_dark_follow_the_system_and_the_switch(open_page):
    def brightness(page):
        return sum(int(part) for part in re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])

    light, dark = open_page(color_scheme="light"), open_page(color_scheme="dark")
    assert brightness(light) > 600 and brightness(dark) < 150
    switch = dark.get_by_role("button", name="Theme")
    seen = []
    for _ in range(3):
        switch.click()
        seen.append(brightness(dark) > 600)
    assert seen == [True, False, False] and "system" in switch.get_attribute("aria-label")


def test_everything_has_a_name(open_page):
    page = open_page()
    for element in page.locator("button, select, textarea, input").all():
        name = element.evaluate("e => (e.ariaLabel || e.textContent || [...(e.labels || [])].map(l => l.textContent).join('')).trim()")
        assert name, element.evaluate("e => e.outerHTML")


def test_the_page_is_small_and_its_policy_strict():
    page, headers = chat_page()
    policy = headers["content-security-policy"]
    assert len(page) < 25_000 and b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"") and b"style=" not in page
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("'sha256-") == 2


def make_picture(url, path, question):
    """Asks the server at `url` and keeps what the page looks like then."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1100, "height": 700})
        page.goto(url)
        expect(page.locator("#model option").first).to_be_attached()
        ask(page, question)
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("path")
    parser.add_argument("--question", default="Explain tides to a child")
    make_picture(**vars(parser.parse_args()))

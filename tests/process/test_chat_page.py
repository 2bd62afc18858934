"""The chat page in headless Chromium, against the real server over a fake engine.

python -m tests.process.test_chat_page http://127.0.0.1:8000 docs/images/chat.png    makes the picture in the
docs, of a server that runs.
"""

import argparse
import json
import re

import pytest
from playwright.sync_api import expect, sync_playwright

from shoal.fake_engine import FakeEngine
from tests.fake_server import FakeServer
from tests.waiting import eventually
from tests.web_pages import (
    CHROMIUM,
    FLAGS,
    WAIT_MS,
    brightness,
    browser,  # noqa: F401 - a fixture
    check_names,
    check_small_and_strict,
    chromium,  # noqa: F401 - a fixture
    pages_of,
)

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


@pytest.fixture
def open_page(browser, served):  # noqa: F811 - the fixture
    """open_page(width=..., color_scheme=...) -> a page in a fresh profile."""
    with pages_of(browser) as new_page:

        def open_page(width=1100, height=760, server=served, num_models=1, **options):
            page = new_page(server.url, width, height, **options)
            page.goto(server.url + "/")
            expect(page.locator("#model option")).to_have_count(num_models, timeout=WAIT_MS)
            return page

        yield open_page


def reload(page, num_models=1):
    """The page takes no message until the models are there."""
    page.reload()
    expect(page.locator("#model option")).to_have_count(num_models, timeout=WAIT_MS)


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
    expect(turn.locator(".figures")).to_have_text(
        re.compile(r"^\d+\.\d\d s to first token · [\d.]+ tokens/s · \d+ tokens")
    )
    assert page.locator(".turn.user .body").all_inner_texts() == ["Explain tides to a child"]
    assert (
        turn.locator(".body h3").inner_text() == "Tides"
        and turn.locator(".body strong").inner_text() == "slow"
    )
    assert turn.locator(".body li").count() == 4 and turn.locator(".body li li").count() == 2
    assert turn.locator(".body pre code").text_content() == 'print("high & low")'


def test_text_is_never_read_as_html(open_page, served):
    served.say(
        '<img src=x onerror="document.title=1"> **<b>x</b>** [a](javascript:alert(1)) '
        "[b](https://example.com/?q=<script>) `<i>`"
    )
    page = open_page()
    turn = ask(page, '<script>document.title = "broken"</script>')
    assert page.title() == "Shoal" and turn.locator("img, b, i, script").count() == 0
    assert '<img src=x onerror="document.title=1">' in turn.locator(".body").inner_text()
    assert all(a.get_attribute("href").startswith("https://") for a in turn.locator("a").all())
    assert page.locator(".turn.user .body").inner_text() == '<script>document.title = "broken"</script>'
    assert page.locator("#list .title").inner_text() == '<script>document.title = "broken"</script>'


def test_a_file_is_never_read_as_html(open_page, served):
    served.say("```html\n<img src=x onerror='document.title=1'>\n```\n\n| <b>x</b> |\n|---|\n| <i>y</i> |")
    page = open_page()
    drop(page, "<img src=x onerror=document.title=1>.txt", b"<script>document.title = 1</script>")
    expect(page.locator("#files li")).to_contain_text("<img src=x onerror=document.title=1>.txt")
    turn = ask(page, "")
    assert page.title() == "Shoal" and page.locator("#chat img, #chat script, #chat i, #chat b").count() == 0
    expect(page.locator(".turn.user summary")).to_contain_text("<img src=x onerror=document.title=1>.txt")
    assert turn.locator("pre code").text_content() == "<img src=x onerror='document.title=1'>"


def test_stop_ends_the_request_in_the_engine(open_page, served):
    served.say("and so on " * 1000, token_seconds=0.05)
    page = open_page()
    turn = ask(page, "Go on for ever", wait=False)
    expect(turn.locator(".body")).to_contain_text("and so on", timeout=WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    expect(turn.locator(".figures")).to_have_text(re.compile("about .* stopped"), timeout=WAIT_MS)
    served.wait_until_idle()  # long before the 2,000 tokens would be out
    served.say("Fine.")
    assert ask(page, "And now?").locator(".body").inner_text() == "Fine."  # the conversation goes on
    assert "and so on" in served.last_prompt()
    page.reload()
    expect(page.locator(".turn.assistant .body").first).to_contain_text("and so on")  # what there was stays


def test_settings_reach_the_request_and_are_kept(open_page, served):
    served.say("Yes.")
    page = open_page()
    page.get_by_role("button", name="Settings").click()
    for label, value in (
        ("System prompt", "Be brief."),
        ("Temperature", "0.25"),
        ("Top p", "0.5"),
        ("Top k", "7"),
        ("Min p", "0.125"),
        ("Max tokens", "33"),
        ("Seed", "11"),
        ("Repetition penalty", "1.5"),
        ("Presence penalty", "-1"),
        ("Frequency penalty", "2"),
        ("Stop strings", "END\nFIN"),
    ):
        page.get_by_label(label).fill(value)
    page.keyboard.press("Escape")
    ask(page, "Really?")
    params = served.last_request().params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens, params.seed) == (
        0.25,
        0.5,
        7,
        0.125,
        33,
        11,
    )
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, -1, 2)
    assert params.stop == ["END", "FIN"] and "Be brief." in served.last_prompt()
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Settings").click()
    assert (
        page.get_by_label("Temperature").input_value() == "0.25"
        and page.get_by_label("System prompt").input_value() == "Be brief."
    )
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New conversation").click()  # has settings of its own
    ask(page, "Really?")
    assert served.last_request().params.temperature == 1 and "Be brief." not in served.last_prompt()


def test_settings_show_the_models_own_sampling_fields(open_page):
    with Served(
        FakeEngine(300, ends=True),
        model={"generation_config": {"do_sample": True, "temperature": 0.25, "repetition_penalty": 1.5}},
    ) as server:
        page = open_page(server=server)
        page.get_by_role("button", name="Settings").click()
        for label, value in (("Temperature", "0.25"), ("Repetition penalty", "1.5"), ("Top k", "default")):
            expect(page.get_by_label(label)).to_have_attribute("placeholder", value)
        expect(page.get_by_label("Seed")).to_have_attribute("placeholder", "random")


def test_errors_are_shown_and_a_retry_asks_again(open_page, served):
    served.say("Better.")
    page = open_page()
    served.engine.refuses = "this question is refused"
    try:
        turn = ask(page, "Too much?")
        expect(turn.get_by_role("alert")).to_have_text(re.compile(r"this question is refused \(400, "))
        expect(page.get_by_role("button", name="Retry")).to_be_in_viewport()
    finally:
        served.engine.refuses = None
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn.assistant .body")).to_have_text("Better.", timeout=WAIT_MS)
    assert page.locator(".turn").count() == 2 and page.get_by_role("alert").count() == 0


def test_a_retry_replaces_the_answer_unless_it_brings_none(open_page, served):
    served.say("First.")
    page = open_page()
    ask(page, "Which?")
    served.say("Second.")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn.assistant .body")).to_have_text("Second.", timeout=WAIT_MS)
    assert page.locator(".turn").count() == 2 and "First." not in served.last_prompt()

    url, alert = "**/v1/chat/completions", page.locator(".turn.assistant").get_by_role("alert")
    page.route(url, lambda route: route.fulfill(status=503, body="asleep", headers={"Retry-After": "7"}))
    page.get_by_role("button", name="Retry").click()
    expect(alert).to_have_text("asleep (503) Retry in 7 s.", timeout=WAIT_MS)
    page.route(url, lambda route: route.abort())  # as when the server is gone
    page.get_by_role("button", name="Retry").click()
    expect(alert).to_contain_text("does not answer", timeout=WAIT_MS)
    page.reload()
    assert page.locator(".turn.assistant .body").inner_text() == "Second."
    assert page.locator(".turn").count() == 2


def test_the_last_question_can_be_edited(open_page, served):
    served.say("Yes.")
    page = open_page()
    ask(page, "One?")
    ask(page, "Two?")
    page.get_by_label("Message").fill("a draft")
    page.get_by_role("button", name="Edit this question").last.click()
    assert page.get_by_label("Message").input_value() == "Two?"
    page.keyboard.press("Escape")
    assert page.get_by_label("Message").input_value() == "a draft"
    page.get_by_role("button", name="Edit this question").last.click()
    ask(page, "Three?")
    expect(page.locator(".turn.user .body")).to_have_text(["One?", "Three?"])
    assert "Three?" in served.last_prompt() and "Two?" not in served.last_prompt()


def versions(turn):
    return turn.locator(".versions .count").inner_text()


def test_answers_are_kept_as_versions(open_page, served):
    """Regression: a retry deleted the answer that was there."""
    served.say("First.")
    page = open_page()
    ask(page, "Which?")
    ask(page, "And then?")
    first = page.locator(".turn.assistant").first
    for text in ("Second.", "Third."):
        served.say(text)
        first.get_by_role("button", name="Retry").click()
        expect(first.locator(".body")).to_have_text(text, timeout=WAIT_MS)
        expect(first).to_have_attribute("aria-busy", "false", timeout=WAIT_MS)
    assert page.locator(".turn").count() == 2 and versions(first) == "3/3"
    assert "And then?" not in served.last_prompt()
    first.get_by_role("button", name="Earlier version").click()
    assert first.locator(".body").inner_text() == "Second." and versions(first) == "2/3"
    first.get_by_role("button", name="Earlier version").click()
    assert first.get_by_role("button", name="Earlier version").is_disabled()
    assert page.locator(".turn .body").all_inner_texts() == ["Which?", "First.", "And then?", "First."]
    reload(page)
    assert page.locator(".turn").count() == 4 and versions(page.locator(".turn.assistant").first) == "1/3"
    served.say("Fourth.")
    ask(page, "More?")
    assert "And then?" in served.last_prompt() and "Second." not in served.last_prompt()


def test_every_turn_can_be_edited(open_page, served):
    served.say("Yes.")
    page = open_page()
    for text in ("One?", "Two?", "Three?"):
        ask(page, text)
    page.get_by_role("button", name="Edit this question").first.click()
    assert page.get_by_label("Message").input_value() == "One?"
    ask(page, "Other?")
    assert page.locator(".turn .body").all_inner_texts() == ["Other?", "Yes."]
    question = page.locator(".turn.user").first
    question.get_by_role("button", name="Earlier version").click()
    assert page.locator(".turn").count() == 6 and versions(question) == "1/2"

    page.get_by_label("Message").fill("a draft")
    page.get_by_role("button", name="Edit this answer").nth(1).click()
    assert not page.get_by_role("button", name="Attach").is_visible()
    page.get_by_label("Message").fill("No, **never**.")
    page.keyboard.press("Enter")
    assert page.get_by_label("Message").input_value() == "a draft"
    texts = ["One?", "Yes.", "Two?", "No, never."]
    assert page.locator(".turn .body").all_inner_texts() == texts
    assert versions(page.locator(".turn.assistant").last) == "2/2"
    ask(page, "Sure?")
    assert "No, **never**." in served.last_prompt() and "Three?" not in served.last_prompt()


def test_an_answer_that_was_stopped_goes_on(open_page, served):
    served.say("and so on " * 1000, token_seconds=0.02)
    page = open_page()
    turn = ask(page, "Go on", wait=False)
    expect(turn.locator(".body")).to_contain_text("and so on and", timeout=WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    proceed = turn.get_by_role("button", name="Continue")
    expect(proceed).to_be_visible(timeout=WAIT_MS)
    had = turn.locator(".body").inner_text()
    reload(page)
    served.say(" THE END")
    turn = page.locator(".turn.assistant")
    with page.expect_request("**/v1/chat/completions") as asked:
        proceed.click()
    body = asked.value.post_data_json
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][-1]["role"] == "assistant" and body["messages"][-1]["content"].startswith(had)
    expect(turn.locator(".body")).to_contain_text("THE END", timeout=WAIT_MS)
    expect(turn).to_have_attribute("aria-busy", "false", timeout=WAIT_MS)
    assert turn.locator(".body").inner_text().startswith(had) and not proceed.is_visible()
    assert page.locator(".turn").count() == 2


def test_a_full_conversation_drops_its_oldest_turns_and_says_so(open_page):
    """Regression: a conversation that filled the context got an error for every further question."""
    with Served(FakeEngine(300, ends=True), model={"max_model_len": 400}) as server:
        server.say("An answer of thirty letters ok")
        page = open_page(server=server)
        meter, dropped = page.locator("#context span"), page.locator(".dropped")
        ask(page, "Question 0 of twelve?")
        expect(meter).to_have_text(re.compile(r"^\d\d of 400 tokens$"))
        assert not dropped.count()
        for i in range(1, 12):
            turn = ask(page, f"Question {i} of twelve?")
            assert turn.locator(".body").inner_text() == "An answer of thirty letters ok"
        assert page.locator(".turn").count() == 24 and page.get_by_role("alert").count() == 0
        expect(dropped).to_have_text(re.compile(r"The \d+ turns above no longer fit the model's context"))
        assert "Question 0" not in server.last_prompt() and "Question 10" in server.last_prompt()
        used = int(meter.inner_text().split()[0])
        assert 100 < used <= 400
        reload(page)
        expect(dropped).to_be_visible()
        assert page.locator("#log > *").nth(0).inner_text().startswith("Question 0")

        turn = ask(page, "long " * 100)
        expect(turn.get_by_role("alert")).to_contain_text("too long for the model")
        server.say("Fine.")
        assert ask(page, "short?").locator(".body").inner_text() == "Fine."


def test_a_conversation_with_room_stays_whole(open_page):
    """Regression: the template's own tokens, in proportion to a short first question, made the page drop it."""
    with Served(
        FakeEngine(300, ends=True), model={"max_model_len": 700, "reasoning_parser": "qwen3"}
    ) as server:
        server.say("<think>" + "hm " * 60 + "</think>" + "A longer answer. " * 6)
        page = open_page(server=server)
        ask(page, "Hi")
        server.say("Yes.")
        ask(page, "b" * 250)
        assert page.locator(".dropped").count() == 0 and "Hi" in server.last_prompt()
        ask(page, "c" * 250)
        assert page.locator(".dropped").count() == 1 and "b" * 250 not in server.last_prompt()


def test_the_server_has_the_last_word_on_what_fits(open_page):
    """A conversation that came from elsewhere has no counts of tokens; the page learns from the refusal."""
    with Served(FakeEngine(300, ends=True), model={"max_model_len": 400}) as server:
        server.say("Yes.")
        page = open_page(server=server)
        page.evaluate("""() => {
            current = readConversation({messages: [..."abcdef"].flatMap(letter => [
                {role: "user", content: letter.repeat(60)}, {role: "assistant", content: "ok"}])});
            showConversation();
        }""")
        assert ask(page, "Well?").locator(".body").inner_text() == "Yes."
        assert "a" * 60 not in server.last_prompt() and "f" * 60 in server.last_prompt()
        expect(page.locator(".dropped")).to_contain_text("no longer fit")


def test_a_page_that_was_opened_too_early_finds_its_models(open_page, served):
    """Regression: a page opened while a fleet started took no message until it was loaded again."""
    served.say("Here.")
    page = open_page()
    answers = [
        {"status": 503, "body": "starting"},
        {"json": {"object": "list", "data": []}},
        {"json": {"object": "list", "data": []}},
    ]
    page.route(
        "**/v1/models", lambda route: route.fulfill(**answers.pop(0)) if answers else route.continue_()
    )
    page.reload()
    notice = page.locator("#notice")
    expect(notice).to_contain_text("asks again")
    page.get_by_label("Message").fill("Anybody there?")
    page.keyboard.press("Enter")
    assert page.get_by_label("Message").input_value() == "Anybody there?"
    expect(page.locator("#model option")).to_have_count(1, timeout=WAIT_MS)
    expect(notice).not_to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .body")).to_have_text("Here.", timeout=WAIT_MS)


def test_two_tabs_keep_the_turns_of_both(open_page, served):
    """Regression: the tab that wrote last overwrote the other's turns."""
    served.say("Yes.")
    page = open_page()
    ask(page, "One?")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("#model option")).to_have_count(1, timeout=WAIT_MS)
    ask(other, "Two?")
    expect(page.locator(".turn.user .body")).to_have_text(["One?", "Two?"], timeout=WAIT_MS)

    served.say("and so on " * 20, token_seconds=0.005)
    ask(page, "Left?", wait=False)
    ask(other, "Right?")
    expect(page.locator(".turn.assistant").last).to_have_attribute("aria-busy", "false", timeout=WAIT_MS)
    for tab in (page, other):
        tab.wait_for_function("storedConversations()[0].messages.filter(m => m.content).length === 8")
        reload(tab)
        expect(tab.locator(".turn.user").nth(2).locator(".count")).to_have_text(re.compile("./2"))
    kept = page.evaluate("storedConversations()[0].messages.map(({content}) => content)")
    assert {"One?", "Two?", "Left?", "Right?"} <= set(kept) and kept.count("and so on " * 20) == 2

    served.engine.refuses = "refused"
    try:
        ask(page, "Failing?")
    finally:
        served.engine.refuses = None
    reload(other)
    expect(other.locator(".turn").get_by_role("alert")).to_be_visible()
    page.locator(".turn.assistant").last.get_by_role("button", name="Retry").click()
    expect(other.locator(".turn").get_by_role("alert")).to_have_count(0, timeout=WAIT_MS)

    page.get_by_role("button", name="New conversation").click()
    ask(page, "Another")
    expect(other.locator("#list .title")).to_have_count(2)
    page.get_by_role("button", name="Delete Another").click()
    expect(other.locator("#list .title")).to_have_count(1)


def test_conversations_of_older_pages_are_read(open_page, served):
    served.say("Yes.")
    page = open_page()
    page.evaluate("""localStorage.setItem("shoal.chat.old", JSON.stringify({id: "old", title: "Old", changed: 5,
        model: "tiny", options: {}, messages: [{role: "user", content: "One?"},
        {role: "assistant", content: "First.", reasoning: ""}]}))""")
    reload(page)
    page.get_by_role("button", name="Old", exact=True).click()
    ask(page, "Two?")
    reload(page)
    assert page.locator(".turn .body").all_inner_texts() == ["One?", "First.", "Two?", "Yes."]


def test_search_finds_titles_and_texts(open_page, served):
    page = open_page()
    for question, text in (("Why is the sky blue?", "It scatters."), ("Why tides?", "The moon pulls.")):
        served.say(text)
        page.get_by_role("button", name="New conversation").click()
        ask(page, question)
    page.keyboard.press("Control+k")
    page.keyboard.type("MOON")
    assert page.locator("#list .title").all_inner_texts() == ["Why tides?\nThe moon pulls."]
    page.get_by_label("Search conversations").fill("sky")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .body")).to_have_text("It scatters.")
    page.get_by_label("Search conversations").fill("fish")
    expect(page.get_by_role("status")).to_have_text("No conversation has these words.")
    page.get_by_label("Search conversations").fill("")
    assert len(titles(page)) == 2


def test_conversations_are_exported_and_imported(open_page, served, tmp_path):
    served.say("First.")
    page = open_page()
    drop(page, "a.txt", b"text")
    ask(page, "Which one?")
    served.say("Second $x$.")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn.assistant .body")).to_contain_text("Second", timeout=WAIT_MS)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    files = {}
    for name in ("This one as Markdown", "This one as JSON", "All as JSON"):
        with page.expect_download() as found:
            page.get_by_role("button", name=name).click()
        files[found.value.suggested_filename] = tmp_path / found.value.suggested_filename
        found.value.save_as(tmp_path / found.value.suggested_filename)
    assert list(files) == ["Which-one.md", "Which-one.json", "conversations.json"]
    asked = "File a.txt:\n```\ntext\n```\n\nWhich one?"
    assert files["Which-one.md"].read_text() == (
        f"# Which one?\n\n**You**\n\n{asked}\n\n**Answer**\n\nSecond $x$.\n"
    )
    body = json.loads(files["Which-one.json"].read_text())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "Second $x$."},
    ]
    assert body.pop("shoal") and body == {"model": "tiny", "messages": messages, "temperature": 0.5}
    assert served.json("/v1/chat/completions", body)[0] == 200

    other = open_page()
    saved = tmp_path / "saved.json"  # as `shoal chat` writes it
    saved.write_text(json.dumps({**body, "stop": ["END"]}))
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[1]")
    other.get_by_role("button", name="Settings").click()
    other.set_input_files("#import-file", [saved, files["conversations.json"], wrong])
    expect(other.get_by_role("alert")).to_have_text(
        "2 conversations are imported. “wrong.json” cannot be imported: it holds no conversations.Dismiss"
    )
    assert len(titles(other)) == 2 and versions(other.locator(".turn.assistant")) == "2/2"
    reload(other)
    other.locator("#list .title").filter(has_text="File a.txt").click()
    other.get_by_role("button", name="Settings").click()
    fields = [
        other.get_by_label(name).input_value() for name in ("System prompt", "Temperature", "Stop strings")
    ]
    assert fields == ["Be brief.", "0.5", "END"]


def titles(page):
    return [button.inner_text() for button in page.locator("#list .title").all()]


def test_conversations_outlive_a_reload_and_can_be_switched_renamed_and_deleted(open_page, served):
    page = open_page()
    served.say("It scatters.")
    ask(page, "Why is the sky blue?")
    page.get_by_role("button", name="New conversation").click()
    served.say("The moon.")
    ask(page, "Why are there tides?")
    assert "sky" not in served.last_prompt()
    page.reload()
    expect(page.locator(".turn.user .body")).to_have_text("Why are there tides?")
    assert titles(page) == ["Why are there tides?", "Why is the sky blue?"]

    page.get_by_role("button", name="Why is the sky blue?", exact=True).click()
    expect(page.locator(".turn.assistant .body")).to_have_text("It scatters.")
    page.go_back()
    expect(page.locator(".turn.assistant .body")).to_have_text("The moon.")

    page.get_by_role("button", name="Rename Why are there tides?").click()
    page.get_by_label("Title").fill("Tides")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Why is the sky blue?", exact=True).hover()  # shows the row's buttons
    page.get_by_role("button", name="Delete Why is the sky blue?").click()
    assert titles(page) == ["Tides"]
    page.get_by_role("button", name="Undo").click()
    assert titles(page) == ["Tides", "Why is the sky blue?"]
    page.get_by_role("button", name="Delete Tides").click()  # the one that is shown
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    assert titles(page) == ["Why is the sky blue?"]


def test_an_answer_goes_on_while_another_conversation_is_shown(open_page, served):
    served.say("and so on " * 40, token_seconds=0.004)
    page = open_page()
    ask(page, "Go on", wait=False)
    expect(page.locator(".turn.assistant .body")).to_contain_text("and so on", timeout=WAIT_MS)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#list .running")).to_have_count(1)
    expect(page.locator("#list .running")).to_have_count(0, timeout=WAIT_MS)
    assert page.locator(".turn").count() == 0
    page.get_by_role("button", name="Go on", exact=True).click()
    assert page.locator(".turn.assistant .body").inner_text() == ("and so on " * 40).strip()


def test_the_oldest_conversations_make_room(open_page, served):
    served.say("Yes.")
    page = open_page()
    page.evaluate("""for (let i = 0; i < MOST_CONVERSATIONS; i++)
        storeConversation({...newConversation("old" + i, ""), title: "old " + i, changed: i})""")
    reload(page)
    ask(page, "One more?")
    kept = page.evaluate("Object.keys(localStorage).filter(name => name.startsWith(ENTRY))")
    assert len(kept) == len(titles(page)) == 100
    assert "shoal.chat.old0" not in kept and "shoal.chat.old1" in kept


def test_a_full_storage_is_reported_and_the_page_goes_on(open_page, served):
    served.say("Still here.")
    page = open_page()
    page.evaluate("""for (let size = 1 << 22; size; size >>= 1)
        for (let i = 0; i < 9; i++)
            try { localStorage.setItem(`filler.${size}.${i}`, "x".repeat(size)) } catch { break }""")
    assert ask(page, "Are you there?").locator(".body").inner_text() == "Still here."
    expect(page.locator("#notice")).to_contain_text("storage is full")
    ask(page, "And now?")
    assert "Are you there?" in served.last_prompt() and titles(page) == ["Are you there?"]


def test_a_draft_outlives_a_reload_and_a_suggestion(open_page, served):
    served.say("It scatters.")
    page = open_page()
    page.get_by_label("Message").fill("half a question")
    reload(page)
    page.get_by_role("button", name="Why is the sky blue?").click()
    expect(page.locator(".turn.assistant .body")).to_have_text("It scatters.", timeout=WAIT_MS)
    assert page.get_by_label("Message").input_value() == "half a question"


def test_an_answer_that_was_left_by_a_reload_can_go_on(open_page, served):
    """Regression: the page said that the server did not answer, when it was the reader who had left."""
    served.say("one two three four five six seven eight", token_seconds=0.2)
    page = open_page()
    turn = ask(page, "Count.", wait=False)
    expect(turn.locator(".body")).to_contain_text("one two", timeout=WAIT_MS)
    reload(page)
    turn = page.locator(".turn.assistant")
    expect(turn.locator(".body")).to_contain_text("one two", timeout=WAIT_MS)
    assert "does not answer" not in page.locator("#log").inner_text()
    expect(turn.get_by_role("button", name="Continue")).to_be_visible()


def test_storage_that_is_forbidden_or_broken_costs_no_page(open_page, served):
    served.say("Yes.")
    page = open_page()
    page.evaluate(
        """localStorage.setItem("shoal.chat.a", "{"); localStorage.setItem("shoal.chat.b", "null")"""
    )
    reload(page)
    ask(page, "Well?")
    assert titles(page) == ["Well?"]
    page.add_init_script("""for (const name of ["localStorage", "sessionStorage"])
        Object.defineProperty(window, name, {get() { throw new DOMException("forbidden", "SecurityError") }})""")
    reload(page)
    assert ask(page, "Well?").locator(".body").inner_text() == "Yes."
    expect(page.locator("#notice")).to_contain_text("switched off")


def drop(page, name, content, mime="text/plain"):
    data = page.evaluate_handle(
        """([name, bytes, type]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], name, {type}));
        return data;
    }""",
        [name, list(content), mime],
    )
    page.dispatch_event("#scroll", "dragover", {"dataTransfer": data})
    page.dispatch_event("#scroll", "drop", {"dataTransfer": data})


def test_a_dropped_file_is_in_the_request(open_page, served):
    served.say("Two columns.")
    page = open_page()
    drop(page, "tides.csv", "height,time\n1,``` ü\n".encode())
    expect(page.locator("#files li")).to_contain_text("tides.csv")
    page.set_input_files("#file", {"name": "more.txt", "mimeType": "text/plain", "buffer": b"more"})
    page.get_by_role("button", name="Remove more.txt").click()
    ask(page, "What is in it?")
    assert "File tides.csv:\n````\nheight,time\n1,``` ü\n````\n\nWhat is in it?" in served.last_prompt()
    assert "more" not in served.last_prompt() and page.locator("#files li").count() == 0
    page.reload()
    page.locator(".turn.user .file summary").click()
    assert page.locator(".turn.user .file pre").inner_text() == "height,time\n1,``` ü\n"


def test_files_that_are_no_text_or_too_large_are_refused(open_page):
    page = open_page()
    drop(page, "fish.png", b"\x89PNG\r\n\x00\xff", "image/png")
    expect(page.get_by_role("alert")).to_contain_text("“fish.png” is not a text file")
    drop(page, "zeros.txt", b"a\x00b")
    expect(page.get_by_role("alert")).to_contain_text("“zeros.txt” is not a text file")
    page.set_input_files("#file", {"name": "large.txt", "mimeType": "text/plain", "buffer": b"x" * 300_000})
    expect(page.get_by_role("alert")).to_contain_text(
        "“large.txt” (293 KB) is too large: a message's files may have 256 KB together."
    )
    assert page.locator("#files li").count() == 0


def test_copy_takes_the_code_alone(open_page, served):
    code = "def f(x):  # a comment\n\n    return x + 1"
    served.say(f"Here:\n\n```python\n{code}\n```\n")
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    turn = ask(page, "Code?")
    turn.get_by_role("button", name="Copy code").click()
    expect(turn.get_by_role("button", name="Copy code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == code
    turn.get_by_role("button", name="Copy the answer").click()
    expect(turn.get_by_role("button", name="Copy the answer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"Here:\n\n```python\n{code}\n```\n"


def test_copy_works_on_a_page_that_came_by_plain_http(open_page, served):
    """Such a page has no navigator.clipboard."""
    served.say("```\nfish\n```")
    page = open_page()
    turn = ask(page, "Code?")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    turn.get_by_role("button", name="Copy code").click()
    expect(turn.get_by_role("button", name="Copy code")).to_have_text("Copied")
    page.get_by_label("Message").focus()
    page.keyboard.press("Control+v")
    assert page.get_by_label("Message").input_value() == "fish"


def test_code_is_coloured_and_stays_what_it_was(open_page, served):
    python = 'def f(x):\n    """Says\n    "x" # often."""\n    return 0x1f, "a\\"b"  # def'
    script = "const s = `a\nb`; /* let\nit */ if (x1 > 1.5) y('don\\'t'); // 'end"
    served.say(f"```python\n{python}\n```\n```js\n{script}\n```\n```unknown\ndef 1\n```")
    page = open_page()
    blocks = ask(page, "Code?").locator("pre code")

    def runs(block, kind):
        return [run.text_content() for run in block.locator("." + kind).all()]

    assert [block.text_content() for block in blocks.all()] == [python, script, "def 1"]
    first, second, third = blocks.all()
    assert runs(first, "keyword") == ["def", "return"] and runs(first, "comment") == ["# def"]
    assert runs(first, "number") == ["0x1f"]
    assert runs(first, "string") == ['"""Says', '    "x" # often."""', '"a\\"b"']
    assert runs(second, "keyword") == ["const", "if"] and runs(second, "number") == ["1.5"]
    assert runs(second, "comment") == ["/* let", "it */", "// 'end"]
    assert runs(second, "string") == ["`a", "b`", "'don\\'t'"]
    assert third.locator(".keyword, .number").count() == 0


def test_tables_and_code_in_lists(open_page, served):
    served.say(
        "| name | count |\n|---|---:|\n| **cod** | 1 |\n| a \\| b | 2 |\n\n"
        "1. Install:\n   ```bash\n   pip install x\n\n   x\n   ```\n\n2. Run."
    )
    page = open_page()
    turn = ask(page, "Table?")
    assert turn.locator("th, td").all_inner_texts() == ["name", "count", "cod", "1", "a | b", "2"]
    assert turn.locator("td strong").inner_text() == "cod" and turn.locator("td.right").count() == 2
    assert turn.locator("ol > li").count() == 2
    assert turn.locator("li pre code").text_content() == "pip install x\n\nx"


def test_quotes_without_end_are_text(open_page, served):
    served.say("> one\n> > two\n\n" + ">" * 5000 + " deep", token_seconds=0)
    page = open_page()
    turn = ask(page, "Quote?")
    assert turn.locator("blockquote").first.locator("blockquote").inner_text() == "two"
    assert turn.locator("blockquote").count() == 2 + 20
    assert turn.locator("p").last.text_content() == ">" * 4980 + " deep"


def test_markdown_is_read_as_the_standard_says(open_page, served):
    """Regression: a list after another kind of list was swallowed, and several marks were shown raw."""
    served.say(
        "1. a\n2. b\n\n- c\n- d\n\n7. e\n\nTitle\n===\n\nSmaller\n---\n\n***both*** \\*star\\* ~~gone~~ &lt;b&gt; "
        "![fish](https://example.com/fish.png) <https://example.com/a> [x](notes.txt) main.py\n\n"
        "- [x] done\n- [ ] open\n  1. inner\n\n     more\n"
    )
    page = open_page()
    body = ask(page, "Lists?").locator(".body")
    assert body.evaluate("e => [...e.children].map(c => c.localName).join(' ')") == "ol ul ol h3 h4 p ul"
    assert body.locator("> ol > li, > ul > li").all_inner_texts()[:5] == ["a", "b", "c", "d", "e"]
    assert body.locator("> ol").nth(1).get_attribute("start") == "7"
    assert body.locator("em strong").inner_text() == "both" and body.locator("s").inner_text() == "gone"
    assert "*star* gone <b> fish" in body.inner_text() and "[x](notes.txt) main.py" in body.inner_text()
    links = [(a.inner_text(), a.get_attribute("href")) for a in body.locator("a").all()]
    assert links == [("fish", "https://example.com/fish.png"), ("https://example.com/a",) * 2]
    assert body.locator("a[target=_blank][rel='noopener noreferrer']").count() == 2
    assert "☑ done" in body.inner_text() and "☐ open" in body.inner_text()
    assert body.locator("li li p").all_inner_texts() == ["inner", "more"]


def formulas(turn):
    return turn.locator("annotation").evaluate_all("all => all.map(a => a.textContent)")


def test_latex_is_drawn(open_page, served):
    served.say(
        r"So $a_1 * b_2 * c$ and \(x < y\), hence $$\frac{1}{2}$$ and \[z\]"
        "\n\n$$\nE = mc^2\n$$\n\n- so\n  \\[\n  \\boxed{\\sqrt{2}}\n\n  = 1\n  \\]\n- $5$ and 2$x$ or $\\$3$"
        "\n\n`$code$` and \\$6$ and $\\nonsense{$"
    )
    page = open_page()
    turn = ask(page, "Formulas?")
    assert formulas(turn) == [
        "a_1 * b_2 * c",
        "x < y",
        r"\frac{1}{2}",
        "z",
        "E = mc^2",
        "\\boxed{\\sqrt{2}}\n\n= 1",
        "5",
        r"\$3",
    ]
    assert turn.locator(".math.display").count() == 4 and turn.locator("em").count() == 0
    assert turn.locator(".katex-html svg").count() == 1  # the root
    assert turn.locator("li").count() == 2 and turn.locator("li .math.display").count() == 1
    assert turn.locator("p > code, .math > code").all_inner_texts() == ["$code$", r"\nonsense{"]
    assert page.evaluate("document.fonts.ready.then(all => all.check('16px KaTeX_Main'))")


def test_formulas_may_touch_words_and_stand_in_environments(open_page, served):
    served.say(
        r"The $n$th of $k$-means, 3$\times$3, 5$^2$, ($x$), $y_1$s, **$z$**: $2 + 2 = 4$, $\alpha$."
        "\n\n\\begin{align*}\na &= b \\\\\n&= c\n\\end{align*}\n\nEnd"
    )
    page = open_page()
    turn = ask(page, "Formulas?")
    align = "\\begin{align*}\na &= b \\\\\n&= c\n\\end{align*}"
    small = ["n", "k", r"\times", "^2", "x", "y_1", "z", "2 + 2 = 4", r"\alpha"]
    assert formulas(turn) == [*small, align] and turn.locator(".math > code").count() == 0


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5 and $6, or $1,000–$2,000.",
        "Between $5 and 10$ a day, ($7) or ($8), US$9 to US$10",
        "echo $HOME/$USER:$PATH $a and $b",
        "5$ or 6$ and $ 7 $",
        "$ 5, then $5/month vs. $10/month.",
        r"\\(not\\) \$1$",
        "$20/month or 200$/year, $5-10 per person or 20$.",
        "A=$HOME/$USER:$A=$B",
        "an open $x + \\(y \\[z",
    ],
)
def test_prices_and_variables_are_not_latex(open_page, served, text):
    served.say(text)
    page = open_page()
    turn = ask(page, "Price?")
    assert turn.locator(".math").count() == 0
    shown = turn.locator(".body").inner_text()
    assert shown.replace("\\", "") == text.replace("\\", "")


def test_a_streamed_formula_and_a_fence_of_four_end_as_what_they_are(open_page, served):
    served.say("Let\n\n$$\nx\n- y\n$$\n\n````md\n```\na\n```\n````\n\nText\n- item\n", 0.01)
    page = open_page()
    body = ask(page, "Go on").locator(".body")
    assert body.evaluate("e => [...e.children].map(c => c.className || c.localName)") == [
        "p",
        "math display",
        "code",
        "p",
        "ul",
    ]
    assert body.locator("pre code").text_content() == "```\na\n```"


def test_long_text_of_openings_costs_no_square_of_its_length(open_page, served):
    page = open_page()
    assert page.evaluate("""["$a", "\\\\(", "$$", "\\\\[", "[", "![", "*a **b ", "`a ``b ", "<", "\\n> - "].every(mark => {
        const body = make("div");
        showMarkdown(body, mark.repeat(10000));
        return body.textContent.length > 0;
    })""")


def test_finished_parts_of_a_streamed_answer_are_built_once(open_page, served):
    served.say("First.\n\n- one\n- two\n- three\n\n```python\nx = 1\ny = 2\nz = 3\n```\n\nLast.", 0.01)
    page = open_page()
    page.evaluate("""window.built = []; new MutationObserver(changes => {
        for (const change of changes) built.push(...change.addedNodes);
    }).observe(log, {childList: true, subtree: true})""")
    turn = ask(page, "Go on")
    # they grew in place
    assert page.evaluate("built.filter(node => node.matches?.('ul, .code')).length") == 2
    assert page.evaluate("built.filter(node => node.textContent === 'x = 1\\n').length") == 1
    assert turn.locator("pre code").text_content() == "x = 1\ny = 2\nz = 3"
    assert turn.locator("li").all_inner_texts() == ["one", "two", "three"]


def test_the_model_can_be_picked_and_stays_with_the_conversation(open_page):
    with Served(FakeEngine(300, ends=True), model={"names": ["tiny", "other"]}) as server:
        server.say("Ok.")
        page = open_page(server=server, num_models=2)
        page.get_by_label("Model").select_option("other")
        with page.expect_request("**/v1/chat/completions") as asked:
            ask(page, "Hi")
        assert asked.value.post_data_json["model"] == "other"
        reload(page, num_models=2)
        expect(page.get_by_label("Model")).to_have_value("other")


def test_thoughts_are_folded(open_page):
    with Served(
        FakeEngine(300, ends=True), model={"max_model_len": 8192, "reasoning_parser": "qwen3"}
    ) as server:
        server.say("<think>\nLet me see.\n</think>\n\nIt is four.")
        page = open_page(server=server)
        turn = ask(page, "Two and two?")
        assert (
            turn.locator(".body").inner_text() == "It is four."
            and not turn.get_by_text("Let me see.").is_visible()
        )
        turn.get_by_text("Thoughts").click()
        assert turn.get_by_text("Let me see.").is_visible()
        ask(page, "Sure?")
        assert "four" in server.last_prompt() and "Let me see" not in server.last_prompt()


def test_the_small_default_model_is_called_small(open_page, served):
    assert "small" not in open_page().locator("#about").inner_text()
    with Served(FakeEngine(300, ends=True), model={"names": ["smollm2"]}) as server:
        page = open_page(server=server)
        expect(page.locator("#about")).to_contain_text("smollm2 is small, to try things out")


def test_a_key_is_asked_for_and_kept_with_the_tab(open_page):
    with Served(FakeEngine(300, ends=True), api_key=["sesame"]) as server:
        server.say("Open.")
        page = open_page(server=server, num_models=0)
        expect(page.get_by_role("alert")).to_have_text(re.compile("401.*Settings"))
        page.get_by_label("Message").fill("Well?")
        page.keyboard.press("Enter")  # opens the settings at the key
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Close").click()
        expect(page.locator("#model option")).to_have_count(1, timeout=WAIT_MS)
        assert (
            ask(page, "Open?").locator(".body").inner_text() == "Open."
            and not page.get_by_role("alert").is_visible()
        )
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)") and "sesame" in page.evaluate(
            "JSON.stringify(sessionStorage)"
        )


def test_keys_write_lines_and_send(open_page, served):
    served.say("Ok.")
    page = open_page()
    message = page.get_by_label("Message")
    message.press_sequentially("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    message.press("Enter")
    expect(page.locator(".turn.assistant .body")).to_have_text("Ok.", timeout=WAIT_MS)
    assert page.locator(".turn.user .body").inner_text() == "one\ntwo" and message.input_value() == ""
    message.press("Enter")  # nothing to send
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
    assert (
        box["x"] + box["width"] <= 360
        and box["y"] + box["height"] <= 640
        and min(box["width"], box["height"]) >= 40
    )
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(fits)
    dialog = page.locator("dialog").bounding_box()
    assert dialog["x"] >= 0 and dialog["width"] <= 360
    page.get_by_role("button", name="Close").click()
    drawer = page.get_by_role("navigation", name="Conversations")
    assert not drawer.is_visible()
    page.get_by_role("button", name="Conversations").click()
    drawer.get_by_role("button", name="New conversation").click()
    assert not drawer.is_visible() and page.locator(".turn").count() == 0


def test_light_and_dark_follow_the_system_and_the_switch(open_page):
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
    check_names(page, "button, select, textarea, input")


def test_the_page_is_small_and_its_policy_strict():
    check_small_and_strict("chat.html", 150_000, 17)


def make_picture(url, path, questions):
    """Asks the server at `url` each question in a conversation of its own, and keeps the look of the last."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1100, "height": 600})
        page.goto(url)
        expect(page.locator("#model option").first).to_be_attached()
        for question in questions:
            page.get_by_role("button", name="New conversation").click()
            page.evaluate("current.options = {temperature: '0', max_tokens: '250'}")  # a picture that stays
            ask(page, question)
        page.mouse.move(550, 300)
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("path")
    parser.add_argument(
        "--questions",
        nargs="+",
        metavar="TEXT",
        default=[
            "What is the capital of France?",
            "Explain tides to a child",
            "Write a short Python function that returns the square of a number.",
        ],
    )
    make_picture(**vars(parser.parse_args()))

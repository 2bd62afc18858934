"""/dashboard in headless Chromium, against the real server over a fake engine: on a phone and on a desk, in light
and dark, with keys, with hostile names, and with a server that goes and comes back."""

import re
import threading
import time

import pytest
from playwright.sync_api import expect

from tests.fake_server import FakeServer, engine_saying
from tests.serving import free_port
from tests.web_pages import (
    WAIT_MS,
    brightness,
    browser,  # noqa: F401 - a fixture
    check_names,
    check_small_and_strict,
    chromium,  # noqa: F401 - a fixture
    pages_of,
)

expect.set_options(timeout=WAIT_MS)
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


def request_of(number, **more):
    return {
        "id": f"request-{number}",
        "model": "tiny",
        "endpoint": "/v1/chat/completions",
        "status": "finished",
        "finish_reason": "stop",
        "started_at": time.time() - 3 * number,
        "seconds": 2.0,
        "ttft_s": 0.5,
        "itl_s": 0.021,
        "prompt_tokens": 1200,
        "cached_tokens": 800,
        "output_tokens": 40,
        "workers": ["prefill-1", "decode-1"],
        **more,
    }


def span(name, start_s, seconds, worker="", **attributes):
    return {"name": name, "worker": worker, "start_s": start_s, "seconds": seconds, "attributes": attributes}


SPANS = [
    span("migration", 1.0, 0.6, "decode-2", reason="drained"),
    span("queue", 0.0, 0.1),
    span("routing", 0.1, 0.002, cached_tokens=12345, cost=36.17841535736709),
    span("prefill", 0.1, 0.3, "prefill-1"),
    span("transfer", 0.4, 0.1, "decode-1", blocks=25),
]
TOKENS = [[0.5 + 0.02 * n + (0.6 if n > 25 else 0.0), 1] for n in range(40)]


@pytest.fixture(scope="module")
def served():
    with FakeServer(engine_saying("hello ", token_seconds=0.01, cached_tokens=1)) as server:
        yield server


@pytest.fixture
def open_dashboard(browser, served):  # noqa: F811 - the fixture
    """open_dashboard(width=..., requests=[...]) -> the page in a fresh profile. `requests`: what GET /requests is
    to answer."""

    def answer(route, found):
        one = found.get(route.request.url.rpartition("/")[2])
        error = {"error": {"message": "it is forgotten", "type": "NotFoundError"}}
        route.fulfill(json=one or error, status=200 if one else 404)

    with pages_of(browser) as new_page:

        def open_dashboard(
            width=1200, height=800, server=served, path="/dashboard", requests=None, **options
        ):
            page = new_page(server.url, width, height, **options)
            if requests is not None:
                page.route("**/requests?limit=100", lambda route: route.fulfill(json={"requests": requests}))
                found = {one["id"]: one for one in requests}
                page.route("**/requests/*", lambda route: answer(route, found))
            page.goto(server.url + path)
            return page

        yield open_dashboard


def talk(server, seconds=3.0):
    """Somebody who uses the server for a while."""

    def ask():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            server.request("/v1/completions", {"prompt": "abc", "max_tokens": 30, "stream": True})

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_load_is_shown_live(open_dashboard, served):
    page = open_dashboard(requests=[])
    talking = talk(served, 5.0)
    expect(page.locator("#status")).to_have_text("1 of 1 ready, one server")
    output = page.locator("#charts .chart", has_text="Output tokens/s")
    expect(output.locator(".value")).to_have_text(re.compile(r"^\s*[1-9][\d.]*\s*$"))
    expect(output.locator("path.line-0")).to_have_attribute("d", re.compile("^M.*L"))
    expect(page.locator("#charts .chart", has_text="Between tokens").locator(".value")).to_have_text(
        re.compile(r"p50 [\d.]+ ms\s+p99 [\d.]+ ms")
    )
    row = page.locator("#workers tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("ready")
    talking.join()


def test_the_past_is_there_when_the_page_is_opened(open_dashboard, served):
    talk(served, 0.1).join()
    time.sleep(4.5)  # two samples
    page = open_dashboard(requests=[])
    line = page.locator("#charts .chart", has_text="Requests").first.locator("path.line-0")
    expect(line).to_have_attribute("d", re.compile(r"^M[\d. -]+(L[\d. -]+)+$"))


def test_a_worker_opens_in_detail_and_closes(open_dashboard):
    page = open_dashboard(requests=[])
    page.get_by_role("button", name="tiny").click()
    detail = page.locator("#worker")
    expect(detail.locator("h2")).to_have_text("tiny")
    expect(detail.locator("dl")).to_contain_text("blocks of 1,024")
    expect(detail.locator(".chart")).to_have_count(9)
    detail.get_by_role("button", name="Close").click()
    expect(detail).to_be_hidden()


def test_the_keyboard_keeps_its_place_while_tables_are_filled_again(open_dashboard):
    page = open_dashboard(requests=[request_of(1), request_of(2)])
    page.locator("#requests button").nth(1).focus()
    with page.expect_response("**/requests?limit=100"), page.expect_response("**/fleet?since=*"):
        pass
    page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.dataset.id") == "request-2"


def test_a_request_shows_its_time_line(open_dashboard):
    requests = [request_of(1, spans=SPANS, tokens=TOKENS), request_of(2, status="failed", finish_reason=None)]
    page = open_dashboard(requests=requests)
    rows = page.locator("#requests tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("prefill-1, decode-1")
    expect(rows.nth(1).locator(".failed")).to_have_text("failed")
    rows.first.get_by_role("button").click()
    line = page.locator("#line")
    expect(line).to_contain_text("1,200 of prompt (800 cached), 40 of output")
    names = line.locator(".span .name").all_inner_texts()
    assert [name.split(" ")[0] for name in names[1:]] == [
        "queue",
        "routing",
        "prefill",
        "transfer",
        "migration",
        "tokens",
    ]
    assert "decode-2, reason drained" in names[5] and "cached tokens 12345, cost 36.18" in names[2]
    boxes = {
        kind: line.locator(f".track .{kind}").bounding_box() for kind in ("queue", "prefill", "migration")
    }
    track = line.locator(".track").first.bounding_box()
    assert boxes["queue"]["x"] < boxes["prefill"]["x"] < boxes["migration"]["x"]
    assert boxes["migration"]["width"] == pytest.approx(0.3 * track["width"], rel=0.05)
    expect(line.locator(".token")).to_have_count(40)
    expect(line.locator("#gaps")).to_contain_text("median 20 ms")
    expect(line.locator("#gaps")).to_contain_text("1 slow")
    expect(line.locator("#gaps small")).to_contain_text("620 ms after 1 s")
    assert page.url.endswith("#request=request-1")
    page.keyboard.press("Escape")
    expect(line).to_be_hidden()
    assert "#" not in page.url


def test_the_servers_own_requests_are_there(open_dashboard, served):
    body = {"prompt": "abc", "max_tokens": 30, "stream": True}
    assert served.request("/v1/completions", body, headers={"X-Request-ID": "a/b c"})[0] == 200
    page = open_dashboard()
    row = page.locator("#requests tbody tr", has=page.get_by_title("a/b c"))
    expect(row).to_contain_text("length")
    row.get_by_role("button").click()
    expect(page.locator("#line-facts")).to_contain_text("tiny at /v1/completions")
    expect(page.locator("#line .token").first).to_be_attached()
    expect(page.locator("#gaps")).to_contain_text("median")
    expect(page.locator("#line .span", has_text="tokens 30")).to_be_visible()


def test_a_time_line_has_an_address(open_dashboard):
    page = open_dashboard(
        path="/dashboard#request=request-1", requests=[request_of(1, spans=SPANS, tokens=TOKENS)]
    )
    expect(page.locator("#line .token")).to_have_count(40)


def test_a_request_that_is_forgotten_is_reported(open_dashboard):
    page = open_dashboard(path="/dashboard#request=other", requests=[])
    expect(page.locator("#line")).to_contain_text("it is forgotten (404, NotFoundError)")
    with page.expect_response("**/requests/other"):
        pass
    expect(page.locator("main.stale")).to_have_count(0)  # all else is as new as ever
    expect(page.locator("#notice")).to_be_hidden()


def test_a_question_that_is_asked_anew_is_no_trouble(open_dashboard):
    page = open_dashboard(requests=[])
    page.route("**/requests/slow", lambda route: None)  # it is never answered
    for asks in ("openRequest('slow')", "void refresh()"):
        with page.expect_request("**/requests/slow"):
            page.evaluate(asks)
    assert "Trouble" not in page.locator("#line").inner_text()


def test_a_request_without_tokens_or_spans_has_an_empty_line(open_dashboard):
    bare = request_of(1, status="running", finish_reason=None, ttft_s=None, itl_s=None, spans=[], tokens=[])
    page = open_dashboard(requests=[bare])
    page.locator("#requests button").click()
    expect(page.locator("#line")).to_contain_text("so far")
    expect(page.locator("#line")).to_contain_text("– to the first token")
    expect(page.locator("#gaps")).to_be_hidden()


def test_names_are_never_read_as_html(browser, open_dashboard):  # noqa: F811 - the fixture
    with FakeServer(engine_saying("hello "), model={"names": [HOSTILE]}) as server:
        hostile = request_of(
            1,
            model=HOSTILE,
            status="failed",
            finish_reason=HOSTILE,
            endpoint=HOSTILE,
            workers=[HOSTILE],
            spans=[span(HOSTILE, 0, 1, HOSTILE, **{HOSTILE: HOSTILE}), span("queue x", 0, 1)],
            tokens=TOKENS,
        )
        page = open_dashboard(server=server, requests=[hostile])
        expect(page.locator("#workers button")).to_have_text(HOSTILE)
        page.locator("#workers button").click()
        expect(page.locator("#worker-title")).to_have_text(HOSTILE)
        expect(page.locator("#worker dl")).to_contain_text("blocks of 1,024")
        page.locator("#requests button").click()
        expect(page.locator("#line")).to_contain_text(HOSTILE)
        assert (
            page.title() == "Shoal: dashboard"
            and page.locator("img, main script, dialog script").count() == 0
        )


def test_what_a_fleet_says_is_shown_and_never_read_as_html(open_dashboard, served):
    worker = served.json("/fleet")[1]["workers"][0]
    tiers = {
        "device": worker["kv"]["device"] | {"usage": 0.4},
        "store": worker["kv"]["device"] | {"usage": None},
    }
    view = served.json("/fleet")[1] | {
        "policy": "kv",
        "queue": {"length": 4, "oldest_s": 2.0},
        "workers": [
            worker | {"id": "p1", "role": "prefill", "kv": tiers},
            worker
            | {"id": HOSTILE, "role": "decode", "state": "broken", "why": HOSTILE, "url": HOSTILE, "kv": {}},
        ],
        "planner": {
            "mode": "load",
            "last_decision": HOSTILE,
            "desired": {"decode": 2},
            "changing": True,
            "decisions": [{"age_s": 90.0, "model": HOSTILE, "what": "add 1 decode", "reason": HOSTILE}],
        },
        "models": [{**served.json("/fleet")[1]["models"][0], "name": name} for name in (HOSTILE, "b")],
    }
    page = open_dashboard(server=served, path="/docs")  # a first page, so that the second one can be prepared
    page.route("**/fleet?*", lambda route: route.fulfill(json=view))
    page.route("**/requests?limit=100", lambda route: route.fulfill(json={"requests": []}))
    page.goto(served.url + "/dashboard")
    expect(page.locator("#status")).to_have_text("1 of 2 ready, policy kv, 4 in the queue")
    rows = page.locator("#workers tbody tr")
    expect(rows).to_have_count(3)  # a broken one has a line that says why
    expect(rows.first).to_contain_text("40 %")
    expect(page.locator("#workers .why")).to_have_text(HOSTILE)
    expect(page.locator("#planner")).to_contain_text("load: wants 2 decode, and changes now.")
    expect(page.locator("#decisions li")).to_contain_text("90 s ago: add 1 decode of")
    expect(page.locator("#models tbody tr")).to_have_count(2)
    assert page.title() == "Shoal: dashboard" and page.locator("img, main script").count() == 0


def test_a_key_is_asked_for_and_kept_for_the_tab(open_dashboard):
    with FakeServer(api_key=["sesame"]) as server:
        page = open_dashboard(server=server, requests=[])
        expect(page.locator("#notice")).to_contain_text("The key goes into Settings.")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#workers tbody tr")).to_have_count(1)
        expect(page.locator("#notice")).to_be_hidden()
        page.goto(server.url + "/")  # the chat page of the same tab has it, too
        expect(page.locator("#model option")).to_have_count(1)
        page.goto(server.url + "/dashboard")
        expect(page.locator("#workers tbody tr")).to_have_count(1)


def test_a_server_that_is_gone_is_reported_and_comes_back_by_itself(open_dashboard):
    port = free_port()
    with FakeServer(port=port) as server:
        page = open_dashboard(server=server, requests=[])
        expect(page.locator("#workers tbody tr")).to_have_count(1)
    expect(page.locator("#notice")).to_contain_text("The server does not answer")
    expect(page.locator("main.stale #workers tbody tr")).to_have_count(1)
    with FakeServer(port=port):
        expect(page.locator("#notice")).to_be_hidden(timeout=WAIT_MS)
        expect(page.locator("main.stale")).to_have_count(0)


WHOLE = "all => all.length && all.every(one => one.scrollWidth <= one.clientWidth)"  # nothing is cut off


@pytest.mark.parametrize("width, height", [(360, 640), (768, 1024), (1440, 900)])
def test_no_width_needs_sideways_scrolling(open_dashboard, width, height):
    names = ["worker-with-a-name-that-is-long-" * 3]
    requests = [
        request_of(n, model="m" * 200, workers=names * 3, spans=SPANS, tokens=TOKENS) for n in range(3)
    ]
    page = open_dashboard(width, height, requests=requests, has_touch=True, is_mobile=width < 500)
    expect(page.locator("#requests tbody tr")).to_have_count(3)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    page.locator("#workers button").click()
    expect(page.locator("#worker dl")).to_contain_text("blocks of")
    assert page.evaluate(fits)
    page.locator("#requests button").first.click()
    expect(page.locator(".token").first).to_be_attached()
    dialog = page.locator("#line")
    assert page.evaluate(fits) and dialog.evaluate("d => d.scrollWidth <= d.clientWidth")
    assert dialog.bounding_box()["x"] >= 0
    # Details that a pointer shows as a title must be readable without one, above all on a phone.
    assert page.locator(".span .name").evaluate_all(WHOLE) and page.locator(".chart small").evaluate_all(
        WHOLE
    )


def test_light_and_dark_follow_the_system_and_the_switch(open_dashboard):
    light, dark = open_dashboard(requests=[]), open_dashboard(requests=[], color_scheme="dark")
    assert brightness(light) > 600 and brightness(dark) < 150
    dark.get_by_role("button", name="Theme").click()
    assert brightness(dark) > 600


def test_everything_has_a_name(open_dashboard):
    page = open_dashboard(requests=[request_of(1)])
    expect(page.locator("#requests button")).to_have_count(1)
    check_names(page, "button, a, input, meter, svg[role=img]")


def test_the_page_is_small_and_its_policy_strict():
    check_small_and_strict("dashboard.html", 60_000, 6)

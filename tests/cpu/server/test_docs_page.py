"""/docs: the page says what the OpenAPI document says, and its examples work."""

import html
import json
import re
import shlex

import pytest

from tests.fake_server import FakeServer, tool_server


@pytest.fixture(scope="module")
def served():
    with tool_server() as served:
        served.say("Hi.")
        yield served


@pytest.fixture(scope="module")
def page(served):
    status, headers, text = served.request("/docs")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    return text


def commands(page):
    texts = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    return [shlex.split(html.unescape(text).replace("\\\n", " ")) for text in texts]


def test_every_endpoint_is_there_with_its_summary(served, page):
    paths = served.json("/openapi.json")[1]["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            summary = html.escape(operation["summary"])
            assert f"<b>{method.upper()}</b> <code>{path}</code> <span>{summary}</span>" in page
    assert re.findall("<h2>(.*?)</h2>", page) == ["OpenAI", "Anthropic", "This server", "Ollama", "Types"]


def test_every_field_is_there_with_its_type_and_whether_it_must_be_given(served, page):
    schemas, page = served.json("/openapi.json")[1]["components"]["schemas"], page.replace("<wbr>", "")
    for name, schema in schemas.items():
        for field in schema.get("properties", ()):
            assert f"<code>{field}</code>" in page, (name, field)
    required = "<em>required</em></td><td>list of object <small>items from 1</small>"
    assert f"<code>messages</code> {required}" in page
    assert "<code>encoding_format</code> <small>default &quot;float&quot;</small>" in page
    assert '<a href="#StreamOptions">StreamOptions</a>' in page and '<details id="StreamOptions">' in page
    assert not set(re.findall(r'href="#(\w+)"', page)) - set(re.findall(r'<details id="(\w+)"', page))


def test_examples_work_when_they_are_run(served, page):
    asked = set()
    served.request(
        "/v1/completions", {"prompt": "a"}, headers={"x-request-id": "ID"}
    )  # whose timeline is shown
    for command in commands(page):
        [url] = [word for word in command if word.startswith("http")]
        assert command[0] == "curl" and url.startswith(served.url + "/")
        body = command[command.index("-d") + 1] if "-d" in command else None
        method = command[command.index("-X") + 1] if "-X" in command else "GET" if body is None else "POST"
        status, _, text = served.request(url.removeprefix(served.url), body and body.encode(), method=method)
        is_kept = not url.endswith("/v1/responses/ID")  # this server keeps no responses
        assert status == (200 if is_kept else 404), (command, text)
        asked.add(url)
    assert len(asked) > 20
    [chat] = [command for command in commands(page) if command[1].endswith("/v1/chat/completions")]
    hello = [{"role": "user", "content": "Hello!"}]
    assert json.loads(chat[-1]) == {"model": "tiny", "messages": hello, "max_tokens": 32}


def test_examples_have_a_place_for_the_key_where_one_is_asked_for():
    with FakeServer(api_key=["sesame"]) as server:
        page = server.request("/docs")[2]
        found = {command[1].removeprefix(server.url): command for command in commands(page)}
    assert "Authorization: Bearer $SHOAL_API_KEY" in found["/v1/completions"] and len(found["/health"]) == 2
    assert "sesame" not in str(found)


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(served):
    _, headers, text = served.request("/docs")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and not re.search("unsafe|script|connect", policy)
    assert not re.search(r"(?:src|href)=\"(?!#|/)|<script|style=|url\(", text)


@pytest.mark.parametrize("host", ['"><script>alert(1)</script>', "x; rm -rf /", "$(reboot)", "a b", ""])
def test_a_host_that_is_none_stands_nowhere(served, host):
    page = served.request("/docs", headers={"host": host})[2]
    assert len(host) < 4 or html.escape(host) not in page
    assert "curl http://127.0.0.1:8000/v1/completions" in page

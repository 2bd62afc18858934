"""Thinking in all APIs: how much a request wants of it reaches the chat template."""

from __future__ import annotations

import pytest

from tests.fake_server import byte_tokenizer, tool_server

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}"
    "{{ raise_exception('unknown effort ' ~ reasoning_effort) }}{% endif %}"
    "[{{ enable_thinking | default('-') }} {{ reasoning_effort | default('-') }}]</think>"
)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def served():
    with tool_server(model={"tokenizer": byte_tokenizer(TEMPLATE)}) as server:
        server.say("Yes.")
        yield server


def wanted(served, path, **fields):
    """Returns what the template is told."""
    bodies = {
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
        "/api/chat": {"messages": MESSAGES, "stream": False},
        "/api/generate": {"prompt": "Hi", "stream": False},
    }
    status, answer = served.json(path, {"model": "tiny", **bodies[path], **fields})
    assert status == 200, answer
    prompt = served.last_prompt()
    return prompt[prompt.rindex("[") + 1 : prompt.rindex("]")]


EFFORTS = {
    "none": "False -",
    "minimal": "True low",
    "low": "True low",
    "medium": "True medium",
    "high": "True xhigh",
    "xhigh": "True xhigh",
}


@pytest.mark.parametrize("effort, expected", EFFORTS.items())
def test_effort_is_the_same_in_all_apis(served, effort, expected):
    assert wanted(served, "/v1/chat/completions", reasoning_effort=effort) == expected
    assert wanted(served, "/v1/responses", reasoning={"effort": effort}) == expected
    if effort in ("low", "medium", "high"):
        assert wanted(served, "/api/chat", think=effort) == expected
        assert wanted(served, "/api/generate", think=effort) == expected
        fields = {"thinking": {"type": "adaptive"}, "output_config": {"effort": effort}}
        assert wanted(served, "/v1/messages", **fields) == expected


def test_a_switch_alone_leaves_the_effort_to_the_template(served):
    for think in (True, False):
        assert wanted(served, "/api/chat", think=think) == f"{think} -"
    assert wanted(served, "/v1/messages", thinking={"type": "enabled", "budget_tokens": 1024}) == "True -"
    assert wanted(served, "/v1/messages", thinking={"type": "disabled"}) == "False -"
    assert wanted(served, "/v1/messages") == "False -"
    for path in ("/v1/chat/completions", "/v1/responses", "/api/chat"):
        assert wanted(served, path) == "- -"


def test_variables_of_the_request_win_over_effort(served):
    def ask(**variables):
        fields = {"reasoning_effort": "high", "chat_template_kwargs": variables}
        return wanted(served, "/v1/chat/completions", **fields)

    assert ask(enable_thinking=False) == "False xhigh"
    assert ask(reasoning_effort="medium") == "True medium"
    fields = {"messages": MESSAGES, "chat_template_kwargs": {"reasoning_effort": "high"}}
    status, answer = served.json("/v1/chat/completions", fields)
    assert status == 400 and "unknown effort high" in answer["error"]["message"]


def test_effort_wins_over_the_defaults_of_the_server():
    model = {"tokenizer": byte_tokenizer(TEMPLATE), "template_defaults": {"enable_thinking": False}}
    with tool_server(model=model) as server:
        server.say("Yes.")
        assert wanted(server, "/v1/chat/completions") == "False -"
        assert wanted(server, "/v1/chat/completions", reasoning_effort="low") == "True low"

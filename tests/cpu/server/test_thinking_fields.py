"""Thinking in all APIs: how much a request wants of it reaches the chat template."""

from __future__ import annotations

import pytest

from tests.fake_server import byte_tokenizer, ids_of, tool_server

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


OPENING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
THOUGHTS = "One, two, three, four."


@pytest.fixture(scope="module", params=["opened by the prompt", "opened by the model"])
def thinker(request):
    """A server of a model that writes these thoughts, or the second half of them as its answer if they are ended
    for it, as its tokens depend on the position alone."""
    template = OPENING if request.param == "opened by the prompt" else OPENING.replace("<think>\n", "")
    model = {"tokenizer": byte_tokenizer(template), "template_defaults": {"enable_thinking": True}}
    with tool_server(model=model) as server:
        begin = "" if request.param == "opened by the prompt" else "<think>"
        server.say(f"{begin}{THOUGHTS}</think>Five.")
        yield server


def both(served, **fields):
    """Returns (reasoning, content, finish reason) of the whole answer, after the stream has given the same."""
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}, **fields}
    [choice] = served.json("/v1/chat/completions", body)[1]["choices"]
    message = choice["message"]
    whole = (message.get("reasoning"), message["content"], choice["finish_reason"])
    reasoning, content, finish = "", "", None
    for event in served.events("/v1/chat/completions", {**body, "stream": True}):
        [choice] = event["choices"]
        reasoning += choice["delta"].get("reasoning") or ""
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
    assert (reasoning or None, content or None, finish) == (whole[0], whole[1] or None, whole[2])
    return whole


def test_without_a_budget_thoughts_end_by_themselves(thinker):
    for fields in ({}, {"thinking_token_budget": -1}, {"thinking_token_budget": 500}):
        assert both(thinker, **fields) == (THOUGHTS, "Five.", "stop")


def test_a_budget_ends_thoughts_and_the_answer_follows(thinker):
    whole = f"{THOUGHTS}</think>Five."
    for budget in (1, 4, 8):
        reasoning, content, finish = both(thinker, thinking_token_budget=budget)
        assert reasoning == THOUGHTS[:budget].strip() and finish == "stop"
        # the fake engine goes on with the text of the position, behind the end that was appended
        assert content == whole[budget + len("</think>") :].lstrip().removesuffix("</think>Five.") + "Five."


def test_a_budget_of_zero_closes_thoughts_at_once(thinker):
    reasoning, content, _ = both(thinker, thinking_token_budget=0)
    assert reasoning is None and content.endswith("Five.") and "think>" not in content


def test_the_budget_holds_in_all_apis(thinker):
    expected = THOUGHTS[:4]
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200}
    thinking = {"type": "enabled", "budget_tokens": 4}
    blocks = thinker.json("/v1/messages", {**body, "thinking": thinking})[1]["content"]
    assert [block["thinking"] for block in blocks if block["type"] == "thinking"] == [expected]
    body = {"model": "tiny", "input": "Hi", "thinking_token_budget": 4, "reasoning": {"effort": "medium"}}
    items = thinker.json("/v1/responses", body)[1]["output"]
    assert [item["content"][0]["text"] for item in items if item["type"] == "reasoning"] == [expected]
    for prompt in ("<think>", ids_of("<think>")):
        body = {"prompt": prompt, "max_tokens": 50, "thinking_token_budget": 0}
        [choice] = thinker.json("/v1/completions", body)[1]["choices"]
        assert choice["text"].startswith("</think>")


def test_several_answers_have_a_budget_each(thinker):
    body = {"messages": MESSAGES, "n": 3, "thinking_token_budget": 4, "logprobs": True}
    status, answer = thinker.json("/v1/chat/completions", body)
    assert status == 200 and [c["message"]["reasoning"] for c in answer["choices"]] == [THOUGHTS[:4]] * 3
    for choice in answer["choices"]:
        text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert f"{THOUGHTS[:4]}</think>" in text


@pytest.mark.parametrize("value", [-5, "many", 2.5, True])
def test_a_bad_budget_is_named(served, value):
    for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "Hi"})):
        status, answer = served.json(f"/v1/{path}", {**body, "thinking_token_budget": value})
        assert status == 400 and "thinking_token_budget" in answer["error"]["message"]

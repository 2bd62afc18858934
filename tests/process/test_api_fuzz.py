"""The API fuzzed by schemathesis, by the document that the server publishes: whatever is sent, no 5xx, and
answers that the document knows.

SHOAL_FUZZ_SEED repeats a run, SHOAL_FUZZ_EXAMPLES (an operation) makes it longer.
"""

import collections
import copy
import http.client
import json
import os
import random

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.fake_server import tool_server

SEED = int(os.environ.get("SHOAL_FUZZ_SEED", random.randrange(1 << 30)))
EXAMPLES = int(os.environ.get("SHOAL_FUZZ_EXAMPLES", 8))


@pytest.fixture(scope="module")
def served():
    with tool_server(model={"max_model_len": 1024, "max_num_seqs": 8}, max_queued_requests=8) as served:
        served.say("Hi")
        yield served


@pytest.fixture(scope="module")
def api(served):
    return schemathesis.openapi.from_url(served.url + "/openapi.json")


# What a schema can't say: fields that make a request one that the server can answer.
MESSAGES = [{"role": "user", "content": "Hi"}]
SENSE = {
    "messages": MESSAGES,
    "prompt": "Hi",
    "input": "Hi",
    "model": "tiny",
    "token_ids": [1, 2],
    "tokens": [72, 105],
    "max_tokens": 5,
    "n": None,
    "tools": None,
    "tool_choice": None,
    "best_of": None,
    "suffix": None,
}


@pytest.mark.parametrize(
    "way",
    [
        "by the schema and with sense",
        "against the schema",
        pytest.param("by the schema", marks=pytest.mark.slow),
    ],
)
def test_answers_are_what_the_document_says(api, way):
    print(f"SHOAL_FUZZ_SEED={SEED}")
    statuses = sum((fuzz(result.ok(), way) for result in api.get_all_operations()), collections.Counter())
    assert statuses[200] if way.endswith("sense") else statuses[400], statuses


def fuzz(operation, way):
    """Statuses of the answers, counted."""
    statuses = collections.Counter()
    has_body = operation.method.upper() == "POST" and operation.path != "/ping"
    mode = (
        schemathesis.GenerationMode.NEGATIVE
        if way.startswith("against")
        else schemathesis.GenerationMode.POSITIVE
    )

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=EXAMPLES if has_body else 2,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(
        case=operation.as_strategy(generation_mode=mode),
        kept=st.sets(st.sampled_from(sorted(SENSE)), max_size=2),
        dropped=st.integers(0, 3),
    )
    def check(case, kept, dropped):
        if not way.startswith("against") and isinstance(case.body, dict):
            case.body.pop("timeout", None)  # a deadline in the past is a 504, and rightly so
        if way.endswith("sense") and isinstance(case.body, dict):
            body = case.body
            if operation.path == "/tokenize":
                body.pop("messages", None)  # or prompt
            for name, value in SENSE.items():
                if name in body and name not in kept:
                    body[name] = value
            if dropped:  # few requests with many fields make sense
                for name in [n for n in body if n not in SENSE and n not in ("version",)][:-dropped]:
                    del body[name]
        # What a schema can't say (that a model exists, that options fit each other) is a 400 too.
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)
        statuses[response.status_code] += 1

    try:
        check()
    except hypothesis.errors.Unsatisfiable:  # nothing can be wrong where nothing is asked for
        assert not has_body
    print(operation.label, way, dict(statuses))
    return statuses


TOOL = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CONVERSATIONS = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "t"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"enable_thinking": True},
            "stop": ["x"],
            "logit_bias": {"5": 1.0},
            "max_tokens": 500,
            "stream_options": {"include_usage": True},
            "stream": True,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "r"}],
                    "content": [{"type": "reasoning_text", "text": "r"}],
                },
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": "t"},
            ],
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
            "max_output_tokens": 500,
        },
    ),
    (
        "/v1/responses",
        {
            "input": "u",
            "stream": True,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": TOOL["parameters"]}},
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "s"}],
            "max_tokens": 500,
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "messages": [
                {"role": "user", "content": "u"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "r", "signature": ""},
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "t"}],
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["x"],
            "output_config": None,
        },
    ),
]
DEEP = json.loads('{"a":' * 400 + "1" + "}" * 400)
JUNK = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "\x00",
    "é" * 50,
    [],
    [1],
    ["x"],
    [None],
    {},
    {"type": "x"},
    {"role": "user"},
    [[]],
    [{}],
    DEEP,
]


def test_spoilt_conversations_never_break_the_server(served):
    print(f"SHOAL_FUZZ_SEED={SEED}")
    rng = random.Random(SEED)
    statuses = collections.Counter()
    served.say('<think>r</think>a<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    for number in range(50 * EXAMPLES):
        path, body = copy.deepcopy(CONVERSATIONS[number % len(CONVERSATIONS)])
        for _ in range(rng.choice((1, 1, 2, 4))):
            spoil(body, rng)
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        statuses[response.status] += 1
        assert response.status < 500 and b"internal error" not in text, (text, path, json.dumps(body))
    connection.close()
    assert statuses[200] and statuses[400] and statuses.keys() <= {200, 400, 404}, statuses


def spoil(value, rng):
    """Puts junk at a random place, or takes something away, if there is anything left."""
    while value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
            value = value[key]
            continue
        if rng.random() < 0.2:
            del value[key]
        else:
            value[key] = copy.deepcopy(rng.choice(JUNK))
        return


def test_the_document_names_every_route_and_refers_to_nothing_missing(api, served):
    document = api.raw_schema
    assert document["openapi"] == "3.1.0"
    text = json.dumps(document)
    for name in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/openapi.json"):
        assert name in document["paths"]
    referred = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred <= document["components"]["schemas"].keys()

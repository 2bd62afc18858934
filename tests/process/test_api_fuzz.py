"""The API fuzzed by schemathesis, by the document that the server publishes: whatever is sent, no 5xx, and answers that the document knows.

SHOAL_FUZZ_SEED repeats a run, SHOAL_FUZZ_EXAMPLES (an operation) makes it longer.
"""

import collections
import json
import os
import random

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.serving import Served

SEED = int(os.environ.get("SHOAL_FUZZ_SEED", random.randrange(1 << 30)))
EXAMPLES = int(os.environ.get("SHOAL_FUZZ_EXAMPLES", 8))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("tiny"), max_model_len=64, max_queued_requests=8, max_num_seqs=8)
    served.say("Hi")
    yield served
    served.close()


@pytest.fixture(scope="module")
def api(served):
    return schemathesis.openapi.from_url(served.url + "/openapi.json")


# What a schema can't say: fields that make a request one that the server can answer.
MESSAGES = [{"role": "user", "content": "Hi"}]
SENSE = {"messages": MESSAGES, "prompt": "Hi", "input": "Hi", "model": "tiny", "token_ids": [1, 2], "tokens": [72, 105], "max_tokens": 5,
         "n": None, "tools": None, "tool_choice": None, "best_of": None, "suffix": None}


@pytest.mark.parametrize("way", ["by the schema", "by the schema and with sense", "against the schema"])
def test_answers_are_what_the_document_says(api, way):
    print(f"SHOAL_FUZZ_SEED={SEED}")
    statuses = sum((fuzz(result.ok(), way) for result in api.get_all_operations()), collections.Counter())
    assert statuses[200] if way.endswith("sense") else statuses[400], statuses


def fuzz(operation, way):
    """Statuses of the answers, counted."""
    statuses = collections.Counter()
    has_body = operation.method.upper() == "POST" and operation.path != "/ping"
    mode = schemathesis.GenerationMode.NEGATIVE if way.startswith("against") else schemathesis.GenerationMode.POSITIVE

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=EXAMPLES if has_body else 2, deadline=None, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate])
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), kept=st.sets(st.sampled_from(sorted(SENSE)), max_size=2),
                      dropped=st.integers(0, 3))
    def check(case, kept, dropped):
        if not way.startswith("against") and isinstance(case.body, dict):
            case.body.pop("timeout", None)     # a deadline in the past is a 504, and rightly so
        if way.endswith("sense") and isinstance(case.body, dict):
            body = case.body
            if operation.path == "/tokenize":
                body.pop("messages", None)     # or prompt
            for name, value in SENSE.items():
                if name in body and name not in kept:
                    body[name] = value
            if dropped:    # few requests with many fields make sense
                for name in [n for n in body if n not in SENSE and n not in ("version",)][:-dropped]:
                    del body[name]
        # What a schema can't say (that a model exists, that options fit each other) is a 400 too.
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)
        statuses[response.status_code] += 1

    try:
        check()
    except hypothesis.errors.Unsatisfiable:    # nothing can be wrong where nothing is asked for
        assert not has_body
    print(operation.label, way, dict(statuses))
    return statuses


def test_the_document_names_every_route_and_refers_to_nothing_missing(api, served):
    document = api.raw_schema
    assert document["openapi"] == "3.1.0"
    text = json.dumps(document)
    for name in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/openapi.json"):
        assert name in document["paths"]
    referred = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred <= document["components"]["schemas"].keys()

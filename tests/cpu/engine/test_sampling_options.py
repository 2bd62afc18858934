"""Each sampling parameter changes the answer. A new parameter needs an example here."""

import dataclasses

import pytest

from shoal import SamplingParams
from shoal.sampling_params import StructuredOutputsParams

PROMPT = [*range(60, 100)]
A, B, END = 32, 33, 257  # tokens of tests/tiny.py
HOT = dict(temperature=1.5, seed=7)
# They change no answer, or that of a model which thinks alone (test_llm_thinking.py).
NONE = ("spaces_between_special_tokens", "skip_reading_prefix_cache", "thinking_token_budget")

# By name: other parameters without which it does nothing, and a value that changes the answer.
EXAMPLES = {
    "n": ({}, 2),
    "presence_penalty": ({}, 2.0),
    "frequency_penalty": ({}, 2.0),
    "repetition_penalty": ({}, 5.0),
    "temperature": ({"seed": 7}, 1.5),
    "top_p": (HOT, 0.1),
    "top_k": (HOT, 1),
    "min_p": (HOT, 0.9),
    "seed": ({"temperature": 1.5}, 8),
    "stop": ({"allowed_token_ids": [A]}, ["AAA"]),
    "stop_token_ids": ({"allowed_token_ids": [A]}, [A]),
    "bad_words": ({"allowed_token_ids": [A, B]}, ["A"]),
    "include_stop_str_in_output": ({"allowed_token_ids": [A], "stop": ["AAA"]}, True),
    "ignore_eos": ({"allowed_token_ids": [END], "ignore_eos": False}, True),
    "max_tokens": ({}, 3),
    "min_tokens": ({"logit_bias": {END: 100.0}, "ignore_eos": False}, 4),
    "logprobs": ({}, 2),
    "prompt_logprobs": ({}, 2),
    "detokenize": ({}, False),
    "skip_special_tokens": ({"allowed_token_ids": [END]}, False),
    "logit_bias": ({}, {A: 100.0}),
    "allowed_token_ids": ({}, [A]),
    "structured_outputs": ({}, StructuredOutputsParams(regex="A{5,}")),
}


@pytest.fixture(scope="module")
def engine(root):
    from shoal import LLM
    from tests import tiny

    folder = tiny.write_model(root, "qwen3")
    with LLM(str(folder), device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 22) as llm:
        yield llm


def answer(engine, options):
    """All that a caller sees of it, but the name of the request."""
    params = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 8, "ignore_eos": True} | options)
    [output] = engine.generate([PROMPT], params)
    return dataclasses.replace(output, request_id="", num_cached_tokens=0)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SamplingParams) if f.name not in NONE])
def test_a_sampling_parameter_changes_the_answer(name, engine):
    base, value = EXAMPLES[name]
    assert answer(engine, base | {name: value}) != answer(engine, base)


def test_a_skipped_prefix_cache_is_not_read(engine):
    engine.generate([PROMPT], SamplingParams(max_tokens=1))
    skipped, read = (
        engine.generate([PROMPT], SamplingParams(max_tokens=1, skip_reading_prefix_cache=skips))
        for skips in (True, False)
    )
    assert (skipped[0].num_cached_tokens, read[0].num_cached_tokens) == (0, 32)

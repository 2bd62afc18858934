"""Fields of vLLM's parameters that Shoal does not have."""

import enum

import msgspec
import pytest

from shoal import BeamSearchParams, SamplingParams
from shoal.errors import RequestError


class Kind(enum.Enum):  # as vLLM's RequestOutputKind
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def test_values_that_ask_for_nothing_are_taken():
    """Regression: programs written for vLLM ended with a TypeError."""
    params = SamplingParams(
        temperature=0.5,
        output_kind=Kind.FINAL_ONLY,
        truncate_prompt_tokens=None,
        flat_logprobs=False,
        extra_args=None,
        logprob_token_ids=None,
        thinking_token_budget=None,
        repetition_detection=None,
        skip_clone=True,
        skip_reading_prefix_cache=None,
    )
    assert params == SamplingParams(temperature=0.5) and params.skip_reading_prefix_cache is False
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    beam = BeamSearchParams(
        beam_width=2, max_tokens=3, include_stop_str_in_output=False, structured_outputs=None
    )
    assert beam == BeamSearchParams(beam_width=2, max_tokens=3)


@pytest.mark.parametrize(
    "field, value",
    [
        ("output_kind", Kind.DELTA),
        ("truncate_prompt_tokens", 5),
        ("flat_logprobs", True),
        ("logprob_token_ids", [1]),
        ("repetition_detection", {"min_count": 2}),
        ("extra_args", {"a": 1}),
        ("best_of", 2),
    ],
)
def test_other_values_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"^{field} must be "):
        SamplingParams(**{field: value})


def test_a_field_that_nobody_knows_is_a_mistake():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)

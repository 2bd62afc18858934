"""Drafts are counted as tokens of answers: what is cut off behind an end is not accepted."""

import pytest

from shoal.api import Drafted, FinishReason, Output, Request
from shoal.collector import merge
from shoal.engine.scheduling.draft_lengths import DraftReport, drafted
from shoal.sampling_params import SamplingParams
from shoal.server.apis.response_shapes import usage_dict
from shoal.server.served.generation import Usage
from shoal.stats import Stats
from shoal.telemetry.metrics import ModelMetrics
from shoal.telemetry.served import recent_rates, totals_of
from shoal.text.thinking_budget import _cut


@pytest.mark.parametrize(
    ("kept", "sampled", "verified", "places"),
    [
        (5, 5, 4, [1, 2, 3, 4, 0]),  # all accepted, and one more token
        (1, 1, 4, [0]),
        (3, 3, 4, [1, 2, 0]),
        (2, 5, 4, [1, 2]),  # the second draft was a stop id
        (2, 3, 4, [1, 2]),
    ],
)
def test_the_last_sampled_token_is_no_draft(kept, sampled, verified, places):
    assert drafted(kept, sampled, DraftReport(verified, 3)) == Drafted(1, verified, places)


def test_a_step_that_verified_nothing_has_no_drafts():
    assert drafted(1, 1, DraftReport(0, 3, True)) is None


def test_merged_outputs_have_the_drafts_of_both():
    first = Output("a", [1, 2, 3], drafted=Drafted(1, 4, [1, 2, 0]))
    merge(first, Output("a", [4]))
    assert first.drafted == Drafted(1, 4, [1, 2, 0, 0])
    merge(first, Output("a", [5, 6], drafted=Drafted(1, 2, [1, 0]), finish_reason=FinishReason.STOP))
    assert first.drafted == Drafted(2, 6, [1, 2, 0, 0, 1, 0]) and first.drafted.num_accepted == 3
    plain = Output("b", [1])
    merge(plain, Output("b", [2]))
    assert plain.drafted is None


def test_a_budget_of_reasoning_cuts_drafts_with_their_tokens():
    output = Output("a", [1, 2, 3], drafted=Drafted(1, 4, [1, 2, 0]))
    assert _cut(output, 1).drafted == Drafted(1, 4, [1])


def exported(metrics):
    found = {}
    for family in metrics.collect(Stats(), None, 0):
        if "spec_decode" in family.name:
            for sample in family.samples:
                found[sample.name.removeprefix("vllm:spec_decode_num_"), sample.labels.get("position")] = (
                    sample.value
                )
    return found


def test_counters_have_vllms_names_and_a_position_for_each_draft():
    metrics = ModelMetrics("m", 100, {}, most_drafts=3)
    zeros = exported(metrics)
    assert set(zeros) == {
        ("drafts_total", None),
        ("draft_tokens_total", None),
        ("accepted_tokens_total", None),
        *((("accepted_tokens_per_pos_total"), str(i)) for i in range(3)),
    }
    assert not any(zeros.values())
    times = metrics.begin(Request("a", [1], SamplingParams()))
    times.drafted(Drafted(2, 6, [1, 2, 0, 1, 2, 3, 0]))
    times.drafted(Drafted(1, 3, [0]))
    now = exported(metrics)
    assert now["drafts_total", None] == 3 and now["draft_tokens_total", None] == 9
    assert now["accepted_tokens_total", None] == 5
    assert [now["accepted_tokens_per_pos_total", str(i)] for i in range(3)] == [2, 2, 1]


def test_without_speculation_there_are_no_counters():
    assert exported(ModelMetrics("m", 100, {})) == {}


def test_recent_rates_say_how_many_drafts_were_accepted():
    metrics = ModelMetrics("m", 100, {}, most_drafts=4)
    before = totals_of(metrics)
    assert recent_rates(totals_of(metrics), before, 1.0, before).acceptance is None
    metrics.drafts.add(Drafted(2, 8, [1, 2, 3, 0, 1, 0]))
    recent = recent_rates(totals_of(metrics), before, 1.0, before)
    assert recent.acceptance == 0.5 and recent.tokens_a_draft == 3.0


def test_usage_says_what_became_of_drafts_only_with_speculation():
    assert "completion_tokens_details" not in usage_dict(Usage(3, 4))
    assert usage_dict(Usage(3, 4, drafted=(5, 2)))["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 3,
    }

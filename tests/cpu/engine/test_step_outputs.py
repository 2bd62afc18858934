"""The outputs of a completed step, where a sequence may get several tokens."""

import torch

from shoal.api import FinishReason, Logprob, Request
from shoal.engine.runner.logprobs import LogprobTensors
from shoal.engine.runner.steps import StepResult
from shoal.engine.scheduling.draft_lengths import DraftReport
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_outputs import InFlight, outputs_of
from shoal.sampling_params import SamplingParams

QUERIES = 3


def scheduler_of(*requests):
    scheduler = Scheduler(
        num_blocks=50,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=100,
        queries=QUERIES,
    )
    for name, options in requests:
        params = SamplingParams(max_tokens=20, **options)
        scheduler.add(Request(name, [ord(name)] * 5, params, eos_token_ids=(99,)))
    return scheduler


def step(scheduler, *tokens):
    """The outputs of a step that sampled these tokens, by request. A decode has QUERIES places, of which its
    tokens are the last. The log-probability of a token is minus its place, its rank 1."""
    plan = scheduler.schedule()
    for entry in plan.scheduled:
        entry.seq.started_at = 0.0
    table = torch.zeros(len(tokens), QUERIES, dtype=torch.int32)
    places = -torch.arange(len(tokens) * QUERIES, dtype=torch.float32)
    ranks, top_ids = torch.ones(len(places), dtype=torch.int64), torch.full((len(places), 1), 7)
    found = LogprobTensors(places, ranks, top_ids, places[:, None])
    reports = [DraftReport(len(own) - 1, 0) for own in tokens]
    result = StepResult(table, None, found, None, None, plan.num_decodes, plan.queries, reports)
    launched = InFlight(plan, result, [], 0.0)
    outputs = outputs_of(launched, scheduler.update(plan, list(tokens), reports), list(tokens))
    return {output.request_id: output for output in outputs}


def test_an_output_has_all_tokens_of_its_step_and_their_logprobs():
    scheduler = scheduler_of(("a", {}), ("b", {"logprobs": 1}))
    first = step(scheduler, [1], [2])
    assert first["a"].token_ids == [1] and first["a"].spans and first["b"].spans
    second = step(scheduler, [3, 4, 5], [6, 8])
    assert (second["a"].token_ids, second["b"].token_ids) == ([3, 4, 5], [6, 8])
    assert second["a"].logprobs is None and not second["a"].spans
    # b is sample 1, and has two tokens, so its log-probabilities are rows 4 and 5
    assert second["b"].logprobs == [
        {6: Logprob(-4.0, 1), 7: Logprob(-4.0, 1)},
        {8: Logprob(-5.0, 1), 7: Logprob(-5.0, 1)},
    ]


def test_the_output_of_an_end_in_the_middle_has_the_tokens_up_to_the_end():
    scheduler = scheduler_of(("a", {"logprobs": 1, "stop_token_ids": [9]}))
    step(scheduler, [1])
    output = step(scheduler, [8, 9, 10])["a"]
    assert output.token_ids == [8, 9] and len(output.logprobs) == 2
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 9)


def test_tokens_before_a_refused_one_have_an_output_without_an_end():
    class Refusing:
        ended, error, is_ready = False, None, True

        def accept(self, token_id):
            self.error = "refused" if token_id == 9 else None
            return token_id != 9

        def close(self):
            pass

    scheduler = scheduler_of(("a", {}))
    step(scheduler, [1])
    [seq] = scheduler.running
    seq.grammar = Refusing()
    output = step(scheduler, [8, 9, 10])["a"]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([8], None, None)
    assert scheduler.take_finished_outside() == [seq] and seq.finish_reason is FinishReason.ERROR

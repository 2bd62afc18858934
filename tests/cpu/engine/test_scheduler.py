"""The scheduler: budgets and chunks, admission and preemption, stopping, shared prefixes, steps in flight."""

from types import SimpleNamespace

import pytest

from shoal.api import FinishReason, Request
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import RequestError
from shoal.kv.blocks import BlockPool
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.stats import STEP_TOKENS

EOS = 99
LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


def make(**options):
    defaults = {
        "num_blocks": 100,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
    }
    return Scheduler(**{**defaults, **options})


def request(name, prompt, *, priority=0, arrival=0.0, salt=None, adapter=None, bad_word_ids=(), **params):
    """`prompt`: token ids, or a number of tokens that nobody else has."""
    if isinstance(prompt, int):
        prompt = [sum(map(ord, name)) * 1000 + i for i in range(prompt)]
    return Request(
        name,
        list(prompt),
        SamplingParams(**{"max_tokens": 50, **params}),
        priority=priority,
        arrival=arrival,
        cache_salt=salt,
        adapter=adapter,
        eos_token_ids=(EOS,),
        bad_word_ids=bad_word_ids,
    )


def summary(plan):
    """(request id, start, number of tokens) of every entry."""
    return (
        [(e.seq.request.request_id, e.start, e.num_tokens) for e in plan.scheduled]
        if plan is not None
        else None
    )


def num_samples(plan):
    return sum(e.samples for e in plan.scheduled)


def update(scheduler, plan, token=7):
    """`token`: one for all, or one for each that samples. Returns {request id: (token, finish reason)}."""
    tokens = token if isinstance(token, list) else [token] * num_samples(plan)
    results = scheduler.update(plan, [[token_id] for token_id in tokens])
    scheduler.check()
    assert all(len(r.token_ids) == 1 for r in results)
    return {r.seq.request.request_id: (r.token_ids[0], r.finish_reason) for r in results}


def step(scheduler, token=7):
    """A synchronous step. Returns the plan's summary."""
    plan = scheduler.schedule()
    scheduler.check()
    if plan is not None:
        update(scheduler, plan, token)
    return summary(plan)


def run(scheduler, token=7):
    """Runs all sequences to the end, synchronously. Returns {request id: sequence}."""
    sequences = {s.request.request_id: s for s in (*scheduler.waiting, *scheduler.running)}
    for _ in range(10_000):
        if not scheduler.has_work:
            return sequences
        assert step(scheduler, token) is not None
    raise AssertionError("no end")


def names(queue):
    return [s.request.request_id for s in queue]


# Budget and chunks


def test_prompts_are_computed_together_and_then_decoded_together():
    s = make()
    for name, n in (("a", 5), ("b", 9), ("c", 1)):
        s.add(request(name, n))
    plan = s.schedule()
    assert summary(plan) == [("a", 0, 5), ("b", 0, 9), ("c", 0, 1)]
    assert (plan.num_decodes, plan.num_tokens) == (0, 15) and all(e.samples for e in plan.scheduled)
    update(s, plan)
    plan = s.schedule()
    assert summary(plan) == [("b", 9, 1), ("a", 5, 1), ("c", 1, 1)] and (
        plan.num_decodes,
        plan.num_tokens,
    ) == (3, 3)


def test_a_long_prompt_is_cut_to_the_budget_and_samples_once_at_its_end():
    s = make(max_num_batched_tokens=10)
    s.add(request("a", 25))
    plans = [s.schedule() for _ in range(3)]
    assert [summary(p) for p in plans] == [[("a", 0, 10)], [("a", 10, 10)], [("a", 20, 5)]]
    assert [num_samples(p) for p in plans] == [0, 0, 1]


def test_steps_are_counted_by_their_tokens():
    s = make(max_num_batched_tokens=10)
    s.add(request("a", 25, max_tokens=4))
    run(s)  # 10, 10, 5, then three of one token
    stats = s.stats()
    by_tokens = dict(zip(STEP_TOKENS, stats.steps_by_tokens))
    assert stats.step_tokens == 28 and by_tokens == {**dict.fromkeys(STEP_TOKENS, 0), 1: 3, 8: 1, 16: 2}


def test_those_who_wait_for_more_than_room_are_told_apart():
    s = make(max_num_seqs=1)
    for name in ("a", "b", "c"):
        s.add(request(name, 4))
    step(s)
    compiling = s.waiting[0]  # its grammar
    s.gates.append(SimpleNamespace(may_start=lambda seq: seq is not compiling))
    assert (s.stats().num_waiting, s.stats().num_deferred) == (2, 1)


def test_a_sequence_without_room_does_not_keep_others_from_drafting():
    """Regression: on a GPU no step had drafts as long as a sequence waited for blocks."""
    s = make(num_blocks=8)
    asked = []
    s.lengths = SimpleNamespace(
        choose=lambda running, may_start: asked.append(may_start) or 1,
        places=lambda num_tokens: 1,
        learn=lambda *_: None,
        head_rests=False,
    )
    s.add(request("a", 20, max_tokens=4))
    step(s)
    s.add(request("b", 16))
    s.add(request("c", 1))
    for _ in range(3):
        step(s)
    assert asked == [True, False, False, False] and not s.running
    step(s)
    assert asked[4:] == [True]


def test_decodes_come_first_and_prompts_share_what_is_left():
    s = make(max_num_batched_tokens=10)
    s.add(request("a", 4))
    s.add(request("b", 4))
    step(s)
    s.add(request("c", 20))
    s.add(request("d", 3))
    assert step(s) == [("a", 4, 1), ("b", 4, 1), ("c", 0, 8)]
    assert step(s) == [("a", 5, 1), ("b", 5, 1), ("c", 8, 8)]
    assert step(s) == [("a", 6, 1), ("b", 6, 1), ("c", 16, 4), ("d", 0, 3)]
    assert step(s) == [("c", 20, 1), ("a", 7, 1), ("b", 7, 1), ("d", 3, 1)]


def test_decodes_come_longest_first_and_keep_their_order_when_others_join_and_leave():
    s = make(max_num_batched_tokens=64)
    for name, n in (("a", 3), ("b", 9), ("c", 3), ("d", 6)):
        s.add(request(name, n))
    step(s)
    assert step(s) == [("b", 9, 1), ("d", 6, 1), ("a", 3, 1), ("c", 3, 1)]
    s.add(request("e", 8))
    assert step(s) == [("b", 10, 1), ("d", 7, 1), ("a", 4, 1), ("c", 4, 1), ("e", 0, 8)]
    s.abort("d")
    assert step(s) == [("b", 11, 1), ("e", 8, 1), ("a", 5, 1), ("c", 5, 1)]


def test_prompts_begun_go_on_before_new_ones():
    s = make(max_num_batched_tokens=8)
    s.add(request("a", 12))
    step(s)
    s.add(request("b", 12))
    assert step(s) == [("a", 8, 4), ("b", 0, 4)]
    assert step(s) == [("a", 12, 1), ("b", 4, 7)]


def test_a_cap_on_long_prompts_lets_others_through_but_costs_nothing_alone():
    s = make(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    s.add(request("long", 60))
    assert step(s) == [("long", 0, 20)]
    s.add(request("b", 3))
    s.add(request("c", 30))
    assert step(s) == [("long", 20, 6), ("b", 0, 3), ("c", 0, 6)]
    s.abort("c")
    assert step(s) == [("b", 3, 1), ("long", 26, 19)]


def test_a_prefill_of_one_token_carries_its_token():
    """Its row on the device lacks that token, so it is not a decode."""
    s = make(max_num_batched_tokens=4)
    s.add(request("a", 5))
    step(s)
    plan = s.schedule()
    assert summary(plan) == [("a", 4, 1)] and plan.num_decodes == 0 and num_samples(plan) == 1


def test_more_decodes_than_budget_still_reach_their_end():
    s = make(max_num_batched_tokens=2)
    for name in "abcd":
        s.add(request(name, 2, max_tokens=5))
    assert {len(q.output_token_ids) for q in run(s).values()} == {5}


def test_no_more_sequences_than_rows_and_the_lowest_free_row_first():
    s = make(max_num_seqs=3)
    for name in "abcd":
        s.add(request(name, 3))
    assert [e.row for e in s.schedule().scheduled] == [0, 1, 2] and names(s.waiting) == ["d"]
    s.abort("c")
    s.abort("b")
    s.add(request("e", 3))
    assert {e.seq.request.request_id: e.row for e in s.schedule().scheduled} == {"a": 0, "d": 1, "e": 2}


# Order and admission


def test_first_come_first_served_and_the_head_is_not_overtaken():
    s = make(num_blocks=6)
    s.add(request("a", 12))
    step(s)
    s.add(request("big", 16))
    s.add(request("small", 1))
    assert step(s) == [("a", 12, 1)] and names(s.waiting) == ["big", "small"]
    s.abort("a")
    assert step(s) == [("big", 0, 16), ("small", 0, 1)]


def test_a_prompt_starts_only_when_all_of_it_fits():
    s = make(num_blocks=6, max_num_batched_tokens=4)
    s.add(request("a", 16))
    s.add(request("b", 12))
    for _ in range(8):
        assert [name for name, *_ in step(s)] == ["a"], "b's first chunk would have fitted, b would not"


def test_priority_orders_by_priority_then_arrival_then_order():
    s = make(scheduling_policy="priority", max_num_seqs=1)
    for name, priority, arrival in (
        ("late", 1, 2.0),
        ("early", 1, 1.0),
        ("second", 0, 5.0),
        ("urgent", -1, 9.0),
        ("third", 0, 5.0),
    ):
        s.add(request(name, 3, priority=priority, arrival=arrival, max_tokens=1))
    order = []
    while s.has_work:
        order += [name for name, *_ in step(s)]
    assert order == ["urgent", "second", "third", "early", "late"]


def test_priorities_mean_nothing_under_fcfs():
    s = make(max_num_seqs=1)
    s.add(request("a", 3, priority=5, arrival=5.0))
    s.add(request("b", 3, priority=-5))
    assert step(s) == [("a", 0, 3)]


# Preemption


def test_the_last_sequence_is_put_out_for_one_that_needs_a_block_and_resumes_where_it_was():
    s = make(num_blocks=4, enable_prefix_caching=False)
    s.add(request("a", 8, max_tokens=8))
    s.add(request("b", 8, max_tokens=5))
    a, b = s.waiting
    step(s, [1, 2])
    assert step(s, [1]) == [("a", 8, 1)]  # a's third block: b has to go
    assert (
        names(s.waiting) == ["b"]
        and (b.num_computed, b.row, b.block_ids) == (0, -1, [])
        and s.stats().num_preemptions == 1
    )
    assert b.output_token_ids == [2]
    s.add(request("c", 1))
    for _ in range(6):
        assert [name for name, *_ in step(s, [1])] == ["a"], "nobody overtakes b"
    assert a.finish_reason is LENGTH
    assert step(s, [2, 3])[0] == ("b", 0, 9)  # all nine tokens it had, at once
    run(s, 2)
    assert b.output_token_ids == [2] * 5 and b.num_prompt_tokens == 8


def test_the_last_sequence_puts_itself_out_if_it_is_the_one_in_need():
    s = make(num_blocks=4, enable_prefix_caching=False)
    s.add(request("a", 9))
    s.add(request("b", 4))
    step(s)
    assert step(s) == [("a", 9, 1)] and names(s.waiting) == ["b"]


def test_under_priority_the_least_urgent_goes_whenever_it_came():
    s = make(num_blocks=5, scheduling_policy="priority", enable_prefix_caching=False)
    s.add(request("low", 8, priority=2))
    step(s)
    s.add(request("high", 8, priority=0, arrival=1.0))
    step(s)
    assert names(s.running) == ["high", "low"]
    while names(s.running) == ["high", "low"]:
        step(s)
    assert names(s.running) == ["high"] and names(s.waiting) == ["low"]


def test_whoever_was_put_out_comes_before_newcomers_that_would_fit():
    s = make(num_blocks=5, enable_prefix_caching=False)
    s.add(request("a", 8))
    s.add(request("b", 12))
    step(s)
    s.add(request("c", 1))
    assert step(s) == [("a", 8, 1)] and names(s.waiting) == ["b", "c"]  # two blocks are free, and c needs one


def test_a_preempted_sequence_finds_its_own_blocks_again():
    s = make(num_blocks=4)
    s.add(request("a", 8, max_tokens=2))
    s.add(request("b", 8))
    step(s)
    assert step(s) == [("a", 8, 1)]  # took b's tail block; a has ended
    assert step(s) == [("b", 4, 5)]
    [b] = s.running
    assert b.num_cached_tokens == 0 and s.stats().prefix_cache_hits == 0, (
        "its own blocks are not counted as hits"
    )


def test_a_sequence_alone_can_use_the_whole_cache_and_ends_with_length():
    s = make(num_blocks=3)
    s.add(request("a", 5, max_tokens=None))
    [a] = run(s).values()
    assert len(a.token_ids) == 12 and a.finish_reason is LENGTH and not s.stats().num_preemptions


def test_nothing_is_left_behind_by_many_requests_in_a_small_cache():
    s = make(num_blocks=12)
    for i in range(60):
        s.add(request(str(i), 1 + i % 17, max_tokens=1 + i % 20))
    assert all(len(q.output_token_ids) == q.request.params.max_tokens for q in run(s).values())
    stats = s.stats()
    assert stats.num_preemptions and (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (
        0,
        0,
        12,
    )


# Ends


def test_max_tokens_and_max_model_len_end_with_length():
    s = make(max_model_len=10)
    s.add(request("few", 3, max_tokens=2))
    s.add(request("many", 3, max_tokens=100))
    s.add(request("open", 9, max_tokens=None))
    done = run(s)
    assert {name: (len(q.output_token_ids), q.finish_reason) for name, q in done.items()} == {
        "few": (2, LENGTH),
        "many": (7, LENGTH),
        "open": (1, LENGTH),
    }


def test_an_end_of_text_id_stops_without_a_reason_and_is_part_of_the_tokens():
    s = make()
    a = s.add(request("a", 3))
    step(s, 5)
    plan = s.schedule()
    assert update(s, plan, EOS) == {"a": (EOS, STOP)}
    assert a.output_token_ids == [5, EOS] and a.stop_reason is None and not s.has_work


def test_a_stop_id_is_the_stop_reason_and_end_of_text_comes_first():
    s = make()
    a, b = s.add(request("a", 3, stop_token_ids=[42])), s.add(request("b", 3, stop_token_ids=[EOS]))
    step(s, [42, EOS])
    assert (a.finish_reason, a.stop_reason) == (STOP, 42)
    assert (b.finish_reason, b.stop_reason) == (STOP, None)


def test_ignore_eos_ignores_end_of_text_but_not_stop_ids():
    s = make()
    a = s.add(request("a", 3, ignore_eos=True, max_tokens=4))
    b = s.add(request("b", 3, ignore_eos=True, stop_token_ids=[EOS]))
    run(s, EOS)
    assert len(a.output_token_ids) == 4 and a.finish_reason is LENGTH
    assert (b.output_token_ids, b.finish_reason, b.stop_reason) == ([EOS], STOP, EOS)


def test_nothing_stops_before_min_tokens():
    s = make()
    a, b = (
        s.add(request("a", 3, min_tokens=3)),
        s.add(request("b", 3, min_tokens=3, stop_token_ids=[EOS], ignore_eos=True)),
    )
    run(s, EOS)
    assert (len(a.output_token_ids), a.stop_reason) == (3, None) and (
        len(b.output_token_ids),
        b.stop_reason,
    ) == (3, EOS)


def test_a_stop_on_the_last_token_is_a_stop():
    s = make()
    a = s.add(request("a", 3, max_tokens=1))
    step(s, EOS)
    assert a.finish_reason is STOP


def test_a_stop_string_found_above_ends_a_request():
    s = make()
    a = s.add(request("a", 3))
    step(s)
    assert s.finish("a", STOP, "\n\n") is a and (a.finish_reason, a.stop_reason) == (STOP, "\n\n")
    assert s.finish("a", STOP, "again") is None and a.stop_reason == "\n\n"
    s.check()


def test_abort_works_wherever_a_request_is_and_ignores_strangers():
    s = make(num_blocks=4)
    for name in ("running", "preempted", "waiting"):
        s.add(request(name, 8))
    sequences = {q.request.request_id: q for q in s.waiting}
    step(s)
    step(s)
    assert names(s.running) == ["running"] and sequences["preempted"].num_admissions == 1
    for name in ("preempted", "running", "waiting"):
        assert s.abort(name) is sequences[name] and sequences[name].finish_reason is ABORT
        s.check()
        assert s.abort(name) is None
    assert s.abort("stranger") is None and not s.has_work and s.schedule() is None
    assert s.stats().num_free_blocks == 4


# Requests that can't be


@pytest.mark.parametrize(
    "options, prompt, words", [({}, 200, "max_model_len 200"), ({"num_blocks": 5}, 20, "whole KV cache")]
)
def test_prompts_that_can_never_run_are_refused_and_nothing_else_notices(options, prompt, words):
    s = make(**options)
    s.add(request("a", 3))
    with pytest.raises(RequestError, match=words):
        s.add(request("b", prompt))
    assert len(run(s)) == 1
    s.add(request("c", prompt - 1 if prompt else 1, max_tokens=None))
    assert [len(q.output_token_ids) for q in run(s).values()] in ([1], [199])


def test_an_id_may_be_used_again_only_after_its_end():
    s = make()
    s.add(request("a", 3))
    with pytest.raises(RequestError, match="'a' is in use"):
        s.add(request("a", 4))
    s.abort("a")
    s.add(request("a", 4))
    assert step(s) == [("a", 0, 4)]


# The prefix cache


def test_full_blocks_of_a_finished_sequence_are_found_outputs_included():
    s = make()
    prompt = list(range(1, 11))
    s.add(request("a", prompt, max_tokens=4))
    run(s, 50)  # 14 tokens; the last was never computed
    b = s.add(request("b", [*prompt, 50, 50, 50, 50, 50, 50]))
    assert step(s) == [("b", 12, 4)] and b.num_cached_tokens == 12
    stats = s.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (26, 12)


def test_a_block_whose_last_token_was_never_computed_is_not_found():
    s = make()
    s.add(request("a", [1, 2, 3], max_tokens=1))
    run(s, 4)
    s.add(request("b", [1, 2, 3, 4, 5]))
    assert step(s) == [("b", 0, 5)]


def test_the_last_token_is_always_computed():
    s = make()
    prompt = list(range(1, 9))
    s.add(request("a", prompt, max_tokens=1))
    run(s)
    s.add(request("b", prompt))
    assert step(s) == [("b", 4, 4)]


@pytest.mark.parametrize("other", [{"salt": "x"}, {"adapter": "x"}])
def test_salts_and_adapters_keep_prefixes_apart(other):
    s = make()
    prompt = list(range(1, 10))
    s.add(request("a", prompt, max_tokens=1))
    run(s)
    for name, extra, start in (("b", other, 0), ("c", other, 8), ("d", {}, 8)):
        s.add(request(name, prompt, max_tokens=1, **extra))
        assert step(s) == [(name, start, 9 - start)]


def test_prompt_logprobs_need_every_token_but_leave_theirs_for_others():
    s = make()
    prompt = list(range(1, 10))
    for name, start, asked in (("a", 0, 2), ("b", 0, 0), ("c", 8, None)):
        s.add(request(name, prompt, max_tokens=1, prompt_logprobs=asked))
        assert step(s) == [(name, start, 9 - start)]
    assert s.stats().prefix_cache_queries == 9


def test_without_prefix_caching_everything_is_computed_again():
    s = make(enable_prefix_caching=False)
    for name in "ab":
        s.add(request(name, range(1, 10), max_tokens=1))
        assert step(s) == [(name, 0, 9)]
    assert s.stats().prefix_cache_queries == 0


def test_suffixes_are_evicted_before_the_prefix_they_share():
    s = make(num_blocks=6)
    prefix = list(range(1, 9))
    for name in "ab":
        s.add(request(name, [*prefix, *([ord(name)] * 4)], max_tokens=2))
        run(s)
    s.add(request("stranger", 12, max_tokens=2))  # four blocks: all but the shared two
    run(s)
    s.add(request("c", [*prefix, 5]))
    assert step(s) == [("c", 8, 1)]


def test_a_prompt_that_does_not_fit_beside_its_own_hits_waits_and_loses_nothing():
    s = make(num_blocks=7)
    s.add(request("a", range(1, 9), max_tokens=1))
    run(s)
    s.add(request("b", 12))
    step(s)
    s.add(request("c", range(1, 25)))  # two hits and four blocks more; b holds three
    assert step(s) == [("b", 12, 1)] and s.stats().num_free_blocks == 3
    s.abort("b")
    assert step(s) == [("c", 8, 16)]


def test_identical_prompts_that_arrive_together_compute_their_prefix_once():
    s = make()
    for name in "abc":
        s.add(request(name, range(1, 15)))
    assert step(s) == [("a", 0, 14), ("b", 12, 2), ("c", 12, 2)]
    assert s.running[0].block_ids[:3] == s.running[1].block_ids[:3] == s.running[2].block_ids[:3]


def test_a_prompt_waits_for_a_prefix_that_is_being_computed_and_others_pass_it():
    s = make(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    s.add(request("a", range(1, 15)))
    s.add(request("same", range(1, 15)))
    s.add(request("other", 3))
    assert step(s) == [("a", 0, 6), ("other", 0, 3)]  # block 1 of `same` is half done
    assert step(s) == [("other", 3, 1), ("a", 6, 6), ("same", 12, 2)]


def test_a_prompt_does_not_wait_for_a_prefix_whose_sequence_has_gone():
    s = make(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    s.add(request("a", range(1, 15)))
    s.add(request("same", range(1, 15)))
    step(s)
    s.abort("a")
    assert step(s) == [("same", 4, 10)]


def test_several_turns_of_a_conversation_compute_only_what_is_new():
    s = make()
    conversation: list[int] = []
    for turn in range(5):
        conversation += range(1000 * turn, 1000 * turn + 9)
        a = s.add(request(f"turn{turn}", conversation, max_tokens=6))
        run(s, 70 + turn)
        assert a.num_cached_tokens >= len(conversation) - 9 - 4 if turn else a.num_cached_tokens == 0
        conversation = list(a.token_ids)


def test_reset_forgets_what_is_free_and_what_runs():
    s = make()
    prompt = list(range(1, 10))
    s.add(request("a", prompt, max_tokens=1))
    run(s)
    assert s.reset_prefix_cache() is True
    s.add(request("b", prompt))
    assert step(s) == [("b", 0, 9)]
    assert s.reset_prefix_cache() is False
    run(s)  # b continues; none of its blocks may be found, later ones neither
    c = s.add(request("c", [*prompt, *[7] * 40], max_tokens=1))
    assert step(s) == [("c", 0, 49)]
    assert c.num_cached_tokens == 0
    s.add(request("d", [*prompt, *[7] * 40]))
    assert step(s) == [("d", 48, 1)]


def test_nobody_waits_for_a_prefix_begun_before_a_reset():
    s = make(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    s.add(request("a", range(1, 15)))
    s.add(request("same", range(1, 15)))
    step(s)
    s.reset_prefix_cache()
    assert step(s) == [("a", 6, 6), ("same", 0, 6)]


# Steps in flight


def test_a_decode_is_scheduled_before_its_token_is_known():
    s = make()
    a = s.add(request("a", 5))
    plans = [s.schedule() for _ in range(4)]
    assert [summary(p) for p in plans] == [[("a", 0, 5)], [("a", 5, 1)], [("a", 6, 1)], [("a", 7, 1)]]
    assert a.num_pending == 4 and a.num_tokens == 9 and a.output_token_ids == []
    for i, plan in enumerate(plans):
        assert update(s, plan, i) == {"a": (i, None)}
    assert a.output_token_ids == [0, 1, 2, 3] and a.num_pending == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_end_by_length_is_known_in_advance(max_tokens):
    s = make()
    s.add(request("a", 5, max_tokens=max_tokens))
    plans = []
    while (plan := s.schedule()) is not None:
        plans.append(plan)
    assert sum(map(num_samples, plans)) == max_tokens and s.has_work
    ends = [update(s, plan)["a"][1] for plan in plans]
    assert ends == [None] * (max_tokens - 1) + [LENGTH] and not s.has_work


def test_a_stop_is_seen_one_step_late_and_the_surplus_token_is_dropped():
    s = make()
    a, b = s.add(request("a", 5)), s.add(request("b", 5))
    first, second = s.schedule(), s.schedule()
    assert update(s, first, [EOS, 7]) == {"a": (EOS, STOP), "b": (7, None)}
    third = s.schedule()
    assert summary(third) == [("b", 6, 1)]
    assert update(s, second, [1, 8]) == {"b": (8, None)}
    assert [r.sample for r in s.update(third, [[9]])] == [0]
    assert a.output_token_ids == [EOS] and b.output_token_ids == [7, 8, 9]


def test_results_name_the_sample_they_came_from():
    s = make()
    for name in "abc":
        s.add(request(name, 5))
    plan = s.schedule()
    s.abort("b")
    results = s.update(plan, [[4], [5], [6]])
    assert [(r.seq.request.request_id, r.sample, r.token_ids) for r in results] == [
        ("a", 0, [4]),
        ("c", 2, [6]),
    ]


def test_abort_with_a_step_in_flight_frees_everything_and_drops_its_token():
    s = make()
    s.add(request("a", 5))
    first, second = s.schedule(), s.schedule()
    s.abort("a")
    s.check()
    assert s.stats().num_free_blocks == 100 and not s.has_work
    assert update(s, first) == {} and update(s, second) == {}


def test_an_id_used_again_while_its_old_step_is_in_flight_gets_none_of_its_tokens():
    s = make()
    s.add(request("a", 5))
    old = s.schedule()
    s.abort("a")
    a = s.add(request("a", 5))
    assert update(s, old) == {} and a.output_token_ids == []


def test_a_sequence_preempted_with_a_token_in_flight_keeps_it_and_waits_for_it():
    s = make(num_blocks=4, enable_prefix_caching=False)
    s.add(request("a", 8, max_tokens=2))
    b = s.add(request("b", 8))
    first = s.schedule()
    second = s.schedule()  # before first's tokens are seen: b is put out
    assert summary(second) == [("a", 8, 1)] and names(s.waiting) == ["b"] and b.num_pending == 1
    assert s.schedule() is None, "a has all it asked for, and b's token is not known yet"
    assert update(s, first, [7, 8]) == {"a": (7, None), "b": (8, None)}
    assert update(s, second) == {"a": (7, LENGTH)}
    assert b.output_token_ids == [8] and step(s) == [("b", 0, 9)]


def test_a_sequence_preempted_while_its_last_token_is_in_flight_just_ends():
    s = make(num_blocks=4)
    s.add(request("a", 8))
    b = s.add(request("b", 8, max_tokens=1))
    first, _second = s.schedule(), s.schedule()
    assert names(s.waiting) == ["b"]
    assert update(s, first)["b"] == (7, LENGTH) and b.num_admissions == 1 and not s.waiting


def test_a_reset_with_steps_in_flight_and_no_room_keeps_every_token():
    s = make(num_blocks=4)
    a, b = s.add(request("a", 7, max_tokens=6)), s.add(request("b", 7, max_tokens=6))
    plans, outputs = [s.schedule()], {"a": [], "b": []}
    token = 0
    while s.has_work:
        if (plan := s.schedule()) is not None:
            plans.append(plan)
        s.reset_prefix_cache()
        s.check()
        plan = plans.pop(0)
        tokens = list(range(token, token + num_samples(plan)))
        token += len(tokens)
        for name, (token_id, _) in update(s, plan, tokens).items():
            outputs[name].append(token_id)
    assert (
        s.stats().num_preemptions
        and a.output_token_ids == outputs["a"]
        and b.output_token_ids == outputs["b"]
    )
    assert len(outputs["a"]) == len(outputs["b"]) == 6


def test_blocks_of_generated_tokens_are_found_only_once_their_tokens_are_known():
    s = make()
    s.add(request("a", [1, 2, 3]))
    plans = [s.schedule() for _ in range(3)]  # positions 0..4 are computed, tokens 3 and 4 are pending
    s.add(request("b", [1, 2, 3, 4, 5], max_tokens=1))
    plans.append(s.schedule())
    assert summary(plans[3])[1] == ("b", 0, 5)
    update(s, plans[0], 4)
    s.add(request("c", [1, 2, 3, 4, 5, 6]))
    assert summary(s.schedule())[1:] == [("c", 4, 2)]


def test_a_sequence_in_lockstep_waits_for_its_token_and_others_don_t():
    s = make()
    s.add(request("free", 5))
    s.add(request("lockstep", 5, structured_outputs=StructuredOutputsParams(regex="a*")))
    # Whether 4 may be drawn depends on the token before, which the device knows.
    s.add(request("banned", 5, bad_word_ids=((3, 4),)))
    first, second = s.schedule(), s.schedule()
    assert summary(second) == [("free", 5, 1), ("banned", 5, 1)]
    update(s, first)
    assert summary(s.schedule()) == [("free", 6, 1), ("banned", 6, 1), ("lockstep", 5, 1)]


def test_rows_and_blocks_of_an_ended_sequence_go_to_the_next_one():
    s = make(num_blocks=3, max_num_seqs=1)
    s.add(request("a", 5))
    first, second = s.schedule(), s.schedule()
    update(s, first, EOS)
    b = s.add(request("b", 9))
    third = s.schedule()
    assert summary(third) == [("b", 0, 9)] and b.row == 0
    assert update(s, second) == {} and update(s, third) == {"b": (7, None)}


# Several tokens of a sequence in one step


class OneRefused:
    """Allows every token but one, and ends with token 50."""

    is_ready = True

    def __init__(self, refused):
        self.refused, self.ended, self.error, self.taken = refused, False, None, []

    def accept(self, token_id):
        if token_id == self.refused:
            self.error = "refused"
            return False
        self.taken.append(token_id)
        self.ended = token_id == 50
        return True

    def close(self):
        pass


def decoding(queries=4, prompt=5, **params):
    """A scheduler that plans decodes of up to `queries` tokens, and its only sequence, which has one output
    token and decodes."""
    s = make(queries=queries)
    seq = s.add(request("a", prompt, **params))
    step(s)
    assert seq.output_token_ids == [7]
    return s, seq


def sampled(scheduler, plan, *tokens):
    """Updates with a list of tokens for each sample. Returns [(request id, kept tokens, finish reason)]."""
    results = scheduler.update(plan, list(tokens))
    scheduler.check()
    return [(r.seq.request.request_id, r.token_ids, r.finish_reason) for r in results]


def test_a_decode_of_several_tokens_gives_its_sequence_as_many_as_it_sampled():
    s, a = decoding()
    for start, tokens in ((5, [1, 2, 3, 4]), (9, [5]), (10, [6, 8])):
        plan = s.schedule()
        assert summary(plan) == [("a", start, 4)] and plan.num_tokens == 4
        assert len(a.block_ids) * 4 >= start + 4
        assert sampled(s, plan, tokens) == [("a", tokens, None)]
    assert a.output_token_ids == [7, 1, 2, 3, 4, 5, 6, 8] and a.num_pending == 0
    assert (a.num_computed, a.num_tokens) == (12, 13)


def test_while_steps_are_in_flight_a_sequence_counts_with_the_most_tokens_they_may_sample():
    s, a = decoding()
    first, second = s.schedule(), s.schedule()
    assert summary(second) == [("a", 9, 4)] and (a.num_pending, len(a.block_ids)) == (8, 4)
    assert sampled(s, first, [1]) == [("a", [1], None)]
    assert a.num_pending == 4
    third = s.schedule()
    assert summary(third) == [("a", 10, 4)]
    assert sampled(s, second, [2, 3, 4]) == [("a", [2, 3, 4], None)]
    assert sampled(s, third, [5]) == [("a", [5], None)]
    assert a.output_token_ids == [7, 1, 2, 3, 4, 5] and (a.num_computed, a.num_pending) == (10, 0)


def test_a_stop_in_the_middle_of_a_step_drops_the_tokens_after_it():
    s, a = decoding()
    assert sampled(s, s.schedule(), [1, EOS, 2, 3]) == [("a", [1, EOS], STOP)]
    assert a.output_token_ids == [7, 1, EOS] and a.stop_reason is None and not s.has_work
    s, a = decoding(stop_token_ids=[3])
    assert sampled(s, s.schedule(), [1, 2, 3, EOS]) == [("a", [1, 2, 3], STOP)] and a.stop_reason == 3


def test_min_tokens_counts_tokens_and_not_steps():
    s, a = decoding(min_tokens=4)
    assert sampled(s, s.schedule(), [EOS, 1, EOS, EOS]) == [("a", [EOS, 1, EOS], STOP)]
    assert len(a.output_token_ids) == 4


def test_max_tokens_ends_a_sequence_in_the_middle_of_a_step():
    s, _ = decoding(max_tokens=4)
    plan = s.schedule()
    assert summary(plan) == [("a", 5, 3)]  # more would be surplus
    assert s.schedule() is None
    assert sampled(s, plan, [1, 2, 3]) == [("a", [1, 2, 3], LENGTH)]
    s, _ = decoding(max_tokens=6)
    first = s.schedule()
    second = s.schedule()
    assert summary(second) == [("a", 9, 1)] and s.schedule() is None
    assert sampled(s, first, [1]) == [("a", [1], None)]
    third = s.schedule()
    assert summary(third) == [("a", 7, 3)]
    assert sampled(s, second, [2]) == [("a", [2], None)]
    assert sampled(s, third, [3, 4, 5]) == [("a", [3, 4, 5], LENGTH)]
    s, _ = decoding(max_tokens=3)
    assert sampled(s, s.schedule(), [1, 2, 3, 4]) == [("a", [1, 2], LENGTH)]  # a runner that gives more


def test_a_decode_never_passes_the_end_of_the_context():
    s = make(queries=8, max_model_len=9)
    a = s.add(request("a", 5))
    step(s)
    plan = s.schedule()
    assert summary(plan) == [("a", 5, 3)]
    assert sampled(s, plan, [1, 2, 3]) == [("a", [1, 2, 3], LENGTH)] and len(a.token_ids) == 9


def test_a_grammar_that_refuses_the_second_token_keeps_the_first():
    s, a = decoding()
    a.grammar = OneRefused(2)
    assert sampled(s, s.schedule(), [1, 2, 3, 4]) == [("a", [1], None)]
    assert s.take_finished_outside() == [a] and not s.has_work
    assert (a.finish_reason, a.stop_reason, a.error) == (FinishReason.ERROR, "grammar", "refused")
    assert a.output_token_ids == [7, 1] == [7, *a.grammar.taken]
    s, a = decoding()
    a.grammar = OneRefused(1)
    assert sampled(s, s.schedule(), [1, 2]) == [] and s.take_finished_outside() == [a]


def test_a_grammar_ends_its_sequence_in_the_middle_of_a_step():
    s, a = decoding()
    a.grammar = OneRefused(None)
    assert sampled(s, s.schedule(), [1, 50, 2, 3]) == [("a", [1, 50], STOP)] and a.grammar.taken == [1, 50]


def test_all_tokens_of_a_step_are_dropped_after_an_end_from_outside():
    s, a = decoding()
    first, second = s.schedule(), s.schedule()
    s.abort("a")
    assert sampled(s, first, [1, 2]) == [] and sampled(s, second, [3, 4, 5]) == []
    assert a.output_token_ids == [7] and s.stats().num_free_blocks == 100


def test_decodes_of_several_tokens_share_the_budget():
    s = make(queries=4, max_num_batched_tokens=10)
    for name in "abcd":
        s.add(request(name, 2))
    step(s)
    plan = s.schedule()
    assert sorted(summary(plan)) == [("a", 2, 4), ("b", 2, 4), ("c", 2, 2)] and plan.num_tokens == 10
    kept = sampled(s, plan, *([7] * e.num_tokens for e in plan.scheduled))
    assert sorted(len(tokens) for _, tokens, _ in kept) == [2, 4, 4]


def test_a_sequence_preempted_with_several_tokens_in_flight_keeps_those_that_were_sampled():
    s = make(num_blocks=6, queries=4)
    _, b = s.add(request("a", 7)), s.add(request("b", 7))
    step(s)
    first, second = s.schedule(), s.schedule()
    assert sorted(summary(first)) == [("a", 7, 4), ("b", 7, 4)] and summary(second) == [("a", 11, 4)]
    assert names(s.waiting) == ["b"] and b.num_pending == 4
    kept = sampled(s, first, *([e.row + 1, 9] for e in first.scheduled))
    assert sorted(kept) == [("a", [1, 9], None), ("b", [2, 9], None)]
    assert b.output_token_ids == [7, 2, 9] and (b.num_computed, b.num_tokens, b.num_pending) == (0, 10, 0)


def test_only_blocks_full_of_kept_tokens_are_found():
    s, a = decoding(prompt=3, queries=8)
    assert sampled(s, s.schedule(), [1, 2]) == [("a", [1, 2], None)]
    assert len(a.block_ids) == 3  # for eight tokens more
    other = s.add(request("b", [*a.token_ids, 1, 1, 1, 1, 1, 1]))
    plan = s.schedule()
    assert other.num_cached_tokens == 4 and ("b", 4, 8) in summary(plan)


def test_only_sequences_that_free_a_block_are_preempted():
    """Regression: a decode that needed a block preempted sequences whose blocks were all lent, which freed
    none, and in the end itself."""
    s = make(num_blocks=5, enable_prefix_caching=False)
    s.add(request("a", 4, max_tokens=6))
    s.add(request("b", 7))
    c = s.add(request("c", 7))
    assert step(s) == [("a", 0, 4), ("b", 0, 7), ("c", 0, 7)] and not s.stats().num_free_blocks
    s.blocks.hold(c.block_ids)
    lent = list(c.block_ids)
    assert step(s) == [("c", 7, 1), ("a", 4, 1)] and names(s.waiting) == ["b"]
    s.blocks.unhold(lent)
    run(s)


def test_a_decode_waits_for_blocks_that_no_preemption_would_free():
    """Regression: with all blocks lent, sequences were preempted for nothing."""
    s = make(num_blocks=4, enable_prefix_caching=False)
    a, b = s.add(request("a", 7, max_tokens=3)), s.add(request("b", 7, max_tokens=3))
    step(s), step(s)
    lent = [*a.block_ids, *b.block_ids]
    s.blocks.hold(lent)
    assert step(s) is None and names(s.running) == ["a", "b"] and not s.stats().num_preemptions
    s.blocks.unhold(lent)
    assert step(s) == [("a", 8, 1)] and names(s.waiting) == ["b"]
    run(s)


def test_the_blocked_head_of_the_queue_is_not_matched_again_in_each_step(monkeypatch):
    """Regression: a step cost a look-up of every block of the first waiting prompt, 0.55 ms for 8,000."""
    s = make(num_blocks=1100, max_num_batched_tokens=5000, max_model_len=5000)
    s.add(request("a", range(4000), max_tokens=1))
    step(s)  # 1,000 blocks of it stay findable
    s.add(request("b", 600, max_tokens=30))
    step(s)
    seq = s.add(request("c", [*range(4000), *range(300)]))
    looked_up, find = [], BlockPool.find
    monkeypatch.setattr(BlockPool, "match", lambda pool, keys: pytest.fail("a look-up of every block"))
    monkeypatch.setattr(BlockPool, "find", lambda pool, key: looked_up.append(key) or find(pool, key))
    for _ in range(5):
        assert [name for name, *_ in step(s)] == ["b"]
    assert len(looked_up) <= 5 * 24 and seq.num_admissions == 0
    monkeypatch.undo()
    assert len(run(s)["c"].output_token_ids) == 50 and seq.num_cached_tokens >= 3600


def test_a_decode_that_needs_no_block_passes_one_that_waits_for_one():
    """Regression: a decode for which no block could be freed kept all decodes after it from the step."""
    s = make(num_blocks=5, enable_prefix_caching=False)
    a, b = s.add(request("a", 8, max_tokens=6)), s.add(request("b", 5, max_tokens=6))
    step(s)
    lent = [*a.block_ids, *b.block_ids, *s.blocks.pool.free_blocks()]
    s.blocks.hold(lent)
    assert step(s) == [("b", 5, 1)]
    s.blocks.unhold(lent)
    assert {name for name, *_ in step(s)} == {"a", "b"}
    run(s)

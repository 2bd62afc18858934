"""The scheduling policy as functions: turns, victims, and how much of the prompts a step takes. What the
scheduler makes of them: test_scheduler.py, test_scheduler_fuzz.py."""

from dataclasses import fields
from pathlib import Path

import pytest

from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.scheduling.policy import POLICIES, near_size, prompt_budget, prompt_cap, tokens_within
from shoal.engine.scheduling.step_costs import StepCosts
from shoal.errors import ConfigError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from tests.cpu.engine.test_scheduler import make, request, step, summary

DOCS = Path(__file__).parents[3] / "docs"
# The requests below in the order in which each policy runs them: a row for every policy.
ORDERS = {"fcfs": ["late", "urgent", "early"], "priority": ["urgent", "early", "late"]}
COSTS = StepCosts(step_s=0.010, seq_s=0.001, token_s=0.001, pair_s=0.0)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_requests_in_its_order(name):
    asked = [
        Request(request_id, [1], SamplingParams(), priority=priority, arrival=arrival)
        for request_id, priority, arrival in (("late", 1, 9.0), ("urgent", 0, 5.0), ("early", 1, 1.0))
    ]
    turns = {asked.request_id: POLICIES[name](asked, order) for order, asked in enumerate(asked)}
    assert sorted(turns, key=turns.__getitem__) == ORDERS[name]
    again = [POLICIES[name](asked[0], order) for order in (7, 8)]
    assert again[0] < again[1], "equal requests have turns of their own, in the order in which they came"


def test_every_policy_can_be_chosen_and_is_explained():
    for name in POLICIES:
        assert EngineConfig(scheduling_policy=name).scheduling_policy == name
    with pytest.raises(ConfigError, match=f"must be one of {', '.join(POLICIES)}, got 'no policy'"):
        EngineConfig(scheduling_policy="no policy")
    [field] = [field for field in fields(EngineConfig) if field.name == "scheduling_policy"]
    server = (DOCS / "server.md").read_text()
    for name in POLICIES:
        assert f'"{name}"' in field.metadata["help"] and f"| `{name}`" in server


def test_a_cap_holds_only_while_several_prompts_are_there():
    assert [prompt_cap(100, 6, count) for count in (0, 1, 2, 9)] == [100, 100, 6, 6]
    assert prompt_cap(100, 0, 9) == 100


@pytest.mark.parametrize("start", [0, 1000, 50_000])
@pytest.mark.parametrize("seconds", [0.001, 0.05, 3.0])
def test_tokens_within_a_time_are_the_most_that_fit(start, seconds):
    costs = StepCosts(token_s=20e-6, pair_s=1e-9)

    def cost(count):
        return sum(costs.token_s + costs.pair_s * (start + i + 0.5) for i in range(count))

    count = tokens_within(seconds, start, costs)
    assert cost(count) <= seconds * (1 + 1e-9) and cost(count + 1) > seconds * (1 - 1e-9)
    assert tokens_within(0.0, start, costs) == tokens_within(-1.0, start, costs) == 0


def test_a_chunk_is_shortened_to_a_captured_size_that_is_near():
    sizes = (32, 64, 128, 256)
    assert near_size(150, 10, sizes) == 118  # 160 tokens become 128
    assert near_size(190, 10, sizes) == 190  # 128 would lose more than a quarter
    assert near_size(300, 10, sizes) == 246  # beyond the largest
    assert near_size(2000, 10, sizes) == 2000
    assert near_size(20, 5, sizes) == 20  # below the smallest
    assert near_size(118, 10, sizes) == 118
    assert near_size(150, 10, ()) == 150


def budget(num_decodes, target_s, *, tokens=1000, block_size=8, sizes=()):
    return prompt_budget(tokens, tokens, num_decodes, num_decodes, target_s, COSTS, block_size, sizes)


def test_a_step_beside_decodes_takes_what_ends_within_the_target():
    # 100 ms - 10 for the step - 4 for four decodes - 1 for the prompt's sequence: 85 tokens, ten blocks
    one = budget(4, 0.1)
    assert one.fit(0, 500) == 80
    assert one.fit(3, 500) == 85, "it ends at the end of a block"
    assert one.fit(0, 60) == 60
    one.spend(0, 60)
    assert one.fit(0, 500) == 24
    one.spend(0, 24)
    assert one.fit(0, 500) == 0


def test_prompts_get_a_share_even_where_decodes_alone_take_the_target():
    # A block; or the time of two tokens for each decode, one for the prompt's sequence.
    for num_decodes, least in ((1, 8), (4, 8), (50, 96)):
        one = budget(num_decodes, 0.005)
        assert not one.is_spent and one.fit(0, 500) == least
        one.spend(0, least)
        assert one.fit(0, 500) == 0
    few = budget(1, 0.005)
    for _ in range(4):  # prompts of one token take the time of two, and eight are a block
        assert few.fit(0, 1) == 1
        few.spend(0, 1)
    assert few.is_spent and few.fit(0, 1) == 0
    assert budget(4, 0.005, tokens=3).fit(0, 500) == 3, "the step's own budget holds"


def test_chunks_fill_a_captured_step():
    assert budget(4, 0.1, sizes=(72, 256)).fit(0, 500) == 64  # and the decodes: 68, and the end of a block


def test_the_target_holds_only_beside_decodes():
    s = make(num_blocks=500, max_num_batched_tokens=400, max_model_len=800, target_itl_s=0.03)
    s.costs = COSTS
    s.add(request("a", 300))
    plan = s.schedule()
    assert summary(plan) == [("a", 0, 300)]
    s.update(plan, [[7]])
    s.add(request("b", 300))
    assert summary(s.schedule()) == [("a", 300, 1), ("b", 0, 16)]
    s.costs = None
    assert summary(s.schedule()) == [("a", 301, 1), ("b", 16, 284)], "nobody has measured anything"


def test_a_decode_that_must_wait_for_its_token_is_not_delayed_by_a_long_step():
    s = make(num_blocks=500, max_num_batched_tokens=400, max_model_len=800, target_itl_s=0.03)
    s.costs = COSTS
    s.add(request("lockstep", 5, structured_outputs=StructuredOutputsParams(regex="a*")))
    s.schedule()
    s.add(request("b", 300))
    assert summary(s.schedule()) == [("b", 0, 16)]


def test_a_waiting_prompt_starts_only_when_the_step_has_time_for_it():
    s = make(num_blocks=500, max_num_batched_tokens=400, max_model_len=800, target_itl_s=0.04)
    s.costs = COSTS
    s.add(request("a", 5))
    step(s)
    for name in ("b", "c", "d"):
        s.add(request(name, 12))
    plan = s.schedule()  # 28 ms: b and c take 13 each
    assert summary(plan) == [("a", 5, 1), ("b", 0, 12), ("c", 0, 12)] and len(s.waiting) == 1
    s.check()


def test_an_engine_learns_what_its_steps_cost_and_cuts_prompts_by_it(build):
    engine = build(target_itl_ms=0.001)  # nothing is that fast, so a step beside a decode takes the least
    core = engine.core
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    core.add(Request("first", list(range(1, 101)), params))
    core.step()
    core.add(Request("second", list(range(1, 101))[::-1], params))
    for _ in range(4):
        core.step()
    stats = core.stats()
    assert stats.step_tokens == 100 + 4 * (1 + 16)
    assert stats.decode_step_s > 0 and stats.prompt_token_s > 0
    while core.has_work:
        core.step()


def test_an_engine_without_a_target_measures_nothing(build):
    engine = build()
    engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=5, ignore_eos=True))
    assert engine.stats().prompt_token_s == 0


def test_a_server_has_a_target_unless_it_is_told_otherwise(folder):
    from shoal.apps.serve import plan
    from shoal.config import SERVER_TARGET_ITL_MS, ServerConfig

    def target(**options):
        [planned] = plan(str(folder), [], options, ServerConfig())
        return planned.config.target_itl_ms

    assert [target(), target(target_itl_ms=0.0), target(target_itl_ms=20)] == [SERVER_TARGET_ITL_MS, 0, 20]


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "50", True])
def test_a_target_is_a_finite_number_of_milliseconds(value):
    with pytest.raises(ConfigError, match="target_itl_ms"):
        EngineConfig(target_itl_ms=value)

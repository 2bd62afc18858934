"""Parts of an engine: their order, which of their methods are called and when, and two small parts as
docs/howto/step-part.md describes them."""

import inspect
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal import SamplingParams
from shoal.api import Request
from shoal.engine.lifecycle import another_model
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.peers.peers import KvPeers
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_part import Parts, StepPart
from shoal.errors import EngineDeadError
from tests import tiny
from tests.sleeping_engines import sleeping_engines

COUNT = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
PROMPT = list(range(40))
QUIET = dict(enable_kv_cache_events=True, publisher="null")


class FairShare(StepPart):
    """Lets at most two sequences of a `cache_salt` run at once."""

    MOST = 2

    def __init__(self, config, ranks, scheduler):
        self.scheduler = scheduler

    def may_start(self, seq):
        if seq.request.cache_salt is None:
            return True
        running = sum(other.request.cache_salt == seq.request.cache_salt for other in self.scheduler.running)
        return running < self.MOST


class CountedBlocks(StepPart):
    """Counts the blocks that became findable, and those that were given back."""

    def __init__(self, config, ranks, scheduler):
        self.num_registered = self.num_released = 0

    def registered(self, seq, start, blocks, group):
        self.num_registered += len(blocks)

    def released(self, blocks):
        self.num_released += len(blocks)


class Recorder(StepPart):
    """Notes every call under its name, before it does nothing."""

    def __init__(self, config=None, ranks=None, scheduler=None, name=None, calls=None):
        self.name, self.calls = name, [] if calls is None else calls

    def note(self, method):
        self.calls.append(method if self.name is None else f"{self.name} {method}")


def _noting(method):
    def noted(self, *args):
        self.note(method)
        return getattr(StepPart, method)(self, *args)

    return noted


METHODS = [name for name, value in vars(StepPart).items() if callable(value) and name[0] != "_"]
for _name in METHODS:
    setattr(Recorder, _name, _noting(_name))


@pytest.fixture
def build(folder):
    with sleeping_engines() as build:
        yield lambda *parts, **options: build(folder, more_parts=parts, **options)


def ids_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


# The order


def test_an_engine_with_everything_has_its_parts_in_the_documented_order(build):
    llm = build(
        Recorder,
        kv_host_bytes=4 << 20,
        kv_transfer_config={"kv_role": "kv_both"},
        kv_events_config=QUIET,
        target_itl_ms=50.0,
        enable_sleep_mode=False,  # other workers map the cache
    )
    assert [type(part).__name__ for part in llm.core.parts] == [
        "GrammarAdmission",
        "CostLearner",
        "KvTiers",
        "KvPeers",
        "Prefetches",
        "WeightExports",
        "Recorder",
        "BlockEvents",
    ]


def test_tiers_order_their_copies_before_peers_write_and_offload_what_peers_have_released(build, monkeypatch):
    llm = build(kv_host_bytes=4 << 20, kv_transfer_config={"kv_role": "kv_consumer"})
    calls = []
    for kind in (KvTiers, KvPeers):
        for method in ("after_schedule", "tick"):
            monkeypatch.setattr(kind, method, noted(kind, method, calls))
    llm.generate([PROMPT], GREEDY)
    llm.core.tick()
    assert calls[:2] == ["KvTiers.after_schedule", "KvPeers.after_schedule"]
    assert calls[-2:] == ["KvPeers.tick", "KvTiers.tick"]


def noted(kind, method, calls):
    before = getattr(kind, method)

    def call(part, *args):
        calls.append(f"{kind.__name__}.{method}")
        return before(part, *args)

    return call


def test_an_engine_without_options_has_no_part_that_a_step_would_call_for_nothing(build):
    parts = build().core.parts
    assert [type(part).__name__ for part in parts] == ["GrammarAdmission", "WeightExports"]
    assert not parts.after_schedule and not parts.completed


def test_parts_are_called_in_order_and_tick_in_the_opposite_order(build):
    calls = []
    llm = build(
        lambda *_: Recorder(name="first", calls=calls), lambda *_: Recorder(name="second", calls=calls)
    )
    llm.generate([PROMPT], GREEDY)
    for method in METHODS:
        order = [call.split()[0] for call in calls if call.split()[1] == method]
        names = ["second", "first"] if method == "tick" else ["first", "second"]
        assert order == names * (len(order) // 2), method


# Which methods are called, and when


def scheduler():
    return Scheduler(num_blocks=20, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)


def test_only_parts_that_override_a_method_are_called_for_it():
    s = scheduler()
    parts = Parts(s)
    parts.add(StepPart())
    assert list(parts) and not (s.gates or s.blocks.watchers or parts.before_schedule or parts.after_step)
    parts.add(fair := FairShare(None, None, s))
    parts.add(counted := CountedBlocks(None, None, s))
    assert s.gates == [fair] and s.blocks.watchers == [counted] and not parts.completed
    assert parts.find(CountedBlocks) is counted and parts.find(Recorder) is None


def test_closed_parts_are_not_called_any_more_even_if_one_does_not_close():
    s, calls = scheduler(), []

    class Stuck(Recorder):
        def close(self):
            raise OSError("stuck")

    parts = Parts(s)
    for part in (Recorder(calls=calls), Stuck(calls=calls), Recorder(calls=calls)):
        parts.add(part)
    with pytest.raises(OSError, match="stuck"):
        parts.close()
    assert calls == ["close", "close"] and not list(parts)
    assert not (s.gates or s.blocks.watchers or parts.before_schedule)
    parts.close()


def test_a_step_calls_its_parts_around_its_own_work(build):
    llm = build(Recorder, async_scheduling=False)
    core = llm.core
    calls = core.parts.find(Recorder).calls
    core.add(Request("a", PROMPT, GREEDY))
    core.step()
    assert calls == [
        "added",
        "before_schedule",
        "may_start",
        "registered",  # two blocks, when the prompt's computation is scheduled
        "after_schedule",
        "before_launch",
        "completed",
        "after_step",
    ]
    while core.has_work:
        core.step()
    calls.clear()
    assert core.tick() is False and calls == ["tick"]


def test_a_paused_engine_calls_no_part_in_a_step_and_reports_what_ended(build):
    core = build(Recorder).core
    core.add(Request("a", PROMPT, GREEDY))
    core.step()
    core.sleep(0)
    calls = core.parts.find(Recorder).calls
    calls.clear()
    assert [output.request_id for output in core.step()][-1:] == ["a"] and not calls
    core.wake_up()


def test_sleep_weights_resets_and_the_end_reach_every_part(build, folder, root):
    llm = build(Recorder)
    calls = llm.core.parts.find(Recorder).calls

    def during(action, *args, **options):
        calls.clear()
        action(*args, **options)
        return list(calls)

    assert during(llm.reset_prefix_cache) == ["before_reset", "after_reset"]
    assert during(llm.sleep, level=1) == ["before_sleep"]
    assert during(llm.wake_up) == []
    assert during(llm.update_weights, folder) == ["weights_change"]
    assert during(llm.stats) == ["fill_in"]
    llm.sleep(level=2)
    other = tiny.write_model(root, "granite")
    assert during(llm.update_weights, other) == ["before_sleep", "give_memory_back", "close"]
    assert llm.core.parts.find(Recorder).calls is not calls, "the new model's engine has a part of its own"


def test_an_interrupt_starts_every_part_anew_and_the_engine_goes_on(build, monkeypatch):
    llm = build(Recorder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(Recorder, "after_schedule", interrupted)
        llm.generate([PROMPT], GREEDY)
    assert llm.core.parts.find(Recorder).calls.count("start_anew") == 1
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_request_that_a_part_does_not_take_leaves_no_trace(build):
    """Regression: its sequence stayed in the scheduler, ran, and ended a second time."""

    class Refuses(StepPart):
        def __init__(self, config, ranks, scheduler):
            pass

        def added(self, seq):
            if seq.request.cache_salt == "refused":
                raise ValueError("no")

    core = build(Refuses).core
    with pytest.raises(ValueError, match="no"):
        core.add(Request("a", PROMPT, GREEDY, cache_salt="refused"))
    assert not core.has_work and not core.scheduler.waiting
    core.add(Request("a", PROMPT, GREEDY))
    tokens = []
    while core.has_work:
        tokens += [token for output in core.step() for token in output.token_ids]
    assert len(tokens) == COUNT


def test_only_parts_that_gave_their_memory_back_take_it_again():
    """Regression: a part that failed to give its memory back was told to take it again."""

    class Fails(Recorder):
        def give_memory_back(self):
            raise OSError("no")

    first, second = Recorder(), Fails()
    machine = SimpleNamespace(use_threads=lambda: None), SimpleNamespace(sleep=lambda *_: None)
    with pytest.raises(OSError, match="no"), another_model.room_made(*machine, [first, second]):
        pytest.fail("there is no room")
    assert first.calls == ["give_memory_back", "take_memory"] and not second.calls


def test_an_error_in_a_part_ends_the_engine(build):
    class Broken(StepPart):
        def before_schedule(self):
            raise KeyError("a bug")

    llm = build(lambda *_: Broken())
    with pytest.raises(EngineDeadError, match="a bug"):
        llm.generate([PROMPT], GREEDY)


# The how-to's parts


def test_a_part_lets_few_sequences_of_a_salt_run_and_changes_no_token(build):
    llm = build(FairShare)
    salts = ["a", "a", "a", "a", "b", None]
    prompts = [
        {"prompt_token_ids": [i, *PROMPT], "cache_salt": salt} if salt else {"prompt_token_ids": [i, *PROMPT]}
        for i, salt in enumerate(salts)
    ]
    core, most, deferred = llm.core, Counter(), []
    step = core.step

    def watched():
        outputs = step()
        running = Counter(seq.request.cache_salt for seq in core.scheduler.running)
        for salt, count in running.items():
            most[salt] = max(most[salt], count)
        deferred.append(core.stats().num_deferred)
        return outputs

    core.step = watched
    found = ids_of(llm.generate(prompts, GREEDY))
    assert most["a"] == FairShare.MOST == max(deferred) and most["b"] == most[None] == 1
    assert found == ids_of(build().generate(prompts, GREEDY))


def test_a_part_counts_the_blocks_that_become_findable(build):
    llm = build(CountedBlocks)
    prompts = [[i] * 50 for i in range(4)]
    llm.generate(prompts, GREEDY)
    counted = llm.core.parts.find(CountedBlocks)
    cached = llm.core.scheduler.blocks.pool.cached_keys()
    assert counted.num_registered == len(cached) == sum(55 // llm.core.config.block_size for _ in prompts)
    assert counted.num_released == sum(-(-55 // llm.core.config.block_size) for _ in prompts)


def test_a_builder_of_a_part_may_start_another_engine(build):
    """Regression: that start waited for the end of the one that it was in, for ever."""
    inner = []

    def build_part(config, ranks, scheduler):
        inner.append(build())
        return StepPart()

    llm = build(build_part)
    assert ids_of(llm.generate([PROMPT], GREEDY)) == ids_of(inner[0].generate([PROMPT], GREEDY))


def test_the_how_to_shows_the_part_that_is_tested_here():
    page = (Path(__file__).parents[3] / "docs/howto/step-part.md").read_text()
    assert textwrap.indent(inspect.getsource(FairShare), " " * 8, str.strip) in page


def test_every_method_of_a_part_says_when_it_is_called():
    assert not [name for name in METHODS if not getattr(StepPart, name).__doc__]

"""Recorded schedules and greedy tokens: a change that is meant to change neither proves it here.

Each load is made from a fixed seed and run through the scheduler alone, or through a whole engine on the
CPU. recorded/replay.json has a digest of every step (rows, positions and token counts, in order) and the
greedy tokens. A commit that means to change a schedule says so and records the loads again:
`python -m tests.cpu.engine.test_recorded_schedules`.
"""

import hashlib
import json
import random
from collections import deque
from pathlib import Path

import pytest

from shoal.api import Request
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.step_costs import StepCosts
from shoal.sampling_params import SamplingParams
from tests import tiny

RECORDED = Path(__file__).parent / "recorded" / "replay.json"
COSTS = StepCosts(0.004, 0.0001, 0.0002, 1e-8)

# name of a load -> what differs from the defaults of `options_of`, and of the load itself
SCHEDULES: dict[str, dict] = {
    "conversations": {},
    "a cache that is too small": {"num_blocks": 24},
    "a cache that is too small for one step in flight": {"num_blocks": 24, "depth": 0},
    "no prefix cache": {"enable_prefix_caching": False},
    "priorities": {"scheduling_policy": "priority", "num_blocks": 40},
    "short chunks": {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 7},
    "a target for the gap between tokens": {"target_itl_s": 0.012, "step_sizes": (16, 32, 64)},
    "few rows": {"max_num_seqs": 3},
    "blocks of one token": {"block_size": 1, "num_blocks": 400},
    "a lower tier": {"fetches": 1},
    "a lower tier and a small cache": {"fetches": 1, "num_blocks": 30},
    "a lower tier and other workers": {"fetches": 2},
    "three steps in flight": {"depth": 3},
}


def options_of(changes: dict) -> dict:
    defaults = {
        "num_blocks": 120,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 90,
    }
    return defaults | {name: value for name, value in changes.items() if name not in ("depth", "fetches")}


def requests_of(seed: int, num_requests: int = 40) -> list[tuple[int, Request]]:
    """(step of arrival, request): conversations with a shared beginning, embeddings, prompt log-probabilities
    and salts among them."""
    r = random.Random(seed)
    systems = [[r.randrange(256) for _ in range(n)] for n in (18, 7, 30)]
    turns: list[list[int]] = []
    found, at = [], 0
    for i in range(num_requests):
        at += r.choice((0, 0, 1, 3))
        base = r.choice(turns) if turns and r.random() < 0.5 else r.choice(systems)
        prompt = (base + [r.randrange(256) for _ in range(r.randrange(1, 20))])[:70]
        turns.append(prompt)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=r.choice((1, 3, 8, 20)),
            ignore_eos=True,
            prompt_logprobs=0 if r.random() < 0.08 else None,
        )
        embed = r.random() < 0.08 and params.prompt_logprobs is None
        salt = r.choice((None, None, None, "a"))
        request = Request(f"r{i}", prompt, params, r.randint(-1, 1), r.randint(0, 3), cache_salt=salt)
        request.embed = embed
        found.append((at, request))
    return found


class SlowSource:
    """Has the first blocks of every third prompt. A fetch takes some steps, and some blocks never come."""

    def __init__(self, seed: int):
        self.r = random.Random(seed)
        self.under_way: list[list] = []  # [steps left, fetch]

    def lookup(self, keys, start: int) -> int:
        if not keys or keys[0][0] % 3:
            return 0
        return max(0, min(len(keys), 1 + keys[0][1] % 6) - start)

    def begin(self, fetch) -> None:
        self.under_way.append([self.r.randrange(1, 6), fetch])

    def step(self, scheduler: Scheduler) -> None:
        for one in list(self.under_way):
            one[0] -= 1
            if one[0] == 0:
                self.under_way.remove(one)
                fetch = one[1]
                scheduler.fetched(fetch, len(fetch.keys) - (self.r.random() < 0.2))


def digest(plan: StepPlan) -> str:
    entries = [(entry.row, entry.start, entry.num_tokens, entry.samples) for entry in plan.scheduled]
    return hashlib.sha256(repr((plan.num_decodes, entries)).encode()).hexdigest()[:8]


def schedule_of(name: str) -> list[str]:
    """Returns the digest of every step of a load. A token is a function of its position and request."""
    changes = SCHEDULES[name]
    scheduler = Scheduler(**options_of(changes))
    scheduler.costs = COSTS
    sources = [SlowSource(number) for number in range(changes.get("fetches", 0))]
    if sources:
        scheduler.blocks.fetches.sources[:] = sources
    arrivals = deque(requests_of(7))
    in_flight: deque[StepPlan] = deque()
    steps, now = [], 0
    while arrivals or scheduler.has_work or in_flight:
        while arrivals and arrivals[0][0] <= now:
            scheduler.add(arrivals.popleft()[1])
        for source in sources:
            source.step(scheduler)
        plan = scheduler.schedule()
        if plan is not None:
            steps.append(digest(plan))
            in_flight.append(plan)
        while in_flight and (plan is None or len(in_flight) > changes.get("depth", 1)):
            done = in_flight.popleft()
            sampled = [entry for entry in done.scheduled if entry.samples]
            scheduler.update(done, [[(entry.start * 31 + entry.seq.row) % 256] for entry in sampled])
        scheduler.check()
        now += 1
        assert now < 5000, "no progress"
    return steps


# name of an engine's load -> options
ENGINES: dict[str, dict] = {
    "plain": {},
    "a small cache": {"num_gpu_blocks_override": 14},
    "short chunks, no steps in flight": {"max_num_batched_tokens": 24, "async_scheduling": False},
    "host memory below": {"num_gpu_blocks_override": 14, "kv_host_bytes": 1 << 20},
}


def tokens_of(folder: Path, name: str) -> list[list[int]]:
    """Returns the greedy tokens of a load, request by request."""
    from shoal.config import EngineConfig
    from shoal.engine.core import EngineCore
    from shoal.weights.source import resolve

    options = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "max_num_seqs": 6}
    config = EngineConfig(model=str(folder), **options | ENGINES[name])
    core = EngineCore(config, resolve(config.model, None, None))
    try:
        arrivals = deque((at, request) for at, request in requests_of(11, 24) if not request.embed)
        tokens: dict[str, list[int]] = {request.request_id: [] for _, request in arrivals}
        now = 0
        while arrivals or core.has_work:
            while arrivals and arrivals[0][0] <= now:
                core.add(arrivals.popleft()[1])
            for output in core.step():
                tokens[output.request_id] += output.token_ids
            now += 1
        core.check()
    finally:
        core.exit()
    return list(tokens.values())


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_as_recorded(recorded, name):
    found, expected = schedule_of(name), recorded["schedules"][name].split()
    for step, (one, other) in enumerate(zip(found, expected)):
        assert one == other, f"step {step} of {len(expected)} differs"
    assert len(found) == len(expected)


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_are_as_recorded(recorded, folder, name):
    assert tokens_of(folder, name) == recorded["tokens"]


def record() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        folder = tiny.write_model(Path(root), "qwen3")
        [tokens, *others] = [tokens_of(folder, name) for name in ENGINES]
    assert all(other == tokens for other in others), "greedy tokens depend on the engine's options"
    schedules = {name: " ".join(schedule_of(name)) for name in SCHEDULES}
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps({"schedules": schedules, "tokens": tokens}, indent=1) + "\n")


if __name__ == "__main__":
    record()

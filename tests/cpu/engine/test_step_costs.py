"""Costs of steps, learned from machines with known costs, with noise and with pauses."""

import random
from dataclasses import dataclass

import pytest

from shoal.engine.scheduling.policy import prompt_budget
from shoal.engine.scheduling.step_costs import StepCosts

TARGET_S = 0.05
BLOCK = 16


@dataclass
class Machine:
    """Seconds of the parts of a step. A step's products take `weights_s` at least, to read the weights."""

    weights_s: float
    seq_s: float
    token_s: float
    pair_s: float

    def seconds(self, num_decodes, chunks=()):
        num_tokens = sum(count for _, count in chunks)
        num_pairs = sum(count * start + count * (count + 1) / 2 for start, count in chunks)
        products_s = max(self.weights_s, (num_decodes + num_tokens) * self.token_s)
        return products_s + (num_decodes + len(chunks)) * self.seq_s + num_pairs * self.pair_s


MACHINES = {
    "a GPU, 8 billion weights": Machine(4.2e-3, 44e-6, 22e-6, 1e-9),
    "a GPU, 600 million weights": Machine(0.6e-3, 9e-6, 2.3e-6, 0.5e-9),
    "two CPU cores, 135 million weights": Machine(7e-3, 1.5e-3, 1.4e-3, 0.1e-6),
}
machines = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


class Load:
    """Streams beside prompts without end on a machine, step by step as the engine does it. A pause makes one
    step in fifty twenty times as long."""

    def __init__(self, machine, seed, noise=0.15, pauses=0.02):
        self.machine, self.random, self.noise, self.pauses = machine, random.Random(seed), noise, pauses
        self.costs = StepCosts()

    def step(self, num_decodes, chunks=()):
        """Learns from one step; returns the seconds that it takes undisturbed."""
        seconds = self.machine.seconds(num_decodes, chunks)
        paused = 20 if self.random.random() < self.pauses else 1
        measured = seconds * self.random.uniform(1 - self.noise, 1 + self.noise) * paused
        self.costs.learn(num_decodes + len(chunks), chunks, measured)
        return seconds

    def mixed(self, num_decodes, start=0):
        """A step that takes what the policy allows of a prompt behind `start` tokens. Returns its seconds and
        its prompt tokens."""
        budget = prompt_budget(100_000, 100_000, num_decodes, num_decodes, TARGET_S, self.costs, BLOCK, ())
        num_tokens = budget.fit(start, 100_000)
        return self.step(num_decodes, [(start, num_tokens)]), num_tokens


@machines
@pytest.mark.parametrize("first_prompt", [5, 700])
def test_steps_come_near_the_target_within_a_few(machine, first_prompt):
    for seed in range(20):
        load = Load(machine, seed)
        load.step(0, [(0, first_prompt)])
        for _ in range(4):
            load.step(1)
        for _ in range(12):
            load.mixed(1)
        seconds = [load.mixed(1)[0] for _ in range(40)]
        assert max(seconds) < 1.6 * TARGET_S, seed
        assert 0.8 * TARGET_S < sum(seconds) / 40 < 1.2 * TARGET_S, seed


@machines
def test_long_contexts_make_chunks_smaller_not_steps_longer(machine):
    load = Load(machine, 1)
    load.step(0, [(0, 500)])
    for _ in range(4):
        load.step(1)
    start = 0
    for _ in range(400):
        seconds, num_tokens = load.mixed(1, start)
        start = (start + num_tokens) % 60_000
        if start > 2_000:
            assert seconds < 2 * TARGET_S or num_tokens == BLOCK


def test_one_pause_changes_nearly_nothing_and_a_slower_machine_is_believed():
    costs, machine = StepCosts(), MACHINES["a GPU, 8 billion weights"]
    chunks = [(0, 1000)]
    for _ in range(30):
        costs.learn(2, chunks, machine.seconds(1, chunks))
    before = costs.token_s
    costs.learn(2, chunks, 60.0)
    assert costs.token_s < 1.1 * before
    costs.learn(2, chunks, machine.seconds(1, chunks))
    for _ in range(30):
        costs.learn(2, chunks, 3 * machine.seconds(1, chunks))
    assert 2 * before < costs.token_s < 4 * before


def test_a_step_that_ran_while_the_host_was_held_up_changes_nearly_nothing():
    """The host sees its end right after the end of the step before it."""
    costs, machine = StepCosts(), MACHINES["a GPU, 8 billion weights"]
    chunks = [(0, 1000)]
    for _ in range(30):
        costs.learn(2, chunks, machine.seconds(1, chunks))
    before = costs.token_s
    costs.learn(2, chunks, 1.0)
    costs.learn(2, chunks, 50e-6)
    assert 0.9 * before < costs.token_s < 1.1 * before


def test_steps_of_decodes_say_nothing_about_prompts():
    costs, machine = StepCosts(), MACHINES["a GPU, 8 billion weights"]
    costs.learn(1, [(0, 1000)], machine.seconds(0, [(0, 1000)]))
    before = costs.token_s, costs.pair_s
    for _ in range(50):
        costs.learn(64, [], machine.seconds(64))
    assert (costs.token_s, costs.pair_s) == before
    assert costs.step_s + 64 * costs.seq_s == pytest.approx(machine.seconds(64), rel=0.02)


def test_figures_stay_positive_and_finite_whatever_is_measured():
    random_ = random.Random(7)
    costs = StepCosts()
    for _ in range(5000):
        seconds = random_.choice((0.0, -1.0, 1e-9, 1e-3, 0.05, 1e6))
        chunks = [
            (random_.randrange(100_000), random_.randrange(1, 16_384)) for _ in range(random_.randrange(4))
        ]
        costs.learn(len(chunks) + random_.randrange(1, 300), chunks, seconds)
        for figure in (costs.step_s, costs.seq_s, costs.token_s, costs.pair_s):
            assert 0 < figure < float("inf")

"""Groups of sequences that are read together: the tree against brute force, and the groups sent to the device against the sequences' blocks."""

import itertools
import random

import numpy as np
import pytest

from shoal.api import Request
from shoal.engine.runner import decode_groups
from shoal.engine.runner.batch import BatchBuilder
from shoal.engine.runner.decode_groups import DecodeGroups, best_runs, num_common
from shoal.engine.runner.packed_step import StepHeader, section_spans
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.kernels.state import FIELDS, MAX_DECODE_GROUPS, DecodeGroupField, StateLayout
from shoal.sampling_params import SamplingParams


@pytest.fixture
def cheap_groups(monkeypatch):
    """Any two sequences that share two tokens are worth a group."""
    for name, value in (("MIN_MEMBERS", 2), ("MIN_SHARED", 2), ("MIN_SAVED", 2)):
        monkeypatch.setattr(decode_groups, name, value)


def saved(groups):
    return sum((len(group.rows) - 1) * group.num_blocks for group in groups)


def groups_of(paths):
    tree = DecodeGroups(16, MAX_DECODE_GROUPS)
    for row, path in enumerate(paths):
        tree.place(row, [*path, -row - 2])  # the last block is never shared
    return tree


def test_common_prefixes_of_any_length():
    for a, b in itertools.product(range(9), repeat=2):
        for common in range(min(a, b) + 1):
            left, right = (
                (*range(common), *range(100, 100 + a - common)),
                (*range(common), *range(200, 200 + b - common)),
            )
            assert num_common(left, right) == common


def test_four_system_prompts_make_four_groups():
    prompts = [list(range(start, start + 32)) for start in (0, 100, 200, 300)]
    tree = groups_of([prompts[i % 4] + [1000 + i] for i in range(256)])
    groups = tree.groups(range(256))
    assert sorted(len(group.rows) for group in groups) == [64] * 4 and all(
        group.num_blocks == 32 for group in groups
    )
    assert {frozenset(row % 4 for row in group.rows) for group in groups} == {
        frozenset([i]) for i in range(4)
    }


@pytest.mark.parametrize(("system", "document", "expected"), [(1, 200, [8, 8]), (200, 1, [16])])
def test_a_tree_is_cut_where_most_is_saved(system, document, expected):
    first = list(range(system))
    documents = [[1000 * d + i for i in range(document)] for d in (1, 2)]
    groups = groups_of([first + documents[i % 2] + [9000 + i] for i in range(16)]).groups(range(16))
    assert sorted(len(group.rows) for group in groups) == expected


def test_few_or_short_or_single_are_no_group():
    long = list(range(1000))
    assert groups_of([long] * 3).groups(range(3)) == []
    assert groups_of([long[:7]] * 200).groups(range(200)) == []
    assert groups_of([[i] for i in range(50)]).groups(range(50)) == []
    four = groups_of([long] * 4)
    assert len(four.groups(range(4))) == 1
    assert four.groups([0]) == [] == four.groups([])


def test_no_more_groups_than_the_device_has_room_for(cheap_groups):
    paths = [[1000 * group + i for i in range(2 + group)] for group in range(90) for _ in range(2)]
    groups = groups_of(paths).groups(range(180))
    assert sorted(group.num_blocks for group in groups) == list(
        range(92 - MAX_DECODE_GROUPS, 92)
    )  # the longest


def brute_force(paths):
    """The most blocks that any partition into groups with a common prefix saves; each sequence adds itself to
    a prefix, or to none."""

    def best(members, depth):
        whole = (len(members) - 1) * depth
        branches = {}
        for path in members:
            if len(path) > depth:
                branches.setdefault(path[depth], []).append(path)
        return max(whole, sum(best(branch, depth + 1) for branch in branches.values() if len(branch) > 1))

    return best(paths, 0)


def test_random_trees_are_cut_as_well_as_can_be(cheap_groups):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        tree, paths = DecodeGroups(16, MAX_DECODE_GROUPS), {}
        for step in range(rng.randint(1, 40)):  # rows change hands, so that entries leave the tree as well
            row = rng.randrange(12)
            path, node = [], 0
            for depth in range(rng.randint(0, 7)):
                # a block stands for all before it
                node = node * 3 + 1 + (0 if rng.random() < 0.8 else rng.randrange(3))
                path.append(10000 * depth + node)
            paths[row] = path
            tree.place(row, [*path, -1 - step])
        rows = [row for row in paths if rng.random() < 0.8]
        groups = tree.groups(rows)
        members = [row for group in groups for row in group.rows]
        assert len(members) == len(set(members)) and set(members) <= set(rows)
        for group in groups:
            assert (
                len({tuple(paths[row][: group.num_blocks]) for row in group.rows}) == 1
                and group.num_blocks > 0 < len(group.rows) - 1
            )
        assert saved(groups) == brute_force([tuple(paths[row]) for row in rows])


def test_a_long_chain_of_prefixes_needs_no_recursion():
    assert best_runs(list(range(1, 3000)), lambda members, blocks: (members - 1) * blocks)


BLOCK = 4


class Device:
    """Applies packed steps to the flat state and compares its groups with the plan they were sent with."""

    def __init__(self, num_rows, max_blocks):
        self.layout = StateLayout(num_rows, max_blocks)
        self.state = np.zeros(self.layout.size, np.int32)
        self.builder = BatchBuilder(self.layout, BLOCK, share_from=2)
        self.most_shared = 0

    def run(self, plan):
        packed, _ = self.builder.build(plan, self.layout.num_rows)
        header = StepHeader.of(packed)
        sections = {name: packed[a:b] for name, (a, b) in section_spans(header).items()}
        assert len(set(sections["addresses"].tolist())) == len(sections["addresses"]), (
            "an address comes twice"
        )
        self.state[sections["addresses"]] = sections["values"]
        lens, members, table = (
            self.state[self.layout.prefix_address :][span] for span in self.layout.prefix_spans
        )
        table = table.reshape(MAX_DECODE_GROUPS, len(DecodeGroupField))
        num_groups = header.num_decode_groups
        assert not table[num_groups:].any()
        found = np.zeros_like(lens)
        for start, count, length, row in table[:num_groups]:
            for index in members[start : start + count]:
                entry = plan.scheduled[index]
                assert index < plan.num_decodes and found[index] == 0 and 0 < length <= entry.start
                base = self.layout.row_address(row) + FIELDS
                assert (
                    self.state[base : base + length // BLOCK].tolist()
                    == entry.seq.block_ids[: length // BLOCK]
                )
                found[index] = length
        assert found.tolist() == lens.tolist()
        self.most_shared = max(self.most_shared, int((lens > 0).sum()))


def test_the_device_holds_the_groups_of_every_step(cheap_groups):
    """Random traffic over a few prompts: sequences join and leave at any step, steps are in flight, blocks
    run out."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    most_shared = preemptions = 0
    for run in range(12):
        device = Device(8, 16)
        scheduler = Scheduler(
            num_blocks=(16, 24, 60)[run % 3],
            block_size=BLOCK,
            max_num_seqs=8,
            max_num_batched_tokens=rng.choice([9, 40]),
            max_model_len=60,
        )
        prompts = [[p * 100 + i for i in range(rng.randint(1, 30))] for p in range(3)]
        in_flight, added = [], 0
        for _ in range(120):
            if rng.random() < 0.3:
                prompt = rng.choice(prompts)
                ids = prompt[: rng.randint(1, len(prompt))] + [
                    5000 + rng.randrange(3) for _ in range(rng.randint(0, 6))
                ]
                scheduler.add(
                    Request(
                        str(added),
                        ids,
                        SamplingParams(max_tokens=rng.randint(1, 15), seed=1, ignore_eos=True),
                    )
                )
                added += 1
            if added and rng.random() < 0.05:
                scheduler.abort(str(rng.randrange(added)))
            plan = scheduler.schedule()
            if plan is not None:
                device.run(plan)
                in_flight.append(plan)
            if in_flight and (plan is None or len(in_flight) > 1):
                done = in_flight.pop(0)
                scheduler.update(done, [[rng.randrange(50)] for entry in done.scheduled if entry.samples])
        scheduler.check()
        most_shared, preemptions = (
            max(most_shared, device.most_shared),
            preemptions + scheduler.stats().num_preemptions,
        )
    assert most_shared >= 4 and preemptions


class Driver:
    """A scheduler whose plans a device runs. Each token is 1."""

    def __init__(self, max_num_seqs, max_num_batched_tokens):
        self.device = Device(max_num_seqs, 16)
        self.scheduler = Scheduler(
            num_blocks=60,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=60,
        )

    def add(self, name, prompt, max_tokens):
        params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
        self.scheduler.add(Request(name, prompt, params))

    def step(self):
        plan = self.scheduler.schedule()
        self.device.run(plan)
        self.scheduler.update(plan, [[1]] * sum(entry.samples for entry in plan.scheduled))
        return plan


def test_a_row_that_decodes_for_another_sequence_in_the_very_next_step_leaves_its_groups(cheap_groups):
    """Its owner's last token and the first of the next one are of steps that follow each other, both decodes."""
    driver = Driver(2, 64)
    add, step, device = driver.add, driver.step, driver.device
    shared, other = list(range(16)), list(range(100, 117))

    add("before", other, 1)
    step()
    add("a", [*shared, 50], 20)
    add("b", [*shared, 51], 3)
    for _ in range(3):
        plan = step()
    assert device.most_shared == 2 and plan.num_decodes == 2
    rows = {entry.row for entry in plan.scheduled}
    add("c", other, 20)
    plan = step()
    assert plan.num_decodes == 2 and {entry.row for entry in plan.scheduled} == rows
    assert {entry.seq.request.request_id for entry in plan.scheduled} == {"a", "c"}


def test_groups_are_sent_anew_when_a_row_gets_an_owner_that_prefills(cheap_groups):
    """The other decodes have other places in the batch then."""
    driver = Driver(4, 128)
    add, step, device = driver.add, driver.step, driver.device
    shared = list(range(16))

    for name, max_tokens in (("a", 20), ("b", 4), ("c", 20), ("d", 20)):
        add(name, [*shared, *name.encode()], max_tokens)
    while len(driver.scheduler.waiting) + len(driver.scheduler.running) == 4:
        plan = step()
    assert plan.num_decodes == 4 and device.most_shared == 4
    rows = {entry.row for entry in plan.scheduled}
    add("e", list(range(100, 140)), 20)
    plan = step()
    assert plan.num_decodes == 3 and {entry.row for entry in plan.scheduled} == rows


def test_steps_that_change_no_membership_send_no_groups(cheap_groups):
    device = Device(4, 16)
    scheduler = Scheduler(
        num_blocks=60, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=60
    )
    for name in "abc":
        scheduler.add(Request(name, list(range(10)), SamplingParams(max_tokens=20, seed=1, ignore_eos=True)))
    sizes = []
    for token in range(8):
        plan = scheduler.schedule()
        before = device.builder.prefixes.sent
        device.run(plan)
        sizes.append(int((device.builder.prefixes.sent != before).sum()))
        scheduler.update(plan, [[token]] * sum(entry.samples for entry in plan.scheduled))
    # lengths, members (the first is 0), the group (its start and row are 0)
    assert sizes[1] == 3 + 2 + 2 and not any(sizes[2:])

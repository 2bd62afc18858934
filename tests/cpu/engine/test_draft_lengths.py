"""DraftLengths in virtual time, on devices whose steps cost what GPUs' and CPUs' do: repetition is found, and
where there is none next to nothing is lost."""

import random

import pytest

from shoal.api import Request
from shoal.engine.scheduling.draft_lengths import DraftLengths, DraftReport, sizes_up_to
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.sampling_params import SamplingParams


def gpu(num_tokens):
    """An 8B model: as long as its weights are read, tokens are free; then each takes its arithmetic."""
    return 0.0006 + max(0.0048, 27e-6 * num_tokens)


def cpu(num_tokens):
    """A token more costs half a step."""
    return 0.02 * (1 + 0.5 * (num_tokens - 1))


def launches(num_tokens):
    """A tiny model: its step takes the time of its launches."""
    return 0.001 + 1e-6 * num_tokens


class Texts:
    """Drafts that a look-up finds for one sequence: in a passage that was said before drafts are right, elsewhere
    few tokens have drafts, and these are wrong. `copied`: the share of passages."""

    def __init__(self, rng, copied, drafted=0.15, right=0.05):
        self.rng, self.copied, self.drafted, self.right = rng, copied, drafted, right
        self.left, self.is_copy = 0, False

    def draws(self, most):
        """Returns the drafts that there are, and how many of them hold, of at most `most`."""
        if self.left <= 0:
            self.is_copy, self.left = self.rng.random() < self.copied, self.rng.randint(20, 60)
        if self.is_copy:
            return most, min(most, self.left)
        if self.rng.random() > self.drafted:
            return 0, 0
        held = 0
        while held < most and self.rng.random() < self.right:
            held += 1
        return most, held


def speed(
    cost, num_seqs, copied, most=8, steps=1500, seed=1, noise=0.03, stalls=0.002, adaptive=True, late=False
):
    """Returns tokens per second, divided by the tokens per second without speculation. `late`: as on a GPU, the
    next step is chosen before this one is known, and sizes are few."""
    rng = random.Random(seed)
    lengths = DraftLengths(most, 16384, adaptive, {2: 64, 4: 64, 9: 28} if late else None)
    seqs, texts = [], []
    for i in range(num_seqs):
        seq = Sequence(Request(str(i), [1, 2], SamplingParams()), (i,), 1 << 30)
        seq.status = SequenceStatus.DECODE
        seqs.append(seq)
        texts.append(Texts(rng, copied))
    now = plain = 0.0
    drafts = [text.draws(most) for text in texts]
    unknown = []
    for _ in range(steps):
        size = lengths.choose(seqs)
        assert size in lengths.sizes
        if late and unknown:
            unknown.pop()()
        num_tokens, reports = 0, []
        for i, (seq, text) in enumerate(zip(seqs, texts)):
            there, held = drafts[i]
            verified = min(there, size - 1)
            accepted = min(held, verified)
            num_tokens += accepted + 1
            text.left -= accepted + 1
            first = held > 0 if there and not verified else None
            drafts[i] = text.draws(most)
            reports.append((seq, accepted + 1, DraftReport(verified, drafts[i][0], first)))
        seconds = cost(num_seqs * size) * rng.gauss(1, noise)
        if rng.random() < stalls:
            seconds += 0.05

        def learn(reports=reports, size=size, seconds=seconds):
            for report in reports:
                lengths.learn(*report)
            lengths.completed(num_seqs, size, seconds, True)

        unknown.append(learn)
        if not late:
            unknown.pop()()
        now += cost(num_seqs * size)
        plain += num_tokens / num_seqs * cost(num_seqs)
    return plain / now


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("num_seqs", [1, 4, 32, 256])
@pytest.mark.parametrize("cost", [gpu, cpu, launches])
def test_text_without_repetition_loses_at_most_a_hundredth(cost, num_seqs, seed):
    assert speed(cost, num_seqs, copied=0.0, steps=1000, seed=seed) > 0.99


@pytest.mark.parametrize(
    ("cost", "num_seqs", "least"),
    [(gpu, 1, 3.0), (gpu, 8, 3.0), (gpu, 64, 1.5), (cpu, 1, 1.4), (launches, 1, 3.0), (launches, 64, 3.0)],
)
def test_repetition_is_found(cost, num_seqs, least):
    found = speed(cost, num_seqs, copied=0.9)
    assert found > least


@pytest.mark.parametrize("seed", [4])
@pytest.mark.parametrize("copied", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("num_seqs", [1, 16, 128])
@pytest.mark.parametrize("cost", [gpu, cpu])
def test_mixed_texts_are_never_slower(cost, num_seqs, copied, seed):
    assert speed(cost, num_seqs, copied, steps=1000, seed=seed) > 0.99


@pytest.mark.parametrize(
    ("cost", "num_seqs", "copied", "least"),
    [
        (gpu, 1, 0.9, 3.0),
        (gpu, 8, 0.9, 2.5),
        (gpu, 48, 0.9, 1.5),
        (launches, 1, 0.9, 3.0),
        (gpu, 1, 0.0, 0.99),
        (launches, 32, 0.0, 0.99),
        (gpu, 256, 0.0, 0.9999),
        (gpu, 16, 0.3, 0.99),
    ],
)
def test_steps_that_are_known_one_step_late_gain_nearly_as_much(cost, num_seqs, copied, least):
    assert speed(cost, num_seqs, copied, late=True) > least


def test_captured_steps_with_drafts_have_few_sizes_few_decodes_and_no_prompts():
    lengths = DraftLengths(8, 16384, False, {2: 64, 4: 64, 9: 28})
    seqs = []
    for i in range(80):
        seq = Sequence(Request(str(i), [1, 2], SamplingParams()), (i,), 1 << 30)
        seq.status = SequenceStatus.DECODE
        seqs.append(seq)
    assert lengths.sizes == [1, 2, 4, 9]
    assert [lengths.choose(seqs[:n]) for n in (1, 28, 29, 64, 65)] == [9, 9, 4, 4, 1]
    assert lengths.choose(seqs[:1], may_start=True) == 1
    seqs[1].status = SequenceStatus.PREFILL
    assert lengths.choose(seqs[:2]) == 1


def test_drafts_of_an_unreported_step_are_forgotten():
    lengths = DraftLengths(8, 16384)
    seq = Sequence(Request("a", [1, 2], SamplingParams()), (0,), 1 << 30)
    lengths.learn(seq, 1, None)
    assert seq.drafts is None
    lengths.learn(seq, 1, DraftReport(0, 3, None, [4, 5, 6]))
    assert seq.drafts.num_drafts == 3
    lengths.learn(seq, 1, None)
    assert seq.drafts.num_drafts == 0 and seq.drafts.drafts == []


def test_a_full_batch_that_computes_already_gains_nothing_from_fixed_lengths():
    """Fixed lengths lose most of such a batch's speed."""
    assert speed(gpu, 256, copied=0.0, adaptive=False, steps=200) < 0.3


def test_without_adaption_all_drafts_are_verified_as_far_as_a_step_has_room():
    lengths = DraftLengths(8, 64, is_adaptive=False)
    seqs = []
    for i in range(40):
        seq = Sequence(Request(str(i), [1, 2], SamplingParams()), (i,), 1 << 30)
        seq.status = SequenceStatus.DECODE
        seqs.append(seq)
    assert [lengths.choose(seqs[:n]) for n in (1, 7, 8, 13, 20, 33, 40)] == [9, 9, 5, 3, 3, 1, 1]


def test_sizes_are_few_and_end_with_the_largest():
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(2) == [1, 2]
    assert sizes_up_to(5) == [1, 2, 3, 5]
    assert sizes_up_to(7) == [1, 2, 3, 5, 7]
    assert sizes_up_to(65) == [1, 2, 3, 5, 9, 17, 33, 65]


def test_any_reports_and_times_give_a_size_that_the_step_has_room_for():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        most, room = rng.randint(1, 64), rng.randint(1, 600)
        lengths = DraftLengths(most, room)
        seqs = []
        for i in range(rng.randint(1, 40)):
            seq = Sequence(Request(str(i), [1, 2], SamplingParams()), (i,), 1 << 30)
            seq.status = SequenceStatus.DECODE
            seqs.append(seq)
        for _ in range(300):
            some = rng.sample(seqs, rng.randint(0, len(seqs)))
            size = lengths.choose(some)
            assert size == 1 or (size in lengths.sizes and size * len(some) <= room)
            for seq in some:
                verified = rng.randint(0, size - 1)
                first = rng.choice([None, True, False]) if not verified else None
                report = DraftReport(verified, rng.randint(0, most), first)
                lengths.learn(seq, 1 + rng.randint(0, verified), report)
                assert 0 <= seq.drafts.first <= 1 and 0 <= seq.drafts.further <= 1
            lengths.completed(len(some), size, rng.choice([0.0, 1e-4, 0.1, 3.0]), rng.random() < 0.8)

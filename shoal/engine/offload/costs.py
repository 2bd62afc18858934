"""`Costs`: measured seconds to compute a block, fetch it from a tier and store it there; they decide what is
worth fetching. tiers.py, fetch.py and writer.py report the figures. Pure: no clock, no I/O.

One bad figure must not switch a tier off for long. A rate is therefore the median of its latest figures, and
a tier that looks too slow is tried on a few blocks of a real request now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WINDOW = 5  # figures that a rate remembers
FETCH_LATENCY_S = 0.002  # time of a fetch apart from its bytes: its end is noticed between two steps
TRIAL_BLOCKS = 16  # the most blocks of a trial
TRIAL_S = 0.05  # how long a trial may take as far as is known; one block is always tried
MOST_TRIAL_SHARE = 4  # a trial of blocks that go together takes this many times their computing at most
MAX_TRIAL_INTERVAL = 64  # a tier that stays slow is tried once in this many requests that skip it
LEAST_BYTES_PER_S = {"cuda": 8e9, "cpu": 1e9}  # the slowest copy that is believed at first; PCIe 3 has 12e9
MOST_OVERHEAD_S = 50e-6  # the most plausible time of a block's copy apart from its bytes


class Rate:
    """Seconds a unit of work takes: the lower median of the latest figures.

    A machine that is busy with something else makes single figures too high, never too low. The lower median
    drops such a figure as soon as there is a good one. `first` counts as a figure; without it the rate is 0
    seconds until the first measurement.
    """

    def __init__(self, first: float | None = None) -> None:
        self._figures: deque[float] = deque(() if first is None else (first,), maxlen=WINDOW)
        self.seconds = self.latest = first or 0.0

    def add(self, seconds: float, units: int) -> None:
        """`units` were done within `seconds`."""
        self.latest = seconds / units
        self._figures.append(self.latest)
        self.seconds = sorted(self._figures)[(len(self._figures) - 1) // 2]


class Throughput:
    """Measures the throughput of overlapping jobs: blocks done per second in which at least one job ran. The
    duration of a single job would include its wait for the others. So the time during which there was any job
    is divided by the blocks that were done in it."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._num_jobs = self._num_blocks = 0
        self._since = self._until = 0.0

    def begun(self, now: float) -> None:
        """A job begins."""
        if not self._num_jobs:
            self._since = self._until = now
            self._num_blocks = 0
        self._num_jobs += 1

    def ended(self, at: float, num_blocks: int) -> None:
        """Notes the end of a job with `num_blocks` intact blocks. A failed job has 0 and does not count."""
        self._num_jobs -= 1
        self._until = max(self._until, at)
        self._num_blocks += num_blocks

    def update_rate(self) -> None:
        """To be called when all jobs that a poll found ended have been reported."""
        if self._num_blocks and self._until > self._since:
            self.rate.add(self._until - self._since, self._num_blocks)
            self._since, self._num_blocks = self._until, 0


@dataclass(slots=True)
class Trials:
    """Schedules trials of a tier that seems too slow. The interval doubles with each failed trial, so that a
    slow tier costs less and less."""

    interval: int = 1
    num_passed: int = 0  # requests that passed the tier over since the last trial
    num_begun: int = 0

    def is_due(self, looks_quick: bool) -> bool:
        """To be called for a request that passes the tier over; the caller tries the tier if this is true.
        `looks_quick`: the tier's newest figure would have been quick enough."""
        self.num_passed += 1
        if looks_quick:
            self.interval = 1
        elif self.num_passed < self.interval:
            return False
        else:
            self.interval = min(2 * self.interval, MAX_TRIAL_INTERVAL)
        self.num_passed = 0
        self.num_begun += 1
        return True

    def was_worth_it(self) -> None:
        """The tier is used again without a trial."""
        self.interval, self.num_passed = 1, 0


class Costs:
    """The rates of one engine. `token_s`: seconds to compute a token of a prompt; `fetch_s`: seconds to fetch
    a block, by tier."""

    def __init__(self, block_size: int, token_s: float, fetch_s: dict[str, float]) -> None:
        self.block_size = block_size
        self.token = Rate(token_s)
        self.fetch = {tier: Rate(seconds) for tier, seconds in fetch_s.items()}
        self.store = {tier: Rate() for tier in fetch_s}  # 0 seconds until something was stored
        self.trials = {tier: Trials() for tier in fetch_s}

    @property
    def block_s(self) -> float:
        """Seconds to compute a block."""
        return self.token.seconds * self.block_size

    def num_worth_fetching(self, run: Iterable[str], num_tokens_ahead: int, fetch_ahead_s: float) -> int:
        """Returns how many of a run of blocks to fetch, given the tier of each.

        The best end is where computing all blocks up to it takes longest compared to fetching them. Computing
        begins after `num_tokens_ahead` tokens of other prompts, fetching after `fetch_ahead_s` seconds of
        other fetches. Blocks after the best end are computed, unless the first of them are a trial.
        """
        block_s = self.block_s
        gain = self.token.seconds * num_tokens_ahead - fetch_ahead_s - FETCH_LATENCY_S
        best, best_gain = 0, 0.0
        tiers: list[str] = []
        for tier in run:
            tiers.append(tier)
            gain += block_s - self.fetch[tier].seconds
            if gain > best_gain:
                best, best_gain = len(tiers), gain
        for tier in set(tiers[:best]):
            self.trials[tier].was_worth_it()
        return best + self._num_to_try(tiers[best:])

    def are_worth_fetching(
        self, tiers: Sequence[str], num_tokens: int, num_tokens_ahead: int, fetch_ahead_s: float
    ) -> bool:
        """Returns whether to fetch blocks that are of use only together, given the tier of each, in place of
        computing `num_tokens` tokens. The others as in `num_worth_fetching`. Now and then they are fetched as
        a trial of the tier that takes longest, if that costs little."""
        fetch_s = sum(self.fetch[tier].seconds for tier in tiers)
        compute_s = self.token.seconds * num_tokens
        if fetch_s + fetch_ahead_s + FETCH_LATENCY_S < compute_s + self.token.seconds * num_tokens_ahead:
            for tier in set(tiers):
                self.trials[tier].was_worth_it()
            return True
        if fetch_s < compute_s or fetch_s > TRIAL_S + MOST_TRIAL_SHARE * compute_s:
            return False  # the tiers are quick enough, or much too slow
        slowest = max(set(tiers), key=lambda tier: self.fetch[tier].seconds * tiers.count(tier))
        latest_s = sum(self.fetch[tier].latest for tier in tiers)
        return self.trials[slowest].is_due(looks_quick=latest_s < compute_s)

    def _num_to_try(self, passed_over: list[str]) -> int:
        if not passed_over:
            return 0
        tier, block_s = passed_over[0], self.block_s
        rate = self.fetch[tier]
        if rate.seconds < block_s:  # the tier is quick enough: the run is too short, or too much waits ahead
            return 0
        if not self.trials[tier].is_due(looks_quick=rate.latest < block_s):
            return 0
        most = max(1, min(TRIAL_BLOCKS, int(TRIAL_S / rate.seconds) if rate.seconds else TRIAL_BLOCKS))
        num_blocks = 0
        while num_blocks < min(most, len(passed_over)) and passed_over[num_blocks] == tier:
            num_blocks += 1
        return num_blocks


def plausible_copy_s(measured_s: float, block_bytes: int, device: str) -> float:
    """The first figure of a block's copy between host and device, or the bound where the figure is beyond
    it: such a figure says more about the moment than about the machine. `device`: "cuda" or "cpu"."""
    return min(measured_s, MOST_OVERHEAD_S + block_bytes / LEAST_BYTES_PER_S[device])

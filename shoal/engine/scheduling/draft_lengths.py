"""`DraftLengths`: how many drafts a step verifies, chosen from measured costs of steps and from how often
each request's drafts were accepted, so that expected tokens per second are most. No drafts at all is one
choice.

A step has one size: the most tokens of a decode, out of a few (`sizes`), as a GPU has graphs of them.
What a size costs is learned for each number of decodes, relative to a step without drafts. Drafts exist in
steps of size 1 too, and are compared with what was sampled: they are free samples of acceptance, so requests
whose drafts fail back off without being forgotten.

A budget makes sure that speculation is never much slower than none: what a step lost or saved, as measured,
is booked, and without budget no step has drafts. Losses are bounded by LOSS of the time, and FIRST_LOSS
steps. A draft head's own passes are booked, too: without budget the head rests. This class reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal.api import Drafted
from shoal.engine.scheduling.part_state import DraftHistory
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus

DECODE, PREFILL = SequenceStatus.DECODE, SequenceStatus.PREFILL
RATE = 0.2  # how much one draft corrects a request's acceptance,
RATE_OF_ALL = 0.02  # and the acceptance with which new requests begin
FIRST, FURTHER = 0.4, 0.7  # that acceptance at the start of the engine
FORCED = 0.95  # acceptance of a draft that a grammar forces: a model may spell the text in other tokens
COST_RATE = 0.2  # how much one step corrects a cost
DISTURBED = 1.25  # a step that took more times its cost is believed if the last one of its size did, too
GUESS = 0.02  # cost of a token of a decode that was not measured, in steps without drafts
WORTH = 1.02  # a size is taken if it promises this many times the tokens per second of size 1
RETRY, MOST_RETRY = 64, 4096  # steps after which the cost of a size that is too dear is doubted
COMPARE = 128  # a step without drafts follows as many with drafts, as costs are relative to it
LOSS = 0.004  # the share of all time that drafts may cost, as measured
FIRST_LOSS = 4  # steps that they may cost in addition,
FIRST_LOSS_OF_HEAD = 32  # with a head, whose passes may cost more than steps until sizes are measured
WAKE = 8  # steps that may be lost when a head that rests is tried again
MOST_SAVED = 50  # steps that were saved and may be lost again


class DraftReport(NamedTuple):
    """A step's report on the drafts of one sequence that it samples from."""

    num_verified: int  # drafts that the step computed
    num_drafts: int  # drafts that the next step may compute
    first: bool | None = None  # whether the first draft equals the token, if the step computed none
    drafts: list[int] = []  # drafts that the next step may compute


@dataclass(slots=True)
class _Cost:
    """Cost of a step size at a number of decodes, as a multiple of a step without drafts."""

    ratio: float
    at: int  # number of the last such step
    last: float  # ratio that it had
    wait: int = RETRY
    count: int = 1


class _Row:
    """Costs at a number of decodes."""

    __slots__ = ("base", "by_size", "compared_at")

    def __init__(self) -> None:
        self.base = 0.0  # seconds of a step without drafts; 0: unknown
        self.compared_at = 0  # number of the last such step
        self.by_size: dict[int, _Cost] = {}


class DraftLengths:
    """most: the most drafts of a sequence in a step. is_adaptive False: always as many, whatever they cost.
    max_num_batched_tokens: room of a step for decodes of equal sizes. most_decodes: the sizes of steps with
    drafts, each with the most decodes that it may have; such steps have no prompts. None: any step may have
    drafts. has_head: a head makes the drafts, and its time is known."""

    def __init__(
        self,
        most: int,
        max_num_batched_tokens: int,
        is_adaptive: bool = True,
        most_decodes: Mapping[int, int] | None = None,
        has_head: bool = False,
    ) -> None:
        self.sizes = sizes_up_to(1 + most) if most_decodes is None else [1, *sorted(most_decodes)]
        self.is_adaptive = is_adaptive
        self._most_decodes = most_decodes
        self._max_tokens = max_num_batched_tokens
        self._rows: dict[int, _Row] = {}
        self._first, self._further = FIRST, FURTHER
        self._num_steps = 0
        self._budget = 0.0  # seconds
        self._budgeted = False  # FIRST_LOSS is in the budget
        self._step_s = 0.0  # seconds of the last step without prompts
        self._num_accepted = 0  # drafts, since the last completed step
        self._has_head = has_head
        self._head_ratio = 0.0  # cost of a head's passes, as a multiple of a step without drafts; 0: unknown
        # in the next step: the head makes no drafts, and its cache misses the step's tokens
        self.head_rests = False

    # Planning

    def choose(self, running: Iterable[Sequence], may_start: bool = False) -> int:
        """Returns the size of the next step, and decides whether a head rests. `may_start`: a waiting
        sequence may start with it."""
        self.head_rests = self._has_head and self.is_adaptive and self._rests(may_start)
        # Rows in lockstep wait for the token that a step in flight samples.
        decodes = [seq for seq in running if seq.status is DECODE and not (seq.lockstep and seq.num_pending)]
        sizes = self._sizes_for(len(decodes))
        if len(sizes) == 1:
            return 1
        if self._most_decodes is not None and (may_start or _has_prompt(running)):
            return 1
        if not self.is_adaptive:
            return sizes[-1]
        row = self._rows.get(_bucket(len(decodes)))
        if row is None or not row.base or self._budget <= 0:
            return 1
        if self._num_steps - row.compared_at > COMPARE:
            return 1
        expected = [0.0] * len(self.sizes)  # tokens in addition to one for each sequence
        for seq in decodes:
            history = seq.drafts
            if history is not None and history.num_drafts and seq.most_drafts:
                if not history.gains:
                    history.gains = self._gains(history)
                for i, gain in enumerate(history.gains):
                    expected[i] += gain
        best, most = 1, WORTH
        for i, ratio in self._ratios(_bucket(len(decodes)), row, sizes):
            promised = (1 + expected[i] / len(decodes)) / ratio
            if promised > most:
                best, most = self.sizes[i], promised
        return best

    def places(self, num_tokens: int) -> int:
        """Returns the places for tokens of each decode in a step whose decodes have at most `num_tokens`
        tokens. Where sizes are few, it is the next size."""
        if self._most_decodes is None:
            return num_tokens
        return self.sizes[bisect_left(self.sizes, num_tokens)]

    def _rests(self, may_start: bool) -> bool:
        """Returns whether a head rests in the next step. Half of the budget is enough to wake it with a new
        sequence, of which its cache lacks no token."""
        if not self.head_rests:
            return self._budgeted and self._budget <= 0
        return self._budget < WAKE * self._step_s * (1 if may_start else 2)

    def _sizes_for(self, num_decodes: int) -> list[int]:
        """Returns the sizes for which a step of that many decodes has room."""
        room = self._max_tokens // max(1, num_decodes)
        if self.is_adaptive:
            room //= 2  # half of a step is left to prompts
        most = self._most_decodes or {}
        return [
            size
            for size in self.sizes
            if size == 1 or (size <= room and num_decodes <= most.get(size, num_decodes))
        ]

    def _gains(self, history: DraftHistory) -> list[float]:
        """Returns for each size how many drafts of the sequence will probably be accepted."""
        gains, size, sum_, held = [], 1, 0.0, 1.0
        for next_size in self.sizes:
            while size < next_size and size <= history.num_drafts:
                if size <= history.num_forced:
                    held *= FORCED
                else:
                    held *= history.first if size == history.num_forced + 1 else history.further
                sum_ += held
                size += 1
            gains.append(sum_)
        return gains

    def _ratios(self, bucket: int, row: _Row, sizes: list[int]) -> Iterable[tuple[int, float]]:
        """Yields (index, cost) of each size that may be tried. A size beyond the measured ones is tried only
        after the ones below it, so that steps never become much more expensive at once."""
        before, slope, ratio = 1, GUESS, 1.0
        for i, size in enumerate(sizes[1:], 1):
            cost, is_known = row.by_size.get(size), True
            if cost is not None:
                found = cost.ratio
                if self._num_steps - cost.at > cost.wait:  # it may have been disturbed
                    found = 1 + (found - 1) / 2
            elif (near := self._near(bucket, size)) is not None:
                found = near
            else:
                found, is_known = ratio + slope * (size - before), False
            found = max(found, ratio)
            slope = max(GUESS, (found - ratio) / (size - before))
            before, ratio = size, found
            yield i, ratio
            if not is_known:
                return

    def _near(self, bucket: int, size: int) -> float | None:
        """Returns the cost of a size at the next smaller number of decodes for which it is known."""
        while bucket > 1:
            bucket = _below(bucket)
            row = self._rows.get(bucket)
            if row is not None and (cost := row.by_size.get(size)) is not None:
                return cost.ratio
        return None

    # Learning

    def learn(self, seq: Sequence, num_tokens: int, report: DraftReport | None) -> None:
        """Corrects the acceptance of a sequence for which a step has sampled `num_tokens` tokens. `report`
        None: its drafts are out of date."""
        history = seq.drafts
        if report is None:
            if history is not None and history.num_drafts:
                history.num_drafts, history.drafts = 0, []
                history.num_forced, history.is_cut, history.gains = 0, False, []
            return
        if history is None:
            history = seq.drafts = DraftHistory(self._first, self._further)
        verified, accepted = report.num_verified, num_tokens - 1
        if verified:
            self._num_accepted += accepted
            history.num_steps += 1
            history.num_verified += verified
            history.num_accepted += accepted
            # Forced drafts say nothing about the others.
            verified, accepted = verified - history.num_forced, accepted - history.num_forced
        if verified > 0 and accepted >= 0:
            self._judge_first(history, accepted > 0)
            if verified > 1 and accepted:
                held = 1 - (1 - RATE) ** (accepted - 1)
                history.further += held * (1 - history.further)
                self._further += RATE_OF_ALL * (accepted - 1) * (1 - self._further) / verified
                if accepted < verified:
                    history.further -= RATE * history.further
                    self._further -= RATE_OF_ALL * self._further
        elif report.first is not None:
            self._judge_first(history, report.first)
        history.num_drafts, history.drafts = report.num_drafts, report.drafts
        history.num_forced, history.is_cut, history.gains = 0, False, []

    def _judge_first(self, history: DraftHistory, held: bool) -> None:
        history.first += RATE * (held - history.first)
        self._first += RATE_OF_ALL * (held - self._first)

    def completed(
        self, num_decodes: int, size: int, seconds: float, num_prompt_tokens: int = 0, head_s: float = 0.0
    ) -> None:
        """Learns from the time of a step with `num_decodes` decodes of this size, and prompts. Its tokens
        were given to `learn` before. `head_s`: the part of the time that a head took."""
        num_accepted, self._num_accepted = self._num_accepted, 0
        seconds -= head_s
        if seconds <= 0 or not self.is_adaptive:
            return
        self._budget += LOSS * seconds
        row = self._rows.setdefault(_bucket(num_decodes), _Row())
        self._book_head(row, size, head_s, seconds)
        if num_prompt_tokens or not num_decodes:
            if num_decodes and size > 1:
                # drafts cost their share of the step, and an accepted one saves a step of its sequence
                num_places = num_decodes * (size - 1)
                share = num_places / (num_places + num_decodes + num_prompt_tokens)
                self._budget += num_accepted / num_decodes * row.base - share * seconds
            return
        self._num_steps += 1
        self._step_s = seconds
        if not self._budgeted:
            self._budgeted = True
            self._budget = (FIRST_LOSS_OF_HEAD if self._has_head else FIRST_LOSS) * seconds
        if size == 1:
            steady = min(seconds, row.base * DISTURBED) if row.base else seconds
            row.base = row.base + COST_RATE * (steady - row.base) if row.base else seconds
            row.compared_at = self._num_steps
        elif row.base:
            row.base = min(row.base, seconds)  # no step is cheaper than one without drafts
            self._learn_cost(row, size, seconds / row.base)
            if row.by_size[size].count > 1:  # the first one of a size may have built what it needs
                self._budget += (1 + num_accepted / num_decodes) * row.base - min(seconds, size * row.base)
        self._budget = min(self._budget, MOST_SAVED * seconds)

    def _book_head(self, row: _Row, size: int, head_s: float, seconds: float) -> None:
        """Books a head's passes, as a multiple of a step without drafts, because on a busy machine the passes
        and the step may both have waited for a processor. `seconds`: of the step without the passes."""
        if not head_s or not seconds:
            return
        cost = row.by_size.get(size)
        ratio = head_s / seconds * (1.0 if cost is None else cost.ratio)
        believed = ratio if not self._head_ratio else min(ratio, 2 * self._head_ratio)
        self._head_ratio += (COST_RATE if self._head_ratio else 1.0) * (believed - self._head_ratio)
        self._budget -= self._head_ratio * (row.base or self._step_s)

    def _learn_cost(self, row: _Row, size: int, ratio: float) -> None:
        cost = row.by_size.get(size)
        if cost is None:
            row.by_size[size] = _Cost(ratio, self._num_steps, ratio)
            return
        if self._num_steps - cost.at > cost.wait:
            cost.wait = min(2 * cost.wait, MOST_RETRY)
        believed = ratio
        if ratio > DISTURBED * cost.ratio:
            believed = min(ratio, max(cost.last, DISTURBED * cost.ratio))
        if cost.count == 1 and ratio < cost.ratio:
            cost.ratio = ratio
        else:
            cost.ratio += COST_RATE * (believed - cost.ratio)
        cost.at, cost.last = self._num_steps, ratio
        cost.count += 1


def _has_prompt(running: Iterable[Sequence]) -> bool:
    return any(seq.status is PREFILL and not seq.request.fetches_only for seq in running)


def drafted(num_kept: int, num_sampled: int, report: DraftReport) -> Drafted | None:
    """Returns what an answer has of the tokens that one step sampled for it, of which it keeps the first. The
    last sampled token is not a draft."""
    if not report.num_verified:
        return None
    num_accepted = min(num_kept, num_sampled - 1)
    places = [*range(1, num_accepted + 1), *[0] * (num_kept - num_accepted)]
    return Drafted(1, report.num_verified, places)


def sizes_up_to(most: int) -> list[int]:
    """Returns 1, 2, 3, 5, 9, 17 and so on, and `most`: the numbers of tokens of a decode in a step."""
    sizes, drafts = [1], 1
    while 1 + drafts < most:
        sizes.append(1 + drafts)
        drafts *= 2
    return [*sizes, most] if most > 1 else sizes


def _bucket(num_decodes: int) -> int:
    """Returns the number of decodes that stands for this one: steps of about as many cost about the same."""
    if num_decodes < 8:
        return num_decodes
    unit = 1 << (num_decodes.bit_length() - 3)
    return num_decodes // unit * unit


def _below(bucket: int) -> int:
    return _bucket(bucket - 1)

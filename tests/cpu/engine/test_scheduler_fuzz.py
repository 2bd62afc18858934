"""Random traces through scheduler and block pool, on a device that remembers which history each KV slot was
written with.

A token is a function of the whole history before it, so a sequence that reads one wrong slot, or is preempted
and resumed wrongly, ends with other tokens than the uninterrupted run. A failing seed is in the test's
output; `trace(seed)` repeats it.
"""

import random
import zlib
from collections import Counter, deque

import pytest

from shoal.api import FinishReason, Request
from shoal.engine.scheduling import policy
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.step_costs import StepCosts
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from tests.seeded import prints_its_seed

VOCAB = 40
EOS = (0, 1)
TRACES_A_TEST = 25
FIRST_SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(TRACES_A_TEST, 200, TRACES_A_TEST)),
]


class History:
    """Running hashes of a token sequence: `hashes[p]` stands for tokens 0..p, under the request's salt and
    adapter."""

    def __init__(self, request: Request, token_ids: list[int]):
        self.hashes: list[int] = []
        self.last = zlib.crc32(repr((request.cache_salt, request.adapter)).encode())
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self.last = hash((self.last, token_id))
        self.hashes.append(self.last)

    def next_token(self) -> int:
        return self.last // 7 % VOCAB


class ToyGrammar:
    """Takes tokens in turn, each once; one refuses, some end it. After some it is asked a few times before it
    is ready."""

    REFUSED, ENDS = frozenset((7, 8, 9)), frozenset(range(30, 33))

    @staticmethod
    def delays(token_id: int) -> bool:
        return token_id % 8 == 0

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.ended, self.error = False, None
        self._num_delays = 0
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        self._num_delays -= 1
        return self._num_delays < 0

    @property
    def is_waiting(self) -> bool:
        return self._num_delays >= 0

    def close(self) -> None:
        self._is_closed = True

    def accept(self, token_id: int) -> bool:
        assert not self.ended and self.error is None and not self._is_closed, (
            "a token after the grammar's end"
        )
        assert self._num_delays < 0, "a token before the grammar was ready"
        self._num_delays = 2 if self.delays(token_id) else -1
        if token_id in self.REFUSED:
            self.error = "refused"
            return False
        self.taken.append(token_id)
        self.ended = token_id in self.ENDS
        return True


class Row:
    """A row is sent with the first step of its owner: with the first tokens' history, and the next token."""

    def __init__(self, owner, entry, epoch: int):
        self.owner, self.epoch = owner, epoch
        self.history = History(entry.seq.request, entry.seq.token_ids[: entry.start])
        self.token: int = entry.seq.token_ids[entry.start]  # the next input of a decode


class Device:
    """Runs plans in the order they come: stores the KV of a step's tokens, then every sequence reads its
    history by its block table. A decode of several tokens samples a random number of them, and the slots of
    the others get the KV of rejected drafts."""

    def __init__(self, num_blocks: int, block_size: int):
        self.r = random.Random(f"drafts {num_blocks} {block_size}")
        self.block_size = block_size
        # (history, epoch of the writer's admission)
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.epoch = 0  # prefix cache resets so far

    def run(self, plan: StepPlan) -> list[list[int]]:
        reads, tokens = [], []
        rows = [entry.row for entry in plan.scheduled]
        assert len(rows) == len(set(rows)), "two sequences in one row"
        for i, entry in enumerate(plan.scheduled):
            seq, row = entry.seq, self._row(entry)
            start, size = len(row.history.hashes), self.block_size
            assert start == entry.start or (start < entry.start and i < plan.num_decodes), (
                "a step that does not follow the one before"
            )
            if i < plan.num_decodes:
                assert start >= len(seq.token_ids) or seq.token_ids[start] == row.token
                known = start + 1
                sampled = self._decode(row, seq, entry.num_tokens)
            else:
                step_tokens = seq.token_ids[start : start + entry.num_tokens]
                assert len(step_tokens) == entry.num_tokens > 0, "a prefill of tokens that nobody knows"
                known = start + entry.num_tokens
                for token in step_tokens:
                    row.history.append(token)
                row.token = row.history.next_token()
                sampled = [row.token]
            if seq.lockstep and entry.samples:
                assert known == len(seq.token_ids), "drawn before the host has seen the last token"
                assert seq.grammar is None or seq.grammar.taken == seq.output_token_ids, (
                    "a grammar that is not where its sequence is"
                )
            end = len(row.history.hashes)
            slots = [seq.block_ids[p // size] * size + p % size for p in range(start + entry.num_tokens)]
            for p in range(start, start + entry.num_tokens):
                self.slots[slots[p]] = (row.history.hashes[p] if p < end else 0, row.epoch)
            reads.append((row, slots[:end]))
            if entry.samples:
                tokens.append(sampled)
        for row, slots in reads:
            for p, slot in enumerate(slots):
                found = self.slots[slot]
                assert found is not None and found[0] == row.history.hashes[p], (
                    f"position {p} reads another history"
                )
                assert found[1] >= row.epoch, "a hit from before a reset"
        return tokens

    def _decode(self, row: Row, seq, most: int) -> list[int]:
        """Samples 1 to `most` tokens. A token after which a grammar is not ready is the step's last."""
        sampled: list[int] = []
        for _ in range(self.r.randint(1, most) if most > 1 else 1):
            row.history.append(row.token)
            row.token = row.history.next_token()
            sampled.append(row.token)
            if seq.request.params.structured_outputs is not None and ToyGrammar.delays(row.token):
                break
        return sampled

    def _row(self, entry) -> Row:
        owner = (entry.seq, entry.seq.num_admissions)
        if entry.row not in self.rows or self.rows[entry.row].owner != owner:
            self.rows[entry.row] = Row(owner, entry, self.epoch)
        return self.rows[entry.row]


def uninterrupted(request: Request, limit: int) -> tuple[list[int], FinishReason, int | None]:
    """Returns the expected outputs of a request that runs alone and undisturbed."""
    params, history, outputs = request.params, History(request, request.prompt_token_ids), []
    if request.embed:
        return [], FinishReason.STOP, None
    structured = params.structured_outputs is not None
    while True:
        token = history.next_token()
        if structured and token in ToyGrammar.REFUSED:
            return outputs, FinishReason.ERROR, None
        history.append(token)
        outputs.append(token)
        if structured and token in ToyGrammar.ENDS:
            return outputs, FinishReason.STOP, None
        if len(outputs) >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return outputs, FinishReason.STOP, None
            if token in params.stop_token_ids:
                return outputs, FinishReason.STOP, token
        if len(outputs) == params.max_tokens or len(request.prompt_token_ids) + len(outputs) == limit:
            return outputs, FinishReason.LENGTH, None


class Trace:
    """One random configuration under one random load."""

    patience = 4  # steps a token
    scheduler_class = Scheduler

    def __init__(self, seed: int, queries: int = 1):
        """`queries`: the most tokens of a decode in one step."""
        self.r = r = random.Random(seed)
        self.block_size = r.choice((1, 2, 4, 8))
        max_model_len = r.randint(10, 80)
        # from less than the longest sequence to room for a few
        num_blocks = r.randint(2, 2 * max_model_len // self.block_size)
        self.limit = min(max_model_len, num_blocks * self.block_size)
        pace = random.Random(f"pace {seed}")
        self.target = pace.choice((None, 0.5, 0.5, 5.0, 15.0, 20.0))  # seconds, as the costs below
        self.scheduler = self.scheduler_class(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=r.choice((1, 2, 4, 8)),
            max_num_batched_tokens=r.choice((1, 3, 8, 16, 64)),
            max_model_len=max_model_len,
            enable_prefix_caching=r.random() < 0.85,
            scheduling_policy=r.choice(list(policy.POLICIES)),
            long_prefill_token_threshold=r.choice((0, 0, 2, 5)),
            target_itl_s=self.target,
            step_sizes=pace.choice(((), (), (4, 8, 12, 20))),
            queries=queries,
        )
        self.costs = StepCosts(
            *(pace.choice((0.01, 0.1, 1.0)) for _ in range(3)), pace.choice((0, 0.01, 0.1))
        )
        self.scheduler.costs, self.scheduler.gates = self.costs, [self]
        self.device = Device(num_blocks, self.block_size)
        self.in_flight: deque[tuple[StepPlan, list[list[int]]]] = deque()
        self.max_depth = r.choice((0, 1, 1, 2, 3))
        self.requests: dict[str, Request] = {}
        self.held = []  # sequences whose grammar is not ready
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[FinishReason, int | str | None]] = {}
        self.seen = Counter[str]()

    def new_request(self) -> Request:
        r = self.r
        base: list[int] = []
        salt, adapter = r.choice((None, None, None, "a")), r.choice((None, None, None, "a"))
        if self.requests and r.random() < 0.8:  # another turn of a conversation, or a sibling of it
            earlier = r.choice(list(self.requests.values())[-6:])
            base = earlier.prompt_token_ids + self.outputs[earlier.request_id]
            base = base[: r.choice((len(base), r.randint(0, len(base))))]
            if r.random() < 0.8:
                salt, adapter = earlier.cache_salt, earlier.adapter
        structured = StructuredOutputsParams(regex=".") if r.random() < 0.15 else None
        embed = structured is None and r.random() < 0.1
        prompt = (base + [r.randrange(VOCAB) for _ in range(r.randint(0 if base else 1, r.choice((3, 20))))])[
            : self.limit - (not embed)
        ]
        max_tokens = r.choice((1, 2, 5, 20, 50, 50, None))
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=r.random() < 0.8,
            min_tokens=r.randint(0, max_tokens or 30) if r.random() < 0.3 else 0,
            stop_token_ids=r.sample(range(VOCAB), r.choice((0, 0, 0, 2))),
            prompt_logprobs=0 if r.random() < 0.1 else None,
            structured_outputs=structured,
        )
        return Request(
            f"r{len(self.requests)}",
            prompt,
            params,
            priority=r.randint(-1, 1),
            arrival=r.randint(0, 3),
            eos_token_ids=EOS,
            cache_salt=salt,
            adapter=adapter,
            embed=embed,
        )

    def run(self, num_requests: int) -> None:
        steps = 0
        while len(self.requests) < num_requests or self.scheduler.has_work or self.in_flight:
            arrivals = self.r.choice((0, 0, 0, 1, 4)) if self.scheduler.has_work else 1
            for _ in range(min(arrivals, num_requests - len(self.requests))):
                self.arrive(self.new_request())
            self.disturb()
            self.compile()
            self.step()
            self.scheduler.check()
            steps += 1
            work = sum(
                len(r.prompt_token_ids) + len(self.outputs[r.request_id]) for r in self.requests.values()
            )
            assert steps <= 200 + self.patience * (self.max_depth + 1) * work, "no progress"
        self.compare()

    def arrive(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = list(request.output_token_ids)
        seq = self.scheduler.add(request)
        if request.params.structured_outputs is not None:
            self.held.append(seq)

    def may_start(self, seq) -> bool:
        return seq not in self.held and not seq.is_delayed

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.in_flight or self.waits or not self.scheduler.has_work, "work, and nothing runs"
        else:
            assert (
                plan.num_tokens
                == sum(e.num_tokens for e in plan.scheduled)
                <= self.scheduler._max_num_batched_tokens
            )
            if self.target is not None:
                self.check_target(plan)
            assert not any(entry.seq in self.held for entry in plan.scheduled)
            self.seen["mixed"] += 0 < plan.num_decodes < len(plan.scheduled)
            self.seen["chunked"] += not all(e.samples for e in plan.scheduled)
            self.in_flight.append((plan, self.launch(plan)))
            self.scheduler.check()
        depth = self.r.randint(0, self.max_depth)
        while len(self.in_flight) > (depth if plan is not None else 0):
            self.see(*self.in_flight.popleft())

    @property
    def holds(self) -> bool:
        """True if a part holds blocks."""
        return False

    @property
    def waits(self) -> bool:
        """True if some sequence waits for something other than a step."""
        waiting = any(
            seq.grammar is not None and seq.grammar.is_waiting
            for seq in (*self.scheduler.running, *self.scheduler.waiting)
        )
        return bool(self.held or self.scheduler.blocks.fetches.under_way or waiting)

    def check_target(self, plan: StepPlan) -> None:
        """A step with decodes ends in time, or takes no more of prompts than it takes at least."""
        # What begins as a decode is counted as a prompt of one token.
        chunks = [e for i, e in enumerate(plan.scheduled) if i >= plan.num_decodes or e.begins_as_decode]
        costs, num_decodes = self.costs, len(plan.scheduled) - len(chunks)
        if not num_decodes:
            return
        seconds = costs.step_s + len(plan.scheduled) * costs.seq_s
        for chunk in chunks:
            pairs = chunk.num_tokens * chunk.start + chunk.num_tokens**2 / 2
            seconds += chunk.num_tokens * costs.token_s + pairs * costs.pair_s
        taken = sum(chunk.num_tokens for chunk in chunks)
        decode_s = costs.step_s + num_decodes * costs.seq_s
        least_s = costs.token_s * max(self.block_size, policy.TOKENS_A_DECODE * num_decodes)
        in_time = seconds <= max(self.target, decode_s + least_s) + 1e-9
        assert in_time or (len(chunks) == 1 and taken <= self.block_size) or not chunks, (
            "a step that is too long"
        )
        self.seen["too long"] += taken > 0 and seconds > self.target
        self.seen["in time"] += taken > 0 and seconds <= self.target

    def launch(self, plan: StepPlan) -> list[list[int]]:
        return self.device.run(plan)

    def compile(self) -> None:
        for seq in list(self.held):
            if self.r.random() < 0.4:
                self.held.remove(seq)
                seq.grammar = ToyGrammar()

    def see(self, plan: StepPlan, tokens: list[list[int]]) -> None:
        results = self.scheduler.update(plan, tokens)
        self.seen["dropped"] += sum(map(len, tokens)) - sum(len(result.token_ids) for result in results)
        decodes = plan.scheduled[: plan.num_decodes]  # they all sample, and come first
        self.seen["fewer than there may be"] += sum(len(a) < e.num_tokens for e, a in zip(decodes, tokens))
        for result in results:
            request_id = result.seq.request.request_id
            assert request_id not in self.finished, "a token after the end"
            num_kept, of_one = len(result.token_ids), tokens[result.sample]
            assert of_one[:num_kept] == result.token_ids
            self.seen["ended in the middle of a step"] += num_kept < len(of_one)
            if result.seq.request.embed:
                self.seen["embeddings"] += 1
            else:
                self.outputs[request_id] += result.token_ids
            self.seen["ended by a grammar"] += result.seq.grammar is not None and result.seq.grammar.ended
            self.seen["pending when preempted"] += (
                result.seq.num_admissions > 0 and result.seq.row == -1 and result.seq.finish_reason is None
            )
            if result.finish_reason is not None:
                self.finished[request_id] = (result.finish_reason, result.seq.stop_reason)
        for seq in self.scheduler.take_finished_outside():
            if seq.finish_reason is FinishReason.ERROR:
                assert seq.error == "refused"
                self.finished[seq.request.request_id] = (seq.finish_reason, None)
                self.seen["refused by a grammar"] += 1

    def disturb(self) -> None:
        r, scheduler = self.r, self.scheduler
        if self.requests and r.random() < 0.05:
            request_id = r.choice(list(self.requests))
            seq = (
                scheduler.abort(request_id)
                if r.random() < 0.7
                else scheduler.finish(request_id, FinishReason.STOP, "text")
            )
            assert (seq is None) == (request_id in self.finished)
            if seq is not None:
                self.finished[request_id] = (seq.finish_reason, seq.stop_reason)
                self.seen["ended from outside"] += 1
            assert scheduler.abort(request_id) is None
        if r.random() < 0.02:
            is_used = (
                scheduler.blocks.fetches.under_way
                or self.holds
                or any(s.block_ids for s in scheduler.running)
            )
            assert scheduler.reset_prefix_cache() == (not is_used)
            self.device.epoch += 1

    def compare(self) -> None:
        assert self.finished.keys() == self.requests.keys(), "not every request has ended"
        for request_id, request in self.requests.items():
            tokens, reason, stop_reason = uninterrupted(request, self.limit)
            outputs, end = self.outputs[request_id], self.finished[request_id]
            if end[0] is FinishReason.ABORT or end[1] == "text":
                assert outputs == tokens[: len(outputs)] and (
                    len(outputs) < len(tokens) or request.embed or reason is FinishReason.ERROR
                )
            else:
                assert (outputs, *end) == (tokens, reason, stop_reason)
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks and not stats.num_running and not stats.num_waiting
        assert self.scheduler._free_rows and stats.prefix_cache_hits <= stats.prefix_cache_queries
        self.seen.update(
            requests=len(self.requests), preemptions=stats.num_preemptions, hits=stats.prefix_cache_hits
        )


@prints_its_seed
def trace(seed: int, queries: int = 1) -> Counter[str]:
    one = Trace(seed, queries)
    one.run(num_requests=30)
    return one.seen


@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
def test_any_load_gives_each_request_the_tokens_of_an_undisturbed_run(first_seed):
    print(f"seeds {first_seed}..{first_seed + TRACES_A_TEST - 1}")
    seen = sum((trace(seed) for seed in range(first_seed, first_seed + TRACES_A_TEST)), Counter[str]())
    for name in (
        "preemptions",
        "hits",
        "mixed",
        "chunked",
        "dropped",
        "pending when preempted",
        "ended from outside",
        "embeddings",
        "ended by a grammar",
        "refused by a grammar",
        "too long",
        "in time",
    ):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


@pytest.mark.parametrize("queries", [2, 4, 25])
def test_decodes_of_several_tokens_give_each_request_the_tokens_of_an_undisturbed_run(queries):
    print(f"seeds 2000..{1999 + TRACES_A_TEST}, decodes of up to {queries} tokens")
    seen = sum((trace(seed, queries) for seed in range(2000, 2000 + TRACES_A_TEST)), Counter[str]())
    for name in (
        "preemptions",
        "hits",
        "mixed",
        "fewer than there may be",
        "ended in the middle of a step",
        "pending when preempted",
        "ended from outside",
        "ended by a grammar",
        "refused by a grammar",
    ):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


def test_whomever_a_policy_puts_out_each_request_gets_its_tokens(monkeypatch):
    chosen = Counter[str]()

    def any_but_the_first_in_turn(candidates):
        i = random.Random(sum(chosen.values())).randrange(min(1, len(candidates) - 1), len(candidates))
        chosen["itself" if i == 0 else "last" if i == len(candidates) - 1 else "another"] += 1
        return i

    monkeypatch.setattr(policy, "victim", any_but_the_first_in_turn)
    for seed in range(1000, 1000 + TRACES_A_TEST):
        trace(seed)
    assert chosen["another"] > 10, f"the traces are too tame: {chosen}"

"""A simulated worker: continuous batching with chunked prefill over a KV cache that shares prefixes.

It has no clock. Whoever runs it calls `begin` when no run is under way, and `complete` when the run has
ended. A run is one step, or several decode steps that nothing changes: these cost as much to simulate as one.
`shorten` ends a run with the step that is under way, so that a request that came can begin.

Blocks have names, which stand for their tokens and all tokens before them. A block that is full can be found
until it is evicted, the least recently freed first. What is generated has no names here, since a trace does
not say which later prompt repeats it; its room is free again at its request's end.

What is evicted goes to host memory, where there is room for it, and is fetched where that is quicker than
computing it. A prompt that another worker has computed is fetched from there. Who waits for a fetch has its
room already, and the others go on meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.errors import ConfigError
from shoal.fleet.simulator.timing import StepTime, StepTiming, StepWork

PAGE = 16  # tokens: the unit of the cache's room, as block_size of `shoal serve`
MAX_RUN_STEPS = 32  # after so many decode steps the router hears of what was generated


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request, and how far the worker has come with it. Times are in seconds of the simulation."""

    id: str
    arrival_s: float
    num_tokens: int  # of the prompt
    output_length: int
    chain: Sequence[int]  # names of the prompt's full blocks
    own_hashes: Sequence[int] = ()  # of these blocks without what is before them; for events
    session: str | None = None
    cached_tokens: int = -1  # found in the cache when it was first admitted; -1: not yet
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_generated: int = 0
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    end_s: float = -1.0
    num_preemptions: int = 0
    is_decoding: bool = False  # it needs one token computed for the next one
    num_named: int = 0  # blocks of the chain that it holds under their names
    own_pages: int = 0  # which it does not share
    host_tokens: int = 0  # of cached_tokens, those that came from host memory
    is_remote: bool = False  # its prompt's keys and values are to be read from a prefill worker
    ready_s: float = 0.0  # when a fetch ends
    num_fetched: int = 0  # tokens that are in the cache then

    @property
    def num_known(self) -> int:
        """Prompt and generated tokens: what has to be computed before the next one."""
        return self.num_tokens + self.num_generated


class SimCache:
    """The room of a KV cache in pages, and which blocks of prompts are in it."""

    def __init__(self, num_pages: int, block_pages: int) -> None:
        self.num_pages = num_pages
        self.removed: list[int] = []  # evicted blocks, until the worker has told of them
        self._block_pages = block_pages
        self._held: dict[int, int] = {}  # block -> requests that hold it
        self._free: OrderedDict[int, None] = OrderedDict()  # blocks that can be found, the coldest first
        self.own_pages = 0  # of requests, beside the blocks that they hold

    @property
    def used_pages(self) -> int:
        """Pages of requests; those of blocks that nobody holds are free for other use."""
        return self.own_pages + len(self._held) * self._block_pages

    @property
    def cached_pages(self) -> int:
        """Pages of blocks that can be found."""
        return (len(self._held) + len(self._free)) * self._block_pages

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    def blocks(self) -> set[int]:
        """Those that can be found."""
        return {*self._held, *self._free}

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks can be found, from the first without a gap."""
        for number, block in enumerate(chain):
            if block not in self._held and block not in self._free:
                return number
        return len(chain)

    def try_begin(self, chain: Sequence[int], num_matched: int, own_pages: int) -> bool:
        """Holds the first `num_matched` blocks of the chain and so many pages beside them, or changes
        nothing if there is no room."""
        num_revived = sum(1 for block in chain[:num_matched] if block not in self._held)
        if self.used_pages + num_revived * self._block_pages + own_pages > self.num_pages:
            return False
        for block in chain[:num_matched]:
            self._free.pop(block, None)
            self._held[block] = self._held.get(block, 0) + 1
        self.own_pages += own_pages
        self._evict()
        return True

    def try_grow(self, num_pages: int) -> bool:
        """Takes so many pages, or none if there is no room."""
        if self.used_pages + num_pages > self.num_pages:
            return False
        self.own_pages += num_pages
        self._evict()
        return True

    def try_name(self, block: int) -> bool:
        """A request has computed a block in pages of its own, which are the block's from now on. False if the
        block is there already: then they stay what they were."""
        if block in self._held or block in self._free:
            return False
        self.own_pages -= self._block_pages
        self._held[block] = 1
        return True

    def release(self, blocks: Sequence[int], own_pages: int) -> None:
        """A request lets go of its blocks, the last of its chain first, and of its own pages."""
        self.own_pages -= own_pages
        for block in reversed(blocks):
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
                self._free[block] = None

    def _evict(self) -> None:
        while self.own_pages + self.cached_pages > self.num_pages:
            block, _ = self._free.popitem(last=False)
            self.removed.append(block)


@dataclass(frozen=True, slots=True)
class Links:
    """What a worker's cache is connected with: how many tokens host memory has room for, the seconds that a
    token of it takes to the device, and those of a token from a prefill worker, with what comes before the
    first one."""

    host_tokens: int = 0
    host_token_s: float = 0.0
    peer_token_s: float = 0.0
    peer_latency_s: float = 0.0


class HostTier:
    """Blocks in host memory, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.stored: list[tuple[int, int, int | None]] = []  # block, own hash, parent; until they were told
        self.removed: list[int] = []
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._facts: dict[int, tuple[int, int | None]] = {}  # own hash and parent, of blocks on the device

    def blocks(self) -> set[int]:
        return set(self._blocks)

    def note(self, request: SimRequest, start: int, end: int) -> None:
        """These blocks of the request's chain are on the device now."""
        chain = request.chain
        for number in range(start, end):
            self._facts[chain[number]] = (request.own_hashes[number], chain[number - 1] if number else None)

    def take(self, blocks: Sequence[int]) -> None:
        """These have left the device."""
        for block in blocks:
            own_hash, parent = self._facts.pop(block)
            if block not in self._blocks:
                self.stored.append((block, own_hash, parent))
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.num_blocks:
            self.removed.append(self._blocks.popitem(last=False)[0])

    def match(self, chain: Sequence[int], start: int, end: int) -> int:
        """How many blocks are here from this one on, without a gap."""
        number = start
        while number < end and chain[number] in self._blocks:
            self._blocks.move_to_end(chain[number])
            number += 1
        return number - start


@dataclass(slots=True)
class Run:
    """Steps that are under way."""

    start_s: float
    step: StepTime
    num_steps: int
    decodes: list[SimRequest]
    chunks: list[tuple[SimRequest, int]] = field(default_factory=list)  # request, tokens
    stored: list[tuple[SimRequest, int, int]] = field(default_factory=list)  # blocks from, to of its chain

    @property
    def end_s(self) -> float:
        return self.start_s + self.step.of_steps(self.num_steps)


@dataclass(slots=True)
class Progress:
    """What a run has changed. `decoded`: requests with `num_steps` more tokens; `first`: those with their
    first token; `gaps`: seconds between tokens, and how many there were; `stored` and `removed`: blocks that
    the cache has since (a request, and from where to where in its chain) or has no longer."""

    num_steps: int
    decoded: list[SimRequest]
    stored: list[tuple[SimRequest, int, int]]
    first: list[SimRequest] = field(default_factory=list)
    ended: list[SimRequest] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    host_stored: list[tuple[int, int, int | None]] = field(default_factory=list)  # as in HostTier
    host_removed: list[int] = field(default_factory=list)


class SimWorker:
    """`block_size`: tokens of a block with a name, a multiple of PAGE."""

    def __init__(
        self,
        timing: StepTiming,
        cache_tokens: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        links: Links | None = None,
    ) -> None:
        self.cache = SimCache(cache_tokens // PAGE, block_size // PAGE)
        self.waiting: deque[SimRequest] = deque()
        self.running: list[SimRequest] = []  # the first admitted first
        self.fetching: list[SimRequest] = []  # those that wait for keys and values on their way
        self.run: Run | None = None
        self._timing, self._block_size = timing, block_size
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._links = links or Links()
        self._host_free_s = self._peer_free_s = 0.0  # when the links have done what was asked of them
        host_blocks = self._links.host_tokens // block_size
        self.host = HostTier(host_blocks) if host_blocks else None
        self._untold: list[tuple[SimRequest, int, int]] = []  # blocks that came by fetches, until a run ends

    @property
    def kv_usage(self) -> float:
        return self.cache.used_pages / self.cache.num_pages

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.fetching)

    @property
    def fetched_s(self) -> float | None:
        """When the next fetch ends."""
        return min((request.ready_s for request in self.fetching), default=None)

    def add(self, request: SimRequest) -> None:
        """Raises ConfigError for a request that the whole cache has no room for."""
        needed = _pages(request.num_tokens + request.output_length)
        if needed > self.cache.num_pages:
            raise ConfigError(
                f"request {request.id} needs {needed * PAGE} tokens of KV cache, and a worker has "
                f"{self.cache.num_pages * PAGE}; give it more (cache_tokens), or take the request out"
            )
        self.waiting.append(request)

    def shorten(self, now: float) -> None:
        """Ends the run that is under way with the step that is."""
        run = self.run
        assert run is not None
        num_steps = 1
        while num_steps < run.num_steps and run.start_s + run.step.of_steps(num_steps) < now:
            num_steps += 1
        run.num_steps = num_steps

    def begin(self, now: float) -> Run | None:
        """What is done next; None if there is nothing to do. Requests that decode come first, then prompts
        that have been begun, then those that wait, as far as the budget of tokens goes."""
        stored = self._end_fetches(now)
        decodes, has_room = self._continue_decodes()
        run = Run(now, StepTime(0.0, 0.0), 1, decodes, stored=stored)
        budget = self._max_num_batched_tokens - len(decodes)
        for request in self.running:
            if not request.is_decoding and budget > 0:
                budget -= self._take_chunk(request, budget, run)
        while (
            has_room
            and self.waiting
            and budget > 0
            and len(self.running) + len(self.fetching) < self._max_num_seqs
        ):
            request = self.waiting[0]
            has_room = self._try_admit(request, now)
            if not has_room:
                break
            self.waiting.popleft()
            if request.ready_s > now:
                self.fetching.append(request)
            else:
                self.running.append(request)
                budget -= self._take_chunk(request, budget, run)
        if not run.decodes and not run.chunks:
            self._untold += stored
            return None
        run.stored, self._untold = self._untold + run.stored, []
        if not run.chunks:
            run.num_steps = self._num_decode_steps(decodes)
        run.step = self._step_time(run)
        if self.fetching and run.num_steps > 1:  # who has been fetched begins with the next step
            self.run = run
            self.shorten(min(request.ready_s for request in self.fetching))
        self.run = run
        return run

    def complete(self) -> Progress:
        """The run has ended."""
        run = self.run
        assert run is not None
        self.run = None
        now = run.end_s
        done = Progress(run.num_steps, run.decodes, run.stored)
        for request, num_tokens in run.chunks:
            request.num_computed += num_tokens
            if request.num_computed == request.num_known:
                request.num_generated += 1
                request.is_decoding = True
                if request.first_token_s < 0:
                    request.first_token_s = now
                    done.first.append(request)
                else:
                    done.gaps.append((now - request.last_token_s, 1))
                request.last_token_s = now
        num_gaps = len(run.decodes) * run.num_steps
        for request in run.decodes:
            if request.is_remote:  # its second token waited for the first one's worker
                request.is_remote = False
                done.gaps.append((run.start_s + run.step.first_s - request.last_token_s, 1))
                num_gaps -= 1
            request.num_computed += run.num_steps
            request.num_generated += run.num_steps
            request.last_token_s = now
        if num_gaps:
            done.gaps.append(((now - run.start_s) / run.num_steps, num_gaps))
        done.ended = [request for request in self.running if request.num_generated == request.output_length]
        for request in done.ended:
            request.end_s = now
            self._release(request)
        if done.ended:
            self.running = [request for request in self.running if request.end_s < 0]
        done.removed, self.cache.removed = self.cache.removed, []
        if self.host is not None:
            host = self.host
            host.take(done.removed)  # before what has come back in the same run
            for request, start, end in run.stored:
                host.note(request, start, end)
            done.host_stored, host.stored = host.stored, []
            done.host_removed, host.removed = host.removed, []
        return done

    def _end_fetches(self, now: float) -> list[tuple[SimRequest, int, int]]:
        """Who has been fetched runs. Returns the blocks that can be found since."""
        stored = []
        for request in [each for each in self.fetching if each.ready_s <= now]:
            self.fetching.remove(request)
            self.running.append(request)
            request.num_computed = request.num_fetched
            request.is_decoding = request.is_remote
            start = request.num_named
            self._name(request)
            if request.num_named > start:
                stored.append((request, start, request.num_named))
        return stored

    def _try_admit(self, request: SimRequest, now: float) -> bool:
        """Gives the request its blocks and pages, unless there is no room. Its last token is computed in any
        case, as its logits are needed."""
        matched = min(self.cache.match(request.chain), (request.num_known - 1) // self._block_size)
        own_pages = _pages(request.num_known - matched * self._block_size)
        if not self.cache.try_begin(request.chain, matched, own_pages):
            return False
        request.num_named, request.own_pages = matched, own_pages
        request.num_computed = matched * self._block_size
        num_fetched = self._fetch(request, matched, now)
        if request.cached_tokens < 0:
            request.host_tokens = 0 if request.is_remote else num_fetched
            request.cached_tokens = request.num_computed + request.host_tokens
        return True

    def _fetch(self, request: SimRequest, num_matched: int, now: float) -> int:
        """Asks for what others have of the request, behind the blocks that the cache has. Returns how many
        tokens come; the fetches of a link come one after the other."""
        links, known = self._links, num_matched * self._block_size
        if request.is_remote:
            num_tokens = request.num_tokens - known
            begin_s = max(now, self._peer_free_s)
            self._peer_free_s = begin_s + num_tokens * links.peer_token_s
            request.ready_s = self._peer_free_s + links.peer_latency_s
        elif self.host is not None:
            last = (request.num_known - 1) // self._block_size
            found = self.host.match(request.chain, num_matched, min(last, len(request.chain)))
            num_tokens = found * self._block_size
            begin_s = max(now, self._host_free_s)
            ready_s = begin_s + num_tokens * links.host_token_s
            pairs = num_tokens * known + num_tokens * (num_tokens + 1) // 2
            work = StepWork(num_chunks=1, chunk_tokens=num_tokens, chunk_pairs=pairs)
            if not num_tokens or ready_s - now > self._timing.step(work).first_s:
                return 0
            self._host_free_s = request.ready_s = ready_s
        else:
            return 0
        request.num_fetched = known + num_tokens
        return num_tokens

    def _name(self, request: SimRequest, num_tokens: int = 0) -> None:
        """The blocks that are full with these further tokens can be found from now on. Where another request
        has the same block already, this one keeps its own from there on."""
        full = min(len(request.chain), (request.num_computed + num_tokens) // self._block_size)
        while request.num_named < full and self.cache.try_name(request.chain[request.num_named]):
            request.num_named += 1
            request.own_pages -= self._block_size // PAGE

    def _take_chunk(self, request: SimRequest, budget: int, run: Run) -> int:
        """Gives the request as much of the step's budget as it can use, and returns that. Blocks that the
        chunk fills can be found from now on: whoever shares them computes later, or in the same step behind
        them."""
        count = min(budget, request.num_known - request.num_computed)
        run.chunks.append((request, count))
        start = request.num_named
        self._name(request, count)
        if request.num_named > start:
            run.stored.append((request, start, request.num_named))
        return count

    def _continue_decodes(self) -> tuple[list[SimRequest], bool]:
        """The requests that decode, with pages for one more token each, and whether there was room for all
        that run. Where there is none, the request that was admitted last waits again."""
        has_room = True
        while True:
            decodes = [request for request in self.running if request.is_decoding]
            if self._try_grow(decodes, 1):
                return decodes, has_room
            has_room = False
            last = self.running.pop()
            last.is_remote = False
            self._release(last)
            last.num_preemptions += 1
            self.waiting.appendleft(last)

    def _num_decode_steps(self, decodes: list[SimRequest]) -> int:
        """For how many steps nothing changes but that each has a token more, as long as nobody comes."""
        left = min(request.output_length - request.num_generated for request in decodes)
        num_steps = min(MAX_RUN_STEPS, left)
        while num_steps > 1 and not self._try_grow(decodes, num_steps):
            num_steps //= 2
        return num_steps

    def _try_grow(self, decodes: list[SimRequest], num_steps: int) -> bool:
        grown = [self._pages_after(request, num_steps) for request in decodes]
        if not self.cache.try_grow(sum(grown) - sum(request.own_pages for request in decodes)):
            return False
        for request, pages in zip(decodes, grown):
            request.own_pages = pages
        return True

    def _pages_after(self, request: SimRequest, num_steps: int) -> int:
        """A run that was shortened has left pages over; they are not given back."""
        own_tokens = request.num_computed + num_steps - request.num_named * self._block_size
        return max(request.own_pages, _pages(own_tokens))

    def _step_time(self, run: Run) -> StepTime:
        context = sum(request.num_computed + 1 for request in run.decodes)
        own = sum(request.num_computed + 1 - request.num_named * self._block_size for request in run.decodes)
        distinct = min(context, own + self.cache.held_blocks * self._block_size)
        num_tokens = num_pairs = num_first = 0
        for request, count in run.chunks:
            num_tokens += count
            num_pairs += count * request.num_computed + count * (count + 1) // 2
            num_first += request.num_computed + count == request.num_known
        return self._timing.step(
            StepWork(len(run.decodes), context, distinct, len(run.chunks), num_tokens, num_pairs, num_first)
        )

    def _release(self, request: SimRequest) -> None:
        self.cache.release(request.chain[: request.num_named], request.own_pages)
        request.num_named = request.own_pages = request.num_computed = 0
        request.is_decoding = False


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)

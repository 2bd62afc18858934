"""A simulated worker: continuous batching with chunked prefill over a KV cache that shares prefixes.

It has no clock. The simulator calls `begin` when the worker is idle, and `complete` at the end of the run. A
run is one step, or several decode steps without a change, which cost as much to simulate as one. `shorten`
ends a run after its present step, so that a new request can begin.

A block's name stands for its tokens and all tokens before them. A full block is in the cache until it is
evicted, the least recently freed first. Generated tokens have no names, since a trace does not contain which
later prompt repeats them; their pages are freed at the request's end.

Evicted blocks move to host memory, if it has room, and are fetched if that is faster than computing them. A
prompt that another worker has computed is fetched from there. A request that waits for a fetch already holds
its pages, and the other requests continue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.errors import ConfigError
from shoal.fleet.simulator.timing import StepTime, StepTiming, StepWork

PAGE = 16  # tokens per page of the cache, as block_size of `shoal serve`
MAX_RUN_STEPS = 32  # decode steps until the router receives the generated tokens


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request and its progress. Times are in seconds of the simulation."""

    id: str
    arrival_s: float
    num_tokens: int  # prompt length
    output_length: int
    chain: Sequence[int]  # names of the prompt's full blocks
    own_hashes: Sequence[int] = ()  # hashes of these blocks without their prefixes; for events
    session: str | None = None
    cached_tokens: int = -1  # found in the cache at the first admission; -1: not admitted yet
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_generated: int = 0
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    end_s: float = -1.0
    num_preemptions: int = 0
    is_decoding: bool = False  # each step computes one token
    num_named: int = 0  # named blocks of the chain that it holds
    own_pages: int = 0  # pages that it does not share
    host_tokens: int = 0  # part of cached_tokens from host memory
    is_remote: bool = False  # its prompt's keys and values come from a prefill worker
    ready_s: float = 0.0  # end of its fetch
    num_fetched: int = 0  # tokens in the cache after the fetch

    @property
    def num_known(self) -> int:
        """Prompt and generated tokens, which must be computed before the next token."""
        return self.num_tokens + self.num_generated


class SimCache:
    """A KV cache in pages, and the prompt blocks in it."""

    def __init__(self, num_pages: int, block_pages: int) -> None:
        self.num_pages = num_pages
        self.removed: list[int] = []  # evicted blocks that are not reported yet
        self._block_pages = block_pages
        self._held: dict[int, int] = {}  # block -> number of requests that hold it
        self._free: OrderedDict[int, None] = OrderedDict()  # unheld cached blocks, the coldest first
        self.own_pages = 0  # pages of requests in addition to their blocks

    @property
    def used_pages(self) -> int:
        """Pages in use by requests; pages of unheld blocks are free."""
        return self.own_pages + len(self._held) * self._block_pages

    @property
    def cached_pages(self) -> int:
        """Pages of cached blocks."""
        return (len(self._held) + len(self._free)) * self._block_pages

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    def blocks(self) -> set[int]:
        """The cached blocks."""
        return {*self._held, *self._free}

    def match(self, chain: Sequence[int]) -> int:
        """Returns the number of cached blocks from the first, without a gap."""
        for number, block in enumerate(chain):
            if block not in self._held and block not in self._free:
                return number
        return len(chain)

    def try_begin(self, chain: Sequence[int], num_matched: int, own_pages: int) -> bool:
        """Holds the first `num_matched` blocks of the chain and `num_pages` additional pages, or changes
        nothing if the room is too small."""
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
        """Takes `num_pages` pages, or nothing if the room is too small."""
        if self.used_pages + num_pages > self.num_pages:
            return False
        self.own_pages += num_pages
        self._evict()
        return True

    def try_name(self, block: int) -> bool:
        """Turns a request's own pages into a named block. Returns False without a change if the block is
        already cached."""
        if block in self._held or block in self._free:
            return False
        self.own_pages -= self._block_pages
        self._held[block] = 1
        return True

    def release(self, blocks: Sequence[int], own_pages: int) -> None:
        """Releases a request's blocks, the last of its chain first, and its own pages."""
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
    """Links of a worker's cache: tokens in host memory, seconds per token from there, seconds per token from
    a prefill worker, and the latency before its first token."""

    host_tokens: int = 0
    host_token_s: float = 0.0
    peer_token_s: float = 0.0
    peer_latency_s: float = 0.0


class HostTier:
    """Blocks in host memory, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.stored: list[tuple[int, int, int | None]] = []  # block, own hash, parent; not reported yet
        self.removed: list[int] = []
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._facts: dict[int, tuple[int, int | None]] = {}  # own hash and parent of blocks on the device

    def blocks(self) -> set[int]:
        return set(self._blocks)

    def note(self, request: SimRequest, start: int, end: int) -> None:
        """Records blocks of the request's chain as being on the device."""
        chain = request.chain
        for number in range(start, end):
            self._facts[chain[number]] = (request.own_hashes[number], chain[number - 1] if number else None)

    def take(self, blocks: Sequence[int]) -> None:
        """Stores blocks that were evicted from the device."""
        for block in blocks:
            own_hash, parent = self._facts.pop(block)
            if block not in self._blocks:
                self.stored.append((block, own_hash, parent))
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.num_blocks:
            self.removed.append(self._blocks.popitem(last=False)[0])

    def match(self, chain: Sequence[int], start: int, end: int) -> int:
        """Returns the number of stored blocks from this one on, without a gap."""
        number = start
        while number < end and chain[number] in self._blocks:
            self._blocks.move_to_end(chain[number])
            number += 1
        return number - start


@dataclass(slots=True)
class Run:
    """Running steps."""

    start_s: float
    step: StepTime
    num_steps: int
    decodes: list[SimRequest]
    chunks: list[tuple[SimRequest, int]] = field(default_factory=list)  # request, tokens
    stored: list[tuple[SimRequest, int, int]] = field(
        default_factory=list
    )  # first and last block in its chain

    @property
    def end_s(self) -> float:
        return self.start_s + self.step.of_steps(self.num_steps)


@dataclass(slots=True)
class Progress:
    """Results of a run. `decoded`: requests with `num_steps` more tokens; `first`: requests with their first
    token; `gaps`: seconds between tokens, and their number; `stored` and `removed`: blocks that were added to
    the cache (a request and a range of its chain) or evicted."""

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
    """`block_size`: tokens of a named block, a multiple of PAGE."""

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
        self.running: list[SimRequest] = []  # in the order of admission
        self.fetching: list[SimRequest] = []  # requests that wait for a fetch
        self.run: Run | None = None
        self._timing, self._block_size = timing, block_size
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._links = links or Links()
        self._host_free_s = self._peer_free_s = 0.0  # end of the links' last transfer
        host_blocks = self._links.host_tokens // block_size
        self.host = HostTier(host_blocks) if host_blocks else None
        self._untold: list[tuple[SimRequest, int, int]] = []  # fetched blocks that are not reported yet

    @property
    def kv_usage(self) -> float:
        return self.cache.used_pages / self.cache.num_pages

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self.fetching)

    @property
    def fetched_s(self) -> float | None:
        """Returns the end of the next fetch."""
        return min((request.ready_s for request in self.fetching), default=None)

    def add(self, request: SimRequest) -> None:
        """Raises ConfigError for a request that exceeds the whole cache."""
        needed = _pages(request.num_tokens + request.output_length)
        if needed > self.cache.num_pages:
            raise ConfigError(
                f"request {request.id} needs {needed * PAGE} tokens of KV cache, and a worker has "
                f"{self.cache.num_pages * PAGE}; raise cache_tokens, or remove the request"
            )
        self.waiting.append(request)

    def shorten(self, now: float) -> None:
        """Ends the present run after its present step."""
        run = self.run
        assert run is not None
        num_steps = 1
        while num_steps < run.num_steps and run.start_s + run.step.of_steps(num_steps) < now:
            num_steps += 1
        run.num_steps = num_steps

    def begin(self, now: float) -> Run | None:
        """Returns the next run, or None if the worker is idle. Decoding requests come first, then begun
        prompts, then waiting ones, up to the token budget."""
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
        if self.fetching and run.num_steps > 1:  # a fetched request begins with the next step
            self.run = run
            self.shorten(min(request.ready_s for request in self.fetching))
        self.run = run
        return run

    def complete(self) -> Progress:
        """Applies a finished run."""
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
            if request.is_remote:  # its second token waited for the prefill worker
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
            host.take(done.removed)  # before blocks that were fetched back in the same run
            for request, start, end in run.stored:
                host.note(request, start, end)
            done.host_stored, host.stored = host.stored, []
            done.host_removed, host.removed = host.removed, []
        return done

    def _end_fetches(self, now: float) -> list[tuple[SimRequest, int, int]]:
        """Moves fetched requests to the running ones. Returns the newly cached blocks."""
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
        """Gives the request its blocks and pages, if there is room. Its last token is always computed, as its
        logits are needed."""
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
        """Starts the fetch of the request's blocks that follow the cached ones, from host memory or another
        worker. Returns the number of fetched tokens; a link transfers one fetch after the other."""
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
        """Caches the blocks that these further tokens fill. If another request has cached a block already,
        this one keeps its own pages from there on."""
        full = min(len(request.chain), (request.num_computed + num_tokens) // self._block_size)
        while request.num_named < full and self.cache.try_name(request.chain[request.num_named]):
            request.num_named += 1
            request.own_pages -= self._block_size // PAGE

    def _take_chunk(self, request: SimRequest, budget: int, run: Run) -> int:
        """Gives the request as much of the step's budget as it can use, and returns that. Blocks that the
        chunk fills are cached at once: requests that share them compute later, or in the same step after
        them."""
        count = min(budget, request.num_known - request.num_computed)
        run.chunks.append((request, count))
        start = request.num_named
        self._name(request, count)
        if request.num_named > start:
            run.stored.append((request, start, request.num_named))
        return count

    def _continue_decodes(self) -> tuple[list[SimRequest], bool]:
        """Returns the decoding requests, with pages for one more token each, and whether all running requests
        had room. Without room, the request that was admitted last is preempted."""
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
        """Returns the number of steps in which each request only gets one more token, without new
        requests."""
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
        """Keeps the surplus pages of a shortened run."""
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

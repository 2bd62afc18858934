"""Disaggregated prefill over fake workers, on virtual time: whatever dies and whenever, every request ends
once and has the tokens that one worker would have given."""

import asyncio
import functools
import logging
import os
from collections import Counter
from random import Random

import pytest

from shoal.api import FinishReason, Output
from shoal.errors import BusyError, ConfigError, RequestError, UnavailableError, WorkerFailedError
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.config import FleetConfig
from shoal.fleet.file.fleet_file import read_fleet_file
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet.native.disagg import LOOK_AHEAD, PREFILL_WORKERS
from shoal.fleet.native.fake_worker import TOKEN_S, FakeWorker
from shoal.fleet.native.fleet_engine import FleetEngine
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.pool.model_pool import ModelPool
from shoal.fleet.routing.dispatcher import RoutingRequest
from shoal.fleet.routing.remote_prefill import is_remote
from shoal.fleet.worker import Worker, WorkerInfo
from shoal.kv_events import GPU, BlockStored
from shoal.model_card import ModelCard
from shoal.stats import Stats
from shoal.wire import ModelInfo
from tests.cpu.fleet.native.test_fleet_engine import REPLY, WHOLE, answer, request

BASE_SEED = int(os.environ.get("SHOAL_STORM_SEED", "0"))
LONG = range(1, 201)
MAX_LOCAL = 100
TIMEOUT_S = 5.0
BLOCK_BYTES = 1 << 20


def card_of(kv_role, max_model_len=4096):
    info = ModelInfo(
        "m",
        1,
        max_model_len,
        vocab_size=512,
        hidden_size=64,
        eos_token_ids=(),
        generation_config={},
        num_blocks=1024,
        kv_cache_tokens=1024 * 16,
        block_size=16,
        max_num_seqs=4,
        device="cpu",
        dtype="float32",
        kv_role=kv_role,
        kv_block_bytes=BLOCK_BYTES,
    )
    return ModelCard(info=info, names=["m"], model="m", eos_token_ids=())


class Site:
    """Workers p0, p1 ... that prefill and d0, d1 ... that decode."""

    def __init__(self, num_prefill=1, num_decode=1, *, limit=3, max_running=0, **options):
        self.clock = LoopClock()
        options = {
            "policy": "round_robin",
            "max_local_prefill_length": MAX_LOCAL,
            "max_prefill_queue_size": 8,
            "prefill_timeout": TIMEOUT_S,
            "seed": 0,
            **options,
        }
        self.model = ModelPool("m", False, FleetConfig(**options), self.clock)
        self.prefills = self.model.prefills
        self.engine = FleetEngine(
            self.model.dispatcher, self.prefills, self.model.kv_transfers, migration_limit=limit
        )
        self.max_running, self.links, self.counts = max_running, {}, Counter()
        for _ in range(num_prefill):
            self.add("prefill")
        for _ in range(num_decode):
            self.add("decode")

    def add(self, role, has_events=False, kv_role=None, tags=(), **options):
        name = f"{role[0]}{self.counts[role]}"
        self.counts[role] += 1
        if kv_role is None:
            kv_role = {"prefill": "kv_producer", "decode": "kv_both", "both": ""}[role]
        card = card_of(kv_role, **options)
        info = WorkerInfo(
            id=name,
            url="",
            models=("m",),
            role=role,
            tags=frozenset(tags),
            max_running=self.max_running,
            total_blocks=card.info.num_blocks,
            kv_block_bytes=BLOCK_BYTES,
            lends_kv=card.info.lends_kv,
            reads_kv=card.info.reads_kv,
        )
        link = self.links[name] = FakeWorker(info, self.clock, card)
        link.engine.reply = REPLY
        worker = Worker(info, link, self.clock.now)
        worker.has_events = has_events
        worker.stats = Stats(prompt_token_s=0.001)
        worker.reached()
        self.model.add(worker)
        return worker

    def answered(self, name):
        """Returns the requests that a worker has received, without prefetch requests."""
        return [asked for asked in self.links[name].received if not asked.fetches_only]

    def prefetches(self, name):
        return [asked for asked in self.links[name].received if asked.fetches_only]

    def received(self, name):
        return len(self.answered(name))

    async def assert_idle(self):
        for _ in range(4):
            await asyncio.sleep(0)
        links = self.links.values()
        assert all(one.is_idle for one in (*links, *self.model.workers.values()))
        used = {request.kv_ticket for link in links for request in link.received}
        unused = {ticket for link in links if link.is_connected for ticket in link.lent} - used
        assert unused <= {ticket for link in links for ticket in link.returned}, (
            "blocks are held that nobody reads"
        )
        assert self.model.router.active_requests.is_idle and self.engine.is_idle
        assert self.model.dispatcher.is_idle and self.prefills.dispatcher.is_idle


def virtual(test):
    """A test of a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        run_virtual(test(*args, **kwargs))

    return run


@pytest.mark.parametrize(
    "num_tokens, num_cached, num_waiting, max_queue, remote",
    [
        (1000, 0, 0, 2, False),  # at most max_local_prefill_length stay
        (1001, 0, 0, 2, True),
        (3000, 2000, 0, 2, False),  # only what is not cached counts
        (3000, 1999, 0, 2, True),
        (3000, 0, 1, 2, True),
        (3000, 0, 2, 2, False),  # fewer than max_prefill_queue_size wait
        (3000, 0, 0, 0, False),  # 0: never
    ],
)
def test_long_prompts_go_while_few_wait(num_tokens, num_cached, num_waiting, max_queue, remote):
    limits = {"max_local_prefill_length": 1000, "max_prefill_queue_size": max_queue}
    assert is_remote(num_tokens, num_cached, num_waiting, **limits) is remote


@virtual
async def test_the_prefill_worker_gives_the_first_token_and_the_decode_worker_the_others():
    site = Site()
    asked = request(
        prompt=LONG,
        params={"seed": 5, "min_tokens": 7, "logprobs": 2, "prompt_logprobs": 1},
        cache_salt="s",
        eos_token_ids=(2,),
    )
    site.links["p0"].engine.cached_tokens = 32
    outputs = [output async for output in site.engine.generate(asked)]
    [prefill], [prefetch, decode] = site.links["p0"].received, site.links["d0"].received
    assert (prefill.params.max_tokens, prefill.params.min_tokens, prefill.offers_kv) == (1, 1, True)
    assert prefill.params.prompt_logprobs == 1 and prefill.cache_salt == decode.cache_salt == "s"
    assert decode.output_token_ids == [REPLY[0]] and decode.params.prompt_logprobs is None
    assert prefetch.kv_ticket == f"KV of {prefill.request_id}".encode() and prefetch.fetches_only
    assert prefetch.prompt_token_ids == prefill.prompt_token_ids and prefetch.cache_salt == "s"
    assert decode.continues == prefetch.request_id and decode.kv_ticket is None and not decode.offers_kv
    assert (decode.params.max_tokens, decode.params.min_tokens, decode.params.seed) == (20, 7, 5)
    assert [i for o in outputs for i in o.token_ids] == WHOLE[0] and outputs[-1].finish_reason == WHOLE[1]
    assert outputs[0].token_ids == [REPLY[0]] and outputs[0].prompt_logprobs is not None
    assert sum(len(o.logprobs) for o in outputs) == 20
    assert {o.num_cached_tokens for o in outputs} == {32} and {o.request_id for o in outputs} == {"r"}
    assert all(o.kv_ticket is None for o in outputs), "tickets are not for clients"
    [first, second] = [[(one.name, one.worker) for one in o.spans] for o in outputs if o.spans]
    own = [("queue", ""), ("routing", "d0"), ("queue", ""), ("routing", "p0")]
    assert first == [*own, ("queue", "p0"), ("prefill", "p0")] and {worker for _, worker in second} == {"d0"}
    assert (asked.worker, asked.prefill_worker) == ("d0", "p0")
    assert site.model.workers["p0"].num_prefills == site.prefills.num_done == 1
    assert not site.prefills.fall_backs
    await site.assert_idle()


@virtual
async def test_the_first_token_does_not_wait_for_the_decode_worker():
    site = Site()
    site.links["d0"].engine.prefill_seconds = 100.0
    stream = site.engine.generate(request(prompt=LONG))
    await anext(stream)
    assert site.clock.now() < 1
    await stream.aclose()
    await site.assert_idle()


@virtual
async def test_the_decode_worker_does_not_wait_for_who_reads_the_first_token():
    """The second token is behind the first by a step; what the client's stream does meanwhile costs
    nothing."""
    site = Site()
    stream = site.engine.generate(request(prompt=LONG))
    await anext(stream)
    assert site.received("d0") == 1
    await stream.aclose()
    await site.assert_idle()


@virtual
async def test_the_first_token_comes_though_the_decode_worker_has_left():
    site = Site()
    stream = site.engine.generate(request(prompt=LONG))
    first = asyncio.create_task(anext(stream))
    while not site.prefetches("d0"):
        await asyncio.sleep(0.001)
    site.links["d0"].kill()
    assert (await asyncio.wait_for(first, 1)).token_ids == [REPLY[0]] and site.received("d0") == 0
    site.add("decode")
    assert [i async for output in stream for i in output.token_ids] == WHOLE[0][1:]
    await site.assert_idle()


@virtual
async def test_short_prompts_stay():
    site = Site()
    asked = request(prompt=range(MAX_LOCAL))
    assert await answer(site.engine, asked) == WHOLE
    assert site.received("p0") == 0 and asked.prefill_worker == "" and asked.worker == "d0"


@virtual
async def test_a_prefix_that_the_decode_worker_has_stays():
    site = Site(policy="kv")
    await answer(site.engine, request(prompt=LONG))
    assert await answer(site.engine, request("again", prompt=[*LONG, *range(50)])) == WHOLE
    assert site.received("p0") == 1 and site.received("d0") == 2


@virtual
async def test_what_the_decode_worker_will_have_only_soon_is_not_there():
    """Otherwise the second of two equal prompts would be computed where the first one is still being sent."""
    site = Site(0, 0, policy="kv")
    for role in ("prefill", "decode"):
        site.add(role, has_events=True)
    running = [asyncio.create_task(answer(site.engine, request(f"r{i}", prompt=LONG))) for i in range(2)]
    assert await asyncio.gather(*running) == [WHOLE] * 2
    assert site.received("p0") == 2 and not site.prefills.fall_backs
    tokens = list(LONG)
    site.model.router.apply(
        WorkerRank("d0"), BlockStored(range(12), None, tokens[: 12 * 16], 16, None, GPU, None)
    )
    await answer(site.engine, request("r2", prompt=LONG))
    assert site.received("p0") == 2


@virtual
async def test_without_prefill_workers_all_is_local():
    site = Site(0)
    assert await answer(site.engine, request(prompt=LONG)) == WHOLE
    assert not site.prefills.fall_backs


@virtual
async def test_prefill_workers_alone_are_no_fleet():
    site = Site(1, 0)
    with pytest.raises(UnavailableError, match="--role decode"):
        await answer(site.engine, request())
    assert site.received("p0") == 0
    site.add("both")
    assert await answer(site.engine, request()) == WHOLE


@virtual
async def test_who_does_both_computes_its_own_prompts():
    site = Site(1, 0)
    site.add("both")
    assert await answer(site.engine, request(prompt=LONG)) == WHOLE
    assert site.received("p0") == 0


@virtual
async def test_a_prompt_that_leaves_room_for_one_token_stays():
    """The decode worker could not take it up behind the first token."""
    for prompt, remote in ((200, True), (201, False)):
        site = Site(num_decode=0)
        site.add("decode", max_model_len=202)
        await answer(site.engine, request(prompt=range(prompt)))
        assert (site.received("p0") == 1) is remote


@virtual
async def test_one_token_is_given_without_the_decode_worker():
    site = Site()
    assert await answer(site.engine, request(max_tokens=1, prompt=LONG)) == ([REPLY[0]], FinishReason.LENGTH)
    assert site.received("d0") == 0 and not site.links["p0"].received[0].offers_kv
    assert not site.prefills.fall_backs
    await site.assert_idle()


class StopsAtOnce(FakeEngine):
    def _output(self, request, done, end, limit):
        return Output(request.request_id, [2], finish_reason=FinishReason.STOP, kv_ticket=b"unused")


@virtual
async def test_a_first_token_that_ends_the_text_ends_the_request():
    site = Site()
    site.links["p0"].engine = StopsAtOnce(vocab_size=512)
    assert await answer(site.engine, request(prompt=LONG)) == ([2], FinishReason.STOP)
    assert site.received("d0") == 0
    await site.assert_idle()


def gone(site):
    site.links["p0"].kill()


def dies(site):
    site.links["p0"].error_at[0] = WorkerFailedError("died")


def hangs(site):
    site.links["p0"].engine.prefill_seconds = 1e6


def is_full(site):
    site.links["p0"].error_at[0] = BusyError("full")


def sleeps(site):
    site.links["p0"].error_at[0] = UnavailableError("asleep")


def refuses(site):
    site.links["p0"].error_at[0] = RequestError("its cache is too small")


def ends_with_an_error(site):
    site.links["p0"].engine.error_after = 1


def aborts(site):
    site.links["p0"].aborted = {"r.prefill1"}


@pytest.mark.parametrize(
    "trouble, reason",
    [
        (gone, "failed"),
        (dies, "failed"),
        (hangs, "late"),
        (is_full, "refused"),
        (sleeps, "refused"),
        (refuses, "refused"),
        (ends_with_an_error, "failed"),
        (aborts, "aborted"),
    ],
)
@virtual
async def test_the_decode_worker_computes_what_the_prefill_worker_does_not(caplog, trouble, reason):
    caplog.set_level(logging.INFO, "shoal.fleet.native.disagg")
    site = Site()
    trouble(site)
    asked = request(prompt=LONG)
    begun = site.clock.now()
    assert await answer(site.engine, asked) == WHOLE
    assert site.clock.now() - begun < TIMEOUT_S + 30 * TOKEN_S
    assert site.prefills.fall_backs == {reason: 1} and site.prefills.num_done == 0
    assert [(r.msg.fields["request_id"], r.msg.fields["kind"]) for r in caplog.records] == [("r", reason)]
    assert (asked.worker, asked.prefill_worker) == ("d0", "")
    [decode] = site.answered("d0")
    assert decode.kv_ticket is None and decode.continues is None and decode.output_token_ids == []
    assert (site.engine.num_migrations, site.engine.num_retries) == (0, 0)
    await site.assert_idle()


@pytest.mark.parametrize("refused", [{"r.2"}, {"r.kv1", "r.2"}], ids=sorted)
@virtual
async def test_a_decode_worker_that_refuses_the_request_leaves_no_blocks_held(refused):
    """The ticket is there by then, and nobody has opened it, or the prefetch alone has."""
    site = Site()
    site.links["d0"].errors = dict.fromkeys(refused, RequestError("it is too long here"))
    with pytest.raises(RequestError, match="too long"):
        await answer(site.engine, request(prompt=LONG))
    assert site.links["p0"].returned == [b"KV of r.prefill1"]
    await site.assert_idle()


@virtual
async def test_the_books_say_who_computes_the_prompt():
    site = Site()
    for link in site.links.values():
        link.engine.prefill_seconds = 1.0

    def loads():
        found = {name: site.model.router.active_requests.load(WorkerRank(name)) for name in ("p0", "d0")}
        return {name: (load.prefill_tokens, load.recent_tokens > 150) for name, load in found.items()}

    running = asyncio.create_task(answer(site.engine, request(prompt=LONG)))
    await site.clock.sleep(TOKEN_S / 2)
    assert loads() == {"p0": (200, True), "d0": (0, False)}
    site.links["p0"].errors["r.prefill1"] = WorkerFailedError("died")
    while not site.received("d0"):
        await site.clock.sleep(TOKEN_S)
    prefill, decode = loads().values()
    assert prefill[0] == 0 and decode == (200, True), "it computes the prompt after all"
    await running
    assert loads()["d0"][0] == 0
    await site.assert_idle()


class WithoutTickets(FakeEngine):
    async def generate(self, request):
        async for output in super().generate(request):
            if output.kv_ticket is None:
                yield output


@virtual
async def test_a_first_token_without_a_ticket_is_of_use_too():
    site = Site()
    site.links["p0"].engine = WithoutTickets(vocab_size=512, reply=REPLY)
    assert await answer(site.engine, request(prompt=LONG)) == WHOLE
    assert site.prefills.fall_backs == {"no_ticket": 1} and site.received("d0") == 1


@virtual
async def test_a_prompt_goes_to_another_prefill_worker_when_one_dies():
    site = Site(PREFILL_WORKERS + 2)
    site.links["p0"].error_at[0] = WorkerFailedError("died")
    asked = request(prompt=LONG)
    assert await answer(site.engine, asked) == WHOLE
    assert asked.prefill_worker in ("p1", "p2", "p3") and not site.prefills.fall_backs
    for number in range(PREFILL_WORKERS + 2):
        site.links[f"p{number}"].error_at[0] = WorkerFailedError("died")
        site.links[f"p{number}"].received.clear()
    assert await answer(site.engine, request(prompt=LONG)) == WHOLE
    tried = [site.received(f"p{number}") for number in range(PREFILL_WORKERS + 2)]
    assert sum(tried) == PREFILL_WORKERS and max(tried) == 1, "it may be the prompt that kills them"
    await site.assert_idle()


@pytest.mark.parametrize("position", range(1, 20))
@virtual
async def test_a_decode_worker_that_dies_at_any_token_changes_none(position):
    site = Site(1, 2)
    site.links["d0"].error_at[position] = WorkerFailedError("died")
    assert await answer(site.engine, request(prompt=LONG)) == WHOLE
    [second] = site.answered("d1")
    assert site.received("p0") == 1 and second.output_token_ids == list(REPLY[:position])
    assert second.kv_ticket is None, "the ticket ended with its reader"
    assert site.engine.num_migrations == 1
    await site.assert_idle()


@pytest.mark.parametrize("way", ["kill", "break", "remove"])
@virtual
async def test_a_decode_worker_that_is_lost_during_the_prefill_is_replaced(way):
    site = Site(1, 2)
    running = asyncio.create_task(answer(site.engine, request(prompt=LONG)))
    await site.clock.sleep(TOKEN_S / 2)
    assert site.links["p0"].running == 1
    worker = site.model.workers["d0"]
    if way == "kill":
        site.links["d0"].kill()
    elif way == "break":
        worker.hung(WorkerFailedError("it hangs"))
    else:
        site.links["d0"].kill()
        site.model.remove("d0")
        worker.interrupt()
    assert await running == WHOLE
    assert site.received("d0") == 0
    assert site.answered("d1")[0].kv_ticket is None, (
        "its reader was lost, and no index names another's blocks"
    )
    assert site.engine.num_migrations == 0
    await site.assert_idle()


@pytest.mark.parametrize("tokens", [0.0, 0.5, 1.5, 5.5])
@virtual
async def test_an_abort_reaches_the_worker_that_has_it(tokens):
    site = Site()
    running = asyncio.create_task(answer(site.engine, request(prompt=LONG)))
    await site.clock.sleep(tokens * TOKEN_S)
    await site.engine.abort("r")
    ids, finish = await running
    assert finish == FinishReason.ABORT and ids == list(REPLY[: len(ids)]) and len(ids) <= tokens + 1
    await site.assert_idle()


@pytest.mark.parametrize("tokens", [0.0, 0.5, 1.5, 5.5])
@virtual
async def test_a_client_that_leaves_leaves_both_workers(tokens):
    site = Site()
    running = asyncio.create_task(answer(site.engine, request(prompt=LONG)))
    await site.clock.sleep(tokens * TOKEN_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await site.assert_idle()


@pytest.mark.parametrize("how", ["the client leaves", "it takes too long", "the worker is abandoned"])
@virtual
async def test_no_blocks_of_an_abandoned_prompt_are_held(how):
    """Regression: each block was held for the 30 s of a lease, so some clients that left stopped all
    prefills."""
    site = Site()
    site.links["p0"].engine.prefill_seconds = 1.0 if how == "the client leaves" else 2 * TIMEOUT_S
    running = asyncio.create_task(answer(site.engine, request(prompt=LONG)))
    await site.clock.sleep(0.5)
    if how == "the client leaves":
        running.cancel()
    elif how == "the worker is abandoned":
        site.model.workers["p0"].hung(WorkerFailedError("silent"))
    await asyncio.gather(running, return_exceptions=True)
    assert site.links["p0"].returned == [b"KV of r.prefill1"]
    await site.assert_idle()


@virtual
async def test_no_more_wait_for_prefill_workers_than_may():
    site = Site(max_prefill_queue_size=2)
    site.prefills.dispatcher.busy_prefill_tokens = len(LONG) - 1  # one at a time
    running = [asyncio.create_task(answer(site.engine, request(f"r{i}", prompt=LONG))) for i in range(6)]
    await site.clock.sleep(TOKEN_S / 2)
    assert site.links["p0"].running == 1 and site.prefills.dispatcher.queue.length == 2
    assert site.received("d0") == 3, "the others are computed where they are decoded"
    assert await asyncio.gather(*running) == [WHOLE] * 6
    assert site.received("p0") == 3 and not site.prefills.fall_backs
    await site.assert_idle()


@virtual
async def test_a_free_prefill_worker_takes_what_its_cache_suits_best():
    site = Site(0, 1, policy="kv")
    worker = site.add("prefill", has_events=True)
    site.prefills.dispatcher.busy_prefill_tokens = len(LONG) - 1  # one at a time
    prompts = [[number, *LONG] for number in range(300, 304)]
    for number, num_blocks in ((2, 4), (3, 8)):
        tokens = list(prompts[number])[: num_blocks * 16]
        hashes = range(100 * number, 100 * number + num_blocks)
        site.model.router.apply(WorkerRank(worker.id), BlockStored(hashes, None, tokens, 16, None, GPU, None))
    running = []
    for number, prompt in enumerate(prompts):
        running.append(asyncio.create_task(answer(site.engine, request(f"r{number}", prompt=prompt))))
        await asyncio.sleep(0)
    urgent = request("urgent", prompt=[400, *LONG], priority=-1)
    running.append(asyncio.create_task(answer(site.engine, urgent)))
    assert await asyncio.gather(*running) == [WHOLE] * 5
    order = [one.request_id.partition(".")[0] for one in site.links[worker.id].received]
    assert order == ["r0", "urgent", "r3", "r2", "r1"]
    await site.assert_idle()


@virtual
async def test_the_oldest_prompt_is_passed_so_often_and_not_for_ever():
    site = Site(0, 0, policy="kv", max_prefill_queue_size=1000, prefill_timeout=1e6)
    worker, _ = site.add("prefill", has_events=True), site.add("decode", has_events=True)
    site.prefills.dispatcher.busy_prefill_tokens = len(LONG) - 1  # one at a time
    known = [400, *LONG]
    stored = BlockStored(range(1000, 1004), None, known[: 4 * 16], 16, None, GPU, None)
    site.model.router.apply(WorkerRank(worker.id), stored)
    running = [asyncio.create_task(answer(site.engine, request("r", prompt=[402, *LONG])))]
    await asyncio.sleep(0)
    running.append(asyncio.create_task(answer(site.engine, request("oldest", prompt=[401, *LONG]))))
    for number in range(3 * LOOK_AHEAD):
        running.append(asyncio.create_task(answer(site.engine, request(f"r{number}", prompt=known))))
        await asyncio.sleep(0)
    assert await asyncio.gather(*running) == [WHOLE] * len(running)
    order = [one.request_id.partition(".")[0] for one in site.links[worker.id].received]
    assert order.index("oldest") == 1 + LOOK_AHEAD
    await site.assert_idle()


@virtual
async def test_a_prompt_stays_if_no_prefill_worker_has_its_tags():
    site = Site()
    site.add("decode", tags={"big"})
    assert await answer(site.engine, request("r0", prompt=LONG, tags=("big",))) == WHOLE
    assert site.received("d1") == 1 and site.received("p0") == 0 and not site.prefills.fall_backs
    site.add("prefill", tags={"big"})
    assert await answer(site.engine, request("r1", prompt=LONG, tags=("big",))) == WHOLE
    assert site.received("p1") == 1 and not site.prefills.fall_backs
    await site.assert_idle()


@virtual
async def test_what_waits_too_long_for_a_prefill_worker_stays():
    site = Site()
    site.prefills.dispatcher.busy_prefill_tokens = len(LONG) - 1
    site.links["p0"].engine.prefill_seconds = 1e6
    running = [asyncio.create_task(answer(site.engine, request(f"r{i}", prompt=LONG))) for i in range(3)]
    assert await asyncio.gather(*running) == [WHOLE] * 3
    assert site.prefills.fall_backs == {"late": 3} and site.received("p0") < 3
    await site.assert_idle()


@virtual
async def test_decode_workers_take_turns_whoever_prefills():
    site = Site(1, 2)
    for number in range(4):
        await answer(site.engine, request(f"r{number}", prompt=LONG))
    assert [site.received(name) for name in ("p0", "d0", "d1")] == [4, 2, 2]


@virtual
async def test_thresholds_change_while_it_runs():
    fleet = Fleet(FleetConfig(max_local_prefill_length=MAX_LOCAL), LoopClock())
    worker = Worker(WorkerInfo(id="p", url="", models=("m",), role="prefill"), None, fleet.clock.now)
    fleet._add_to_models(worker)
    prefills = fleet.models["m"].prefills
    assert "p" in prefills.dispatcher.workers and not fleet.models["m"].dispatcher.workers
    assert fleet.view().prefill_queue.length == 0
    settings = await fleet.configure({"max_local_prefill_length": 7})
    assert settings["max_local_prefill_length"] == prefills.max_local_prefill_length == 7
    assert settings["max_prefill_queue_size"] == prefills.dispatcher.max_queued == 2
    await fleet.configure({"max_prefill_queue_size": 0})
    assert prefills.dispatcher.max_queued == 0 and prefills.max_local_prefill_length == 7
    for wrong in ({"max_local_prefill_length": -1}, {"max_prefill_queue_size": "many"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            await fleet.configure(wrong)
    fleet._remove_from_models(worker)
    assert not fleet.models["m"].workers


@virtual
async def test_what_waits_for_prefill_workers_is_told():
    fleet = Fleet(FleetConfig(), LoopClock())
    worker = Worker(WorkerInfo(id="p", url="", models=("m",), role="prefill"), None, fleet.clock.now)
    fleet._add_to_models(worker)
    worker.reached()
    dispatcher = fleet.models["m"].prefills.dispatcher
    async with dispatcher.assign(RoutingRequest("a", list(range(9000)))):
        waiting = asyncio.create_task(dispatcher.assign(RoutingRequest("b", LONG)).__aenter__())
        await fleet.clock.sleep(3)
        queue, seen = fleet.view().prefill_queue, fleet.observe("m", "decode")
        told = {sample.name: sample.value for family in fleet.metrics() for sample in family.samples}
        assert told["shoal:router_prefill_queue"] == 1
        assert told["shoal:router_prefill_queue_oldest_seconds"] == 3
        assert (queue.length, queue.oldest_s) == (1, 3) and fleet.view().queue.length == 0
        assert (seen.prefill_workers, seen.prefill_queue, seen.decode, seen.queued) == (1, 1, [], 0)
        waiting.cancel()


@pytest.mark.parametrize(
    "roles, plane, fits",
    [
        (["prefill"], "", False),
        (["prefill", "prefill"], "", False),
        (["decode"], "", True),
        (["prefill", "decode"], "", True),
        (["prefill", "both"], "", False),  # a worker that does both reads nothing of others
        (["prefill", "both", "decode"], "", True),
        (["both"], "", True),
        (["prefill"], '[plane]\nurl = "nats://10.0.0.1:4222"', True),  # its partners are on another host
        (["prefill"], '[plane]\nurl = "tcp://127.0.0.1:5600"', False),
    ],
)
def test_a_file_with_prefill_and_no_decode_workers_is_refused_with_the_way_out(roles, plane, fits, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text("".join(f'[[workers]]\nrole = "{role}"\n' for role in roles) + plane)
    if fits:
        assert [group.role for group in read_fleet_file(path).workers] == roles
    else:
        with pytest.raises(ConfigError, match='role = "decode"'):
            read_fleet_file(path)


@pytest.mark.parametrize("seed", range(BASE_SEED, BASE_SEED + 30))
@virtual
async def test_in_a_storm_every_request_ends_once_with_the_right_tokens(seed):
    """Workers of both roles die, come, drain, hang, refuse and forget; clients leave. SHOAL_STORM_SEED
    chooses other storms."""
    print(f"SHOAL_STORM_SEED={seed}")
    random = Random(seed)
    outcome = Counter()
    site = Site(
        3, 3, limit=20, max_running=random.choice([0, 4]), policy=random.choice(["round_robin", "kv"])
    )
    if random.random() < 0.5:
        site.prefills.dispatcher.busy_prefill_tokens = 300

    async def client(i):
        await site.clock.sleep(random.uniform(0, 20))
        length = random.randint(1, 60)
        asked = request(f"r{i}", length, [random.randrange(512) for _ in range(random.randint(1, 400))])
        leaves_after = random.randint(0, length) if random.random() < 0.2 else None
        patience = random.uniform(0, 3) if random.random() < 0.2 else None
        ids, finish = [], None
        stream = site.engine.generate(asked)
        try:
            async with asyncio.timeout(patience):
                async for output in stream:
                    assert finish is None and output.kv_ticket is None
                    ids, finish = ids + output.token_ids, output.finish_reason
                    if leaves_after is not None and len(ids) >= leaves_after:
                        break
        except UnavailableError:
            outcome["failed"] += 1
        except TimeoutError:
            outcome["left"] += 1
        else:
            if finish is None:
                assert leaves_after is not None
                outcome["left"] += 1
            else:
                assert finish == FinishReason.LENGTH and len(ids) == length
                outcome["whole"] += 1
        finally:
            await stream.aclose()
        assert ids == list(REPLY[: len(ids)])

    async def trouble():
        for _ in range(60):
            await site.clock.sleep(random.uniform(0, 0.7))
            kind = random.choice(["kill", "drain", "hang", "abort", "fault", "slow"])
            worker = random.choice(list(site.model.workers.values()))
            link = worker.link
            if kind == "kill":
                link.kill()
                site.add(worker.info.role)
                await site.clock.sleep(random.uniform(0, 3))
                site.model.remove(worker.id)
                worker.interrupt()
            elif kind == "drain":
                worker.is_draining = not worker.is_draining
                worker.changed()
            elif kind == "hang":
                worker.hung(WorkerFailedError("it hangs"))
                await site.clock.sleep(random.uniform(0, 1))
                worker.reached()
            elif kind == "abort":
                for one in link.received[-3:]:
                    link.send_abort(one.request_id)
            elif kind == "slow":
                link.engine.prefill_seconds = random.choice([0.0, 1.0, 2 * TIMEOUT_S])
            else:
                kinds = [WorkerFailedError("x"), BusyError("y"), UnavailableError("z")]
                link.error_at = {random.choice([0, random.randint(1, 60)]): random.choice(kinds)}
        for link in site.links.values():  # a worker that is busy for ever would be asked for ever
            link.error_at = {}

    await asyncio.gather(trouble(), *[client(i) for i in range(60)])
    assert sum(outcome.values()) == 60 and outcome["whole"] > 15, outcome
    assert site.prefills.num_done > 5
    await site.assert_idle()

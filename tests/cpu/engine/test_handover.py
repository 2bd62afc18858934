"""Prefill and decode apart, in one process: one engine computes a prompt and lends its KV blocks, another one
reads them and continues. The outputs equal a single engine's, whatever happens to the ticket."""

import errno
import logging
import os
import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from shoal.api import FinishReason, Request
from shoal.apps.serve import plan
from shoal.config import EngineConfig, ServerConfig
from shoal.engine.core import EngineCore
from shoal.engine.peers import reader as reader_module
from shoal.engine.runner import rank_peers
from shoal.engine.runner.rank_peers import RankPeers
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.errors import ConfigError
from shoal.hashing import KEY_SIZE
from shoal.kv.transfer import fetch
from shoal.kv.transfer import registry as transport_registry
from shoal.kv.transfer.fetch import BlockReader
from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.ticket import Failure, TransferError, seal, unseal
from shoal.kv.transfer.transport import TransportError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.telemetry.metrics import ModelMetrics, exposition
from shoal.weights.source import resolve
from tests import tiny

PROMPT = random.Random(1).choices(range(256), k=70)
BLOCKS = 5  # four full ones, and one for the tail
COUNT = 10
DEADLINE_S = 60


def core_of(folder, role=None, lease_s=30.0, **options):
    transfer = None if role is None else {"kv_role": role, "lease_s": lease_s}
    defaults = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "kv_cache_memory_bytes": 4 << 20}
    config = EngineConfig(model=str(folder), kv_transfer_config=transfer, **defaults | options)
    return EngineCore(config, resolve(config.model, None, None))


@pytest.fixture(scope="module")
def cores(folder):
    made = SimpleNamespace(
        lender=core_of(folder, "kv_producer"), reader=core_of(folder, "kv_consumer"), one=core_of(folder)
    )
    yield made
    for core in vars(made).values():
        core.exit()


@pytest.fixture
def trio(cores):
    """The three engines, with nothing in their caches. Afterwards nobody holds anything."""
    for core in vars(cores).values():
        assert core.reset_prefix_cache()
    cores.reader.peers.reader.failures.clear()
    cores.reader.peers.reader.transfers.clear()
    yield cores
    all_is_given_back(cores.lender, cores.reader, cores.one)


@pytest.fixture
def build(folder):
    made = []

    def make(*args, folder=folder, **options):
        made.append(core_of(folder, *args, **options))
        return made[-1]

    yield make
    for core in made:
        core.exit()


def all_is_given_back(*cores):
    """Waits until no core has work and all blocks are free, and checks its state."""
    until = time.monotonic() + DEADLINE_S
    while True:
        is_busy = [core.tick() for core in cores]
        stats = [core.stats() for core in cores]
        if not any(is_busy) and all(s.num_free_blocks == s.num_blocks for s in stats):
            break
        assert time.monotonic() < until, f"blocks are held: {stats}"
        time.sleep(0.002)
    for core in cores:
        core.check()
        assert not core.has_work


def request(name, prompt=PROMPT, output_token_ids=(), **options):
    fields = {
        key: options.pop(key)
        for key in ("offers_kv", "kv_ticket", "fetches_only", "eos_token_ids")
        if key in options
    }
    params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options
    return Request(name, prompt, SamplingParams(**params), output_token_ids=list(output_token_ids), **fields)


class Answer:
    def __init__(self):
        self.tokens, self.logprobs, self.ticket, self.reason, self.cached = [], [], None, None, 0
        self.spans = []

    def take(self, output):
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.spans += output.spans or []
        if output.kv_ticket is not None:
            assert self.ticket is None and not self.tokens, "a ticket comes once, before the first token"
            self.ticket = output.kv_ticket
        self.reason, self.cached = output.finish_reason, output.num_cached_tokens


def run(core, *requests):
    """Steps until all is done. Returns the answers of the requests."""
    answers = {}
    for one in requests:
        core.add(one)
    until = time.monotonic() + DEADLINE_S
    while core.has_work:
        for output in core.step():
            answers.setdefault(output.request_id, Answer()).take(output)
        assert time.monotonic() < until, "the work does not end"
    return [answers[one.request_id] for one in requests]


def prefill(lender, prompt=PROMPT, **options):
    [answer] = run(lender, request("prefill", prompt, offers_kv=True, **options | {"max_tokens": 1}))
    return answer


def decode(reader, first, prompt=PROMPT, **options):
    [answer] = run(reader, request("decode", prompt, first.tokens, **{"kv_ticket": first.ticket} | options))
    return answer


def failures(core):
    return core.stats().kv_transfer_failures


def blocks_in(core):
    return sum(stats.blocks for stats in core.stats().kv_transfers.values())


def test_workers_whose_requests_wait_for_each_others_blocks_go_on(build, monkeypatch):
    """Regression: each renewed its lease of the other's blocks for ever, and no request had room."""
    monkeypatch.setattr(reader_module, "STUCK_S", 0.3)
    pair = [build("kv_both", num_gpu_blocks_override=BLOCKS, max_model_len=80) for _ in range(2)]
    prompts = [PROMPT, PROMPT[::-1]]
    firsts = [prefill(core, prompt) for core, prompt in zip(pair, prompts)]
    for i, core in enumerate(pair):
        fields = {"output_token_ids": firsts[1 - i].tokens, "kv_ticket": firsts[1 - i].ticket}
        core.add(request("decode", prompts[1 - i], **fields))
    tokens, until = [[*first.tokens] for first in firsts[::-1]], time.monotonic() + DEADLINE_S / 4
    while any(core.has_work for core in pair):
        assert time.monotonic() < until, [core.stats() for core in pair]
        for core, found in zip(pair, tokens):
            found += [token for output in core.step() for token in output.token_ids]
    [plain] = [build()]
    assert tokens == [run(plain, request("a", prompt))[0].tokens for prompt in prompts[::-1]]
    all_is_given_back(*pair)


# What comes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.95},
        {"temperature": 1.2, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.7},
        {"frequency_penalty": 1.5, "max_tokens": 20},
        {"logprobs": 3},
        {"min_tokens": 8, "ignore_eos": False, "eos_token_ids": tuple(range(0, 256, 2))},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3}[0-9]{5}")},
        {"skip_reading_prefix_cache": True},
        {"prompt_logprobs": 1},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_two_engines_give_what_one_gives(trio, options):
    [expected] = run(trio.one, request("one", **options))
    first = prefill(trio.lender, **options | ({"min_tokens": 1} if "min_tokens" in options else {}))
    assert trio.lender.stats().kv_loans.held_blocks == len(unseal(first.ticket).blocks) == BLOCKS
    rest = decode(trio.reader, first, **options)
    assert first.tokens + rest.tokens == expected.tokens and rest.reason == expected.reason
    for here, there in zip(first.logprobs + rest.logprobs, expected.logprobs, strict=True):
        assert here.keys() == there.keys()
        assert all(here[i].logprob == pytest.approx(there[i].logprob, abs=1e-4) for i in here)
    reads = not options.keys() & {"skip_reading_prefix_cache", "prompt_logprobs"}
    assert blocks_in(trio.reader) == BLOCKS * reads and rest.cached == len(PROMPT) * reads
    assert not failures(trio.reader)


def test_a_ticket_without_the_first_token_serves_as_well(trio):
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    first.tokens = []
    assert decode(trio.reader, first).tokens == expected.tokens and blocks_in(trio.reader) == 4


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 64])
def test_prompts_around_the_ends_of_blocks(trio, num_tokens):
    prompt = PROMPT[:num_tokens]
    [expected] = run(trio.one, request("one", prompt))
    first = prefill(trio.lender, prompt)
    rest = decode(trio.reader, first, prompt)
    assert first.tokens + rest.tokens == expected.tokens and rest.cached == num_tokens
    assert blocks_in(trio.reader) == -(-num_tokens // 16) and not failures(trio.reader)


def test_only_the_blocks_that_are_missing_travel(trio):
    [expected] = run(trio.one, request("one"))
    run(trio.reader, request("before", PROMPT[:40]))
    first = prefill(trio.lender)
    rest = decode(trio.reader, first)
    assert first.tokens + rest.tokens == expected.tokens
    assert blocks_in(trio.reader) == 3 and rest.cached == len(PROMPT)
    # and if none is missing, the owner hears at once that nobody needs the blocks
    first = prefill(trio.lender, PROMPT[:64])
    decode(trio.reader, first, PROMPT[:64])
    assert blocks_in(trio.reader) == 3
    all_is_given_back(trio.lender, trio.reader)


def test_prefix_hits_of_the_owner_are_offered_as_well(trio):
    first = prefill(trio.lender)
    again = prefill(trio.lender)
    assert again.cached == 64 and len(unseal(again.ticket).blocks) == BLOCKS
    assert trio.lender.stats().kv_loans.held_blocks == 2 * BLOCKS
    decode(trio.reader, first)
    decode(trio.reader, again)
    assert blocks_in(trio.reader) == BLOCKS + 1, "a tail is nobody else's"


def test_a_prompt_in_pieces_is_offered_whole(build, trio):
    lender = build("kv_producer", max_num_batched_tokens=16, async_scheduling=True)
    [expected] = run(trio.one, request("one"))
    first = prefill(lender)
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert blocks_in(trio.reader) == BLOCKS


def test_an_engine_may_lend_and_read(build, trio):
    both, expected = build("kv_both"), run(trio.one, request("one"))[0]
    assert both.peers.lender.offers.model == trio.lender.peers.lender.offers.model
    first = prefill(trio.lender)
    assert first.tokens + decode(both, first).tokens == expected.tokens and blocks_in(both) == BLOCKS
    again = prefill(both)
    assert again.tokens + decode(trio.reader, again).tokens == expected.tokens
    assert blocks_in(trio.reader) == BLOCKS


def test_figures_say_what_went_where(trio):
    before = trio.lender.stats().kv_loans
    decode(trio.reader, prefill(trio.lender))
    all_is_given_back(trio.lender, trio.reader)
    loans, [(name, read)] = trio.lender.stats().kv_loans, trio.reader.stats().kv_transfers.items()
    assert (name, read.blocks) == ("in_process", BLOCKS) and read.seconds > 0
    assert loans.blocks_out - before.blocks_out == BLOCKS
    assert loans.bytes_out - before.bytes_out == read.num_bytes
    assert read.num_bytes == BLOCKS * trio.reader.ranks.runner.cache.plan.specs[0].block_bytes
    assert loans.ended["done"] == before.ended.get("done", 0) + 1
    assert trio.one.stats().kv_loans is None and trio.reader.stats().kv_loans is None


def test_metrics_tell_what_went_where(trio):
    decode(trio.reader, prefill(trio.lender))
    trio.reader.reset_prefix_cache()
    decode(trio.reader, prefill(trio.lender), kv_ticket=b"no ticket")
    trio.lender.peers.withdraw_all("the test ends")

    def lines(core):
        families = ModelMetrics("tiny", 128, {}).collect(core.stats(), None, 0)
        return [line for line in exposition(families).decode().splitlines() if line.startswith("shoal:kv_")]

    told = " ".join(lines(trio.reader))
    assert 'shoal:kv_transfer_blocks_total{engine="0",model_name="tiny",transport="in_process"} 5.0' in told
    assert 'shoal:kv_transfer_failures_total{engine="0",kind="damaged",model_name="tiny"} 1.0' in told
    told = " ".join(lines(trio.lender))
    assert 'shoal:kv_loan_offers{engine="0",model_name="tiny"} 0.0' in told
    assert 'how="done"' in told and 'how="ended"' in told and "kv_transfer" not in told
    assert not lines(trio.one)


# Tickets that are of no use


def cut(ticket):
    return ticket[:-3]


def flipped(ticket):
    return ticket[:-1] + bytes([ticket[-1] ^ 1])


def forged(ticket):
    """A well-formed ticket with other blocks than the owner's."""
    known = unseal(ticket)
    blocks = tuple((block + 1) % known.specs[0].num_blocks for block in known.blocks)
    return seal(msgspec.structs.replace(known, blocks=blocks))


def of_nobody(ticket):
    return seal(msgspec.structs.replace(unseal(ticket), id=bytes(16)))


def of_a_closed_port(ticket):
    return seal(msgspec.structs.replace(unseal(ticket), server="127.0.0.1:1"))


@pytest.mark.parametrize(
    "spoil, kind",
    [
        (lambda ticket: b"", "damaged"),
        (lambda ticket: b"no ticket", "damaged"),
        (cut, "damaged"),
        (flipped, "damaged"),
        (forged, "forged"),
        (of_nobody, "unknown"),
        (of_a_closed_port, "unreachable"),
    ],
)
def test_a_ticket_that_is_not_the_owners_means_computing(trio, caplog, spoil, kind):
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            trio.reader.reset_prefix_cache()
            rest = decode(trio.reader, first, kv_ticket=spoil(first.ticket))
            assert first.tokens + rest.tokens == expected.tokens and rest.cached == 0
    assert failures(trio.reader) == {kind: 2} and blocks_in(trio.reader) == 0
    [told] = [record for record in caplog.records if record.name == "shoal.engine.peers.reader"]
    assert told.msg.fields == {"request_id": "decode", "failure": kind}, "each kind is logged once"
    trio.lender.peers.withdraw_all("the test ends")


def test_blocks_that_hold_something_else_by_now_are_computed(trio):
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    trio.lender.scheduler.blocks.pool.reset()  # without notifying the offers
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert failures(trio.reader) == {"stale": 1} and blocks_in(trio.reader) == 0
    trio.lender.peers.withdraw_all("the test ends")


def test_blocks_that_the_owner_took_back_are_computed(trio):
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    trio.lender.reset_prefix_cache()
    assert trio.lender.stats().kv_loans.offers == 0
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert failures(trio.reader) == {"ended": 1}


def test_the_ticket_of_another_prompt_is_not_used(trio):
    other = PROMPT[:16] + PROMPT[:54]
    [expected] = run(trio.one, request("one", other))
    first, wrong = prefill(trio.lender, other), prefill(trio.lender)
    first.ticket = wrong.ticket
    assert first.tokens + decode(trio.reader, first, other).tokens == expected.tokens
    assert blocks_in(trio.reader) == 1, "the block that both prompts begin with"
    trio.lender.peers.withdraw_all("the test ends")


def test_the_tail_of_another_prompt_is_not_used(trio):
    """Only its last token differs, or its salt."""
    other = PROMPT[:69] + [PROMPT[69] ^ 1]
    [expected] = run(trio.one, request("one", other))
    first, wrong = prefill(trio.lender, other), prefill(trio.lender)
    first.ticket = wrong.ticket
    assert first.tokens + decode(trio.reader, first, other).tokens == expected.tokens
    assert blocks_in(trio.reader) == 4, "the full blocks, which are the same"
    salted = request("salted", PROMPT, kv_ticket=prefill(trio.lender).ticket)
    salted.cache_salt = "of somebody else"
    [answer] = run(trio.reader, salted)
    assert answer.tokens == run(trio.one, request("two"))[0].tokens and blocks_in(trio.reader) == 4
    trio.lender.peers.withdraw_all("the test ends")


def test_keys_that_claim_the_blocks_of_another_prompt_are_forged(trio):
    first, other = prefill(trio.lender), prefill(trio.lender, PROMPT[::-1])
    keys = unseal(first.ticket).keys
    assert len(keys) == BLOCKS and all(len(key) == KEY_SIZE for key in keys)
    first.ticket = seal(msgspec.structs.replace(unseal(other.ticket), keys=keys))
    [expected] = run(trio.one, request("one"))
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert failures(trio.reader) == {"forged": 1}
    trio.lender.peers.withdraw_all("the test ends")


def test_blocks_of_other_weights_are_computed(build, trio, folder, tmp_path):
    """The same shapes, other weights: they were updated on one side, from a checkpoint or from tensors."""
    changed = tiny.write_changed(folder, tmp_path / "changed")
    lender, expected = build("kv_producer"), run(trio.one, request("one"))[0]
    first = prefill(lender)
    lender.update_weights(str(changed))
    assert lender.stats().kv_loans.offers == 0
    first.ticket = prefill(lender).ticket
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert failures(trio.reader) == {"incompatible": 1} and blocks_in(trio.reader) == 0
    lender.update_weights(str(folder))
    trio.reader.reset_prefix_cache()
    first = prefill(lender)
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert blocks_in(trio.reader) == BLOCKS, "the weights are equal again"


@pytest.mark.parametrize("options", [{"block_size": 32}, {"dtype": "bfloat16"}])
def test_blocks_of_another_layout_are_computed(build, trio, options):
    lender = build("kv_producer", **options)
    first = prefill(lender)
    [expected] = run(trio.one, request("one", PROMPT, first.tokens))
    assert decode(trio.reader, first).tokens == expected.tokens
    assert blocks_in(trio.reader) == 0
    if "dtype" in options:
        assert failures(trio.reader) == {"incompatible": 1}


def test_a_tail_in_a_block_of_another_size_is_computed(build, trio):
    """The prompt is shorter than either block, so its tail has the same key."""
    lender, prompt = build("kv_producer", block_size=32), PROMPT[:9]
    [expected] = run(trio.one, request("one", prompt))
    first = prefill(lender, prompt)
    assert first.tokens + decode(trio.reader, first, prompt).tokens == expected.tokens
    assert failures(trio.reader) == {"incompatible": 1} and blocks_in(trio.reader) == 0


def test_an_engine_that_does_not_read_leaves_a_ticket_alone(trio):
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    for core in (trio.one, trio.lender):
        assert first.tokens + decode(core, first).tokens == expected.tokens
    assert prefill(trio.reader).ticket is None, "nor does one that lends nothing give a ticket"
    trio.lender.peers.withdraw_all("the test ends")


# Blocks that a router asks for


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.95},
        {"temperature": 1.2, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.7},
        {"logprobs": 3},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3}[0-9]{37}")},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_a_request_that_moves_in_mid_stream_takes_its_blocks_along(build, trio, options):
    """Also the blocks of the answer so far. The outputs equal one engine's."""
    lender = build("kv_both", async_scheduling=True)
    [expected] = run(trio.one, request("one", **options | {"max_tokens": 40}))
    lender.add(request("before", **options | {"max_tokens": 40}))
    before = Answer()
    while len(before.tokens) < 28:
        for output in lender.step():
            before.take(output)
    so_far = PROMPT + before.tokens
    ticket = lender.lend_kv(so_far)
    lender.abort("before")
    [rest] = run(
        trio.reader, request("after", PROMPT, before.tokens, kv_ticket=ticket, **options | {"max_tokens": 40})
    )
    assert before.tokens + rest.tokens == expected.tokens and rest.reason == expected.reason
    assert blocks_in(trio.reader) == len(unseal(ticket).blocks) == (len(so_far) - 1) // 16 >= 6
    assert not failures(trio.reader)
    for here, there in zip(before.logprobs + rest.logprobs, expected.logprobs, strict=True):
        assert here.keys() == there.keys()
        assert all(here[i].logprob == pytest.approx(there[i].logprob, abs=1e-4) for i in here)
    run(lender)
    all_is_given_back(lender, trio.reader)


def test_what_is_not_there_is_not_lent(trio):
    assert trio.lender.lend_kv(PROMPT) is None
    run(trio.lender, request("before", PROMPT[:40]))
    assert (
        trio.lender.lend_kv(PROMPT, "salt") is None and trio.lender.lend_kv(PROMPT, None, "adapter") is None
    )
    assert trio.lender.lend_kv(PROMPT[::-1]) is None and trio.reader.lend_kv(PROMPT) is None
    ticket = trio.lender.lend_kv(PROMPT)
    assert len(unseal(ticket).blocks) == 2 and trio.lender.stats().kv_loans.offers == 1
    for _ in range(2):
        trio.lender.take_back_kv(ticket)
    loans = trio.lender.stats().kv_loans
    assert (loans.offers, loans.held_blocks) == (0, 0)
    with pytest.raises(TransferError):
        trio.lender.take_back_kv(b"no ticket")


def test_a_first_token_that_ends_the_text_leaves_nothing_held(trio):
    first = prefill(trio.lender)
    trio.lender.take_back_kv(first.ticket)
    for ending in (
        {"stop_token_ids": first.tokens},
        {"ignore_eos": False, "eos_token_ids": (*first.tokens,)},
    ):
        again = prefill(trio.lender, **ending)
        assert (again.tokens, again.reason) == (first.tokens, FinishReason.STOP)
        assert trio.lender.stats().kv_loans.offers == 0


def test_memory_of_other_workers_is_let_go_when_nobody_reads_it(trio, monkeypatch):
    monkeypatch.setattr(rank_peers, "IDLE_S", 0.02)
    monkeypatch.setattr(fetch, "IDLE_S", 0.02)
    peers, until = trio.reader.ranks.runner.peers, time.monotonic() + DEADLINE_S
    if peers._tidying is not None:  # An earlier test began the wait of a minute that others have.
        peers._tidying.cancel()
        peers._tidying = None
    decode(trio.reader, prefill(trio.lender))
    while peers._peers.num_connected or peers._tidying is not None:
        assert time.monotonic() < until
        time.sleep(0.01)


# How long blocks are held


def test_an_offer_that_nobody_wants_ends_with_its_lease(build):
    lender = build("kv_producer", lease_s=0.05)
    assert prefill(lender).ticket is not None and lender.stats().kv_loans.held_blocks == BLOCKS
    time.sleep(0.06)
    loans = lender.stats().kv_loans
    assert loans.ended == {"expired": 1} and loans.held_blocks == 0
    all_is_given_back(lender)


def test_a_ticket_that_comes_too_late_means_computing(build, trio):
    lender, expected = build("kv_producer", lease_s=0.05), run(trio.one, request("one"))[0]
    first = prefill(lender)
    time.sleep(0.06)
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert failures(trio.reader) == {"expired": 1}


def test_a_request_that_waits_for_its_turn_renews_its_lease(build, trio):
    lender, reader = build("kv_producer", lease_s=0.3), build("kv_consumer", max_num_seqs=1)
    [expected] = run(trio.one, request("one"))
    first = prefill(lender)
    reader.add(request("long", PROMPT[::-1], max_tokens=50))
    reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
    tokens = []
    while reader.has_work:
        for output in reader.step():
            tokens += output.token_ids if output.request_id == "decode" else []
        lender.tick()
        time.sleep(0.02 if not tokens else 0)
    assert first.tokens + tokens == expected.tokens and blocks_in(reader) == BLOCKS and not failures(reader)
    all_is_given_back(lender, reader)


def test_a_ticket_that_two_requests_bring_serves_both(build, trio):
    """At once, or one after the other: a request that is too late to read computes."""
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    asked = [request(name, PROMPT, first.tokens, kv_ticket=first.ticket) for name in "ab"]
    for answer in run(trio.reader, *asked):
        assert first.tokens + answer.tokens == expected.tokens
    trio.reader.reset_prefix_cache()
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert failures(trio.reader).keys() <= {"unknown", "ended"}


def test_more_tickets_than_are_opened_at_once_all_serve(build, trio, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_OPENING", 2)
    reader = build("kv_consumer")
    prompts = [[i, *PROMPT] for i in range(20)]
    expected = [
        answer.tokens for answer in run(trio.one, *(request(f"{i}", p) for i, p in enumerate(prompts)))
    ]
    firsts = [prefill(trio.lender, prompt) for prompt in prompts]
    asked = [
        request(f"{i}", prompt, first.tokens, kv_ticket=first.ticket)
        for i, (prompt, first) in enumerate(zip(prompts, firsts))
    ]
    found = [first.tokens + answer.tokens for first, answer in zip(firsts, run(reader, *asked))]
    assert found == expected and blocks_in(reader) == 20 * BLOCKS and not failures(reader)
    all_is_given_back(trio.lender, reader)


def test_requests_do_not_wait_in_turn_for_an_owner_that_is_silent(build, trio, monkeypatch):
    """A process that is stopped takes connections and answers nobody."""
    monkeypatch.setattr(reader_module, "Lease", partial(Lease, timeout_s=0.3))
    with socket.create_server(("127.0.0.1", 0), backlog=128) as silent:
        reader = build("kv_consumer")
        first = prefill(trio.lender)
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        ticket = seal(msgspec.structs.replace(unseal(first.ticket), server=server))
        asked = [request(f"r{i}", output_token_ids=first.tokens, kv_ticket=ticket) for i in range(40)]
        run(reader, *asked)
        assert failures(reader) == {Failure.LATE: 40}
        silent.setblocking(False)
        connections = 0
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                connections += 1
    assert 0 < connections <= reader_module.MAX_OPENING
    decode(trio.reader, first)  # so that the owner releases its blocks


def test_a_request_that_is_preempted_when_its_blocks_have_come_waits_for_none(trio):
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    trio.reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
    tokens = []

    def steps(enough):
        until = time.monotonic() + DEADLINE_S
        while not enough():
            tokens.extend(i for output in trio.reader.step() for i in output.token_ids)
            assert time.monotonic() < until

    steps(lambda: len(tokens) >= 3)
    trio.reader.loop.drain()
    trio.reader.scheduler.preempt_all()
    steps(lambda: not trio.reader.has_work)
    assert first.tokens + tokens == expected.tokens and blocks_in(trio.reader) == BLOCKS


def test_a_request_that_is_aborted_before_it_starts_lets_the_owner_go(build, trio):
    reader = build("kv_consumer", max_num_seqs=1)
    first = prefill(trio.lender)
    reader.add(request("long", PROMPT[::-1], max_tokens=50))
    reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
    for _ in range(3):
        reader.step()
    reader.abort("decode")
    lost = trio.lender.stats().kv_loans.ended.get("lost", 0)
    run(reader)
    all_is_given_back(trio.lender, reader)
    assert blocks_in(reader) == 0 and trio.lender.stats().kv_loans.ended.get("lost", 0) == lost + 1


class Slow:
    """Reads that last until they are cancelled."""

    def __init__(self, monkeypatch):
        self.num_begun = 0
        monkeypatch.setattr(BlockReader, "fetch", lambda peers, *args: self.fetch(*args))

    def fetch(self, lease, positions, blocks, patience_s, is_cancelled):
        self.num_begun += 1
        while not is_cancelled():
            time.sleep(0.001)
        raise TransferError(Failure.CANCELLED, "the test cancelled it")

    def wait_for(self, core):
        """Waits until a read has begun."""
        until = time.monotonic() + DEADLINE_S
        while not self.num_begun:
            core.step()
            assert time.monotonic() < until


def test_an_abort_while_blocks_travel_frees_everything(trio, monkeypatch):
    slow, first = Slow(monkeypatch), prefill(trio.lender)
    trio.reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
    slow.wait_for(trio.reader)
    stats = trio.reader.stats()
    assert stats.num_running == 1 and stats.num_free_blocks < stats.num_blocks
    trio.reader.check()
    trio.reader.abort("decode")
    assert trio.reader.step()[0].finish_reason is FinishReason.ABORT
    all_is_given_back(trio.lender, trio.reader)
    assert not failures(trio.reader)


def test_others_go_on_while_blocks_travel(trio, monkeypatch):
    [expected] = run(trio.one, request("one", PROMPT[::-1]))
    slow, first = Slow(monkeypatch), prefill(trio.lender)
    trio.reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
    slow.wait_for(trio.reader)
    trio.reader.add(request("other", PROMPT[::-1]))
    tokens = []
    while len(tokens) < COUNT:
        tokens += [i for output in trio.reader.step() for i in output.token_ids]
    assert tokens == expected.tokens
    trio.reader.abort("decode")
    run(trio.reader)


def test_a_cache_that_sleeps_is_read_into_no_more(build, trio, monkeypatch):
    reader, expected = build("kv_consumer", enable_sleep_mode=True), run(trio.one, request("one"))[0]
    slow, first = Slow(monkeypatch), prefill(trio.lender)
    reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
    slow.wait_for(reader)
    reader.sleep(1, mode="keep")
    reader.check()
    reader.wake_up()
    [answer] = run(reader, request("after"))
    assert answer.tokens == expected.tokens
    all_is_given_back(trio.lender, reader)


def test_new_weights_end_what_is_being_read(build, trio, folder, tmp_path, monkeypatch):
    changed = tiny.write_changed(folder, tmp_path / "changed")
    reader, slow, first = build("kv_consumer"), Slow(monkeypatch), prefill(trio.lender)
    reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
    slow.wait_for(reader)
    reader.update_weights(str(changed))
    run(reader)
    assert blocks_in(reader) == 0
    all_is_given_back(trio.lender, reader)


def test_an_interrupt_while_blocks_travel_leaves_a_whole_core(build, trio, monkeypatch):
    reader, expected = build("kv_consumer"), run(trio.one, request("one"))[0]
    with monkeypatch.context() as patch:
        slow, first = Slow(patch), prefill(trio.lender)
        reader.add(request("decode", PROMPT, first.tokens, kv_ticket=first.ticket))
        slow.wait_for(reader)

        def interrupted():
            raise KeyboardInterrupt

        patch.setattr(reader.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.step()
    assert reader.step()[0].finish_reason is FinishReason.ABORT
    all_is_given_back(trio.lender, reader)
    first = prefill(trio.lender)
    assert first.tokens + decode(reader, first).tokens == expected.tokens and blocks_in(reader) == BLOCKS


def test_a_read_that_fails_in_an_unknown_way_means_computing(trio, monkeypatch):
    def broken(*args):
        raise RuntimeError("a transport is broken")

    monkeypatch.setattr(RankPeers, "_read", broken)
    [expected] = run(trio.one, request("one"))
    first = prefill(trio.lender)
    assert first.tokens + decode(trio.reader, first).tokens == expected.tokens
    assert failures(trio.reader) == {"error": 1}


def test_an_owner_that_ends_while_a_reader_waits_means_computing(build, trio):
    lender, expected = build("kv_producer"), run(trio.one, request("one"))[0]
    first = prefill(lender)
    loan = request("decode", PROMPT, first.tokens, kv_ticket=first.ticket)
    trio.reader.add(loan)
    [known] = trio.reader.peers.reader._opened
    known.opening.result(DEADLINE_S)  # the owner has answered, and nothing was read yet
    lender.exit()
    tokens = []
    while trio.reader.has_work:
        tokens += [i for output in trio.reader.step() for i in output.token_ids]
    assert first.tokens + tokens == expected.tokens
    assert blocks_in(trio.reader) == 0 and sum(failures(trio.reader).values()) == 1


# The scheduler


class FakeSource:
    """Has the blocks of a prompt up to `end`."""

    def __init__(self, end):
        self.end, self.begun = end, []

    def lookup(self, keys, start):
        return max(0, min(self.end, len(keys)) - start)

    def begin(self, fetch):
        self.begun.append(fetch)


@pytest.mark.parametrize("num_arrived", [0, 1, 2])
def test_what_the_tiers_lack_is_asked_of_other_workers(num_arrived):
    scheduler = Scheduler(
        num_blocks=20, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64
    )
    tiers, peers = scheduler.blocks.fetches.sources[:] = FakeSource(2), FakeSource(5)
    seq = scheduler.add(request("a", list(range(22))))
    assert scheduler.schedule() is None
    assert (tiers.begun[0].start, len(tiers.begun[0].keys)) == (0, 2) and not peers.begun
    scheduler.fetched(tiers.begun[0], num_arrived)
    scheduler.check()
    assert (peers.begun[0].start, len(peers.begun[0].keys)) == (num_arrived, 5 - num_arrived)
    assert scheduler.schedule() is None
    scheduler.fetched(peers.begun[0], 5 - num_arrived)
    scheduler.check()
    [entry] = scheduler.schedule().scheduled
    assert (entry.start, entry.num_tokens) == (20, 2) and seq.num_cached_tokens == 20
    assert scheduler.stats().external_prefix_cache_queries == 22


@pytest.mark.parametrize("num_shared, waits", [(2, False), (9, False), (10, True), (20, True)])
def test_a_prompt_waits_for_anothers_fetch_only_if_half_of_it_is_of_use(num_shared, waits):
    """Regression: a short prompt that shared its beginning with a long one waited for the whole fetch of the
    long one, which may take seconds."""
    scheduler = Scheduler(
        num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=200, max_model_len=200
    )
    tiers = FakeSource(20)
    scheduler.blocks.fetches.sources.append(tiers)
    scheduler.add(request("long", list(range(90))))
    assert scheduler.schedule() is None
    [fetch] = tiers.begun
    assert len(fetch.keys) == 20
    tiers.end = 0  # nothing of the short one's is worth a fetch
    seq = scheduler.add(request("short", [*range(4 * num_shared), 500, 501], max_tokens=1))
    plan = scheduler.schedule()
    scheduler.check()
    assert (plan is None) == waits
    if plan is not None:
        [entry] = plan.scheduled
        assert entry.seq is seq and entry.start == 0
        scheduler.update(plan, [[7]])
    scheduler.fetched(fetch, 20)
    scheduler.check()
    started = {entry.seq.request.request_id: entry.start for entry in scheduler.schedule().scheduled}
    assert started == {"long": 80} | ({"short": 4 * num_shared} if waits else {})


def test_blocks_that_are_lent_are_nobody_elses_until_they_are_taken_back():
    scheduler = Scheduler(
        num_blocks=6, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=24
    )
    seq = scheduler.add(request("a", list(range(16)), max_tokens=1))
    plan = scheduler.schedule()
    lent = seq.block_ids[:4]
    scheduler.blocks.hold(lent)
    scheduler.update(plan, [[7]])
    scheduler.check()
    scheduler.blocks.check_held(lent)
    scheduler.add(request("b", list(range(100, 116)), max_tokens=1))
    assert scheduler.schedule() is None, "two blocks are free, and it needs four"
    scheduler.blocks.unhold(lent)
    scheduler.blocks.check_held([])
    assert scheduler.schedule() is not None
    scheduler.check()


# Everything at once


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_requests_gives_the_tokens_of_one_engine(build, trio, seed):
    """Small caches, tiers below one of them, aborts, tickets spoilt and used twice, caches reset."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    stems = [rng.choices(range(256), k=60) for _ in range(3)]
    prompts = [rng.choice(stems)[: rng.randint(1, 60)] + rng.choices(range(256), k=5) for _ in range(12)]
    expected = [one.tokens for one in run(trio.one, *(request(str(i), p) for i, p in enumerate(prompts)))]
    asynchronous = seed % 2 == 1
    lender = build("kv_producer", num_gpu_blocks_override=40, async_scheduling=asynchronous)
    tiers = {"kv_host_bytes": 1 << 20, "kv_load_policy": "always"} if seed > 1 else {}
    reader = build("kv_consumer", num_gpu_blocks_override=14, async_scheduling=asynchronous, **tiers)
    firsts = [prefill(lender, prompt) for prompt in prompts[:8]]
    spoilers = [lambda t: t, lambda t: t, lambda t: t, flipped, forged]
    waiting = []
    for n in range(30):
        i = rng.randrange(8)
        ticket = firsts[i].ticket
        if ticket is None or rng.random() < 0.4:
            firsts[i] = prefill(lender, prompts[i])
            ticket = firsts[i].ticket
        spoilt = None if ticket is None else rng.choice(spoilers)(ticket)
        waiting.append((i, request(str(n), prompts[i], firsts[i].tokens, kv_ticket=spoilt)))
    tokens, aborted = {}, set()
    until = time.monotonic() + DEADLINE_S
    names = {one.request_id: i for i, one in waiting}
    while waiting or reader.has_work:
        assert time.monotonic() < until
        if waiting and rng.random() < 0.3:
            reader.add(waiting.pop()[1])
        if rng.random() < 0.03:
            aborted.add(name := str(rng.randrange(30)))
            reader.abort(name)
        if rng.random() < 0.02:
            reader.reset_prefix_cache()
        for output in reader.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        reader.check()
        lender.tick()
    for name, i in names.items():
        if name not in aborted:
            assert firsts[i].tokens + tokens[name] == expected[i]
    lender.peers.withdraw_all("the test ends")
    all_is_given_back(lender, reader)


# Options


def test_options_that_do_not_go_together_are_refused(folder):
    def config(**options):
        return EngineConfig(model=str(folder), **options)

    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        config(kv_transfer_config={}, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="take kv_role 'kv_consumer'"):
        config(kv_transfer_config='{"kv_role": "kv_producer"}', enable_sleep_mode=True)
    with pytest.raises(ConfigError, match=r"kv_transfer_config\.kv_role"):
        config(kv_transfer_config={"kv_role": "prefill"})
    with pytest.raises(ConfigError, match="did you mean 'kv_role'"):
        config(kv_transfer_config={"kv_roles": "kv_both"})
    with pytest.raises(ConfigError, match=r"kv_transfer_config\.lease_s"):
        config(kv_transfer_config={"lease_s": 0})
    with pytest.raises(
        ConfigError, match=r"must be an address that readers can connect to, got '0\.0\.0\.0'"
    ):
        config(kv_transfer_config={"kv_ip": "0.0.0.0"})
    sleeper = config(kv_transfer_config={"kv_role": "kv_consumer"}, enable_sleep_mode=True)
    assert replace(sleeper, seed=1).kv_transfer_config == sleeper.kv_transfer_config


@pytest.mark.parametrize("role, kv_role", [("prefill", "kv_producer"), ("decode", "kv_both")])
def test_a_role_in_a_fleet_says_what_the_engine_does(folder, role, kv_role):
    server = ServerConfig(plane="tcp://127.0.0.1:1", role=role)
    [planned] = plan(str(folder), [], {}, server)
    assert planned.config.kv_transfer_config.kv_role == kv_role
    [planned] = plan(str(folder), [], {"kv_transfer_config": {"kv_role": "kv_both"}}, server)
    assert planned.config.kv_transfer_config.kv_role == "kv_both"
    if role == "decode":
        [planned] = plan(str(folder), [], {"kv_transfer_config": {"kv_role": "kv_consumer"}}, server)
        assert planned.config.kv_transfer_config.kv_role == "kv_consumer"
        # others can't map memory that it gives back
        [planned] = plan(str(folder), [], {"enable_sleep_mode": True}, server)
        assert planned.config.kv_transfer_config.kv_role == "kv_consumer"
    [planned] = plan(str(folder), [], {}, ServerConfig(plane="tcp://127.0.0.1:1"))
    assert planned.config.kv_transfer_config is None


@pytest.mark.parametrize("transfer, named", [({"kv_role": "kv_consumer"}, "'kv_consumer'"), (None, "None")])
def test_a_prefill_worker_that_would_lend_nothing_is_refused(folder, transfer, named):
    """Its prompts would be computed again, and nobody would notice but by the time that it takes."""
    server = ServerConfig(plane="tcp://127.0.0.1:1", role="prefill")
    with pytest.raises(ConfigError, match=f"must lend its KV blocks, got kv_transfer_config {named}, "):
        plan(str(folder), [], {"kv_transfer_config": transfer}, server)


def test_readers_of_other_hosts_need_a_transport_that_reaches_them(folder, monkeypatch):
    def refuses(transport, view):
        raise TransportError("it is not installed")

    transfer = {"kv_role": "kv_producer", "kv_ip": "10.0.0.1"}
    monkeypatch.setattr(transport_registry.Nixl, "export", refuses)
    with pytest.raises(ConfigError, match=r"on other hosts could read this cache.*it is not installed"):
        EngineCore(
            EngineConfig(model=str(folder), device="cpu", kv_transfer_config=transfer),
            resolve(str(folder), None, None),
        )


def test_a_host_without_shared_memory_is_told_at_the_start(folder, monkeypatch):
    def refuses(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuses)
    with pytest.raises(
        ConfigError, match=r"kv_transfer_config.*shared memory cannot be had: Function not impl"
    ):
        core_of(folder, "kv_both")


def test_an_address_that_is_not_ours_is_refused(build):
    lender = build("kv_producer")
    port = int(lender.peers.lender.offers.server.rpartition(":")[2])
    config = replace(lender._given, kv_transfer_config={"kv_role": "kv_producer", "kv_port": port})
    with pytest.raises(ConfigError, match=f"can't be served at 127.0.0.1:{port}"):
        EngineCore(config, resolve(config.model, None, None))


def test_a_start_that_fails_leaves_no_port(folder):
    def fails(*_):
        raise ConfigError("the part can't be had")

    config = EngineConfig(model=str(folder), device="cpu", kv_transfer_config={"kv_role": "kv_producer"})
    before = threading.enumerate()
    with pytest.raises(ConfigError, match="the part"):
        EngineCore(config, resolve(config.model, None, None), more_parts=[fails])
    assert "kv-offers" not in [thread.name for thread in threading.enumerate() if thread not in before]

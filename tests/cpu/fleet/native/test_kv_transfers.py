"""KV blocks that go along with a request, over workers that are fakes, on virtual time: from a worker that
drains, to one that takes over from a dead one, and of a prefix that another worker has."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from shoal.api import Output
from shoal.errors import BusyError, WorkerFailedError
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet.native.fleet_engine import _Progress
from shoal.fleet.native.kv_transfers import LEASE_TIMEOUT_S, KvLease, is_transfer_faster
from shoal.fleet.native.worker_wire import Report
from shoal.fleet.worker import RefusedError
from shoal.kv_events import GPU, BlockStored
from shoal.stats import KvTransferStats, SleepState, Stats
from tests.cpu.fleet.native.test_disagg import LONG, REPLY, TOKEN_S, WHOLE, Site, answer, request, virtual

NUM_BLOCKS = len(LONG) // 16


def has_prompt(site, name, num_blocks=NUM_BLOCKS):
    tokens = list(LONG)[: num_blocks * 16]
    site.model.router.apply(
        WorkerRank(name), BlockStored(range(num_blocks), None, tokens, 16, None, GPU, None)
    )


def with_events(num_prefill, num_decode, **options):
    site = Site(0, 0, **options)
    for role in ["prefill"] * num_prefill + ["decode"] * num_decode:
        site.add(role, has_events=True)
    return site


async def begun(site, name="r", tokens=3, prompt=LONG, **options):
    """Returns a running request with `tokens` tokens."""
    running = asyncio.create_task(answer(site.engine, request(name, prompt=prompt, **options)))
    await site.clock.sleep((tokens + 0.5) * TOKEN_S)
    return running


@pytest.mark.parametrize(
    "num_tokens, num_bytes, bytes_per_s, prompt_token_s, quicker",
    [
        (10_000, 1_500_000_000, 40e9, 1e-4, True),  # 0.06 s beside 1 s
        (10_000, 1_500_000_000, 1e9, 1e-4, False),  # a slow network: 1.5 s
        (10_000, 1_500_000_000, 40e9, 5e-6, False),  # a small model
        (100, 15_000_000, 40e9, 1e-4, False),  # little to move: a ticket takes longer
        (1_000, 15_000_000, 40e9, 1e-4, True),
    ],
)
def test_blocks_move_where_that_is_quicker_than_computing(
    num_tokens, num_bytes, bytes_per_s, prompt_token_s, quicker
):
    rates = {"bytes_per_s": bytes_per_s, "prompt_token_s": prompt_token_s}
    assert is_transfer_faster(num_tokens, num_bytes, **rates) is quicker


@virtual
async def test_what_was_not_measured_yet_is_tried_and_what_was_slow_is_not_tried_again():
    site = Site(0, 2)
    worker, moves = site.model.workers["d1"], site.model.kv_transfers
    worker.info = replace(worker.info, kv_block_bytes=144_000 * 16)  # an 8B model in bf16
    for measured, quicker in (
        (None, True),
        (Stats(), True),
        (Stats(prompt_token_s=25e-6), True),
        (Stats(prompt_token_s=25e-6, kv_transfers={"nixl": KvTransferStats(10, 10**9, 1.0)}), False),
        (Stats(prompt_token_s=25e-6, kv_transfers={"cuda_ipc": KvTransferStats(10, 10**9, 0.01)}), True),
    ):
        worker.stats = measured
        assert moves.is_faster(3_000, worker) is quicker
    assert moves.is_faster(1_000, worker)
    worker.info = replace(worker.info, state_bytes=2 * 10**9)
    assert not moves.is_faster(1_000, worker)


# A worker that drains


@virtual
async def test_a_long_context_leaves_a_worker_that_drains_with_its_blocks():
    site = Site(0, 2)
    running = await begun(site, cache_salt="s")
    old, new = site.links["d0"], site.links["d1"]
    site.model.workers["d0"].drain(True)
    assert await running == WHOLE
    [moved] = new.received
    assert old.lent_for == [(203, "s", None)] and moved.kv_ticket == old.lent[0]
    assert moved.output_token_ids == list(REPLY[:3]) and old.running == 0
    assert site.engine.num_migrations == 0
    await site.assert_idle()


def computing_is_quicker(site):
    for worker in site.model.workers.values():
        worker.stats = Stats(prompt_token_s=1e-5)


def transfers_are_slow(site):
    for worker in site.model.workers.values():
        worker.stats.kv_transfers["nixl"] = KvTransferStats(1, 1000, 1.0)


def nobody_reads(site):
    site.model.workers["d1"].info = replace(site.model.workers["d1"].info, reads_kv=False)


def it_lends_nothing(site):
    site.model.workers["d0"].info = replace(site.model.workers["d0"].info, lends_kv=False)


def the_other_lacks_a_tag(site):
    site.model.workers["d0"].info = replace(site.model.workers["d0"].info, tags=frozenset({"eu"}))


def the_other_is_full(site):
    site.model.workers["d1"].info = replace(site.model.workers["d1"].info, total_blocks=4)


def there_is_no_other(site):
    site.model.remove("d1")


def it_refuses(site):
    site.links["d0"].refuses_kv = True


def it_gives_no_ticket(site):
    site.links["d0"].lend_s = None


@pytest.mark.parametrize(
    "prevent",
    [
        computing_is_quicker,
        transfers_are_slow,
        nobody_reads,
        it_lends_nothing,
        the_other_lacks_a_tag,
        the_other_is_full,
        there_is_no_other,
        it_refuses,
        it_gives_no_ticket,
    ],
)
@virtual
async def test_else_it_ends_where_it_is(prevent):
    site = Site(0, 2)
    prevent(site)
    running = await begun(site, tags=sorted(site.model.workers["d0"].info.tags))
    site.model.workers["d0"].drain(True)
    assert await running == WHOLE
    assert site.received("d1") == 0
    await site.assert_idle()


@virtual
async def test_no_more_leave_than_others_have_room_for():
    site = Site(0, 2, max_running=3)
    site.model.workers["d1"].is_draining = True
    running = [await begun(site, f"r{i}") for i in range(3)]
    site.model.workers["d1"].drain(False)
    full = await begun(site, "elsewhere")
    site.model.workers["d0"].drain(True)
    assert await asyncio.gather(full, *running) == [WHOLE] * 4
    assert site.received("d1") == 3
    await site.assert_idle()


@virtual
async def test_a_request_that_ends_before_the_ticket_comes_gives_it_back():
    site = Site(0, 2)
    site.links["d0"].lend_s = LEASE_TIMEOUT_S / 2
    running = await begun(site, tokens=18)
    site.model.workers["d0"].drain(True)
    assert await running == WHOLE
    await site.clock.sleep(LEASE_TIMEOUT_S)
    assert len(site.links["d0"].lent) == 1 and site.received("d1") == 0
    await site.assert_idle()


@virtual
async def test_a_ticket_that_comes_too_late_is_given_back():
    site = Site(0, 2)
    site.links["d0"].lend_s = LEASE_TIMEOUT_S + 0.1
    running = await begun(site)
    site.model.workers["d0"].drain(True)
    assert await running == WHOLE
    assert site.links["d0"].returned == site.links["d0"].lent != [] and site.received("d1") == 0
    await site.assert_idle()


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.4])
@virtual
async def test_a_client_that_leaves_during_the_move_leaves_nothing_held(after_s):
    site = Site(0, 2)
    site.links["d0"].lend_s = 0.3
    running = await begun(site)
    site.model.workers["d0"].drain(True)
    await site.clock.sleep(after_s)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await site.clock.sleep(LEASE_TIMEOUT_S)
    await site.assert_idle()


@virtual
async def test_a_worker_that_dies_while_it_drains_is_replaced_as_any_other():
    site = Site(0, 2)
    site.links["d0"].lend_s = 0.3
    running = await begun(site)
    site.model.workers["d0"].drain(True)
    await site.clock.sleep(0.1)
    site.links["d0"].kill()
    assert await running == WHOLE
    assert site.engine.num_migrations == 1 and site.links["d1"].received[0].kv_ticket is None
    await site.assert_idle()


@virtual
async def test_a_worker_that_breaks_off_while_it_makes_a_ticket_may_make_two():
    """The worker aborts the request to sleep, and gets another request for a lease, as it still has the
    blocks."""
    site = with_events(0, 2)
    site.links["d0"].lend_s = 0.3
    running = await begun(site)
    has_prompt(site, "d0")
    site.model.workers["d0"].drain(True)
    await site.clock.sleep(0.1)
    site.links["d0"].break_off("r", RefusedError("it has ended its requests"))
    assert await running == WHOLE
    assert len(site.links["d0"].lent) == 2 and site.received("d1") == 1
    await site.assert_idle()


def test_a_ticket_that_comes_before_the_first_output_is_for_the_next_worker():
    """The worker drains at once, and its first output arrives nevertheless."""
    assignment = SimpleNamespace(
        worker=SimpleNamespace(id="w"),
        now=0.0,
        take_spans=list,
        cached=lambda num_tokens: None,
        generated=lambda num_tokens: None,
    )
    progress, lease = _Progress(request()), KvLease(None, b"ticket")
    progress.take_lease(lease)
    progress.take(Output("r", [1]), assignment)
    assert progress.lease is lease


@virtual
async def test_the_new_worker_may_die_too():
    site = Site(0, 3)
    site.links["d2"].error_at[4] = WorkerFailedError("died")
    running = await begun(site)
    site.model.workers["d0"].drain(True)
    assert await running == WHOLE
    assert site.received("d1") == site.received("d2") == 1 and site.engine.num_migrations == 1
    await site.assert_idle()


@virtual
async def test_a_worker_that_is_full_leaves_the_ticket_to_the_next():
    site = Site(0, 3)
    site.links["d2"].error_at[3] = BusyError("full")
    running = await begun(site)
    site.model.workers["d0"].drain(True)
    assert await running == WHOLE
    assert [site.links[name].received[0].kv_ticket for name in ("d1", "d2")] == site.links["d0"].lent * 2
    await site.assert_idle()


# After a death


@virtual
async def test_blocks_of_a_prompt_come_from_whoever_has_them_when_its_worker_has_died():
    site = with_events(1, 2, policy="kv")
    has_prompt(site, "p0")
    has_prompt(site, "d0", 4)
    for name in ("p0", "d0"):
        site.model.workers[name].is_draining = name == "p0"
    running = await begun(site)
    [asked] = [name for name in ("d0", "d1") if site.received(name)]
    [other] = {"d0", "d1"} - {asked}
    site.links[asked].kill()
    assert await running == WHOLE
    assert site.links["p0"].lent_for == [(203, None, None)], "it drains, and lends"
    assert site.links[other].received[0].kv_ticket == site.links["p0"].lent[0]
    await site.assert_idle()


@pytest.mark.parametrize("tokens", [0.5, 1.5])
@virtual
async def test_a_decode_worker_that_dies_with_the_ticket_is_followed_by_one_with_another(tokens):
    """A ticket ends with its reader, which begins to read while the prompt is computed."""
    site = with_events(1, 2, max_local_prefill_length=16)
    running = asyncio.create_task(answer(site.engine, request(prompt=LONG)))
    await site.clock.sleep(tokens * TOKEN_S)
    [asked] = [name for name in ("d0", "d1") if site.links[name].received]
    [other] = {"d0", "d1"} - {asked}
    has_prompt(site, "p0")
    site.links[asked].kill()
    assert await running == WHOLE
    [second] = site.answered(other)
    assert second.kv_ticket == site.links["p0"].lent[0]
    await site.assert_idle()


@virtual
async def test_a_dead_worker_is_not_asked():
    site = with_events(0, 2)
    has_prompt(site, "d0")
    running = await begun(site)
    site.links["d0"].kill()
    assert await running == WHOLE and site.links["d1"].received[0].kv_ticket is None
    assert not site.links["d0"].lent_for
    await site.assert_idle()


# A prefix of another worker


@pytest.mark.parametrize("enable_p2p", [False, True])
@virtual
async def test_a_new_request_gets_a_prefix_from_another_worker_if_that_is_enabled(enable_p2p):
    site = with_events(0, 2, enable_p2p=enable_p2p)
    has_prompt(site, "d1")
    has_prompt(site, "d0", 2)
    assert await answer(site.engine, request(prompt=LONG)) == WHOLE
    [asked] = site.links["d0"].received
    assert asked.kv_ticket == (site.links["d1"].lent[0] if enable_p2p else None)
    assert site.model.kv_transfers.num_leases == ({"prefix": 1} if enable_p2p else {})
    await site.assert_idle()


@pytest.mark.parametrize("options", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
@virtual
async def test_a_request_that_uses_no_cached_blocks_gets_none(options):
    site = with_events(0, 2, enable_p2p=True)
    has_prompt(site, "d1")
    assert await answer(site.engine, request(prompt=LONG, params=options)) == WHOLE
    assert not site.links["d1"].lent_for


@virtual
async def test_little_more_than_the_own_prefix_is_computed():
    site = with_events(0, 2, enable_p2p=True)
    has_prompt(site, "d1")
    has_prompt(site, "d0", NUM_BLOCKS - 1)
    assert await answer(site.engine, request(prompt=LONG)) == WHOLE
    assert not site.links["d1"].lent_for


# Tickets of prefill workers


@virtual
async def test_a_client_that_needs_only_the_first_token_gives_the_ticket_back():
    """The stop string is in the first token."""
    site = Site()
    stream = site.engine.generate(request(prompt=LONG))
    first = await anext(stream)
    await stream.aclose()
    assert first.token_ids == [REPLY[0]] and site.links["p0"].returned == [b"KV of r.prefill1"]
    await site.assert_idle()


# Workers of the role both as partners


def mixed(*roles, **options):
    site = Site(0, 0, **{"policy": "kv"} | options)
    for role in roles:
        site.add(role, has_events=True, kv_role="kv_both" if role == "both" else None)
    return site


async def keep_busy(site, name):
    """Has the worker generate for a while."""
    for worker in site.model.workers.values():
        worker.is_draining = worker.id != name
    running = await begun(site, f"at {name}", tokens=1, prompt=range(300, 399))
    for worker in site.model.workers.values():
        worker.is_draining = False
    return running


async def computed_by(site, **options):
    """Returns the workers that decode and prefill a long prompt."""
    asked = request(prompt=LONG, **options)
    assert await answer(site.engine, asked) == WHOLE
    return asked.worker, asked.prefill_worker


@virtual
async def test_who_does_both_prefills_for_a_decode_worker():
    site = mixed("both", "decode")
    busy = await keep_busy(site, "b0")
    assert await computed_by(site) == ("d0", "b0")
    [prefill] = [one for one in site.links["b0"].received if one.offers_kv]
    assert site.links["d0"].received[0].kv_ticket == f"KV of {prefill.request_id}".encode()
    assert site.model.workers["b0"].num_prefills == 1 and await busy == WHOLE
    await site.assert_idle()


@virtual
async def test_the_cheapest_of_both_kinds_prefills():
    site = mixed("prefill", "both", "decode")
    busy = await keep_busy(site, "b0")
    assert await computed_by(site) == ("d0", "p0")
    await busy
    site = mixed("prefill", "both", "decode")
    has_prompt(site, "b0", 6)
    has_prompt(site, "d0", 6)
    busy = await keep_busy(site, "b0")
    assert await computed_by(site) == ("d0", "b0"), "it has half of the prompt"
    await busy
    await site.assert_idle()


@virtual
async def test_who_does_both_has_a_prompt_computed_where_it_costs_less():
    site = mixed("prefill", "both")
    assert await computed_by(site) == ("b0", ""), "nothing is gained where it costs as much"
    site = mixed("prefill", "both")
    busy = await keep_busy(site, "b0")
    assert await computed_by(site) == ("b0", "p0")
    await busy
    await site.assert_idle()
    site = mixed("prefill", "both", policy="round_robin")
    busy = await keep_busy(site, "b0")
    assert await computed_by(site) == ("b0", ""), "its costs do not count blocks"
    await busy


@virtual
async def test_who_does_both_counts_once():
    site = mixed("both", "prefill", "decode")
    for link in site.links.values():
        link.report = Report(Stats(num_running=1), SleepState(), 0)
    assert (await site.engine.stats()).num_running == 3


@virtual
async def test_workers_that_all_do_both_compute_their_own_prompts():
    site = mixed("both", "both")
    busy = await keep_busy(site, "b0")
    assert await computed_by(site) == ("b1", "")
    await busy
    site = mixed("both")
    busy = await keep_busy(site, "b0")
    assert await computed_by(site) == ("b0", "")
    await busy
    await site.assert_idle()


@virtual
async def test_a_worker_of_both_that_dies_or_leaves_is_in_neither_list():
    site = mixed("both", "decode")
    site.model.remove("b0")
    assert list(site.model.workers) == ["d0"] and not site.prefills.dispatcher.workers
    assert await computed_by(site) == ("d0", "")
    await site.assert_idle()

"""Prefill and decode apart, layer by layer: a prefetch request brings a prompt's KV blocks in while they are
computed, and its continuation starts after the first token. In one process, on the CPU."""

import random
import time

import pytest

from shoal.api import FinishReason
from shoal.engine.peers.prefetches import Prefetches
from shoal.errors import RequestError
from shoal.kv.transfer.mapped import MappedPeer
from shoal.sampling_params import StructuredOutputsParams
from tests import tiny
from tests.cpu.engine.test_handover import (  # noqa: F401 (fixtures)
    BLOCKS,
    DEADLINE_S,
    PROMPT,
    Answer,
    FakeSource,
    all_is_given_back,
    blocks_in,
    build,
    core_of,
    cores,
    failures,
    request,
    run,
    trio,
)
from tests.cpu.engine.test_tails import PrefetchingScheduler


def prefetches(core):
    return core.parts.find(Prefetches)


CHUNKS = {"max_num_batched_tokens": 16}  # a prompt is computed in five steps


def until(true, *engines):
    """Steps these engines until something is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        for core in engines:
            core.step() if core.has_work else core.tick()


class Pulls:
    """The readers' pulls: (layer, number of blocks)."""

    def __init__(self, monkeypatch):
        self.seen, pull = [], MappedPeer.pull

        def watched(peer, src_ids, dst_ids, layers, group):
            pulled = pull(peer, src_ids, dst_ids, layers, group)
            self.seen += [(layer, len(src_ids)) for layer in layers]
            return pulled

        monkeypatch.setattr(MappedPeer, "pull", watched)


def apart(lender, reader, prompt=PROMPT, name="", after_step=lambda: None, **options):
    """The answer of a prefill worker and a decode worker together. after_step: called behind each step of the
    prefill worker."""
    first, rest = Answer(), Answer()
    lender.add(request(f"p{name}", prompt, offers_kv=True, **options | {"max_tokens": 1}))
    deadline = time.monotonic() + DEADLINE_S
    while rest.reason is None:
        assert time.monotonic() < deadline
        outputs = lender.step() if lender.has_work else []
        for output in outputs:
            if output.kv_ticket is not None:
                ahead = request(f"f{name}", prompt, kv_ticket=output.kv_ticket, fetches_only=True)
                reader.add(ahead)
            first.take(output)
            if output.finish_reason is not None:
                behind = request(f"d{name}", prompt, first.tokens, **options)
                behind.continues = f"f{name}"
                reader.add(behind)
        if outputs or lender.has_work:
            after_step()
        for output in reader.step() if reader.has_work else []:
            if output.request_id == f"d{name}":
                rest.take(output)
            else:
                assert output.finish_reason is FinishReason.LENGTH and not output.token_ids
    rest.tokens = first.tokens + rest.tokens
    return rest


@pytest.fixture(scope="module")
def chunked_core(folder):
    core = core_of(folder, "kv_producer", **CHUNKS)
    yield core
    core.exit()


@pytest.fixture
def chunked(chunked_core, trio):  # noqa: F811
    """A prefill worker that computes a prompt in five steps."""
    assert chunked_core.reset_prefix_cache()
    yield chunked_core
    all_is_given_back(chunked_core, trio.reader)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.95},
        {"temperature": 1.2, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.7},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3}[0-9]{5}")},
        {"logprobs": 2},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "chunks"])
def test_two_engines_give_what_one_gives(trio, chunked, options, in_chunks):  # noqa: F811
    lender = chunked if in_chunks else trio.lender
    [expected] = run(trio.one, request("one", **options))
    found = apart(lender, trio.reader, **options)
    assert (found.tokens, found.reason) == (expected.tokens, expected.reason) and found.cached == len(PROMPT)
    assert blocks_in(trio.reader) == BLOCKS and not failures(trio.reader)
    all_is_given_back(lender, trio.reader)


def test_blocks_that_a_prefetch_request_has_brought_are_told_with_its_continuation_first_token(trio, chunked):  # noqa: F811
    found = apart(chunked, trio.reader)
    names = [span.name for span in found.spans]
    assert names == ["queue", "transfer", "prefill"]
    queue, transfer, prefill = found.spans
    assert transfer.attributes == {"from": "worker", "blocks": BLOCKS} and prefill.attributes["tokens"] == 1
    assert transfer.ago_s > transfer.seconds > 0 and queue.ago_s >= prefill.ago_s == prefill.seconds


def test_a_layer_is_read_while_the_next_one_is_computed(trio, chunked, monkeypatch):  # noqa: F811
    """The third step of the prompt stands still behind each layer until the decode worker has read it."""
    lender, pulls = chunked, Pulls(monkeypatch)
    [expected] = run(trio.one, request("one"))
    ends, num_steps, stood = lender.ranks.runner.layer_events, [], []
    tell = ends._tell

    def tell_and_stand(layer, event):
        tell(layer, event)
        deadline = time.monotonic() + DEADLINE_S
        while len(num_steps) == 2 and pulls.seen[-1] != (layer, 1):
            assert time.monotonic() < deadline, f"nobody reads layer {layer}: {pulls.seen}"
            time.sleep(0.001)
            stood.append(layer)

    def after_step():
        num_steps.append(True)
        if len(num_steps) == 2:
            num_layers = lender.ranks.runner.cache.plan.specs[0].num_layers
            until(lambda: sum(blocks for _, blocks in pulls.seen) == 2 * num_layers, trio.reader)

    monkeypatch.setattr(ends, "_tell", tell_and_stand)
    found = apart(lender, trio.reader, after_step=after_step)
    assert found.tokens == expected.tokens and blocks_in(trio.reader) == BLOCKS
    assert set(stood) == set(range(lender.ranks.runner.cache.plan.specs[0].num_layers))


def test_only_the_blocks_that_are_missing_travel(trio, chunked):  # noqa: F811
    lender, [expected] = chunked, run(trio.one, request("one"))
    run(trio.reader, request("before", PROMPT[:40]))
    found = apart(lender, trio.reader)
    assert found.tokens == expected.tokens and blocks_in(trio.reader) == 3 and found.cached == len(PROMPT)
    # and where none is missing, the owner hears at once that nobody needs the blocks
    [expected] = run(trio.one, request("whole", PROMPT[:64]))
    found = apart(lender, trio.reader, PROMPT[:64], "again")
    assert found.tokens == expected.tokens and blocks_in(trio.reader) == 3
    all_is_given_back(lender, trio.reader)


def test_prefix_hits_of_the_owner_travel_with_the_step_that_follows_them(trio, chunked):  # noqa: F811
    lender, [expected] = chunked, run(trio.one, request("one"))
    run(lender, request("before", PROMPT[:50]))
    assert apart(lender, trio.reader).tokens == expected.tokens and blocks_in(trio.reader) == BLOCKS


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 47, 48])
def test_prompts_around_the_ends_of_blocks(build, trio, num_tokens):  # noqa: F811
    lender, prompt = trio.lender, PROMPT[:num_tokens]
    [expected] = run(trio.one, request("one", prompt))
    found = apart(lender, trio.reader, prompt)
    assert found.tokens == expected.tokens and found.cached == num_tokens
    assert blocks_in(trio.reader) == -(-num_tokens // 16) and not failures(trio.reader)


@pytest.mark.parametrize("way", ["gone", "withdrawn", "aborted"])
def test_an_owner_that_is_lost_in_the_middle_of_a_prompt_costs_time_and_no_token(build, trio, chunked, way):  # noqa: F811
    lender = build("kv_producer", **CHUNKS) if way == "gone" else chunked
    [expected] = run(trio.one, request("one"))
    steps = []

    def lose():
        steps.append(True)
        if len(steps) == 3:
            until(lambda: trio.reader.scheduler.blocks.fetches.under_way, trio.reader)
            if way == "gone":
                lender.peers.lender._server.close()
            elif way == "withdrawn":
                lender.peers.withdraw_all("the test took it back")
            else:
                lender.abort("p")

    assert apart(lender, trio.reader, after_step=lose).tokens == expected.tokens
    assert blocks_in(trio.reader) == 0 and sum(failures(trio.reader).values()) == 1
    all_is_given_back(lender, trio.reader)


def test_a_prompt_that_is_aborted_or_ends_with_its_first_token_is_lent_no_longer(trio, chunked):  # noqa: F811
    [expected] = run(trio.one, request("one"))
    ends = {"max_tokens": 5, "ignore_eos": False, "eos_token_ids": (expected.tokens[0],)}
    [answer] = run(chunked, request("p", offers_kv=True, **ends))
    assert answer.reason is FinishReason.STOP and answer.ticket is not None
    assert chunked.stats().kv_loans.offers == 0
    chunked.add(request("q", PROMPT[::-1], offers_kv=True))
    [output] = chunked.step()
    assert output.kv_ticket is not None and chunked.stats().kv_loans.offers == 1
    chunked.abort("q")
    assert chunked.stats().kv_loans.offers == 0
    run(chunked)


def test_a_preempted_prompt_is_lent_no_longer(chunked):
    chunked.add(request("p", offers_kv=True, max_tokens=1))
    [output] = chunked.step()
    chunked.loop.drain()
    chunked.scheduler.preempt_all()
    assert output.kv_ticket is not None and chunked.stats().kv_loans.offers == 0
    while chunked.has_work:
        assert all(output.kv_ticket is None for output in chunked.step()), "one ticket a request"
    assert chunked.stats().kv_loans.offers == 0


def test_a_preempted_prompt_reports_no_blocks_that_it_had_before(chunked, monkeypatch):
    """Regression: a prompt that was preempted, and started again, within one schedule reported its old blocks."""
    scheduler, offers, reported = chunked.scheduler, chunked.peers.lender.offers, []
    chunked.add(request("p", offers_kv=True, max_tokens=1))
    chunked.step()
    chunked.loop.drain()
    with monkeypatch.context() as patched:
        advance, schedule_decodes = offers.advance, scheduler._schedule_decodes

        def preempting(scheduled, queries):
            scheduler.preempt_all()
            return schedule_decodes(scheduled, queries)

        patched.setattr(scheduler, "_schedule_decodes", preempting)
        patched.setattr(offers, "advance", lambda *progress: (reported.append(progress), advance(*progress)))
        chunked.step()
        assert scheduler.num_to_prefill > 0 and not reported
    run(chunked)
    assert chunked.stats().kv_loans.offers == 0


def test_a_prefetch_request_that_is_aborted_gives_everything_back(trio, chunked):  # noqa: F811
    lender = chunked
    lender.add(request("p", offers_kv=True, max_tokens=1))
    [output] = lender.step()
    trio.reader.add(request("f", kv_ticket=output.kv_ticket, fetches_only=True))
    until(lambda: trio.reader.scheduler.blocks.fetches.under_way, trio.reader)
    trio.reader.check()
    trio.reader.abort("f")
    until(
        lambda: not trio.reader.scheduler.blocks.fetches.under_way, trio.reader
    )  # while the lender computes no more of it
    until(lambda: not (lender.has_work or trio.reader.has_work), lender, trio.reader)
    all_is_given_back(lender, trio.reader)
    assert lender.stats().kv_loans.offers == blocks_in(trio.reader) == 0


def test_a_prefetch_request_keeps_its_blocks_until_its_continuation_comes(trio):  # noqa: F811
    [expected] = run(trio.one, request("one"))
    [first] = run(trio.lender, request("p", offers_kv=True, max_tokens=1))
    trio.reader.add(request("f", kv_ticket=first.ticket, fetches_only=True))
    until(lambda: blocks_in(trio.reader) == BLOCKS, trio.reader)
    for _ in range(5):
        assert not trio.reader.step()
    assert not trio.reader.scheduler.running and len(prefetches(trio.reader).held_blocks()) == 5
    trio.reader.check()
    behind = request("d", PROMPT, first.tokens)
    behind.continues = "f"
    answers = {}
    trio.reader.add(behind)
    while trio.reader.has_work:
        for output in trio.reader.step():
            answers.setdefault(output.request_id, Answer()).take(output)
    assert first.tokens + answers["d"].tokens == expected.tokens and answers["d"].cached == len(PROMPT)
    assert answers["f"].reason is FinishReason.LENGTH and not answers["f"].tokens


def test_a_cache_that_was_reset_under_a_prefetch_request_is_computed(trio):  # noqa: F811
    [expected] = run(trio.one, request("one"))
    [first] = run(trio.lender, request("p", offers_kv=True, max_tokens=1))
    trio.reader.add(request("f", kv_ticket=first.ticket, fetches_only=True))
    until(lambda: blocks_in(trio.reader) == BLOCKS, trio.reader)
    trio.reader.reset_prefix_cache()
    behind = request("d", PROMPT, first.tokens)
    behind.continues = "f"
    trio.reader.add(behind)
    tokens = []
    while trio.reader.has_work:
        tokens += [i for output in trio.reader.step() for i in output.token_ids]
    assert first.tokens + tokens == expected.tokens


def test_a_sleep_that_aborts_requests_ends_a_prefetch_request_that_is_held(build, trio):  # noqa: F811
    """Regression: at level 0 its blocks stayed held until they were due."""
    reader = build("kv_consumer")
    [first] = run(trio.lender, request("p", offers_kv=True, max_tokens=1))
    reader.add(request("f", kv_ticket=first.ticket, fetches_only=True))
    until(lambda: prefetches(reader).held_blocks(), reader)
    reader.sleep(0, mode="abort")
    assert not prefetches(reader).held_blocks()
    reader.wake_up()
    (ended,) = reader.step()
    assert (ended.request_id, ended.finish_reason) == ("f", FinishReason.ABORT)
    all_is_given_back(trio.lender, reader)


@pytest.mark.parametrize("way", ["sleep", "weights"])
def test_a_cache_that_is_lost_under_a_prefetch_request_is_computed(build, trio, folder, tmp_path, way):  # noqa: F811
    """The tail has no key that the pool could forget. With other weights, the rest is theirs."""
    changed = tiny.write_changed(folder, tmp_path / "changed") if way == "weights" else folder
    reader, one = build("kv_consumer", enable_sleep_mode=True), build(folder=changed)
    for prompt in (PROMPT, PROMPT[:9]):
        [first] = run(trio.lender, request("p", prompt, offers_kv=True, max_tokens=1))
        [expected] = run(one, request("one", prompt, first.tokens))
        reader.add(request("f", prompt, kv_ticket=first.ticket, fetches_only=True))
        until(lambda: prefetches(reader).held_blocks(), reader)
        reader.sleep(1, mode="keep") if way == "sleep" else reader.update_weights(str(changed))
        reader.wake_up() if way == "sleep" else None
        behind = request("d", prompt, first.tokens)
        behind.continues = "f"
        reader.add(behind)
        tokens = []
        while reader.has_work:
            tokens += [i for output in reader.step() for i in output.token_ids]
        assert tokens == expected.tokens
        reader.update_weights(str(folder)) if way == "weights" else None
        all_is_given_back(trio.lender, reader)


@pytest.mark.parametrize("wrong", [{"kv_ticket": None}, {"output_token_ids": [1]}])
def test_a_prefetch_request_without_a_ticket_or_with_tokens_is_refused(trio, wrong):  # noqa: F811
    fields = {"kv_ticket": b"x", "fetches_only": True} | wrong
    with pytest.raises(RequestError, match="fetches_only"):
        trio.reader.add(request("f", PROMPT, **fields))


def test_a_prefetch_request_where_nothing_is_read_is_refused(trio):  # noqa: F811
    for core in (trio.lender, trio.one):
        with pytest.raises(RequestError, match="kv_consumer"):
            core.add(request("f", PROMPT, kv_ticket=b"x", fetches_only=True))


# The scheduler


def new_scheduler(**options):
    defaults = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
    }
    scheduler = PrefetchingScheduler(**defaults | options)
    scheduler.blocks.fetches.sources.append(FakeSource(5))
    return scheduler


def ahead(name, prompt, **options):
    return request(name, prompt, kv_ticket=b"x", fetches_only=True, **options)


def continuation(name, of, prompt, first):
    behind = request(name, prompt, [first])
    behind.continues = of
    return behind


def test_a_continuation_starts_before_those_who_lack_room():
    """Its turn is directly after its prefetch request's, whose blocks no other request can take."""
    scheduler = new_scheduler()
    prompt = list(range(20))
    scheduler.add(ahead("f", prompt))
    assert scheduler.schedule() is None
    scheduler.add(request("long", list(range(50, 70))))
    [fetch] = scheduler.blocks.fetches.sources[-1].begun
    assert len(fetch.keys) == 5
    scheduler.fetched(fetch, 5)
    assert scheduler.schedule() is None, "two blocks are free, and the other one needs five"
    scheduler.check()
    scheduler.add(continuation("d", "f", prompt, 7))
    plan = scheduler.schedule()
    assert [(entry.seq.request.request_id, entry.start, entry.num_tokens) for entry in plan.scheduled] == [
        ("d", 20, 1)
    ]
    assert [seq.request.request_id for seq in scheduler.take_finished_outside()] == ["f"]
    scheduler.check()


def test_a_continuation_waits_for_what_is_on_its_way():
    scheduler = new_scheduler()
    prompt = list(range(20))
    scheduler.add(ahead("f", prompt))
    scheduler.schedule()
    scheduler.add(continuation("d", "f", prompt, 7))
    assert scheduler.schedule() is None
    scheduler.fetched(scheduler.blocks.fetches.sources[-1].begun[0], 2)
    [entry] = scheduler.schedule().scheduled
    assert (entry.seq.request.request_id, entry.start, entry.num_tokens) == ("d", 8, 13)
    scheduler.check()


def test_a_continuation_whose_first_token_was_lost_starts_though_its_whole_prompt_was_fetched():
    """A prefill worker that ends between its last block and its token leaves a prompt of whole blocks behind."""
    scheduler = new_scheduler()
    prompt = list(range(20))
    scheduler.add(ahead("f", prompt))
    scheduler.schedule()
    scheduler.fetched(scheduler.blocks.fetches.sources[-1].begun[0], 5)
    behind = request("d", prompt)
    behind.continues = "f"
    scheduler.add(behind)
    [entry] = scheduler.schedule().scheduled
    assert (entry.seq.request.request_id, entry.start, entry.num_tokens) == ("d", 16, 4)
    assert [seq.request.request_id for seq in scheduler.take_finished_outside()] == ["f"]
    scheduler.check()


def test_a_prefetch_request_gives_way_to_sequences_that_run():
    scheduler = new_scheduler(num_blocks=7)
    scheduler.blocks.fetches.sources[-1].end = 0
    scheduler.add(request("runs", list(range(50, 54)), max_tokens=10))
    plan = scheduler.schedule()
    scheduler.blocks.fetches.sources[-1].end = 4
    prompt = list(range(19))
    scheduler.add(ahead("f", prompt))
    scheduler.update(plan, [[1]])
    for _ in range(9):
        plan = scheduler.schedule()
        if scheduler.blocks.fetches.under_way:
            scheduler.fetched(scheduler.blocks.fetches.under_way[0], 4)
        scheduler.check()
        scheduler.update(plan, [[1]])
    assert [seq.request.request_id for seq in scheduler.take_finished_outside()] == ["f"]
    scheduler.blocks.fetches.sources[-1].end = 0
    scheduler.add(continuation("d", "f", prompt, 7))
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, [[1] for entry in plan.scheduled if entry.samples])
        scheduler.check()
    assert not scheduler.stats().num_preemptions


# Everything at once


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_gives_the_tokens_of_one_engine(build, trio, seed):  # noqa: F811
    """Small caches, chunks, aborts of either side, resets, owners that take blocks back."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    stems = [rng.choices(range(256), k=60) for _ in range(2)]
    prompts = [rng.choice(stems)[: rng.randint(1, 60)] + rng.choices(range(256), k=8) for _ in range(8)]
    expected = [one.tokens for one in run(trio.one, *(request(str(i), p) for i, p in enumerate(prompts)))]
    options = {"async_scheduling": seed % 2 == 1}
    lender = build("kv_producer", num_gpu_blocks_override=24, max_num_batched_tokens=24, **options)
    tiers = {"kv_host_bytes": 1 << 20, "kv_load_policy": "always"} if seed == 2 else {}
    reader = build("kv_consumer", num_gpu_blocks_override=14, **tiers, **options)
    tokens, firsts, todo = {}, {}, list(range(24))
    deadline = time.monotonic() + DEADLINE_S
    while todo or lender.has_work or reader.has_work:
        assert time.monotonic() < deadline
        if todo and rng.random() < 0.3:
            n = todo.pop()
            lender.add(request(f"p{n}", prompts[n % 8], offers_kv=True, max_tokens=1))
        if rng.random() < 0.02:
            n = rng.randrange(24)
            core, letter = rng.choice([(lender, "p"), (reader, "f")])
            core.abort(f"{letter}{n}")
        if rng.random() < 0.01:
            rng.choice([lender, reader]).reset_prefix_cache()
        for output in lender.step() if lender.has_work else []:
            n = int(output.request_id[1:])
            if output.kv_ticket is not None:
                ticket = output.kv_ticket if rng.random() > 0.1 else b"no ticket"
                reader.add(request(f"f{n}", prompts[n % 8], kv_ticket=ticket, fetches_only=True))
            firsts.setdefault(n, []).extend(output.token_ids)
            if output.finish_reason is not None:
                behind = request(f"d{n}", prompts[n % 8], firsts[n])
                behind.continues = f"f{n}"
                reader.add(behind)
        for output in reader.step() if reader.has_work else []:
            if output.request_id[0] == "d":
                tokens.setdefault(int(output.request_id[1:]), []).extend(output.token_ids)
        lender.check()
        reader.check()
    assert tokens.keys() == set(range(24))
    for n, found in tokens.items():
        assert firsts[n] + found == expected[n % 8], n
    lender.peers.withdraw_all("the test ends")
    all_is_given_back(lender, reader)

"""Speculation on a GPU: its kernels against their oracle, and engines with and without drafts give equal tokens,
with graphs and without, asynchronous or not."""

import os
import random
from dataclasses import astuple

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.kernels.drafting import reference
from shoal.kernels.drafting.draft_rows import EARLIER, REPORT_SIZE, DraftRows, LookUp, Report, SuffixLookUp
from shoal.kernels.state import Field, StateLayout
from tests import eagle3_heads, mtp_chains, tiny
from tests.chain import broken_runs, follow, ring, write_chain
from tests.cpu.engine.test_speculation import close, random_params, seen
from tests.mtp_heads import NEAR_LAST, write_mtp
from tests.tiny_families import write_family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
FIXED = NGRAM | {"enable_adaptive_verification": False}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5, "enable_adaptive_verification": False}
RING = ring(12)
NUM_REQUESTS = int(os.environ.get("SHOAL_SPECULATION_REQUESTS", "80"))


# Kernels


def _rows(seed, num_rows, length, most, letters):
    """State rows of sequences with drafts, on the CPU, and the entries of their histories."""
    r = random.Random(seed)
    layout = StateLayout(num_rows, 4)
    table = layout.table(torch.zeros(layout.size, dtype=torch.int32))
    drafts = DraftRows(
        torch.randint(0, letters, (num_rows + 1, most), dtype=torch.int32),
        torch.zeros(num_rows + 1, length, dtype=torch.int32),
        torch.zeros(num_rows + 1, dtype=torch.int32),
    )
    entries = []
    for row in range(num_rows):
        tokens = [r.randrange(letters) for _ in range(r.randint(1, 3 * length // 2))]
        again = r.randrange(len(tokens))
        tokens += tokens[again : again + r.randint(0, 40)]
        first = max(0, len(tokens) - length)
        entries += [row, first, len(tokens) - first, *tokens[first:]]
        earlier = r.randrange(len(tokens))
        entries += [row, EARLIER, 1, earlier]
        table[row, Field.TOKEN], table[row, Field.POSITION] = tokens[-1], len(tokens) - 1 - earlier
        table[row, Field.MAX_TOKENS], table[row, Field.NUM_DRAFTS] = (
            r.randint(1, most + 1),
            r.randint(0, most),
        )
    return table, drafts, torch.tensor(entries, dtype=torch.int32)


@pytest.mark.parametrize(
    "parameters",
    [LookUp(8, 3, 8), LookUp(8, 1, 3), SuffixLookUp(8, 24, 1.0, 0.1), SuffixLookUp(8, 12, 2.5, 0.3)],
    ids=["auto", "ngram", "suffix", "short suffix"],
)
@pytest.mark.parametrize("letters", [3, 50])
def test_kernels_are_the_references(parameters, letters):
    from shoal.kernels.drafting import triton_ops

    seed, num_rows, length = random.randrange(1 << 30), 40, 3000
    print("seed", seed)
    torch.manual_seed(seed)
    table, drafts, entries = _rows(seed, num_rows, length, 8, letters)
    on_gpu = table.cuda(), DraftRows(*(tensor.cuda() for tensor in astuple(drafts)))
    reference.write_histories(entries, drafts)
    triton_ops.write_histories(entries.cuda(), on_gpu[1])
    assert torch.equal(on_gpu[1].history_RL.cpu(), drafts.history_RL)
    assert torch.equal(on_gpu[1].earlier_R.cpu(), drafts.earlier_R)
    order = torch.randperm(num_rows).int()
    for queries in (1, 4, 9):
        decodes, prefills = torch.cat((order[:30], torch.tensor([-1], dtype=torch.int32))), order[30:]
        size = len(decodes) * queries
        sampled = torch.randint(0, letters, (size + len(prefills),), dtype=torch.int32)
        found = []
        for ops, (rows, own), device in ((reference, (table, drafts), "cpu"), (triton_ops, on_gpu, "cuda")):
            ints = lambda *shape, d=device: torch.full(shape, -7, dtype=torch.int32, device=d)  # noqa: E731
            begun = [*ints(3, size), *ints(5, len(decodes))]
            ops.begin_verification(decodes.to(device), rows, own, *begun)
            token_ids, *_, starts, verified, unverified, _ = begun
            if queries > 1:  # some drafts hold
                held = torch.arange(size) % 3 < 2
                sampled[:-1][: size - 1][held[1:]] = token_ids[1:].cpu()[held[1:]]
            rows_S = torch.cat((decodes, prefills)).to(device)
            starts_S = torch.cat((starts, rows[prefills.to(device).long(), Field.POSITION]))
            report = ints(len(rows_S), REPORT_SIZE + queries + 8)
            ins = sampled.to(device), token_ids, rows_S, starts_S, verified, unverified
            for _ in range(2):  # the second time changes nothing
                ops.accept(*ins, len(decodes), queries, rows, own, report)
                ops.look_up(rows_S, rows, own, parameters, report)
            found.append([*begun, report, rows[:-1], own.drafts_RK[:-1], own.history_RL[:-1]])
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            assert torch.equal(a, b.cpu()), (queries, i)


def test_look_ups_find_what_stands_in_a_long_history():
    from shoal.kernels.drafting import triton_ops

    table, drafts, entries = _rows(5, 40, 3000, 8, 50)
    on_gpu = table.cuda(), DraftRows(*(tensor.cuda() for tensor in astuple(drafts)))
    reference.write_histories(entries, drafts)
    triton_ops.write_histories(entries.cuda(), on_gpu[1])
    rows = torch.arange(40, dtype=torch.int32)
    for parameters in (LookUp(8, 3, 8), SuffixLookUp(8, 24, 1.0, 0.1)):
        reports = torch.full((2, 40, REPORT_SIZE + 9 + 8), -7, dtype=torch.int32)
        reference.look_up(rows, table, drafts, parameters, reports[0])
        on_device = reports[1].cuda()
        triton_ops.look_up(rows.cuda(), *on_gpu, parameters, on_device)
        assert torch.equal(on_device.cpu(), reports[0])
        assert (reports[0, :, Report.NUM_DRAFTS] > 0).sum() > 20


# Engines


@pytest.fixture(scope="module")
def wavering(tmp_path_factory):
    """A chain that goes on as expected two times of three, if it is sampled."""
    return write_chain(tmp_path_factory.mktemp("chains"), "wavering", RING, margin=4.0)


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("chains"), "steady", RING)


@pytest.fixture
def build():
    made = []

    def make(folder, **options):
        defaults = {
            "dtype": "float32",
            "max_model_len": 256,
            "kv_cache_memory_bytes": 1 << 26,
            "gpu_memory_utilization": 0.05,
            "max_num_seqs": 32,
        }
        made.append(LLM(str(folder), **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.core.check()
        llm.exit()


def greedy(n):
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


def pieces(llm, prompt, params):
    """The tokens of an answer, and how many of them each step brought."""
    sizes, last = [], None
    for last in llm.stream(prompt, params):
        sizes.append(len(last.outputs[0].token_ids) - sum(sizes))
    return list(last.outputs[0].token_ids), [size for size in sizes if size]


OPTIONS = [
    {},
    {"enforce_eager": True},
    {"async_scheduling": False, "enable_prefix_caching": False},
    {"num_gpu_blocks_override": 24, "max_num_seqs": 8, "max_num_batched_tokens": 64},
]


@pytest.mark.parametrize("speculation", [FIXED, NGRAM, SUFFIX], ids=["fixed", "adaptive", "suffix"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_requests_are_answered_as_without_drafts(options, speculation, wavering, build):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [broken_runs(rng, RING) for _ in range(NUM_REQUESTS)]
    params = [random_params(rng) for _ in range(NUM_REQUESTS)]
    want = build(wavering, enforce_eager=True).generate(prompts, params, use_tqdm=False)
    llm = build(wavering, speculative_config=speculation, **options)
    for _ in range(2):  # the second time with what the first one has cached
        got = llm.generate(prompts, params, use_tqdm=False)
        for i, (a, b) in enumerate(zip(seen(want), seen(got))):
            assert a == b, (i, params[i])
        for a, b in zip(want, got):
            close(a, b)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"async_scheduling": False}], ids=str)
def test_repetition_takes_few_steps(options, steady, build):
    prompt = [40, *follow(RING, 40, 30)]
    llm = build(steady, speculative_config=FIXED, **options)
    tokens, sizes = pieces(llm, prompt, greedy(90))
    assert tokens == follow(RING, prompt[-1], 90)
    assert sizes[:2] == [1, 9] and len(sizes) <= 13
    stats = llm.stats()
    assert stats.num_running == 0


def test_many_sequences_draft_when_few_are_left(steady, build):
    """Steps of more decodes than may draft look nothing up, and the answers that go on draft afterwards."""
    llm = build(steady, max_num_seqs=96, speculative_config=FIXED)
    prompts = [[33 + i % 90, *follow(RING, 33 + i % 90, 20)] for i in range(90)]
    params = [greedy(20 if i < 60 else 150) for i in range(90)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, out in zip(prompts, params, outputs):
        assert list(out.outputs[0].token_ids) == follow(RING, prompt[-1], one.max_tokens)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 16}], ids=str)
@pytest.mark.parametrize("kind, k", [("hidden", 1), ("hidden", 3), ("attention", 1)])
def test_a_head_that_is_right_is_always_right(kind, k, options, tmp_path, build):
    """For prompts whole, in chunks, and from the prefix cache."""
    rings = eagle3_heads.ring(7)
    chain = eagle3_heads.write_chain(tmp_path / "chain", rings)
    head = eagle3_heads.write_right_head(tmp_path / kind, rings, kind)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": k}
    speculation |= {"enable_adaptive_verification": False}
    llm = build(chain, speculative_config=speculation, **options)
    prompt = [3, *eagle3_heads.follow(rings, 3, 39)]
    n = 1 + 8 * (k + 1)
    for again in range(3):
        tokens, sizes = pieces(llm, prompt, greedy(n))
        assert tokens == eagle3_heads.follow(rings, prompt[-1], n)
        assert sizes == [1, *[k + 1] * 8], again
    batch = [eagle3_heads.follow(rings, i, 20 + i) for i in range(12)]
    outputs = llm.generate(batch, greedy(40), use_tqdm=False)
    want = [eagle3_heads.follow(rings, p[-1], 40) for p in batch]
    assert [list(o.outputs[0].token_ids) for o in outputs] == want


HYBRIDS = ["qwen3.5", "qwen3-next", "granite4-mamba", "lfm2", "nemotron-h"]


@pytest.mark.parametrize("name", [*tiny.MODELS, "gpt-oss", "gemma2", "gemma3", "glm4-flash", *HYBRIDS])
def test_every_architecture_generates_the_oracles_tokens_with_drafts(name, root, build):
    folder = tiny.write_model(root, name) if name in tiny.MODELS else write_family(root, name)
    prompts = [[*random.Random(i).choices(range(256), k=9)] * 4 for i in range(6)]
    llm = build(folder, speculative_config=FIXED)
    outputs = llm.generate(prompts, greedy(40), use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [tiny.greedy(folder, p, 40) for p in prompts]


@pytest.mark.parametrize("name", [*NEAR_LAST, "qwen3.5", "qwen3-next"])
def test_a_models_own_head_changes_no_token(name, root, build):
    folder = write_mtp(root, name)
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    llm = build(folder, speculative_config=speculation)
    prompts = [[*range(40 + i, 60 + 2 * i)] for i in range(6)]
    outputs = llm.generate(prompts, greedy(30), use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [tiny.greedy(folder, p, 30) for p in prompts]


@pytest.mark.parametrize("has_head", [False, True], ids=["look-up", "head"])
def test_the_cache_fills_what_drafts_leave_of_the_gpus_share(has_head, steady, tmp_path, build):
    """Steps of the largest size, with drafts and a head, find room beside it."""
    rings, chain, speculation = RING, steady, FIXED
    if has_head:
        rings = eagle3_heads.ring(7)
        chain = eagle3_heads.write_chain(tmp_path / "chain", rings)
        head = eagle3_heads.write_right_head(tmp_path / "head", rings, "hidden")
        speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    options = dict(kv_cache_memory_bytes=None, gpu_memory_utilization=0.08, max_model_len=1024)
    llm = build(chain, speculative_config=speculation, max_num_seqs=256, **options)
    torch.cuda.reset_peak_memory_stats()
    prompts = [[33 + i % 90, *follow(rings, 33 + i % 90, 200)] for i in range(300)]
    for prompt, out in zip(prompts, llm.generate(prompts, greedy(60), use_tqdm=False)):
        assert list(out.outputs[0].token_ids) == follow(rings, prompt[-1], 60)
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.max_memory_reserved() < 0.16 * total  # other engines of this process included


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("speculation", [FIXED, SUFFIX], ids=["ngram", "suffix"])
def test_two_gpus_give_the_tokens_of_one(speculation, root, build):
    folder = tiny.write_model(root, "qwen3")
    prompts = [[*random.Random(i).choices(range(256), k=9)] * 4 for i in range(6)]
    llm = build(folder, speculative_config=speculation, tensor_parallel_size=2)
    outputs = llm.generate(prompts, greedy(40), use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [tiny.greedy(folder, p, 40) for p in prompts]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 16}], ids=str)
@pytest.mark.parametrize("kind, k", [("hidden", 1), ("hidden", 3), ("attention", 1)])
def test_an_mtp_head_that_is_right_is_always_right(kind, k, options, tmp_path, build):
    """On a model with recurrent layers, for prompts whole, in chunks, and from the prefix cache."""
    rings = eagle3_heads.ring(7)
    speculation = {"method": "mtp", "num_speculative_tokens": k, "enable_adaptive_verification": False}
    chain = mtp_chains.write_chain(tmp_path, rings, kind)
    llm = build(chain, speculative_config=speculation, **options)
    prompt = [3, *eagle3_heads.follow(rings, 3, 39)]
    n = 1 + 8 * (k + 1)
    for again in range(3):
        tokens, sizes = pieces(llm, prompt, greedy(n))
        assert tokens == eagle3_heads.follow(rings, prompt[-1], n)
        assert sizes == [1, *[k + 1] * 8], again
    batch = [eagle3_heads.follow(rings, i, 20 + i) for i in range(12)]
    outputs = llm.generate(batch, greedy(40), use_tqdm=False)
    want = [eagle3_heads.follow(rings, p[-1], 40) for p in batch]
    assert [list(o.outputs[0].token_ids) for o in outputs] == want


def test_a_server_of_the_default_options_drafts_and_its_answers_are_equal(wavering, build):
    prompts = [[40 + i, *follow(RING, 40 + i, 25)] for i in range(6)]
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=100, ignore_eos=True) for i in range(6)]
    want = build(wavering, enforce_eager=True).generate(prompts, params, use_tqdm=False)
    llm = build(wavering, speculative_config={"method": "auto"})
    for _ in range(3):
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == seen(want)

"""Options of sampling on a GPU: kernels against the reference, and engines against a sequential computation,
without a host sync and without an allocation in a decode step."""

import random

import pytest
import torch

from shoal import SamplingParams
from shoal.kernels import triton_ops
from shoal.kernels.cpu import ops as cpu_ops
from tests import option_cases, tiny
from tests.cpu.kernels.test_row_options import Rows, ints

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB = 151_936
LENGTHS = 30, 800, 1500, 5, 400, 60  # tokens of the state rows
PROMPTS = [random.Random(i).choices(range(256), k=20 + i) for i in range(12)]


@pytest.fixture
def engine_options():
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 512 << 20,
        "max_num_seqs": 16,
    }


def rows_with_everything(device):
    """State rows with every option, in lists that are long and short, and tokens in a thousand blocks."""
    dice, rows = random.Random(7), Rows(7, device, VOCAB)
    for row, length in enumerate(LENGTHS):
        tokens = [dice.randrange(VOCAB) for _ in range(length)]
        tokens[-4:] = [1, 2, 3, 4]
        num_prompt = len(tokens) // 2
        rows.add(
            row,
            tokens,
            num_prompt=num_prompt,
            penalties=[(1.0, 0.0, 0.0), (1.3, 0.5, -0.25), (1.0, 0.5, 0.125), (0.75, 0.0, 0.0)][row % 4],
            allowed=dice.sample(range(VOCAB), 5000) if row % 3 == 1 else (),
            bias={i: dice.uniform(-50, 50) for i in dice.sample(range(VOCAB), (0, 3, 2000)[row % 3])},
            stops=dice.sample(range(VOCAB), 5),
            min_end=len(tokens) + row % 2,
            words=[(2, 3, 4, 90), (4, 91), (7, 92), (93,)] * (row % 3),
        )
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_change_logits_as_the_reference_does(dtype):
    print("seed", torch.manual_seed(11).initial_seed())
    logits = (torch.randn(9, VOCAB) * 4).to(dtype)
    samples, chosen = ints(3, 8, 0, -1, 5, 1, 7), [2, 0, 5, -1, 1, 4, 3]
    positions = ints(*(LENGTHS[row] - 1 if row >= 0 else 0 for row in chosen))
    results = []
    for ops, device in ((cpu_ops, "cpu"), (triton_ops, "cuda")):
        options = rows_with_everything(device).options
        at = [x.to(device) for x in (samples, ints(*chosen), positions)]
        found = torch.zeros(7, VOCAB, device=device)
        ops.take_rows(logits.to(device), at[0], found)
        ops.store_tokens(at[1], at[2], at[2], options)
        ops.keep_allowed(found, at[1], options)
        ops.add_bias(found, at[1], options)
        ops.penalize(found, at[1], at[2], options)
        ops.ban_stops(found, at[1], at[2], options)
        ops.ban_words(found, at[1], at[2], options)
        results.append((found.cpu()[[0, 1, 2, 4, 5, 6]], options.history.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not options.counts_KV.any()


@pytest.mark.parametrize(
    "mode",
    [
        {},
        dict(enforce_eager=True),
        dict(async_scheduling=False),
        dict(max_num_batched_tokens=64),
        dict(num_gpu_blocks_override=16, max_model_len=200),
        dict(max_num_seqs=3),
    ],
    ids=str,
)
def test_rows_with_options_and_rows_beside_them_get_the_tokens_of_a_sequential_run(mode, root, build):
    folder = tiny.write_model(root, "qwen3")
    expected = [option_cases.naive(folder, request) for request in option_cases.requests(folder)]
    engine = build("qwen3", **mode)
    for _ in range(2):
        assert option_cases.run(engine.core, option_cases.requests(folder)) == expected


def draws(**options):
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 24, "ignore_eos": True} | options)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_a_row_with_options_changes_no_token_of_the_others(eager, build):
    engine = build("qwen3", dtype="bfloat16", enforce_eager=eager, enable_prefix_caching=False)
    answers = []
    for options in ({}, dict(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={3: 5.0})):
        params = [draws(seed=i) for i in range(len(PROMPTS))]
        params[4] = draws(seed=4, **options)
        answers.append([o.outputs[0].token_ids for o in engine.generate(PROMPTS, params, use_tqdm=False)])
    assert answers[0][4] != answers[1][4]
    assert [a for i, a in enumerate(answers[0]) if i != 4] == [a for i, a in enumerate(answers[1]) if i != 4]


def many_whole_rows():
    return [
        draws(seed=i, repetition_penalty=1.2) if i % 2 else draws(seed=i, logit_bias={5: 1.0}, min_tokens=3)
        for i in range(len(PROMPTS) - 1)
    ] + [draws(seed=99)]


def test_a_step_with_options_never_waits_for_the_device(build):
    engine = build("qwen3", dtype="bfloat16")
    engine.generate(PROMPTS, many_whole_rows(), use_tqdm=False)  # pinned memory is allocated now
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.generate(PROMPTS, many_whole_rows(), use_tqdm=False)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_a_decode_step_with_options_allocates_nothing(build):
    engine = build("qwen3", dtype="bfloat16")
    for i, (prompt, params) in enumerate(zip(PROMPTS, many_whole_rows())):
        engine.core.add(option_cases.Request(f"{i}", prompt, params))
    for _ in range(6):
        engine.core.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(8):
        engine.core.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    while engine.core.has_work:
        engine.core.step()


def test_options_take_no_room_from_the_cache_beforehand(build):
    """Regression: 5 bytes for each row and token of the vocabulary were kept for counts that few engines
    need."""
    engine = build("qwen3", max_num_seqs=512)
    sampler = engine.core.ranks.runner.whole_rows
    history = sampler.options.history
    assert history.nbytes == 4 * engine.stats().num_blocks * engine.core.config.block_size
    assert sampler.logits_KV.shape[0] == 64

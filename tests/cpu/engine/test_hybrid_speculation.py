"""Models with recurrent layers answer with drafts what they answer without, however engines run: states that lag
behind, snapshots in the middle of accepted drafts, and rows that begin anew."""

import random
from types import SimpleNamespace

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.kernels.drafting import reference
from shoal.kernels.drafting.draft_rows import Report
from shoal.kernels.state import Field
from tests.tiny_families import write_family

pytestmark = pytest.mark.usefixtures("quick_starts")

FAMILIES = ["qwen3.5", "qwen3-next", "granite4-mamba", "nemotron-h", "lfm2"]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
FIXED = DRAFTS | {"enable_adaptive_verification": False}
LONG = FIXED | {"num_speculative_tokens": 40}
CACHE_BYTES = 16 << 20


def draft_right(llm, texts, rng):
    """Has an engine draft what it will say, as `texts` know it, with a mistake now and then."""
    drafting = llm.core.ranks.runner.drafting

    def look_up(rows_S, table, drafts, parameters, report_SX):
        reference.look_up(rows_S, table, drafts, parameters, report_SX)
        for s, row in enumerate(rows_S.tolist()):
            known = drafts.history_RL[row, : int(table[row, Field.POSITION]) + 1].tolist()
            text = next((text for text in texts if text[: len(known)] == known), known)
            right = text[len(known) :][: parameters.max_drafts]
            if right:
                if rng.random() < 0.5:
                    right[rng.randrange(len(right))] = rng.randrange(100)
                drafts.drafts_RK[row, : len(right)] = torch.tensor(right, dtype=torch.int32)
                table[row, Field.NUM_DRAFTS] = report_SX[s, Report.NUM_DRAFTS] = len(right)
                report_SX[s, -drafts.drafts_RK.shape[1] :] = drafts.drafts_RK[row]

    drafting._ops = SimpleNamespace(**vars(drafting._ops) | {"look_up": look_up})


@pytest.fixture
def build(root):
    made = []

    def make(name, **options):
        defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
        defaults["kv_cache_memory_bytes"] = CACHE_BYTES
        made.append(LLM(str(write_family(root, name)), **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


def repetitive(rng, size):
    """A prompt in which pieces come again, so that drafts are found and some of them hold."""
    pieces = [[rng.randrange(100) for _ in range(rng.randint(2, 9))] for _ in range(4)]
    tokens = []
    while len(tokens) < size:
        tokens += rng.choice(pieces)
    return tokens[:size]


def traffic(rng, count):
    """Prompts, of which some begin like others, and their parameters."""
    prompts, params = [], []
    for _ in range(count):
        base = rng.choice(prompts)[: rng.randint(0, 90)] if prompts and rng.random() < 0.6 else []
        prompts.append((base + repetitive(rng, rng.randint(3, 60)))[:140])
        own = {"temperature": 0.0} if rng.random() < 0.7 else {"temperature": 0.7, "seed": rng.randrange(99)}
        if rng.random() < 0.2:
            own |= {"repetition_penalty": 1.2} if rng.random() < 0.5 else {"logprobs": 1}
        params.append(SamplingParams(max_tokens=rng.choice((1, 5, 33, 60)), ignore_eos=True, **own))
    return prompts, params


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


OPTIONS = [
    {},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 40},
    {"async_scheduling": True, "max_num_batched_tokens": 64},
    {"num_gpu_blocks_override": 24},
    {
        "num_gpu_blocks_override": 24,
        "async_scheduling": True,
        "kv_host_bytes": 8 << 20,
        "kv_load_policy": "always",
    },
    {"speculative_config": DRAFTS, "async_scheduling": True},
    {"speculative_config": LONG, "async_scheduling": True, "num_gpu_blocks_override": 40},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_random_requests_are_answered_as_without_drafts(name, build):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts, params = traffic(rng, 12)
    want = answers(build(name), prompts, params)
    # The next turns of these conversations begin from snapshots in the middle of answers.
    turns = [p + tokens + repetitive(rng, 7) for p, tokens in zip(prompts, want)]
    want_turns = answers(build(name, enable_prefix_caching=False), turns, params)
    for options in OPTIONS if name == "qwen3.5" else rng.sample(OPTIONS, 2):
        llm = build(name, **{"speculative_config": FIXED} | options)
        all_prompts, all_tokens = prompts + turns, want + want_turns
        draft_right(llm, [prompt + tokens for prompt, tokens in zip(all_prompts, all_tokens)], rng)
        for _ in range(2):
            assert answers(llm, prompts, params) == want, options
            assert answers(llm, turns, params) == want_turns, options


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_accepted_and_a_turn_computes_its_own_tokens_and_at_most_a_block(name, build):
    llm, plain = build(name, speculative_config=FIXED), build(name, enable_prefix_caching=False)
    rng = random.Random(5)
    known, params = repetitive(rng, 70), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    num_accepted, old = 0, 0
    for turn in range(4):
        draft_right(llm, [known + answers(plain, [known], params)[0]], rng)
        sizes, tokens = [], []
        for output in llm.stream({"prompt_token_ids": known}, params, every_step=True):
            tokens = list(output.outputs[0].token_ids)
            sizes.append(len(tokens) - sum(sizes))
            num_accepted += max(0, sizes[-1] - 1)
        assert tokens == answers(plain, [known], params)[0]
        if turn:
            assert old - 16 <= output.num_cached_tokens <= old
        old = len(known) + len(tokens)
        known += [*tokens, *repetitive(rng, 9)]
    assert num_accepted > 60


@pytest.mark.parametrize("name", ["qwen3.5", "granite4-mamba", "lfm2"])
def test_two_ranks(name, build):
    rng = random.Random(8)
    prompts, params = traffic(rng, 8)
    want = answers(build(name), prompts, params)
    llm = build(name, speculative_config=FIXED, tensor_parallel_size=2, num_gpu_blocks_override=30)
    for _ in range(2):
        assert answers(llm, prompts, params) == want


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h"])
def test_states_in_bfloat16_are_the_same_states(name, build):
    prompts, params = traffic(random.Random(3), 12)
    options = {"mamba_ssm_cache_dtype": "bfloat16", "enable_prefix_caching": False}
    want = answers(build(name, **options), prompts, params)
    assert answers(build(name, speculative_config=FIXED, **options), prompts, params) == want


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h"])
def test_sleep_and_new_weights(name, build, root):
    llm = build(name, speculative_config=FIXED, enable_sleep_mode=True)
    prompts, params = traffic(random.Random(4), 6)
    want = answers(llm, prompts, params)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(str(write_family(root, name)))
        assert answers(llm, prompts, params) == want


def test_servers_draft_with_hybrids_too(build):
    llm = build("lfm2", speculative_config={"method": "auto"})
    prompts, params = traffic(random.Random(6), 6)
    assert answers(llm, prompts, params) == answers(build("lfm2"), prompts, params)
    assert llm.core.ranks.runner.drafting is not None

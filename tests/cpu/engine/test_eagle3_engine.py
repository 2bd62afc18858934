"""An engine with EAGLE-3 heads that are right or wrong by construction: tokens are those without speculation, and as
few steps bring them as the head allows."""

import math

import pytest

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError, ConfigError
from tests import tiny
from tests.cpu.models.test_eagle3 import layer_config, tensors_of
from tests.eagle3_heads import follow, ring, write_chain, write_right_head
from tests.eagle3_oracle import HeadOracle, TargetOracle, write_head

pytestmark = pytest.mark.usefixtures("quick_starts")

RING = ring(7)
PROMPT = [3, *follow(RING, 3, 39)]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("chain"), RING)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    return {kind: write_right_head(root / kind, RING, kind) for kind in ("hidden", "attention", "wrong")}


@pytest.fixture
def build():
    engines = []

    def make(path, head=None, k=1, adaptive=False, **options):
        defaults = dict(dtype="float32", device="cpu", max_model_len=256, kv_cache_memory_bytes=64 << 20)
        speculation = None
        if head is not None:
            speculation = dict(
                method="eagle3",
                model=str(head),
                num_speculative_tokens=k,
                enable_adaptive_verification=adaptive,
            )
        engines.append(LLM(str(path), speculative_config=speculation, **defaults | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()


def params(n, **options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": n, "ignore_eos": True} | options)


def pieces(llm, prompt, params):
    """The tokens of an answer, and how many of them each step brought."""
    sizes, last = [], None
    for last in llm.stream(prompt, params):
        sizes.append(len(last.outputs[0].token_ids) - sum(sizes))
    return last, [size for size in sizes if size]


@pytest.mark.parametrize(
    "options", [{}, dict(max_num_batched_tokens=16), dict(tensor_parallel_size=2)], ids=str
)
@pytest.mark.parametrize("kind, k", [("hidden", 1), ("hidden", 3), ("attention", 1)])
def test_a_head_that_is_right_is_always_right(kind, k, options, chain, heads, build):
    """For prompts whole, in chunks, and from the prefix cache."""
    n = 1 + 8 * (k + 1)
    want = follow(RING, PROMPT[-1], n)
    llm = build(chain, heads[kind], k, **options)
    for again in range(3):
        out, sizes = pieces(llm, PROMPT, params(n))
        assert list(out.outputs[0].token_ids) == want
        assert sizes == [1, *[k + 1] * 8], again
    assert out.num_cached_tokens >= 32
    batch = [follow(RING, i, 20 + i) for i in range(12)]
    outputs = llm.generate(batch, params(40), use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [follow(RING, p[-1], 40) for p in batch]


def test_a_head_that_is_wrong_costs_no_token_and_no_step(chain, heads, build):
    out, sizes = pieces(build(chain, heads["wrong"], 3), PROMPT, params(60))
    assert list(out.outputs[0].token_ids) == follow(RING, PROMPT[-1], 60) and sizes == [1] * 60


def test_few_blocks_and_preemption_change_nothing(chain, heads, build):
    llm = build(chain, heads["hidden"], 3, num_gpu_blocks_override=14, max_model_len=128)
    batch = [follow(RING, i, 20 + i) for i in range(6)]
    for _ in range(2):
        outputs = llm.generate(batch, params(60), use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [follow(RING, p[-1], 60) for p in batch]


def test_an_answer_ends_with_the_context(chain, heads, build):
    llm = build(chain, heads["hidden"], 3, max_model_len=64)
    out, sizes = pieces(llm, PROMPT, params(100))
    assert list(out.outputs[0].token_ids) == follow(RING, PROMPT[-1], 24)
    assert out.outputs[0].finish_reason == "length" and len(sizes) <= 1 + math.ceil(23 / 4) + 1


@pytest.mark.parametrize("k", [1, 2, 3])
def test_an_honest_heads_steps_are_those_of_the_plain_head(k, tmp_path, build):
    """A random head drafts what the test computes, and so takes as many steps. The target is a chain that now and then
    does something else, by way of random weights in its layers."""
    target = tiny.write_model(tmp_path / "target", "llama", num_hidden_layers=8)
    layer, tensors = layer_config(target), tensors_of(target)
    oracle = TargetOracle(target)
    plain = oracle.head = HeadOracle(layer, tensors, oracle.embedding)
    llm = build(target, write_head(tmp_path / "head", layer, tensors), k)
    for prompt in ([5, 6, 7], list(range(60, 90))):
        want = tiny.greedy(target, prompt, 24)
        steps, _, _ = oracle.steps(prompt, want, k)
        out, sizes = pieces(llm, prompt, params(24))
        assert list(out.outputs[0].token_ids) == want and len(sizes) == steps
    assert plain is oracle.head


def test_sampled_answers_gain_more_than_by_the_likeliest_token(tmp_path, build):
    """At temperature 1 the chain goes on as expected two times of three. A head that knows the chain, and draws with
    the noise of the position, is right whenever the token before was as expected."""
    chain = write_chain(tmp_path / "chain", RING, margin=4.0)
    head = write_right_head(tmp_path / "head", RING, "hidden", margin=4.0, drafts_all=True)
    sampled = params(120, temperature=1.0, seed=11)
    [want] = build(chain).generate([PROMPT], sampled, use_tqdm=False)
    tokens = list(want.outputs[0].token_ids)
    out, sizes = pieces(build(chain, head, 1), PROMPT, sampled)
    assert list(out.outputs[0].token_ids) == tokens
    expected = [RING[a] == b for a, b in zip([PROMPT[-1], *tokens], tokens)]
    at, by_noise, by_likeliest = 1, 1, 1
    while at < len(tokens):
        at, by_noise = at + 1 + (expected[at - 1] and at + 1 < len(tokens)), by_noise + 1
    at = 1
    while at < len(tokens):
        both = expected[at - 1] and expected[at]
        at, by_likeliest = at + 1 + (both and at + 1 < len(tokens)), by_likeliest + 1
    assert len(sizes) <= by_noise + 2 < by_likeliest, (len(sizes), by_noise, by_likeliest)


def test_the_number_of_drafts_is_the_heads_own_or_must_be_given(tmp_path, chain, heads, build):
    with pytest.raises(ConfigError, match=r"speculative_config\.num_speculative_tokens must be given"):
        build(chain, heads["hidden"], None)
    target = tiny.write_model(tmp_path / "target", "llama", num_hidden_layers=8)
    head = write_head(tmp_path / "head", layer_config(target), tensors_of(target), "speculators")
    assert build(target, head, None).core.config.speculative.num_speculative_tokens == 3


def test_a_head_of_another_model_is_refused(tmp_path, heads, build):
    target = tiny.write_model(tmp_path, "llama", num_hidden_layers=8)
    with pytest.raises(CheckpointError, match="hidden_size must be 48 as in the model, got 300"):
        build(target, heads["hidden"])

"""SmolLM2 in conversations whose KV does not fit on the device: the same greedy answers with host memory
below it, and from disk after a restart."""

import pytest

from shoal import LLM, SamplingParams

QUESTIONS = ["How does the sea freeze?", "Why is that so?", "Tell me more about it."]
TOPICS = [
    "Water boils at one hundred degrees. ",
    "The moon moves the tides. ",
    "Bees dance to show the way. ",
    "Iron rusts in damp air. ",
]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def talk(llm):
    """Four conversations of three turns, two at a time. Every answer's tokens, and how many prompt tokens
    from the second turn on came from a cache."""
    tokenizer = llm.get_tokenizer()
    histories = [tokenizer.encode(topic * 12) for topic in TOPICS]
    answers, cached = [], 0
    for turn, question in enumerate(QUESTIONS):
        for at in (0, 2):
            pair = histories[at : at + 2]
            for history in pair:
                history += tokenizer.encode(question)
            outputs = llm.generate(
                [{"prompt_token_ids": list(history)} for history in pair], PARAMS, use_tqdm=False
            )
            for history, output in zip(pair, outputs):
                history += output.outputs[0].token_ids
                answers.append(output.outputs[0].token_ids)
                cached += output.num_cached_tokens if turn else 0
    return answers, cached


@pytest.mark.slow
def test_conversations_survive_a_small_cache_and_a_restart(tmp_path):
    small = dict(max_model_len=256, num_gpu_blocks_override=24)  # a conversation takes 10 to 12 blocks
    with LLM("smollm2", max_model_len=256, enable_prefix_caching=False) as llm:
        want, _ = talk(llm)
    with LLM("smollm2", max_model_len=256) as llm:
        answers, most = talk(llm)
        assert answers == want
    with LLM("smollm2", **small) as llm:
        answers, forgetful = talk(llm)
        assert answers == want and forgetful < most / 2
    tiers = dict(
        kv_host_bytes=32 << 20,
        kv_disk_path=str(tmp_path / "kv"),
        kv_disk_bytes=64 << 20,
        kv_load_policy="always",
    )
    with LLM("smollm2", **small, **tiers) as llm:
        assert talk(llm) == (want, most)
        llm.core.check()
    with LLM("smollm2", **small, **tiers) as llm:
        answers, remembered = talk(llm)
        assert answers == want and remembered >= most
        assert llm.stats().kv_tiers["disk"].fetched_blocks > 0

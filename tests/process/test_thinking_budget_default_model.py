"""A budget of thoughts with the default model: what it writes up to the budget, and after the end of reasoning, is
what it writes without one."""

import asyncio
import itertools

from shoal.api import FinishReason, Request
from shoal.config import EngineConfig
from shoal.engine.process.async_llm import AsyncLLM
from shoal.sampling_params import SamplingParams
from shoal.text.reading.thoughts import Start, Thoughts
from shoal.text.thinking_budget import ThinkingBudget
from shoal.text.tokenizer import load_tokenizer
from shoal.weights.source import resolve

DEADLINE_S = 300
THINK = Thoughts("qwen3", "<think>", "</think>", ())
QUESTION = "<|im_start|>user\nWhat is rain?<|im_end|>\n<|im_start|>assistant\n<think>\nRain is"
LENGTH = 40


def test_the_answer_continues_as_after_a_prompt_with_closed_thoughts():
    async def check():
        files = resolve("smollm2")
        tokenizer = load_tokenizer(files, None, None)
        end = tuple(tokenizer.encode("</think>", add_special_tokens=False))
        llm = await AsyncLLM.start(
            EngineConfig(model="smollm2", device="cpu", max_model_len=512, kv_cache_memory_bytes=1 << 25)
        )
        numbers = itertools.count()
        prompt = tokenizer.encode(QUESTION, add_special_tokens=False)

        def request(params, *more):
            return Request(str(next(numbers)), [*prompt, *more], params, arrival=float(next(numbers)))

        async def ids_of(outputs):
            found = [output async for output in outputs]
            assert found[-1].finish_reason is FinishReason.LENGTH
            return [i for output in found for i in output.token_ids]

        try:
            for seed in (None, 1, 2):
                options = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
                params = SamplingParams(**options, max_tokens=LENGTH, ignore_eos=True)
                plain = await ids_of(llm.generate(request(params)))
                assert len(plain) == LENGTH
                for limit in (0, 1, 7, 16):
                    budget = ThinkingBudget(limit, THINK, Start.AMID, end, tokenizer.token_bytes)
                    ids = await ids_of(budget.generate(llm.generate, request(params)))
                    begun = [*plain[:limit], *end]
                    assert len(ids) == LENGTH and ids[: len(begun)] == begun
                    after = request(params)
                    after.output_token_ids = begun
                    assert ids[len(begun) :] == await ids_of(llm.generate(after))
        finally:
            await llm.close()

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))

"""The same answers with and without the prefix cache (after vLLM's prefix_caching_offline.py)."""

import sys

from shoal import LLM, SamplingParams

PREFIX = (
    "You are an expert in managing a school. Draft questions for a teacher who comes in for a first "
    "interview, "
    "has taught for five years, and is to teach mathematics. Based on these information, fulfill the "
    "following paragraph: "
)
PROMPTS = [PREFIX + end for end in ("Hello, my name is", "The capital of France is", "The future of AI is")]
PARAMS = SamplingParams(temperature=0.0)


def main():
    regular = LLM(model=sys.argv[1], enable_prefix_caching=False, gpu_memory_utilization=0.4)
    expected = [output.outputs[0].text for output in regular.generate(PROMPTS, PARAMS)]
    del regular
    cached = LLM(model=sys.argv[1], enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(PROMPTS[0], PARAMS)
    outputs = cached.generate(PROMPTS, PARAMS)
    assert all(output.num_cached_tokens > 0 for output in outputs)
    print("Generated answers are the same:", [output.outputs[0].text for output in outputs] == expected)


if __name__ == "__main__":
    main()

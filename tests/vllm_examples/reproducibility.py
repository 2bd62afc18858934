"""Seeds: the same answers from another engine, others from another seed (after vLLM's
features/batch_invariance/reproducibility_offline.py)."""

import sys

from shoal import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]


def texts(outputs):
    return [[completion.text for completion in output.outputs] for output in outputs]


def main():
    first, second, other = (LLM(model=sys.argv[1], seed=seed) for seed in (1, 1, 2))
    params = SamplingParams(temperature=0.8, top_p=0.95, n=2)
    answers = texts(first.generate(PROMPTS, params))
    assert answers == texts(second.generate(PROMPTS, params)) != texts(other.generate(PROMPTS, params))
    seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=42)
    [alone] = texts(first.generate(PROMPTS[1], seeded))
    assert alone == texts(other.generate(PROMPTS, seeded))[1]
    print(answers)


if __name__ == "__main__":
    main()

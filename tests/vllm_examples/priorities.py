"""Requests of different urgency in one call (the API of LLM.generate's `priority`)."""

import sys

from shoal import LLM, SamplingParams


def main():
    llm = LLM(model=sys.argv[1], scheduling_policy="priority", max_num_seqs=1)
    prompts = ["Later:", "Now:"]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False, priority=[1, 0])
    print([output.prompt for output in outputs])


if __name__ == "__main__":
    main()

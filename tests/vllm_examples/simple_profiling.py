"""A trace of what the engine does (after vLLM's simple_profiling_offline.py; the folder is an argument)."""

import sys

from shoal import LLM, SamplingParams


def main():
    llm = LLM(model=sys.argv[1], tensor_parallel_size=1)
    llm.start_profile(sys.argv[2])
    llm.generate(
        ["Hello, my name is", "The future of AI is"],
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4),
    )
    print("traces:", llm.stop_profile())


if __name__ == "__main__":
    main()

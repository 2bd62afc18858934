"""Four prompts, one answer each (after vLLM's basic/offline_inference/basic.py)."""

import sys

from shoal import LLM, SamplingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main():
    llm = LLM(model=sys.argv[1], trust_remote_code=True, tensor_parallel_size=1)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({len(output.outputs[0].token_ids)} tokens)")


if __name__ == "__main__":
    main()

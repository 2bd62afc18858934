"""The options as an object, whole and changed (as vLLM's multimodal examples do)."""

import sys
from dataclasses import asdict

from shoal import LLM, EngineArgs, SamplingParams


def main():
    engine_args = EngineArgs(
        model=sys.argv[1], max_model_len=128, max_num_seqs=2, limit_mm_per_prompt={"image": 1}
    )
    llm = LLM(**asdict(engine_args) | {"seed": 7})
    [output] = llm.generate(
        "The capital of France is", sampling_params=SamplingParams(temperature=0.2, max_tokens=8)
    )
    print(f"max_model_len={engine_args.max_model_len}", repr(output.outputs[0].text))


if __name__ == "__main__":
    main()

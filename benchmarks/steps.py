"""Microseconds of a decode step by the number of sequences: what a change to kernels is measured by before
whole workloads are.

    python benchmarks/steps.py [--models qwen3-0.6b,qwen3-8b] [--rows 1,4,16,64,256] [--context 1000]
    [--tokens 128] [--penalized 0,1,256]

All sequences have as many tokens. A run of `tokens` steps more, minus one without them, over their number:
prompts, which are in the prefix cache by then, and whatever else a run costs fall out. The best of some runs
each. `penalized`: numbers of rows that have penalties and a bias; a line for each, with its ratio to the
first. Random weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from random import Random

FEW = 8  # steps of the run that is subtracted


def microseconds(llm, rows: int, context: int, tokens: int, penalized: int = 0) -> float:
    from shoal import SamplingParams

    random = Random(rows)
    prompts = [[random.randint(0, 10000) for _ in range(context)] for _ in range(rows)]

    def seconds(count: int) -> float:
        plain = dict(temperature=0.6, ignore_eos=True, max_tokens=count, detokenize=False)
        options = dict(repetition_penalty=1.1, presence_penalty=0.5, logit_bias={7: 1.0, 9: -1.0})
        params = [SamplingParams(**plain, **(options if i < penalized else {})) for i in range(rows)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds(FEW)  # fills the prefix cache
    few, many = min(seconds(FEW) for _ in range(4)), min(seconds(FEW + tokens) for _ in range(3))
    return (many - few) / tokens * 1e6


def main() -> None:
    from workloads import write_model

    from shoal import LLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--penalized", default="0")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        longest = arguments.context + arguments.tokens + FEW
        llm = LLM(
            write_model(tempfile.mkdtemp(), name), load_format="dummy", max_model_len=max(4608, longest)
        )
        for rows in map(int, arguments.rows.split(",")):
            first = None
            for penalized in map(int, arguments.penalized.split(",")):
                if penalized > rows:
                    continue
                found = microseconds(llm, rows, arguments.context, arguments.tokens, penalized)
                first = first or found
                kind = f"{penalized:4d} penalized {found / first:6.3f}" if arguments.penalized != "0" else ""
                print(f"{name:11} {rows:4d} rows {found:9.1f} us {kind}", flush=True)


if __name__ == "__main__":
    main()

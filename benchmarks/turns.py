"""A conversation turn by turn on one GPU, with random weights: the time to the first token of each turn,
against a prompt of the turn alone and against no cache.

    python benchmarks/turns.py [--models qwen3.5-9b] [--turns 10] [--tokens 8000] [--json out.json]

A turn is `--tokens` new tokens behind all that was said before and its answers. "alone" is a prompt of the
new tokens by themselves. "no cache" is the whole conversation with the prefix cache emptied before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from random import Random

from report import write_json
from workloads import write_model


def first_token(llm, prompt: list[int]) -> tuple[float, int]:
    """Returns the seconds to the first token, and how many tokens of the prompt were found in the cache."""
    from shoal import SamplingParams

    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1, detokenize=False)
    start = time.perf_counter()
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    return time.perf_counter() - start, output.num_cached_tokens


def run_model(name: str, num_turns: int, tokens: int, answer: int, options: dict) -> list[dict]:
    from shoal import LLM, SamplingParams

    random = Random(0)

    def new(count: int) -> list[int]:
        return [random.randint(0, 10000) for _ in range(count)]

    length = num_turns * (tokens + answer) + 64
    path = write_model(tempfile.mkdtemp(), name)
    llm = LLM(path, **dict(load_format="dummy", max_model_len=length) | options)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=answer, detokenize=False)
    first_token(llm, new(tokens))
    alone = min(first_token(llm, new(tokens))[0] for _ in range(3))
    llm.reset_prefix_cache()
    rows, said = [], []
    for turn in range(num_turns):
        said += new(tokens)
        # The answer is made by a request of its own, which finds the whole prompt.
        seconds, cached = first_token(llm, said)
        rows.append(
            dict(model=name, turn=turn + 1, prompt=len(said), cached=cached, seconds=seconds, alone=alone)
        )
        said = said + list(llm.generate([said], params, use_tqdm=False)[0].outputs[0].token_ids)
    for row in rows:
        llm.reset_prefix_cache()
        row["no_cache"] = first_token(llm, said[: row["prompt"]])[0]
        print(
            f"{name:16} turn {row['turn']:2} {row['prompt']:6} tokens, {row['cached']:6} found "
            f"{row['seconds'] * 1e3:7.1f} ms   {row['seconds'] / alone:5.2f} x alone ({alone * 1e3:.1f} ms)"
            f"   no cache {row['no_cache'] * 1e3:8.1f} ms",
            flush=True,
        )
    llm.exit()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="qwen3.5-9b")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--options", default="{}", help="more engine options, as JSON")
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    for name in given.models.split(","):
        rows += run_model(name, given.turns, given.tokens, given.answer, json.loads(given.options))
    if given.json:
        write_json(given.json, rows)


if __name__ == "__main__":
    main()

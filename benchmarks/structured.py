"""Cost of structured outputs per step: generation of the same shape with and without a grammar, in turns, as
a ratio.

    python -m benchmarks.structured [--model smollm2] [--streams 1 8 32] [--repeat 5] [--beside 2]

`tokens` tokens are drawn by each stream either way: the grammars (words without end, an array of 1000
objects) go on for as long.
`--beside`: as many processes of one busy Python loop each run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from shoal import LLM, SamplingParams, StructuredOutputsParams

GRAMMARS = {
    "regex": StructuredOutputsParams(regex=r"([a-z]+ )*[A-Z]{100}"),
    "json": StructuredOutputsParams(
        json={
            "type": "array",
            "minItems": 1000,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            },
        }
    ),
}


def seconds(llm: LLM, streams: int, tokens: int, structured: StructuredOutputsParams | None) -> float:
    params = SamplingParams(
        max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True, structured_outputs=structured
    )
    prompts = [[i + 40, *range(100, 116)] for i in range(streams)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    return elapsed / max(len(o.outputs[0].token_ids) for o in outputs)


@contextlib.contextmanager
def busy(num_processes: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--beside", type=int, default=0)
    args = parser.parse_args()
    with LLM(args.model, max_model_len=1024) as llm, busy(args.beside):
        start = time.perf_counter()
        seconds(llm, 1, 4, GRAMMARS["regex"])
        print(f"first structured request: {1e3 * (time.perf_counter() - start):.0f} ms")
        for streams in args.streams:
            times: dict[str, list[float]] = {"plain": [], **{name: [] for name in GRAMMARS}}
            for _ in range(args.repeat):
                for name, found in times.items():
                    found.append(seconds(llm, streams, args.tokens, GRAMMARS.get(name)))
            plain = statistics.median(times["plain"])
            medians = {name: statistics.median(t) for name, t in times.items()}
            print(
                f"{streams} streams, a step:",
                ", ".join(f"{name} {1e3 * t:.2f} ms ({t / plain:.2f} x)" for name, t in medians.items()),
            )


if __name__ == "__main__":
    main()

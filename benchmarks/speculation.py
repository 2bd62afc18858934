"""Tokens per second with and without drafts, by text and batch size: k = 0, fixed k, and the measured choice.
Prints one table; each speed of a text is divided by its speed at k = 0.

    python benchmarks/speculation.py smollm2 --batches 1,4,16 --threads 2

All engines live in one process, on a GPU if there is one, and their runs alternate, so that a change of the
machine meets all of them. --cpu-time counts the process' CPU time in place of the wall's, for a machine that
others use too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

PASSAGE = (
    "The history of the steam engine begins with the first recorded rudimentary device, described by Hero of "
    "Alexandria. Several centuries later, inventors in Europe built pumps that were driven by steam, and "
    "coal mines used them to drain water. James Watt improved the design with a separate condenser, so that "
    "much less fuel was needed for the same work."
)
RECORD = (
    '{"name": "Ada Lovelace", "born": 1815, "city": "London", "field": "mathematics", '
    '"known_for": "notes on the engine"}'
)
# Prompts that the model continues as the name says. The default model is small: it copies what stands twice.
TEXTS = {
    "editing a text": f"{PASSAGE}\n\n{PASSAGE}\n\n{PASSAGE[:60]}",
    "JSON from a document": f"Document: {RECORD}\nThe same document again: {RECORD}\nAnd again: {RECORD[:9]}",
    "chat": "Question: What should one know before a first visit to the mountains?\nAnswer:",
    "random text": "k2 zebra; 77 lamp, oblique fern? quartz 19 - drum of ash and violet,",
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 8}
KINDS = {
    "k = 0": None,
    "k = 4": {**NGRAM, "num_speculative_tokens": 4, "enable_adaptive_verification": False},
    "k = 8": {**NGRAM, "enable_adaptive_verification": False},
    "measured": {"method": "auto"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--count", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()

    import torch

    from shoal import LLM, SamplingParams

    torch.set_num_threads(arguments.threads)
    clock: Callable[[], float] = time.process_time if arguments.cpu_time else time.perf_counter
    engines = {
        name: LLM(
            arguments.model,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 29,
            max_num_seqs=max(map(int, arguments.batches.split(","))),
            enable_prefix_caching=False,
            speculative_config=config,
        )
        for name, config in KINDS.items()
    }

    def seconds(llm: LLM, text: str, batch: int) -> float:
        """Returns the time of decoding: whole answers take it after their first tokens."""
        found = []
        for count in (arguments.count, 1):
            hot = text == TEXTS["random text"]
            params = [
                SamplingParams(
                    temperature=1.5 if hot else 0.8 if text == TEXTS["chat"] else 0.0,
                    seed=i,
                    max_tokens=count,
                    ignore_eos=True,
                )
                for i in range(batch)
            ]
            start = clock()
            llm.generate([text] * batch, params, use_tqdm=False)
            found.append(clock() - start)
        return found[0] - found[1]

    print(f"| text | batch | {' | '.join(KINDS)} |\n|---|---|{'---|' * len(KINDS)}")
    for name, text in TEXTS.items():
        for batch in map(int, arguments.batches.split(",")):
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for run in range(arguments.runs + 1):
                for kind, llm in engines.items():
                    taken = seconds(llm, text, batch)
                    if run:  # the first run warms up, and lets costs be learned
                        times[kind].append(taken)
            speeds = {kind: batch * arguments.count / statistics.median(each) for kind, each in times.items()}
            base = speeds["k = 0"]
            cells = [f"{base:.1f} tokens/s", *(f"{speed / base:.2f}" for speed in list(speeds.values())[1:])]
            print(f"| {name} | {batch} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

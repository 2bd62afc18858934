"""Tokens per second with and without drafts, by text and batch size: k = 0, fixed k, and the measured choice.
Prints one table: each speed is divided by the speed at k = 0 of the same round, and the median of these
ratios counts.

    python benchmarks/speculation.py smollm2 --batches 1,4,16 --threads 2 --json speculation.json
    python benchmarks/speculation.py --draw speculation.json speculation.png
    python benchmarks/speculation.py smollm2 --tasks --threads 1 --cpu-time

With --tasks requests come one after the other, each for the same task as the ones before, and never twice the
same: what earlier answers bring as drafts, and what they cost where they are of no use.

benchmarks/performance.py draws speculation-cpu.json and speculation-gpu.json of benchmarks/results into
docs/performance.md, where there are such files.

All engines live in one process, on a GPU if there is one, and their runs alternate, so that a change of the
machine meets all of them. --cpu-time counts the process' CPU time in place of the wall's, for a machine that
others use too; engines then learn from it what steps cost.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
KEYS = ("name", "city", "field", "known_for")
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "string"} for key in KEYS},
    "required": [*KEYS],
    "additionalProperties": False,
}
EDITING = f"{PASSAGE}\n\n{PASSAGE}\n\n{PASSAGE[:60]}"
# Prompts that the model continues as the name says. The default model is small: it copies what stands twice.
TEXTS = {
    "editing a text": EDITING,
    "editing, with a penalty": EDITING,
    "editing, with log-probabilities": EDITING,
    "JSON by a schema": f"Document: {RECORD}\nThe same document again: {RECORD}\nAs JSON: ",
    "JSON from a document": f"Document: {RECORD}\nThe same document again: {RECORD}\nAnd again: {RECORD[:9]}",
    "chat": "Question: What should one know before a first visit to the mountains?\nAnswer:",
    "random text": "k2 zebra; 77 lamp, oblique fern? quartz 19 - drum of ash and violet,",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "editing, with a penalty": {"frequency_penalty": 0.01},
    "editing, with log-probabilities": {"logprobs": 5},
    "JSON by a schema": {"ignore_eos": False},  # and the schema, as a grammar
    "chat": {"temperature": 0.8},
    "random text": {"temperature": 1.5},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 8}
KINDS = {
    "k = 0": None,
    "k = 4": {**NGRAM, "num_speculative_tokens": 4, "enable_adaptive_verification": False},
    "k = 8": {**NGRAM, "enable_adaptive_verification": False},
    "measured": {"method": "auto"},
}

SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
TASK_KINDS = {
    "k = 0": None,
    "auto": {"method": "auto"},
    "suffix": SUFFIX,
    "suffix, earlier answers": {**SUFFIX, "suffix_decoding_max_cached_requests": 1000},
}
WORDS = {
    "name": "Ada Grace Alan Edsger Barbara Donald Leslie John Frances Ken Dennis Niklaus Kathleen Maurice",
    "surname": "Lovelace Hopper Turing Dijkstra Liskov Knuth Lamport Backus Allen Ritchie Wirth Booth",
    "city": "London Paris Berlin Rome Madrid Vienna Prague Oslo Dublin Zurich Boston Chicago Lisbon",
    "field": "mathematics physics chemistry biology astronomy medicine geology botany optics",
    "subject": "rivers clocks bread violins bridges whales glass maps tea salt kites bees paper ice trains",
}
QUESTIONS = (
    "How are {} made, and how {}?",
    "Tell a short story about {} and {}.",
    "Why do people like {} more than {}?",
    "What was known about {} and {} a hundred years ago?",
    "Write a letter to a friend about {} and {}.",
)


def form(rng: random.Random) -> str:
    """Returns a prompt to write a document's facts as JSON, as an example shows."""

    def facts() -> tuple[str, str]:
        name, surname, city, field = (
            rng.choice(WORDS[kind].split()) for kind in ("name", "surname", "city", "field")
        )
        name, year = f"{name} {surname}", rng.randint(1800, 1990)
        text = f"{name} was born in {year} in {city} and worked in {field}."
        person = f'"person": {{"full_name": "{name}", "year_of_birth": {year}}}'
        details = f'"details": {{"city_of_birth": "{city}", "field_of_work": "{field}"}}'
        return text, f'{{{person}, {details}, "status": "checked"}}'

    (text, answer), (other, _) = facts(), facts()
    return f"Write the facts of a text as JSON.\n\nText: {text}\nJSON: {answer}\n\nText: {other}\nJSON:"


def question(rng: random.Random) -> str:
    """Returns a question that begins as all others do, and has another answer."""
    asked = rng.choice(QUESTIONS).format(*rng.sample(WORDS["subject"].split(), 2))
    return f"An assistant answers questions at length, in plain words.\n\nQuestion: {asked}\nAnswer:"


# One request after the other: how a prompt is made, and the options of its answer.
TASKS: dict[str, tuple[Callable[[random.Random], str], dict[str, Any]]] = {
    "the same form for other documents": (form, {"stop": ["\n"], "ignore_eos": False}),
    "other questions": (question, {"temperature": 0.8}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--count", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--texts", help="names of texts or tasks, with ,, between them; default: all")
    parser.add_argument("--tasks", action="store_true", help="requests for a task, one after the other")
    parser.add_argument("--requests", type=int, default=16, help="with --tasks: requests of a run")
    parser.add_argument("--machine", default="", help="a name of the machine, for --json")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--draw", nargs=2, metavar=("JSON", "PNG"), help="draw the figures of a file")
    arguments = parser.parse_args()
    if arguments.draw:
        with open(arguments.draw[0]) as file:
            draw(json.load(file), arguments.draw[1])
        return

    import torch

    from shoal import LLM, SamplingParams, StructuredOutputsParams
    from shoal.engine import step_loop

    torch.set_num_threads(arguments.threads)
    kinds: dict[str, Any] = TASK_KINDS if arguments.tasks else KINDS
    clock: Callable[[], float] = time.perf_counter
    if arguments.cpu_time:
        clock = time.process_time
        step_loop.time = SimpleNamespace(monotonic=clock)  # type: ignore[attr-defined]
    engines = {
        name: LLM(
            arguments.model,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 29,
            max_num_seqs=max(map(int, arguments.batches.split(","))),
            enable_prefix_caching=False,
            speculative_config=config,
        )
        for name, config in kinds.items()
    }

    def speed(llm: LLM, batches: list[list[str]], options: dict[str, Any]) -> float:
        """Returns the tokens per second of whole answers, batch after batch, less the time up to first
        tokens."""
        options = {"temperature": 0.0, "ignore_eos": True} | options
        taken, num_tokens = [], 0
        for count in (arguments.count, 1):
            start = clock()
            for at, prompts in enumerate(batches):
                seeds = range(at, at + len(prompts))
                params = [SamplingParams(seed=seed, max_tokens=count, **options) for seed in seeds]
                outputs = llm.generate(prompts, params, use_tqdm=False)
                num_tokens += sum(len(one.outputs[0].token_ids) - 1 for one in outputs)
            taken.append(clock() - start)
        return num_tokens / (taken[0] - taken[1])

    rows = []
    names = (arguments.texts or ",,".join(TASKS if arguments.tasks else TEXTS)).split(",,")

    def compare(name: str, batch: int, speed_in: Callable[[LLM, int], float]) -> None:
        """Prints and keeps a row. `speed_in` returns the speed of an engine in a run."""
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for run in range(arguments.runs + 1):
            for kind, llm in engines.items():
                found = speed_in(llm, run)
                if run:  # the first run warms up, and lets costs be learned
                    speeds[kind].append(found)
        base = statistics.median(speeds["k = 0"])
        pairs = {kind: zip(each, speeds["k = 0"]) for kind, each in speeds.items()}
        ratios = {kind: statistics.median(a / b for a, b in each) for kind, each in pairs.items()}
        cells = [f"{base:.1f} tokens/s", *(f"{ratio:.2f}" for ratio in [*ratios.values()][1:])]
        print(f"| {name} | {batch} | {' | '.join(cells)} |", flush=True)
        rows.append({"text": name, "batch": batch, "base": base, "ratios": ratios})

    print(f"| text | batch | {' | '.join(kinds)} |\n|---|---|{'---|' * len(kinds)}")
    for name in names:
        if arguments.tasks:
            make, options = TASKS[name]

            def speed_of_task(llm: LLM, run: int, make: Any = make, options: Any = options) -> float:
                rng = random.Random(run)
                return speed(llm, [[make(rng)] for _ in range(arguments.requests)], options)

            compare(name, 1, speed_of_task)
            continue
        options = dict(OPTIONS.get(name, {}))
        if name == "JSON by a schema":
            options["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
        for batch in map(int, arguments.batches.split(",")):
            prompts = [TEXTS[name]] * batch
            compare(name, batch, lambda llm, run, p=prompts, o=options: speed(llm, [p], o))
    if arguments.json:
        described = {"model": arguments.model, "machine": arguments.machine, "rows": rows}
        described |= {
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["benchmarks/speculation.py", *sys.argv[1:]]),
        }
        with open(arguments.json, "w") as file:
            json.dump(described, file, indent=1)


def draw(measured: dict[str, Any], path: str) -> None:
    """Draws tokens per second by batch size, a panel for each text and a line for each number of drafts."""
    from matplotlib.figure import Figure

    texts = list(dict.fromkeys(row["text"] for row in measured["rows"]))
    figure = Figure(figsize=(3.7 * len(texts), 3.5), layout="constrained")
    colours = dict(zip(KINDS, ("#57606a", "#c2571a", "#b39b53", "#0b6b74")))
    for axis, text in zip(figure.subplots(1, len(texts), squeeze=False)[0], texts):
        rows = [row for row in measured["rows"] if row["text"] == text]
        batches = [row["batch"] for row in rows]
        for kind, colour in colours.items():
            speeds = [row["base"] * row["ratios"][kind] for row in rows]
            axis.plot(range(len(rows)), speeds, marker="o", color=colour, label=kind)
        axis.set(title=text, xlabel="sequences at once", ylabel="tokens a second", ylim=(0, None))
        axis.set_xticks(range(len(rows)), [str(batch) for batch in batches])
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.suptitle(f"{measured['model']} on {measured['machine']}: drafts by number and batch size")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()

"""Workloads against the peers' figures and against physics, on one GPU (or several), with random weights.

    python benchmarks/gpu.py [--models qwen3-0.6b,qwen3-8b:nano+single] [--workloads nano,single,...] [--tp 1]
        [--json out.json] [--quick]

Prints one line a workload: seconds (the better of two runs after a warm-up that fills no prefix cache),
tokens a second, ms a token, the ratio to vLLM 0.24 and to nano-vllm on one H200, the fraction of the physical
floor, the part of the GPU's time between steps in a run of its own. With `--quick` the warm-up is four of the
requests with 16 tokens each, runs longer than four seconds are not repeated, and the time between steps is
not measured. `python benchmarks/performance.py out.json` draws it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from random import Random

START = time.perf_counter()

# Seconds of a whole run on one H200: vLLM 0.24, nano-vllm bb823b3.
PEERS = {
    ("qwen3-0.6b", "nano"): (5.85, 6.47),
    ("qwen3-8b", "nano"): (14.75, 15.98),
    ("qwen3-0.6b", "single"): (0.876, 1.085),
    ("qwen3-8b", "single"): (2.708, 3.000),
    ("qwen3-0.6b", "prefill"): (0.387, 0.4305),
    ("qwen3-8b", "prefill"): (3.275, 3.309),
    ("qwen3-0.6b", "decode"): (3.56, 4.03),
    ("qwen3-8b", "decode"): (8.88, 9.34),
    ("qwen3-0.6b", "shared"): (1.16, 1.03),
    ("qwen3-8b", "shared"): (2.36, None),
    ("qwen3-30b-a3b", "nano"): (23.5, None),
    ("qwen3-30b-a3b", "single"): (2.309, None),
    ("qwen3-30b-a3b", "prefill"): (2.097, None),
    ("qwen3-30b-a3b", "decode"): (13.2, None),
    # vLLM's random routers sent all tokens to the same experts, which are read once
    ("gpt-oss-20b", "nano"): (11.5, None),
    ("gpt-oss-20b", "single"): (1.592, None),
    ("gpt-oss-20b", "prefill"): (1.589, None),
    ("gpt-oss-20b", "decode"): (12.0, None),
    ("gemma-3-12b", "nano"): (27.7, None),
    ("gemma-3-12b", "single"): (4.362, None),
    ("gemma-3-12b", "prefill"): (4.648, None),
    ("gemma-3-12b", "decode"): (17.2, None),
    ("glm-4.7-flash", "nano"): (24.4, None),
    ("glm-4.7-flash", "single"): (2.775, None),
    ("glm-4.7-flash", "prefill"): (2.506, None),
    ("glm-4.7-flash", "decode"): (13.0, None),
    ("qwen3.5-9b", "single"): (2.949, None),
    ("qwen3.5-9b", "prefill"): (3.387, None),
    ("qwen3.5-9b", "decode"): (12.0, None),
    ("qwen3.6-35b-a3b", "nano"): (26.7, None),
    ("qwen3.6-35b-a3b", "single"): (2.447, None),
    ("qwen3.6-35b-a3b", "prefill"): (2.135, None),
    ("qwen3.6-35b-a3b", "decode"): (16.8, None),
}
COMPARED = ["nano", "single", "prefill", "decode", "shared"]
OTHERS = ["four", "service", "tiny", "long", "tree"]
SHARED = {"shared": 2048}  # tokens that all prompts begin with
QUICK_SECONDS = 4.0  # a longer run is not repeated with --quick
CEILINGS = 4.28e12, 680e12  # An H200: bytes copied and bf16 operations per second.


def other_workload(name: str) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths of shapes by which nobody was compared yet."""
    random = Random(1)

    def tokens(count: int) -> list[int]:
        return [random.randint(0, 10000) for _ in range(count)]

    if name == "four":  # four streams
        return [tokens(1024) for _ in range(4)], [256] * 4
    if name == "service":  # a small service's 32 streams
        return [tokens(512) for _ in range(32)], [256] * 32
    if name == "tiny":  # thousands of tiny requests
        return [tokens(random.randint(8, 40)) for _ in range(2000)], [
            random.randint(1, 12) for _ in range(2000)
        ]
    if name == "long":  # long contexts
        return [tokens(30000) for _ in range(8)], [64] * 8
    # a tree of shared prefixes: 2 of 1,024 tokens, 4 more of 1,024 under each, 16 requests under each of
    # those
    if name == "tree":
        documents = [trunk + tokens(1024) for trunk in [tokens(1024) for _ in range(2)] for _ in range(4)]
        return [document + tokens(64) for document in documents for _ in range(16)], [64] * 128
    raise SystemExit(f"no workload {name!r}; there are {', '.join(COMPARED + OTHERS)}")


def run_workload(llm, name: str, kind: str, quick: bool) -> dict:
    from workloads import workload

    from shoal import SamplingParams
    from shoal.bench.floor import Ceilings
    from shoal.bench.offline import floor_of, idle_share

    prompts, lengths = workload(kind) if kind in COMPARED else other_workload(kind)

    def params_of(lengths: list[int]) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in lengths
        ]

    warm_up = [min(16, n) for n in lengths[:4]] if quick else lengths
    llm.generate(prompts[: len(warm_up)], params_of(warm_up), use_tqdm=False)
    runs: list[float] = []
    while len(runs) < 2 and not (quick and runs and runs[0] > QUICK_SECONDS):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params_of(lengths), use_tqdm=False)
        runs.append(time.perf_counter() - start)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    llm.reset_prefix_cache()
    idle = None if quick else idle_share(llm, prompts, params_of(lengths))
    seconds, out, into = min(runs), sum(lengths), sum(map(len, prompts))
    vllm, nano = PEERS.get((name, kind), (None, None))
    least = floor_of(llm, Ceilings(*CEILINGS)).run(
        [len(p) for p in prompts], lengths, llm.core.config.max_num_seqs, SHARED.get(kind, 0)
    )
    floor = None if kind == "tree" else least.seconds / seconds  # a tree's shared reads are not reckoned
    row = dict(
        model=name,
        workload=kind,
        seconds=seconds,
        runs=runs,
        out_tokens_per_s=out / seconds,
        in_tokens_per_s=into / seconds,
        ms_per_token=seconds / max(lengths) * 1e3,
        vs_vllm=vllm and vllm / seconds,
        vs_nano=nano and nano / seconds,
        floor=floor,
        floor_seconds=least.seconds,
        bytes_moved=least.bytes_moved,
        operations=least.operations,
        idle=idle,
    )
    print(
        f"{name:15} {kind:8} {seconds:7.3f} s {row['out_tokens_per_s']:9.0f} out/s "
        f"{row['in_tokens_per_s']:9.0f} in/s "
        f"{row['ms_per_token']:7.3f} ms/token   idle {idle or 0:5.1%}"
        + (f"   floor {floor:5.1%}" if floor else "")
        + (f"   vLLM/ours {vllm / seconds:5.2f}" if vllm else "")
        + (f"   nano/ours {nano / seconds:5.2f}" if nano else ""),
        flush=True,
    )
    return row


def run_model(name: str, workloads: list[str], tp: int, options: dict, quick: bool) -> list[dict]:
    from workloads import write_model

    from shoal import LLM, SamplingParams

    path = write_model(tempfile.mkdtemp(), name)
    start = time.perf_counter()
    options = (
        dict(
            load_format="dummy", max_model_len=32768 if "long" in workloads else 4608, tensor_parallel_size=tp
        )
        | options
    )
    llm = LLM(path, **options)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    rows = [
        dict(
            model=name,
            workload="start-up",
            seconds=time.perf_counter() - start,
            with_imports=time.perf_counter() - START,
        )
    ]
    print(
        f"{name:15} start-up {rows[0]['seconds']:.2f} s ({rows[0]['with_imports']:.2f} s since the process "
        "began), "
        f"{llm.core.num_blocks} blocks",
        flush=True,
    )
    rows += [run_workload(llm, name, kind, quick) for kind in workloads]
    llm.exit()
    return rows


def main() -> None:
    from report import write_json

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", default="qwen3-0.6b,qwen3-8b", help="names, each with its own workloads if it has a colon"
    )
    parser.add_argument("--workloads", default=",".join(COMPARED), help=f"also: {', '.join(OTHERS)}")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--options", default="{}", help="more engine options, as JSON")
    parser.add_argument("--quick", action="store_true", help="a short warm-up and fewer runs")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models.split(","):
        name, _, own = model.partition(":")
        workloads = own.split("+") if own else arguments.workloads.split(",")
        rows += run_model(name, workloads, arguments.tp, json.loads(arguments.options), arguments.quick)
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()

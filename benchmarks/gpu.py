"""The five workloads against the peers' figures, on one GPU (or several), with random weights.

    python benchmarks/gpu.py [--models qwen3-0.6b,qwen3-8b] [--workloads nano,single,...] [--tp 1] [--json out.json]

Prints one line a workload: seconds (the better of two runs after a warm-up that fills no prefix cache), tokens a second, ms a token,
the ratio to vLLM 0.24 and to nano-vllm on one H200, the fraction of the physical floor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

START = time.perf_counter()

# Seconds of a whole run on one H200: vLLM 0.24, nano-vllm bb823b3, the floor (bytes at 4.28 TB/s, FLOPs at 680 TFLOP/s).
PEERS = {
    ("qwen3-0.6b", "nano"): (5.85, 6.47, 3.77), ("qwen3-8b", "nano"): (14.75, 15.98, 11.25),
    ("qwen3-0.6b", "single"): (0.876, 1.085, 0.159), ("qwen3-8b", "single"): (2.708, 3.000, 1.843),
    ("qwen3-0.6b", "prefill"): (0.387, 0.4305, 0.2606), ("qwen3-8b", "prefill"): (3.275, 3.309, 2.913),
    ("qwen3-0.6b", "decode"): (3.56, 4.03, 2.11), ("qwen3-8b", "decode"): (8.88, 9.34, 6.57),
    ("qwen3-0.6b", "shared"): (1.16, 1.03, 0.17), ("qwen3-8b", "shared"): (2.36, None, 1.23),
}
WORKLOADS = ["nano", "single", "prefill", "decode", "shared"]


def run_model(name: str, workloads: list[str], tp: int, options: dict) -> list[dict]:
    from workloads import workload, write_model

    from shoal import LLM, SamplingParams

    path = write_model(tempfile.mkdtemp(), name)
    start = time.perf_counter()
    llm = LLM(path, load_format="dummy", max_model_len=4608, tensor_parallel_size=tp, **options)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    rows = [dict(model=name, workload="start-up", seconds=time.perf_counter() - start, with_imports=time.perf_counter() - START)]
    print(f"{name:11} start-up {rows[0]['seconds']:.2f} s ({rows[0]['with_imports']:.2f} s since the process began), "
          f"{llm.core.num_blocks} blocks", flush=True)
    for kind in workloads:
        prompts, lengths = workload(kind)
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in lengths]
        runs = []
        for _ in range(3):    # the first is the warm-up
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            runs.append(time.perf_counter() - start)
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        seconds, out, into = min(runs[1:]), sum(lengths), sum(map(len, prompts))
        vllm, nano, floor = PEERS.get((name, kind), (None, None, None))
        row = dict(model=name, workload=kind, seconds=seconds, runs=runs, out_tokens_per_s=out / seconds, in_tokens_per_s=into / seconds,
                   ms_per_token=seconds / max(lengths) * 1e3, vs_vllm=vllm and vllm / seconds, vs_nano=nano and nano / seconds,
                   floor=floor and floor / seconds)
        rows.append(row)
        print(f"{name:11} {kind:8} {seconds:7.3f} s {row['out_tokens_per_s']:9.0f} out/s {row['in_tokens_per_s']:9.0f} in/s "
              f"{row['ms_per_token']:7.3f} ms/token"
              + (f"   vLLM/ours {vllm / seconds:5.2f}" if vllm else "") + (f"   nano/ours {nano / seconds:5.2f}" if nano else "")
              + (f"   floor {floor / seconds:5.1%}" if floor else ""), flush=True)
    llm.exit()
    return rows


def main() -> None:
    from report import write_json

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-8b")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--options", default="{}", help="more engine options, as JSON")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        rows += run_model(name, arguments.workloads.split(","), arguments.tp, json.loads(arguments.options))
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()

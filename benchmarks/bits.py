"""Gains of fewer bits on one GPU: seconds of each workload in bf16, with weights and cache in fp8, and
with weights in int4 as `shoal quantize` writes them, in one run, and the weights' memory.

    python benchmarks/bits.py [--shape qwen3-8b] [--workloads single,nano] [--formats "bf16;fp8"]

Weights are random, made up on the GPU. A cell is the better of two runs after a warm-up, none of
which finds a prefix in the cache, and how many times faster than bf16 it is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu import COMPARED
from report import write_json
from workloads import workload, write_model

from shoal import LLM, SamplingParams
from shoal.weights.quantize import quantization_config


def made_up(root: Path, shape: str) -> dict:
    return {"model": write_model(str(root), shape), "load_format": "dummy"}


def int4(root: Path, shape: str) -> dict:
    options = made_up(root / "int4", shape)
    path = Path(options["model"]) / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = quantization_config("int4", 128)
    path.write_text(json.dumps(config))
    return options


FORMATS: dict[str, Callable[[Path, str], dict]] = {
    "bf16": made_up,
    "fp8": lambda root, shape: made_up(root, shape) | {"quantization": "fp8"},
    "fp8, cache too": lambda root, shape: (
        made_up(root, shape) | {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    ),
    "int4": int4,
    "int4, cache fp8": lambda root, shape: int4(root, shape) | {"kv_cache_dtype": "fp8"},
}


def seconds_of(llm: LLM, kind: str) -> float:
    prompts, lengths = workload(kind)
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in lengths
    ]
    runs = []
    for _ in range(3):  # the first is the warm-up
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runs.append(time.perf_counter() - begun)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    return min(runs[1:])


def measure(root: Path, shape: str, name: str, workloads: list[str]) -> list[dict]:
    llm = LLM(**FORMATS[name](root, shape), max_model_len=4608)
    print(f"{name}: {llm.core.num_blocks} blocks", flush=True)
    rows = []
    for kind in workloads:
        rows.append({"model": shape, "format": name, "workload": kind, "seconds": seconds_of(llm, kind)})
        print(f"{name}: {kind} {rows[-1]['seconds']:.3f} s", flush=True)
    rows[0]["blocks"] = llm.core.num_blocks
    llm.exit()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--workloads", default=",".join(COMPARED))
    parser.add_argument("--formats", default=";".join(FORMATS), help="separated by ;")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    workloads, rows = arguments.workloads.split(","), []
    with tempfile.TemporaryDirectory() as root:
        for name in arguments.formats.split(";"):
            rows += measure(Path(root), arguments.shape, name, workloads)
            if arguments.json:
                write_json(arguments.json, rows)
    seconds = {(row["format"], row["workload"]): row["seconds"] for row in rows}
    names = list(dict.fromkeys(row["format"] for row in rows))
    print("| workload |", " | ".join(names), "|")
    print("|---" * (len(names) + 1) + "|")
    for kind in workloads:
        first = seconds[names[0], kind]
        cells = [f"{seconds[name, kind]:.3f}, {first / seconds[name, kind]:.2f}" for name in names]
        print(f"| {kind} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()

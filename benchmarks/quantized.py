"""SmolLM2 in fewer bits on the CPU: its weights as bfloat16, in fp8 and in int4 as `shoal quantize`
writes them, with activations in float32; its KV cache in float32 and in fp8. Perplexity and drift over a
text, bytes on disk, and tokens a second at one stream.

    python benchmarks/quantized.py [--tokens 2000] [--threads 2]

The model is the default one, unpacked to a folder of plain numbers. Drift is the mean and the largest
difference of the log-probabilities of the text's own tokens.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal import LLM, SamplingParams
from shoal.weights.quantize import quantize
from shoal.weights.source import CheckpointFiles
from tests.plain_default_model import GROUP, WINDOW, log_probs, text_ids, write_plain


def rate(llm: LLM, ids: list[int]) -> float:
    """Tokens a second at one stream."""
    params, rates = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), []
    for _ in range(3):
        start = time.perf_counter()
        llm.generate([ids[:32]], params, use_tqdm=False)
        rates.append(64 / (time.perf_counter() - start))
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        plain = write_plain(root / "plain")
        ids = text_ids(plain, args.tokens)
        folders = {"bfloat16": plain}
        for to in ("fp8", "int4"):
            folders[to] = quantize(CheckpointFiles(plain), to, root / to, GROUP)
        base: list[float] = []
        print("| weights | KV cache | bytes | perplexity | mean drift | largest drift | tokens/s |")
        print("|---|---|---|---|---|---|---|")
        for (name, folder), cache in itertools.product(folders.items(), ("auto", "fp8")):
            dtype = "float32" if name == "bfloat16" else "auto"
            options = dict(device="cpu", dtype=dtype, max_model_len=WINDOW + 64, kv_cache_dtype=cache)
            with LLM(str(folder), **options) as llm:
                found, speed = log_probs(llm, ids), rate(llm, ids)
            base = base or found
            drift = [abs(a - b) for a, b in zip(found, base)]
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            perplexity = math.exp(-sum(found) / len(found))
            kept = "float32" if cache == "auto" else cache
            print(
                f"| {name} | {kept} | {size / 1e6:.0f} MB | {perplexity:.3f} | "
                f"{sum(drift) / len(drift):.4f} | {max(drift):.3f} | {speed:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

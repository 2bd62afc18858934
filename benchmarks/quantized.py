"""What fewer bits do to SmolLM2 on the CPU: its weights as float32, in fp8 and in int4 as `shoal quantize`
writes them; its KV cache as float32 and in fp8. Perplexity and drift over a text, bytes on disk, and tokens a
second at one stream.

    python benchmarks/quantized.py [--tokens 2000] [--threads 2]

The model is the default one, unpacked to a folder of plain numbers. Drift is the mean and the largest
difference of the log-probabilities of the text's own tokens.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from shoal import LLM, SamplingParams
from shoal.weights import default_model
from shoal.weights.loader import checkpoint_tensors
from shoal.weights.quantize import quantize
from shoal.weights.source import CheckpointFiles

WINDOW = 512
GROUP = 64  # SmolLM2's 576 inputs are no whole groups of 128


def plain_folder(folder: Path) -> Path:
    path = default_model.fetch_default_model()
    for kind in (transformers.AutoTokenizer, transformers.AutoConfig):
        kind.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    tensors = checkpoint_tensors(CheckpointFiles(path.parent, path))
    plain = {name: t if isinstance(t, torch.Tensor) else t.dequantize() for name, t in tensors}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def text_ids(folder: Path, count: int) -> list[int]:
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = "\n\n".join(page.read_text() for page in pages)
    return transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:count]


def measure(folder: Path, ids: list[int], dtype: str, kv_cache_dtype: str) -> tuple[list[float], float]:
    """The log-probability of each token after those before it in its window; and tokens a second."""
    with LLM(
        str(folder), device="cpu", dtype=dtype, max_model_len=WINDOW + 64, kv_cache_dtype=kv_cache_dtype
    ) as llm:
        windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
        outputs = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        found = [
            position[token].logprob
            for output, window in zip(outputs, windows)
            for token, position in zip(window[1:], output.prompt_logprobs[1:])
        ]
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        rates = []
        for _ in range(3):
            start = time.perf_counter()
            llm.generate([ids[:32]], params, use_tqdm=False)
            rates.append(64 / (time.perf_counter() - start))
    return found, max(rates)


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
        plain = plain_folder(root / "plain")
        ids = text_ids(plain, args.tokens)
        folders = {"float32": plain}
        for to in ("fp8", "int4"):
            folders[to] = quantize(CheckpointFiles(plain), to, root / to, GROUP)
        base: list[float] = []
        print("| weights | KV cache | bytes | perplexity | mean drift | largest drift | tokens/s |")
        print("|---|---|---|---|---|---|---|")
        for (name, folder), cache in itertools.product(folders.items(), ("auto", "fp8")):
            found, rate = measure(folder, ids, "float32" if name == "float32" else "auto", cache)
            base = base or found
            drift = [abs(a - b) for a, b in zip(found, base)]
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            perplexity = math.exp(-sum(found) / len(found))
            kept = "float32" if cache == "auto" else cache
            print(
                f"| {name} | {kept} | {size / 1e6:.0f} MB | {perplexity:.3f} | "
                f"{sum(drift) / len(drift):.4f} | {max(drift):.3f} | {rate:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

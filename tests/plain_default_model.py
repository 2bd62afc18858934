"""The default model in plain numbers, as a model is published before anybody quantizes it, and what it makes of
a text. Its GGUF file holds 4 bits a weight, so that this original is what those mean, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from shoal import LLM, SamplingParams
from shoal.weights.loader import checkpoint_tensors
from shoal.weights.packaged_models import SMOLLM2
from shoal.weights.source import CheckpointFiles

ROOT = Path(__file__).parents[1]
WINDOW = 512
GROUP = 64  # SmolLM2's 576 inputs are not a multiple of 128


def write_plain(folder: Path) -> Path:
    path = SMOLLM2.download()
    for kind in (transformers.AutoTokenizer, transformers.AutoConfig):
        kind.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    tensors = checkpoint_tensors(CheckpointFiles(path.parent, path))
    plain = {name: t if isinstance(t, torch.Tensor) else t.dequantize() for name, t in tensors}
    save_file(
        {name: t.bfloat16() for name, t in plain.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def text_ids(folder: Path, count: int) -> list[int]:
    """The first tokens of this project's pages."""
    text = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    return transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:count]


def log_probs(llm: LLM, ids: list[int]) -> list[float]:
    """The log-probability of each token after those before it in its window."""
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]
    outputs = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [
        position[token].logprob
        for output, window in zip(outputs, windows)
        for token, position in zip(window[1:], output.prompt_logprobs[1:])
    ]

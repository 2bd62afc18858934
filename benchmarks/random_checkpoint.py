"""Checkpoints of a published shape with random weights, in files as Hugging Face's: for what reads files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from workloads import write_model

from shoal.models.shapes import checkpoint_shapes
from shoal.weights.source import CheckpointFiles

SHARD_BYTES = 1 << 30


def write_checkpoint(root: Path, name: str) -> str:
    """Its folder. Weights are bfloat16, in files of a gigabyte or more."""
    folder = write_model(str(root), name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors: dict[str, torch.Tensor] = {}
    num_files = 0

    def write() -> None:
        nonlocal num_files
        save_file(tensors, Path(folder, f"model-{num_files:05}.safetensors"), metadata={"format": "pt"})
        num_files += 1
        tensors.clear()

    for weight, shape in checkpoint_shapes(CheckpointFiles(Path(folder)).config):
        numbers = torch.empty(shape, dtype=torch.bfloat16, device=device)
        tensors[weight] = (numbers.fill_(1) if "norm" in weight else numbers.normal_(std=0.02)).cpu()
        if sum(tensor.nbytes for tensor in tensors.values()) >= SHARD_BYTES:
            write()
    if tensors:
        write()
    return folder

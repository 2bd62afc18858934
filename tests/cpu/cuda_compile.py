"""Compiles kernels in CUDA C++ for Hopper by nvcc, which needs no GPU, for what its log says of them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal.kernels.cuda_library import HEADER

COMPILER = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(COMPILER is None, reason="needs nvcc")


def log_of(source: Path, constants: Mapping[str, int], folder: Path) -> str:
    """Returns what nvcc and ptxas say. `folder` gets the machine code."""
    defines = [f"-D{name}={value}" for name, value in constants.items()]
    options = ["-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", "-I", str(HEADER.parent)]
    done = subprocess.run(
        [str(COMPILER), *options, *defines, "-o", str(folder / "made"), str(source)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr

"""attend_new_tokens on a CPU: its CUDA C++ is compiled with the functions of emulated_cuda.h in place of a GPU's
instructions, and must equal the plain PyTorch of what it does in one launch."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from shoal.kernels.attention import new_tokens
from shoal.kernels.attention.new_tokens import ClusterKernel, arguments_of, attend_new_tokens, takes
from shoal.kernels.layer_cache import LayerCache
from tests.new_tokens import BF16, Case, close

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


CASES = {
    "one block": ([1], 4, 2, 128),
    "a cluster": ([300, 129], 4, 2, 64),
    "padding": ([0, 17, 16], 2, 1, 128),
    "odd group": ([33, 280], 7, 1, 64),
    "eight heads": ([150], 8, 1, 128),
    "more than slots": ([2600], 1, 1, 64),
    "plain": ([90], 2, 1, 64, False, False),
    "window": ([700, 30], 2, 1, 64, True, True, 100),
    "sinks": ([60, 400], 4, 1, 64, False, True, None, True),
    "sinks and a window": ([0, 1, 300], 16, 2, 64, False, True, 128, True),
}


SHAPES = dict.fromkeys(CASES, (16, 1)) | {"more than slots": (8, 2), "a cluster": (14, 1), "window": (6, 3)}


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_chain(name: str, tmp_path: Path) -> None:
    case = Case(*CASES[name])
    tokens, (cluster, slots) = len(case.lens), SHAPES[name]
    kernel = ClusterKernel(case.heads, case.cache.shape[3], case.size, slots)
    constants = {"NEW_T": tokens, "NEW_CLUSTER": cluster} | kernel.constants()
    defines = [f"-D{key}={value}" for key, value in constants.items()]
    folders = [f"-I{HERE}", f"-I{Path(new_tokens.__file__).parent}"]
    library = tmp_path / "emulated.so"
    flags = ["-O1", "-w", "-shared", "-fPIC", *folders, *defines]
    subprocess.run(
        [str(COMPILER), *flags, str(HERE / "emulated_new_tokens.cpp"), "-o", str(library)], check=True
    )
    expected, cache = case.expected()
    out = torch.full((tokens, case.heads * case.size), float("nan"), dtype=BF16)
    pointers = (
        case.qkv,
        *case.norms,
        case.cos_sin,
        case.sinks,
        case.positions,
        case.rows,
        case.lens,
        case.tables,
    )
    arguments = arguments_of((*pointers, case.layer().blocks, out), 1e-6, case.size**-0.5, case.window)
    used = ctypes.CDLL(str(library)).run(ctypes.byref(arguments))
    assert used <= kernel.shared_bytes() <= used + 256
    close(out, expected)
    assert torch.equal(case.layer().blocks.nan_to_num(9.0), cache.nan_to_num(9.0))
    assert (out[case.lens == 0] == 0).all()


def test_other_tokens_are_left_to_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([5], 4, 2, 64)
    assert attend_new_tokens(*case.inputs()) is None  # not on a GPU
    monkeypatch.setattr(new_tokens, "is_hopper", lambda device: True)
    qkv, norm, cache = case.qkv, case.norms[0], case.layer()
    assert takes(qkv, norm, case.cos_sin, cache, 4)
    assert not takes(qkv.expand(5, -1), norm, case.cos_sin, cache, 4)
    assert not takes(qkv.half(), norm, case.cos_sin, cache, 4)
    assert not takes(qkv, norm.float(), case.cos_sin, cache, 4)
    assert not takes(qkv, norm, case.cos_sin[:, :32], cache, 4)
    assert not takes(qkv, norm, case.cos_sin, LayerCache(case.layer().blocks.to(torch.float8_e4m3fn)), 4)
    assert not takes(qkv, norm, case.cos_sin, LayerCache(case.layer().blocks[:, :, :, :8]), 4)
    assert not takes(qkv, norm, case.cos_sin, cache, 17)


@pytest.mark.parametrize(
    ("tokens", "heads", "expected"),
    [
        (1, (16, 8, 128), 9),
        (2, (16, 8, 128), 6),
        (4, (16, 8, 128), None),
        (1, (32, 4, 128), 16),
        (1, (8, 1, 128), None),
    ],
)
def test_the_largest_clusters_are_taken_that_run_at_once(
    monkeypatch: pytest.MonkeyPatch, tokens: int, heads: tuple[int, int, int], expected: int | None
) -> None:
    """Programs of 128 KB on an H200, whose groups of SMs differ in size. A few programs are left to the chain."""

    class Function(NamedTuple):
        binary: bytes
        name: str
        shared_bytes: int

        def clusters_at_once(self, programs: tuple[int, int, int], threads: int) -> int:
            return sum(size // programs[0] for size in 7 * (18,) + (6,))

    compiled: Future[bytes] = Future()
    compiled.set_result(b"")
    monkeypatch.setattr(new_tokens, "_binary", lambda device, kernel: compiled)
    monkeypatch.setattr(new_tokens, "CudaFunction", Function)
    found = new_tokens._function.__wrapped__(torch.device("cuda"), tokens, *heads)
    assert (found and found[0]) == expected

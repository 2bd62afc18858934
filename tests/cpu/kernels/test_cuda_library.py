"""Functions in CUDA C++: what is compiled is kept, and every failure to compile is a BuildError. A stand-in takes
NVRTC's place, except where it is installed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.kernels import cuda_library
from shoal.kernels.attention import new_tokens
from shoal.kernels.c_library import BuildError
from shoal.kernels.cuda_library import CudaFunction, compiled
from shoal.kernels.launching import only_prepared


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "some.cu"
    path.write_text('extern "C" __global__ void some(int* p) { *p = SIZE; }')
    return path


def test_it_is_compiled_once_for_each_source_constant_and_gpu(source, monkeypatch):
    asked = []

    def compile_cuda(text, name, header, options):
        asked.append((name, options))
        return b"code %d" % len(asked)

    monkeypatch.setattr(cuda_library, "compile_cuda", compile_cuda)
    assert [compiled(source, {"SIZE": 3}, (9, 0)) for _ in range(2)] == [b"code 1"] * 2
    assert compiled(source, {"SIZE": 4}, (9, 0)) == b"code 2"
    assert compiled(source, {"SIZE": 3}, (10, 0)) == b"code 3"
    source.write_text("another")
    assert compiled(source, {"SIZE": 3}, (9, 0)) == b"code 4"
    header = source.with_suffix(".cuh")
    header.write_text("constexpr int HALF = SIZE / 2;")
    monkeypatch.setattr(cuda_library, "HEADER", header)
    assert compiled(source, {"SIZE": 3}, (9, 0)) == b"code 5"
    assert asked[0] == ("some.cu", ["--gpu-architecture=sm_90a", "--std=c++17", "-DSIZE=3"])


def test_without_nvrtc_there_is_a_build_error(source, monkeypatch):
    def nvrtc():
        raise OSError("libnvrtc.so.13: not found")

    monkeypatch.setattr(cuda_library, "_nvrtc", nvrtc)
    with pytest.raises(BuildError, match=r"some.cu could not be compiled and kept: libnvrtc.so.13"):
        compiled(source, {}, (9, 0))


@pytest.fixture
def nvrtc() -> None:
    try:
        cuda_library._nvrtc()
    except OSError:
        pytest.skip("needs NVRTC")


@pytest.mark.usefixtures("nvrtc")
def test_an_error_in_the_source_is_told(source):
    source.write_text("int int;")
    with pytest.raises(BuildError, match="NVRTC failed"):
        compiled(source, {}, (9, 0))


@pytest.mark.usefixtures("nvrtc", "source")
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 4, 128), (14, 2, 64)])
def test_attention_of_new_tokens_compiles(heads):
    path = Path(new_tokens.__file__).with_name("new_tokens.cu")
    for tokens in (1, 2):
        kernel = new_tokens.kernel_of(tokens, *heads)
        assert compiled(path, kernel.constants(), (9, 0))[:4] == b"\x7fELF"


def test_a_launch_runs_nothing_where_kernels_are_only_prepared(monkeypatch):
    """Regression: experts' rows were arranged by experts that no kernel had chosen, and the engine ended."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    function, called = CudaFunction.__new__(CudaFunction), []
    function.shared_bytes, function._function = 0, ctypes.c_void_p()
    monkeypatch.setattr(function, "_call", lambda name, *arguments: called.append(name), raising=False)
    with only_prepared():
        function.launch((1, 1, 1), 32, cuda_library._Launch())
    assert called == []
    function.launch((1, 1, 1), 32, cuda_library._Launch())
    assert called == ["cuLaunchKernelEx"]

"""Matmuls with weights that stay quantized, against the matrix they stand for."""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu import linear as cpu_linear
from shoal.kernels.quant.gguf_tensor import GROUPS, GGUFTensor

needs_library = pytest.mark.skipif(cpu_build.load() is None, reason="needs a C compiler")
# activations rounded to 16 bits a group of 32: steps of about 2.2 / 32767, an error of 2e-5 of each term
TOLERANCE = 1e-4
REQUANTIZED = 1e-2  # weights rounded to 8 bits a group: then 5e-3


def random_tensor(kind: str, rows: int, cols: int, seed: int = 0) -> GGUFTensor:
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    size, num_bytes = GROUPS[kind]
    groups = generator.integers(0, 256, (rows, cols // size, num_bytes), dtype=np.uint8)
    offsets = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0]}.get(
        kind, [0, 2]
    )  # where the group's fp16 numbers are
    for offset in offsets:
        scales = generator.uniform(0.001, 0.01, groups.shape[:2]).astype(np.float16)
        groups[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return GGUFTensor(kind, (rows, cols), groups.reshape(rows, -1))


def error(
    got: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> float:
    """The error of x W^T, relative to the size that a sum of such terms has when they don't cancel."""
    want = torch.nn.functional.linear(x.float(), matrix, bias)
    return float(
        ((got.float() - want) / (x.float().square() @ matrix.square().T).sqrt()).square().mean().sqrt()
    )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    cpu_build.load().shoal_set_threads(request.param)
    yield
    cpu_build.load().shoal_set_threads(torch.get_num_threads())


@needs_library
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("outs", "cols"), [(1, 32), (16, 64), (23, 96), (100, 576)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17])
def test_a_packed_matmul_is_that_of_the_dequantized_matrix(threads, kind, outs, cols, tokens):
    tensor = random_tensor(kind, outs, cols)
    x, bias = torch.randn(tokens, cols), torch.randn(outs)
    weight = cpu_linear.pack([tensor])
    assert error(weight.linear(x, bias), x, tensor.dequantize(), bias) < TOLERANCE


@needs_library
def test_engines_in_two_threads_share_the_helpers(threads):
    weight, x = cpu_linear.pack([random_tensor("Q4_1", 100, 576)]), torch.randn(40, 576)
    want = weight.linear(x, None)

    def work(_: int) -> bool:
        return all(torch.equal(weight.linear(x, None), want) for _ in range(500))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(3)))


@needs_library
def test_many_rows_take_several_panels():
    tensor = random_tensor("Q4_1", 40, 1536)
    x = torch.randn(700, 1536)
    assert error(cpu_linear.pack([tensor]).linear(x, None), x, tensor.dequantize()) < TOLERANCE


@needs_library
def test_each_row_of_a_batch_is_as_if_it_were_alone():
    weight = cpu_linear.pack([random_tensor("Q4_1", 100, 576), random_tensor("Q4_1", 30, 576, seed=1)])
    x = torch.randn(19, 576)
    together = weight.linear(x, None)
    assert all(torch.equal(weight.linear(x[i : i + 1], None)[0], together[i]) for i in range(19))


@needs_library
@pytest.mark.parametrize(
    "kinds", [("Q4_1", "Q4_1", "Q4_0"), ("Q4_0", "Q8_0"), ("Q4_K", "Q6_K"), ("Q4_K", "Q4_1"), ("Q5_K",)]
)
def test_rows_of_several_tensors_and_kinds_are_one_weight(kinds):
    tensors = [random_tensor(kind, 13 + 8 * i, 512, seed=i) for i, kind in enumerate(kinds)]
    weight = cpu_linear.pack(tensors)
    x = torch.randn(5, 512)
    four = all(kind.startswith("Q4") for kind in kinds)
    assert weight.header.bits == (4 if four else 8)
    # Q4_K's scales become fp16
    tolerance = REQUANTIZED if not four else 1e-3 if "Q4_K" in kinds else TOLERANCE
    assert error(weight.linear(x, None), x, torch.cat([t.dequantize() for t in tensors])) < tolerance


@needs_library
def test_a_packed_weight_is_as_small_as_the_file():
    tensors = {kind: random_tensor(kind, 960, 576) for kind in ("Q4_0", "Q4_1", "Q8_0")}
    ratios = {kind: cpu_linear.pack([t]).data.nbytes / t.data.nbytes for kind, t in tensors.items()}
    assert ratios == {"Q4_0": pytest.approx(20 / 18), "Q4_1": 1.0, "Q8_0": 1.0}


@needs_library
def test_a_shard_of_columns_packs_from_its_strided_view():
    tensor = random_tensor("Q4_1", 20, 128).columns(32, 96)
    x = torch.randn(2, 64)
    assert error(cpu_linear.pack([tensor]).linear(x, None), x, tensor.dequantize()) < TOLERANCE


@needs_library
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_moved_columns_are_packed_in_their_order(kind):
    order = np.random.default_rng(0).permutation(8)
    tensor = random_tensor(kind, 20, 256).take_columns(order)
    tolerance = {"Q4_K": 1e-3, "Q6_K": REQUANTIZED}.get(kind, TOLERANCE)
    x = torch.randn(2, 256)
    assert error(cpu_linear.pack([tensor]).linear(x, None), x, tensor.dequantize()) < tolerance


@needs_library
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_embedding_rows_are_the_dequantized_ones(kind):
    tensor = random_tensor(kind, 50, 256)
    ids = torch.tensor([49, 0, 17, 17])
    tolerance = {"Q4_K": 1e-3, "Q6_K": 1e-2}.get(kind, 0.0)  # fp16 scales; 8 bits
    want = tensor.dequantize()[ids]
    assert (cpu_linear.pack([tensor]).embed(ids) - want).norm() <= tolerance * want.norm()


@needs_library
def test_activations_may_be_strided_unaligned_zero_or_of_another_dtype():
    tensor = random_tensor("Q8_0", 30, 64)
    weight, matrix = cpu_linear.pack([tensor]), tensor.dequantize()
    unaligned = torch.randn(3 * 64 + 1)[1:].view(3, 64)
    assert error(weight.linear(unaligned, None), unaligned, matrix) < TOLERANCE
    strided = torch.randn(3, 128)[:, ::2]
    assert error(weight.linear(strided, None), strided, matrix) < TOLERANCE
    half = torch.randn(3, 64, dtype=torch.bfloat16)
    got = weight.linear(half, None)
    assert got.dtype == torch.bfloat16 and error(got, half, matrix) < 4e-3  # its rounding
    assert not weight.linear(torch.zeros(2, 64), None).any()
    assert weight.linear(torch.zeros(0, 64), None).shape == (0, 30)


@pytest.mark.parametrize("kinds", [("Q4_1",), ("Q4_0", "Q4_1"), ("Q4_K",), ("Q8_0",), ("Q6_K", "Q4_0")])
def test_without_a_library_torch_does_it(monkeypatch, kinds):
    monkeypatch.setattr(cpu_linear, "LIBRARY", None)
    tensors = [random_tensor(kind, 32, 256, seed=i) for i, kind in enumerate(kinds)]
    weight = cpu_linear.pack(tensors)
    x, bias = torch.randn(4, 256), torch.randn(32 * len(kinds))
    matrix = torch.cat([t.dequantize() for t in tensors])
    # bf16 activations and scales
    assert error(weight.linear(x, bias), x, matrix, bias) < 1e-2
    ids = torch.tensor([3, 31])
    assert torch.equal(weight.embed(ids), tensors[0].dequantize()[ids])


def test_without_a_compiler_the_warning_says_what_to_install(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert cpu_build.load.__wrapped__() is None
    assert "apt install gcc" in caplog.text and "neither gcc nor cc" in caplog.text


@needs_library
def test_processes_that_build_at_once_get_one_library(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(cpu_build.build, [(*cpu_build.FLAGS, "-O0")] * 2))
    assert paths[0] == paths[1] and [p.name for p in tmp_path.iterdir()] == [paths[0].name]
    cpu_build.open_library(paths[0])


@needs_library
@pytest.mark.parametrize("target", ["x86-64", "alderlake", "icelake-server"])
@pytest.mark.skipif(cpu_build.NATIVE != "-march=native", reason="needs x86")
def test_kernels_for_other_processors_compile(monkeypatch, tmp_path, target):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    library = cpu_build.open_library(
        cpu_build.build((*cpu_build.FLAGS, f"-march={target}", "-O1", "-Wall", "-Werror"))
    )
    if target == "x86-64":  # plain C runs anywhere, and must agree
        monkeypatch.setattr(cpu_linear, "LIBRARY", library)
        for kind in ("Q4_1", "Q8_0"):
            tensor, x = random_tensor(kind, 23, 96), torch.randn(3, 96)
            assert error(cpu_linear.pack([tensor]).linear(x, None), x, tensor.dequantize()) < TOLERANCE

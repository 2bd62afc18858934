"""Hopper's matmuls of each head with its own matrix: run as numbers (gluon_numbers.py) against the reference, and
compiled for sm_90 in the sizes that published models bring. tests/gpu/test_latent_gpu.py runs them on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gluon_numbers import Descriptor, Machine, load
from triton_compile import check_kernels

from shoal.kernels.latent import reference
from shoal.kernels.latent.hopper_project import hopper_absorb_queries, hopper_project_values, takes_heads
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.attention import QueryScaling
from shoal.kinds.latent import LatentKind
from shoal.kinds.rope import RopeConfig

CAPABILITIES = (90,)
BF16, FP16 = torch.bfloat16, torch.float16
GLM_FLASH = LatentKind(20, 768, 512, 192, 64, 256, 0.1, RopeConfig())


def as_numbers():
    names = dict(
        descriptor=lambda matrix, rows, columns, _=0: Descriptor(
            matrix, [*matrix.shape], [*matrix.stride()], [rows, columns], None
        ),
        cdiv=cdiv,
        next_power_of_2=next_power_of_2,
    )
    return load(Machine(), "hopper_project", names, folder="latent")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", [None, QueryScaling(0.3, 7, 1)])
@pytest.mark.parametrize(("rows", "plain", "size"), [(50, 64, 128), (130, 192, 64), (64, 64, 192)])
def test_queries_as_numbers(
    rows: int, plain: int, size: int, scaling: QueryScaling | None, interleaved: bool
) -> None:
    torch.manual_seed(0)
    q, kv_b = torch.randn(rows, 3, plain + 64), torch.randn(3, plain + 64, size)
    angles, positions = torch.randn(90, 32), torch.randint(-1, 90, (rows,), dtype=torch.int32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    found = as_numbers().hopper_absorb_queries(q, kv_b, cos_sin, positions, interleaved, scaling)
    expected = reference.absorb_queries(q, kv_b, cos_sin, positions, interleaved, scaling)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("rows", "size", "values"), [(40, 128, 64), (130, 512, 256), (257, 256, 128)])
def test_values_as_numbers(rows: int, size: int, values: int) -> None:
    torch.manual_seed(0)
    sums, kv_b = torch.randn(rows, 3, size), torch.randn(3, 64 + values, size)
    found = torch.full((rows, 3, values), float("nan"))
    as_numbers().hopper_project_values(sums, kv_b, found)
    torch.testing.assert_close(found, reference.project_values(sums, kv_b, values), atol=1e-3, rtol=1e-5)


def test_few_rows_and_other_sizes_are_not_taken() -> None:
    assert takes_heads(torch.zeros(40, 20, 256, dtype=BF16), GLM_FLASH)
    assert not takes_heads(torch.zeros(32, 20, 256, dtype=BF16), GLM_FLASH)
    assert not takes_heads(torch.zeros(40, 20, 256), GLM_FLASH)
    assert not takes_heads(torch.zeros(40, 20, 300, dtype=BF16)[..., :256], GLM_FLASH)
    assert not takes_heads(torch.zeros(40, 20, 240, dtype=BF16), replace(GLM_FLASH, qk_rope_head_dim=48))


LAUNCHES: dict[str, Callable[[], object]] = {}


def launch(
    rows: int,
    heads: int,
    plain: int,
    size: int,
    values: int,
    dtype: torch.dtype,
    scaling: QueryScaling | None,
) -> None:
    kv_b, positions = torch.zeros(heads, plain + values, size, dtype=dtype), torch.zeros(rows).int()
    q, sums = (torch.zeros(rows, heads, n, dtype=dtype) for n in (plain + 64, size))
    hopper_absorb_queries(q, kv_b, torch.zeros(8, 64), positions, scaling is None, scaling)
    hopper_project_values(sums, kv_b, torch.zeros(rows, heads, values, dtype=dtype))


for name, *case in (
    ("glm-4.7-flash, 256 rows", 256, 20, 192, 512, 256, BF16, None),
    ("glm-4.7-flash, 40 rows in fp16", 40, 20, 192, 512, 256, FP16, None),
    ("deepseek-v3", 100, 128, 128, 512, 128, BF16, None),
    ("mistral-small-4", 100, 32, 64, 256, 128, BF16, QueryScaling(0.1, 8192)),
):
    LAUNCHES[name] = lambda case=case: launch(*case)


@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case):
    check_kernels(compiled[case])
    # Two programs share an SM.
    assert all(2 * (kernel.shared + 1024) <= 228 * 1024 for kernel in compiled[case])

"""Small products on a GPU at real sizes, against float32 products of the same operands: one rounding to bf16
is 2**-9 relative."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from shoal.kernels import triton_ops
from shoal.kernels.matmul.dispatch import After, Before, Kernel, Shape, choose, gpu_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE = torch.device("cuda")


def kernel_of(x: torch.Tensor, weight: torch.Tensor, gated: bool, before: Before = Before.NOTHING) -> Kernel:
    shape = Shape(
        weight.shape[0] // (1 + gated), weight.shape[1], before, After.SILU_MUL if gated else After.NOTHING
    )
    return choose(shape, x.shape[0], x.dtype, gpu_of(x.device)).kernel


def operands(
    rows: int, outs: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    print("seed", torch.manual_seed(17).initial_seed())
    x, weight = (
        torch.randn(rows, columns, device=DEVICE),
        torch.randn(outs, columns, device=DEVICE) / columns**0.5,
    )
    return x.to(dtype), weight.to(dtype), torch.randn(outs, device=DEVICE).to(dtype)


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.float() - exact).norm() / exact.norm())


def check_replays(launch: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch()
    for _ in range(20):
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("outs", "columns"),
    [
        (4096, 1024),
        (1024, 3072),
        (151936, 1024),
        (1000, 576),
        (37, 2056),
        (6144, 4096),
        (1000, 4096),
        (1016, 1544),
        (2051, 2576),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16, 17, 31, 33, 100, 255, 300])
def test_products(rows: int, outs: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, outs, columns, dtype)
    assert error(triton_ops.linear(x, weight, bias), F.linear(x.float(), weight.float(), bias.float())) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outs", "columns"), [(257, 2048), (1, 576), (2051, 2576)])
def test_many_rows_with_unaligned_outputs(outs: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(5003, outs, columns, dtype)
    ours = triton_ops.linear(x, weight, bias)
    assert ours.is_contiguous()
    assert error(ours, F.linear(x.float(), weight.float(), bias.float())) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outs", "columns"),
    [
        (1024, 2048),
        (1024, 3072),
        (1000, 576),
        (37, 2056),
        (4096, 4096),
        (4096, 12288),
        (1016, 1544),
        (2051, 9728),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 7, 16, 17, 31, 33, 64, 100, 255, 300])
def test_products_that_add_themselves(rows: int, outs: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, some_bias = operands(rows, outs, columns, dtype)
    for bias in (None, some_bias):
        room = torch.randn(rows + 2, outs, device=DEVICE).to(dtype)
        before, residual = room.clone(), room[1:-1]
        left = triton_ops.linear_add(x, weight, bias, residual)
        residual += 0 if left is None else left
        assert torch.equal(room[0], before[0]) and torch.equal(room[-1], before[-1])
        if kernel_of(x, weight, False) is not Kernel.CUBLAS:
            assert torch.equal(residual, before[1:-1] + triton_ops.linear(x, weight, bias))
        elif rows:
            exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            assert error(residual, before[1:-1] + exact) < 4e-3


@pytest.mark.parametrize(
    ("outs", "columns", "gated"),
    [(1024, 3072, False), (4096, 4096, False), (4096, 12288, False), (3072, 1024, True)],
)
@pytest.mark.parametrize("rows", [3, 5, 24, 40, 72, 100, 200])
def test_what_lies_behind_the_rows_changes_no_bit(rows: int, outs: int, columns: int, gated: bool) -> None:
    x, weight, _ = operands(rows, outs * (1 + gated), columns, torch.bfloat16)
    room = torch.full((256, columns), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    room[:rows] = x
    product = triton_ops.linear_gated if gated else triton_ops.linear
    assert torch.equal(product(room[:rows], weight, None), product(x, weight, None))


@pytest.mark.parametrize(
    ("size", "columns"),
    [(3072, 1024), (12288, 4096), (1536, 576), (360, 1048), (29, 130), (1000, 4096), (2053, 2576)],
)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 32, 50, 65, 100, 256])
def test_gated_products(rows: int, size: int, columns: int) -> None:
    x, weight, bias = operands(rows, 2 * size, columns, torch.bfloat16)
    gate, up = F.linear(x.float(), weight.float(), bias.float()).chunk(2, dim=1)
    assert error(triton_ops.linear_gated(x, weight, bias), F.silu(gate) * up) < 8e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "columns"), [(3072, 1024), (1096, 584), (128, 64), (12288, 4096)])
@pytest.mark.parametrize("rows", [4096, 5003])
def test_gated_products_of_many_rows(rows: int, size: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, _ = operands(rows, 2 * size, columns, dtype)
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=1)
    ours = triton_ops.linear_gated(x, weight, None)
    assert error(ours, F.silu(gate) * up) < 8e-3
    gelu = triton_ops.linear_gated(x, weight, None, "gelu_tanh")
    assert error(gelu, F.gelu(gate, approximate="tanh") * up) < 8e-3
    assert torch.equal(triton_ops.linear_gated(x[:4096], weight, None), ours[:4096])


@pytest.mark.parametrize(
    ("rows", "outs", "columns"), [(1, 128, 2048), (1, 257, 2048), (2, 128, 2048), (1, 8, 4096), (1, 32, 2880)]
)
def test_a_norm_is_returned_with_its_matmul(rows: int, outs: int, columns: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns).cuda().bfloat16(), torch.randn(outs, columns).cuda().bfloat16()
    norm = torch.rand(columns).cuda().bfloat16()
    normed, ours = triton_ops.norm_linear(x, norm, 1e-6, weight, None)
    assert torch.equal(normed, triton_ops.rms_norm(x, norm, 1e-6))
    exact = normed.double() @ weight.double().T
    assert (ours - exact).norm() / exact.norm() < 6e-3


@pytest.mark.parametrize(
    ("outs", "columns", "gated"),
    [(4096, 1024, False), (6144, 1024, True), (6144, 4096, False), (74, 2056, True)],
)
@pytest.mark.parametrize("rows", [1, 2, 8, 65])
def test_sum_norm_and_product(rows: int, outs: int, columns: int, gated: bool) -> None:
    x, weight, bias = operands(rows, outs, columns, torch.bfloat16)
    residual, norm_weight = torch.randn_like(x), torch.rand_like(x[0])
    total = x + residual
    y = F.linear(
        F.rms_norm(total.float(), (columns,), norm_weight.float(), 1e-6), weight.float(), bias.float()
    )
    ours, ours_total = triton_ops.add_norm_linear(
        x, residual, norm_weight, 1e-6, weight, bias, "silu" if gated else None
    )
    assert torch.equal(ours_total, total)
    assert error(ours, F.silu(y.chunk(2, dim=1)[0]) * y.chunk(2, dim=1)[1] if gated else y) < 8e-3
    of_the_sum, unchanged = triton_ops.add_norm_linear(
        None, total, norm_weight, 1e-6, weight, bias, "silu" if gated else None
    )
    assert unchanged is total and torch.equal(total, ours_total)
    assert error(of_the_sum, F.silu(y.chunk(2, dim=1)[0]) * y.chunk(2, dim=1)[1] if gated else y) < 8e-3


def test_a_chain_of_sums_norms_and_products_is_in_order_and_equal_each_time() -> None:
    x, weight, _ = operands(1, 2048, 2048, torch.bfloat16)
    norm_weight = torch.ones(2048, device=DEVICE, dtype=torch.bfloat16)

    def chain(wait: bool) -> torch.Tensor:
        y, residual = x, torch.zeros_like(x)
        for _ in range(60):
            y, residual = triton_ops.add_norm_linear(y, residual, norm_weight, 1e-6, weight, None, None)
            y = triton_ops.linear(y, weight, None)
            if wait:
                torch.cuda.synchronize()
        return y

    expected = chain(wait=True)
    check_replays(lambda: chain(wait=False), expected)


@pytest.mark.parametrize(
    ("rows", "hidden", "size"),
    [
        (1, 1024, 3072),
        (2, 1024, 3072),
        (16, 1024, 3072),
        (64, 1024, 3072),
        (300, 1024, 3072),
        (1, 2560, 9728),
        (1, 4096, 12288),
    ],
)
def test_a_chain_of_products_that_add_themselves_is_in_order_and_equal_each_time(
    rows: int, hidden: int, size: int
) -> None:
    """Each pair of kernels reads the residual and writes it in place, as a layer's halves do."""
    x, up, _ = operands(rows, 2 * size, hidden, torch.bfloat16)
    down, norm_weight = (
        operands(1, hidden, size, torch.bfloat16)[1],
        torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16),
    )

    def chain(wait: bool) -> torch.Tensor:
        residual = x.clone()
        for _ in range(60):
            hidden, residual = triton_ops.add_norm_linear(None, residual, norm_weight, 1e-6, up, None, "silu")
            triton_ops.linear_add(hidden, down, None, residual)
            if wait:
                torch.cuda.synchronize()
        return residual

    expected = chain(wait=True)
    check_replays(lambda: chain(wait=False), expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outs", "inputs"), [(6144, 4096), (2051, 2576), (2048, 8192)])
def test_a_norm_inside_a_ring_rounds_as_the_norm_itself(outs: int, inputs: int, gated: bool) -> None:
    x, weight, bias = operands(1, outs * (1 + gated), inputs, torch.bfloat16)
    if kernel_of(x, weight, gated, Before.NORM) is not Kernel.HOPPER_ROW:
        pytest.skip("needs Hopper")
    norm_weight = torch.rand_like(x[0])
    ours, _ = triton_ops.add_norm_linear(None, x, norm_weight, 1e-6, weight, bias, "silu" if gated else None)
    apart = triton_ops.rms_norm(x, norm_weight, 1e-6)
    expected = (triton_ops.linear_gated if gated else triton_ops.linear)(apart, weight, bias)
    # the sums of squares have different orders: here and there a last bit
    assert error(ours, expected.float()) < 2e-4


def test_a_chain_of_dependent_launches_is_in_order_and_equal_each_time() -> None:
    """Each kernel overwrites what the one before the last read (the allocator reuses memory); cuBLAS stands
    in between in places."""
    x, weight, _ = operands(1, 2048, 2048, torch.bfloat16)
    norm_weight = torch.ones(2048, device=DEVICE, dtype=torch.bfloat16)

    def chain(product) -> torch.Tensor:
        y, residual = x, torch.zeros_like(x)
        for i in range(60):
            y = F.linear(y, weight) if i % 7 == 3 else product(y, weight)
            y = triton_ops.add_rms_norm(y, residual, norm_weight, 1e-6)
        return y

    def ours(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return triton_ops.linear(y, weight, None)

    def waiting(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        y = ours(y, weight)
        torch.cuda.synchronize()
        return y

    expected = chain(waiting)
    assert torch.equal(chain(ours), expected)
    check_replays(lambda: chain(ours), expected)


def test_a_result_is_the_same_each_time() -> None:
    for rows in (1, 3, 16):
        x, weight, _ = operands(rows, 1024, 3072, torch.bfloat16)
        assert kernel_of(x, weight, False) is not Kernel.CUBLAS
        first = triton_ops.linear(x, weight, None)
        assert all(torch.equal(triton_ops.linear(x, weight, None), first) for _ in range(20))


def test_rows_beyond_the_last_are_not_read() -> None:
    if not gpu_of(torch.device("cuda", 0)).hopper:
        pytest.skip("needs Hopper")
    for rows, outs, inputs in ((17, 4096, 1024), (70, 1024, 2048)):
        x, weight, bias = operands(rows, outs, inputs, torch.bfloat16)
        room = torch.full((rows + 64, inputs), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        room[:rows] = x
        ours = triton_ops.linear(room[:rows], weight, bias)
        assert torch.equal(ours, triton_ops.linear(x, weight, bias)) and not ours.isnan().any()


def test_a_chain_of_split_products_is_in_order() -> None:
    """Launches that overlap share the counters of parts that have arrived."""
    x, down, _ = operands(64, 1024, 3072, torch.bfloat16)  # split in two
    up = down.T.contiguous()

    def chain(sync: bool) -> torch.Tensor:
        y = x
        for i in range(30):
            y = triton_ops.linear(y, up if i % 2 else down, None)
            if sync:
                torch.cuda.synchronize()
        return y

    expected = chain(True)
    check_replays(lambda: chain(False), expected)

"""Repeated launches: each one is what Triton itself would have launched. In a process of its own, in which
Triton does not interpret; nothing is compiled or runs."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from shoal.kernels.matmul.split_k import arrival_counters

OPTIONS = {}, {"SECOND": 4}, {"num_warps": 8}, {"flag": False}


@triton.jit(do_not_specialize=["rows"])
def several_kinds(
    x_ptr, y_ptr, bias_ptr, scale, size, rows, FIRST: tl.constexpr, SECOND: tl.constexpr = 3, flag=True
):
    pass


@pytest.fixture(scope="module")
def seen():
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join((str(root), str(Path(__file__).parents[1]))),
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout.splitlines()[0])  # the seed
    return json.loads(done.stdout.splitlines()[-1])


def test_every_launch_is_the_one_that_triton_makes(seen):
    assert seen["differences"] == [] and seen["variants"] > 20


def test_triton_is_asked_once_for_arguments_of_the_same_kinds(seen):
    assert 0 < seen["asked"] < seen["launches"] / 2


def test_a_descriptor_of_other_tiles_is_of_another_kind(seen):
    assert len(seen["descriptors"]) == 3  # six launches, two for each size of tiles


def test_another_threads_launches_are_tritons_own(seen):
    assert seen["another thread"] == 4  # four launches


def test_tritons_launch_is_back_afterwards_also_after_an_error(seen):
    assert seen["restored"] == [True, True]


def _observe() -> dict[str, object]:
    from concurrent.futures import ThreadPoolExecutor

    from triton.runtime.jit import JITFunction
    from triton_compile import _NoDriver

    from shoal.kernels.launching import repeated_launches

    triton.runtime.driver.set_active(_NoDriver())
    seed = random.randrange(1 << 32)
    print("seed", seed)
    random.seed(seed)
    launched: list[tuple[object, ...]] = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def __init__(self, key: str) -> None:
            self.key = key

        def launch_metadata(self, *_: object) -> None:
            return None

        def run(self, x, y, z, stream, function, metadata, _launch, _enter, _leave, *arguments) -> None:
            assert (stream, function, metadata) == (0, "function", "metadata")
            launched.append((self.key, x, y, z, *map(_shown, arguments)))

    def compile_nothing(self, key, signature, device, *_: object) -> Compiled:
        return self.device_caches[device][0].setdefault(key, Compiled(key))

    JITFunction._do_compile = compile_nothing
    run = JITFunction.run
    asked = []

    def counting(self, *arguments, **options):
        asked.append(self)
        return run(self, *arguments, **options)

    JITFunction.run = counting
    types = torch.float32, torch.bfloat16
    tensors = {kind: [torch.zeros(64, dtype=kind)[start:] for start in (0, 0, 1)] for kind in types}

    def calls_of_one_shape():
        """Calls whose arguments differ in their tensors' alignments alone, and in the numbers."""
        kinds = random.choices(types, k=2)
        bias, options = random.choice([None, tensors[types[0]][0]]), random.choice(OPTIONS)
        for _ in range(16):
            arguments = (
                *(random.choice(tensors[kind]) for kind in kinds),
                bias,
                random.choice([0.5, 2.0]),
                random.choice([1, 16]),
                random.choice([1, 16]),
            )
            grid = random.choice([(3,), (3, 4), (3, 4, 5)])
            yield functools.partial(several_kinds[grid], *arguments, FIRST=True, **options)

    calls = [call for _ in range(12) for call in calls_of_one_shape()] * 4
    random.shuffle(calls)
    for function in calls:
        function()
    expected = launched.copy()
    launched.clear()
    asked.clear()
    with repeated_launches():
        for function in calls:
            function()
    seen: dict[str, object] = {
        "differences": [pair for pair in zip(expected, launched, strict=True) if pair[0] != pair[1]],
        "variants": len({key for key, *_ in expected}),
        "launches": len(calls),
        "asked": len(asked),
    }
    seen["descriptors"] = _descriptors(repeated_launches, launched)
    asked.clear()
    with ThreadPoolExecutor(1) as pool, repeated_launches():
        for _ in range(4):
            pool.submit(calls[0]).result()
    seen["another thread"] = len(asked)
    restored = [JITFunction.run is counting]
    with pytest.raises(ValueError, match="a mistake"), repeated_launches():
        raise ValueError("a mistake")
    seen["restored"] = [*restored, JITFunction.run is counting]
    return seen


def _descriptors(repeated_launches, launched) -> list[object]:
    """The variants of launches whose weight is described in tiles of three sizes."""
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    @gluon.jit
    def reads(x_desc, size):
        pass

    launched.clear()
    with repeated_launches():
        for rows in (16, 32, 64) * 2:
            matrix = torch.zeros(64, 64, dtype=torch.bfloat16)
            layout = gl.NVMMASharedLayout.get_default_for([rows, 64], gl.bfloat16)
            reads[(1,)](TensorDescriptor(matrix, [64, 64], [64, 1], [rows, 64], layout), 64)
    assert len(launched) == 6
    return sorted({key for key, *_ in launched})


def _shown(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return str(argument) if hasattr(argument, "block_shape") else argument


if __name__ == "__main__":
    print(json.dumps(_observe()))


def test_a_start_counts_arrivals_apart_from_graphs_and_other_threads(monkeypatch):
    """Regression: rehearsals on the stream of captures counted in the counters of graphs that an engine replayed
    meanwhile, so a matmul added its parts before all of them were there."""
    is_capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])

    def counters():
        return arrival_counters("a kernel", 8, torch.device("meta"))

    own = counters()
    assert counters() is own
    with ThreadPoolExecutor() as threads:
        assert threads.submit(counters).result() is not own
    is_capturing[0] = True
    captured = counters()
    assert captured is not own
    with ThreadPoolExecutor() as threads:
        assert threads.submit(counters).result() is captured

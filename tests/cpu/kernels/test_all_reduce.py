"""The kernels of sums over peer memory, interpreted, by real processes that share their buffers: right sums
for odd sizes, whichever rank is late, over many turns, also where counters wrap.

What the interpreter can't show is how a GPU orders memory; tests/gpu/test_all_reduce_gpu.py is for that.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

HIDDEN = 48
SHAPES = [(1, HIDDEN), (3, HIDDEN), (1, 31), (2, 2049), (5, HIDDEN)]
WRAPPING = 2**31 - 4  # turns before the first one


@pytest.mark.parametrize(
    "size, turns, start",
    [
        (2, 20, WRAPPING),
        (3, 10, 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 100, 0), (4, 30, WRAPPING))),
    ],
)
def test_all_ranks_get_the_sums_and_norms(size, turns, start, tmp_path):
    from shoal.kernels.all_reduce import PLAIN_BLOCK, buffer_bytes

    num_bytes = buffer_bytes(4 * PLAIN_BLOCK, size)
    for rank in range(size):
        with (tmp_path / f"{rank}").open("wb") as file:
            file.truncate(num_bytes)
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    processes = [
        subprocess.Popen(
            [*command, json.dumps({"rank": rank, "size": size, "turns": turns, "start": start})],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        answers = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in zip(processes, answers):
        assert process.returncode == 0, errors[-3000:]
        assert output.split()[-1] == str(turns)
    assert len({output for output, _ in answers}) == 1, "all ranks have the same bits"


def test_a_wait_ends_after_so_many_polls_and_when_it_is_released():
    import torch

    from shoal.kernels.all_reduce import COUNTER_INTS, FLAG_INTS, Peers, all_reduce, buffer_bytes

    buffers = [torch.zeros(buffer_bytes(1 << 13, 2), dtype=torch.uint8) for _ in range(2)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    all_reduce(Peers(0, 2, addresses, buffers[0], 1 << 13, most_polls=5), torch.ones(3))
    peers = Peers(0, 2, addresses, buffers[0], 1 << 13)
    peers.release_waits(*(torch.zeros(n, dtype=torch.int32) for n in (COUNTER_INTS, FLAG_INTS)))
    for _ in range(3):
        all_reduce(peers, torch.ones(3))
    assert peers.head[0] == 4  # turns


def test_the_way_depends_on_bytes_and_ranks():
    from shoal.kernels.all_reduce import ONE_SHOT_BYTES, Way, choose_way

    assert choose_way(1 << 24, 2) is Way.ONE_SHOT, "two shots write as much"
    assert choose_way(10240, 4) is choose_way(10240, 8) is Way.ONE_SHOT
    assert choose_way(1 << 20, 4) is choose_way(1 << 19, 8) is Way.TWO_SHOT
    assert set(ONE_SHOT_BYTES) == set(range(2, 9))


def run_rank(folder: Path, rank: int, size: int, turns: int, start: int) -> None:
    import hashlib

    import torch

    from shoal.kernels import reference
    from shoal.kernels.all_reduce import (
        COUNTER_INTS,
        PLAIN_BLOCK,
        Peers,
        Way,
        all_reduce,
        all_reduce_add_rms_norm,
    )
    from tests.cpu.quick_interpreter import quicken

    quicken()
    buffers = []
    for other in range(size):
        with (folder / f"{other}").open("r+b") as file:
            buffers.append(torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8))
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    peers = Peers(rank, size, addresses, buffers[rank], 4 * PLAIN_BLOCK, most_polls=1 << 24)
    if start:
        peers.head[:COUNTER_INTS] = start
        peers.head[COUNTER_INTS:] = start
    (folder / f"ready{rank}").touch()  # nobody raises a flag before all have set theirs
    while not all((folder / f"ready{other}").exists() for other in range(size)):
        time.sleep(0.01)
    lag, digest = random.Random(rank), hashlib.sha256()
    for turn in range(turns):
        if lag.random() < 0.3:
            time.sleep(lag.random() / 50)
        shape = SHAPES[turn % len(SHAPES)]
        way, dtype = list(Way)[turn // 2 % 2], (torch.float32, torch.float16)[turn // 3 % 2]
        generator = torch.Generator().manual_seed(turn)
        inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]
        total = torch.zeros(shape)
        for x in inputs:  # in the order of ranks
            total += x.float()
        total = total.to(dtype)
        if shape[1] == HIDDEN:
            residual = torch.randn(shape, generator=generator).to(dtype)
            weight = torch.rand(HIDDEN, generator=generator).to(dtype)
            expected = (total.float() + residual.float()).to(dtype)
            normed = all_reduce_add_rms_norm(peers, inputs[rank], residual, weight, 1e-6, way)
            assert torch.equal(residual, expected), (turn, way)
            near = 1e-5 if dtype is torch.float32 else 2e-3  # an ulp
            torch.testing.assert_close(
                normed, reference.rms_norm(expected, weight, 1e-6), rtol=near, atol=1e-5
            )
            digest.update(normed.numpy().tobytes())
        else:
            assert torch.equal(all_reduce(peers, inputs[rank], way), total), (turn, way)
    print(digest.hexdigest(), turns)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), **json.loads(sys.argv[2]))

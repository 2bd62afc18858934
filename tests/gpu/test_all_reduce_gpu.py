"""Sums over peer memory on real GPUs: equal to NCCL's at all sizes, in graphs that are replayed thousands of
times by ranks that come at different times, and ended when a rank is gone."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from shoal import LLM, SamplingParams
from tests import tiny

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
HIDDEN = 5120
SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
WAYS = ["ONE_SHOT", "TWO_SHOT"]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request):
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)  # ranks get it too
    from sums_worker import Group

    with Group(request.param, HIDDEN) as group:
        assert all(about["connected"] for about in group.call("about"))
        yield group
    sys.path.remove(folder)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "rows, columns",
    [
        (1, HIDDEN),
        (3, HIDDEN),
        (64, HIDDEN),
        (256, HIDDEN),
        (1, 1),
        (1, 2049),
        (7, 577),
        (33, 1000),
        (64, 2048),
    ],
)
def test_sums_and_norms_are_those_of_nccl(ranks, rows, columns, dtype, way):
    assert ranks.call("differences", rows, columns, dtype, way, 20) == [[0, 0, 0]] * ranks.tp.size


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 5, 128])
def test_thousands_of_replays_see_their_own_inputs(ranks, rows, way):
    assert ranks.call("replays", way, rows, 2000, 0.0) == [[0, 0]] * ranks.tp.size


@pytest.mark.parametrize("way", WAYS)
def test_ranks_may_come_at_different_times(ranks, way):
    assert ranks.call("replays", way, 3, 300, 0.05) == [[0, 0]] * ranks.tp.size


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_soak(ranks, way):
    """SHOAL_SOAK_S seconds of replays with late ranks; a race between two turns would show as a wrong
    number."""
    end = time.monotonic() + float(os.environ.get("SHOAL_SOAK_S", "60"))
    rows = 1
    while time.monotonic() < end:
        assert ranks.call("replays", way, rows, 3000, 0.002) == [[0, 0]] * ranks.tp.size
        rows = rows % 64 + 9


def test_other_sums_go_on_beside_them(ranks):
    """Ways, sizes and NCCL's sums in turn, as blocks count their turns each for itself."""
    for rows in (1, 200, 2, 64, 1):
        for way in WAYS:
            assert ranks.call("differences", rows, HIDDEN, "bfloat16", way, 3) == [[0, 0, 0]] * ranks.tp.size


@pytest.mark.parametrize("rows", [1, 300, 4096, 9000, 16384])
def test_large_sums_are_those_of_nccl(ranks, rows):
    if ranks.own.sums.large is None:
        assert ranks.tp.size != 2
        pytest.skip("large sums of more than two ranks go by NCCL")
    assert ranks.call("large_differences", rows, 12, 0.02) == [0] * ranks.tp.size


def test_a_wait_for_a_rank_that_is_gone_ends():
    sys.path.insert(0, str(Path(__file__).parent))
    from sums_worker import Group

    with Group(2, HIDDEN) as group:
        pid = group.group.submit("about").results()[0]["pid"]
        os.kill(pid, signal.SIGSTOP)  # its memory stays
        assert group.own.waits_alone() < 1.0


@pytest.mark.parametrize("name", ["qwen3-four", "granite", "olmo2", "qwen3-moe"])
@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_gives_the_oracles_tokens(name, eager, tmp_path, caplog):
    folder = tiny.write_model(tmp_path, name)
    prompts = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 7, 33, 80))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with (
        caplog.at_level("INFO"),
        LLM(
            str(folder),
            dtype="float32",
            max_model_len=256,
            tensor_parallel_size=2,
            peer_all_reduce=True,
            enforce_eager=eager,
            gpu_memory_utilization=0.1,
        ) as llm,
    ):
        assert "go over the GPUs' own memory" in caplog.text
        found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
        assert len(set(llm.collective_rpc("state_digest"))) == 1
    assert found == [tiny.greedy(folder, p, 12) for p in prompts]

"""The default model, written with fewer bits by `shoal quantize`: how far it is from what it was. The bounds are
a little above what was measured (benchmarks/results/quantized.md)."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from shoal import LLM
from tests.plain_default_model import GROUP, ROOT, WINDOW, log_probs, text_ids, write_plain

# The most by which perplexity may grow, and the most that log-probabilities may differ, in the mean.
BOUNDS = {"fp8": (1.05, 0.17), "int4": (1.5, 0.8)}


def log_probs_of(folder, ids, dtype):
    with LLM(str(folder), device="cpu", dtype=dtype, max_model_len=WINDOW + 64) as llm:
        return log_probs(llm, ids)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = write_plain(tmp_path_factory.mktemp("plain"))
    ids = text_ids(folder, WINDOW)
    return folder, ids, log_probs_of(folder, ids, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("to", BOUNDS)
def test_perplexity_and_log_probabilities_stay_within_bounds(to, plain, tmp_path):
    folder, ids, before = plain
    command = [sys.executable, "-m", "shoal", "quantize", str(folder), "--to", to]
    command += ["--group-size", str(GROUP), "--output", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, timeout=600)
    after = log_probs_of(tmp_path / "out", ids, "auto")
    drift = sum(abs(a - b) for a, b in zip(after, before)) / len(before)
    growth = math.exp((sum(before) - sum(after)) / len(before))
    print(f"{to}: perplexity x {growth:.3f}, mean drift {drift:.4f}")
    most_growth, most_drift = BOUNDS[to]
    assert len(before) == len(after) == WINDOW - 1
    assert 0.9 < growth < most_growth and 0 < drift < most_drift

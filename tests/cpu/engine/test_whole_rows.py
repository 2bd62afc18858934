"""Options of sampling in a whole engine: the tokens of a sequential computation, for rows with options and for
the rows beside them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.engine.runner import runner
from tests import option_cases, tiny

MODES = [
    dict(async_scheduling=False),
    dict(async_scheduling=True),
    dict(async_scheduling=True, max_num_batched_tokens=24),
    dict(async_scheduling=True, max_num_seqs=3),
    dict(async_scheduling=True, num_gpu_blocks_override=16, max_model_len=200),
]


@pytest.fixture(scope="module")
def expected(root):
    folder = tiny.write_model(root, "qwen3")
    return [option_cases.naive(folder, request) for request in option_cases.requests(folder)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_rows_with_options_and_rows_beside_them_get_the_tokens_of_a_sequential_run(
    mode, folder, expected, build
):
    engine = build("qwen3", **mode)
    for _ in range(2):  # the second time prompts come from the prefix cache
        assert option_cases.run(engine.core, option_cases.requests(folder)) == expected


def test_every_option_changes_its_answer(folder, expected):
    plain = [tiny.greedy(folder, prompt, option_cases.COUNT) for prompt in option_cases.PROMPTS]
    differs = [found != free[: len(found)] for found, free in zip(expected, plain)]
    assert differs == [i not in (0, 3, 9) for i in range(len(plain))]


@pytest.mark.parametrize("sizes", [[1], [1, 4], [8]], ids=str)
def test_chunks_of_few_sizes_as_graphs_have_them_change_no_token(sizes, folder, expected, build, monkeypatch):
    """With padding, and with more rows than the largest chunk has."""
    replays = []

    class Graph:
        def __init__(self, sampler, size):
            self.sampler, self.size = sampler, size

        def replay(self):
            replays.append(self.size)
            self.sampler.draw_chunk(self.size)

    monkeypatch.setattr(runner, "whole_row_sizes", lambda *_, **__: sizes)
    engine = build("qwen3")
    sampler = engine.core.ranks.runner.whole_rows
    sampler.graphs = SimpleNamespace(graphs={size: Graph(sampler, size) for size in sizes})
    assert option_cases.run(engine.core, option_cases.requests(folder)) == expected
    assert sizes[-1] in replays and set(replays) <= set(sizes)

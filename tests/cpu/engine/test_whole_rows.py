"""Options of sampling in a whole engine: the tokens of a sequential computation, for rows with options and for
the rows beside them."""

from __future__ import annotations

import pytest

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

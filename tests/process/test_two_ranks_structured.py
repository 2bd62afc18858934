"""Two ranks on the CPU (Gloo): grammars choose on rank 0 alone, and embeddings are one rank's."""

import random

import pytest
import torch

from shoal import LLM, SamplingParams, StructuredOutputsParams
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_starts")

PROMPTS = [random.Random(i).choices(range(94), k=n) for i, n in enumerate((1, 7, 33, 80))]


@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_ranks_give_one_ranks_structured_tokens_and_the_oracles_embeddings(async_scheduling, tmp_path):
    folder = tiny.write_model(tmp_path, "qwen3")
    params = [
        SamplingParams(
            max_tokens=40,
            seed=i,
            structured_outputs=StructuredOutputsParams(regex="[a-f]{3,20}!") if i != 1 else None,
        )
        for i in range(len(PROMPTS))
    ]
    found = []
    for size in (1, 2):
        with LLM(
            str(folder),
            dtype="float32",
            max_model_len=256,
            device="cpu",
            tensor_parallel_size=size,
            async_scheduling=async_scheduling,
        ) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
            embeddings = llm.embed(PROMPTS)
            digests = llm.collective_rpc("state_digest")
            assert len(set(digests)) == 1
    assert found[0] == found[1]
    for prompt, output in zip(PROMPTS, embeddings):
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), tiny.embedding(folder, prompt), atol=2e-5, rtol=1e-4
        )

"""Grammars and embeddings on a GPU: masks and hidden states that travel while the next step runs, beside
captured graphs."""

import json
import random
import re

import pytest
import torch

from shoal import LLM, SamplingParams, StructuredOutputsParams
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# printable ASCII
PROMPTS = [random.Random(i).choices(range(94), k=n) for i, n in enumerate((1, 7, 16, 33, 40, 100))]
CODE = r"[a-f]{2,5}-[0-9]{1,4}!"
SIZE = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m", "l"]}},
    "required": ["size"],
    "additionalProperties": False,
}


@pytest.fixture(params=[dict(), dict(enforce_eager=True), dict(async_scheduling=False)], ids=str)
def llm(request, folder):
    options = {
        "dtype": "float32",
        "max_model_len": 256,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 256 << 20,  # whatever other processes take of the card
        "max_num_seqs": 16,
    } | request.param
    with LLM(str(folder), **options) as llm:
        yield llm
        llm.core.check()


def test_answers_hold_and_plain_requests_beside_them_keep_their_tokens(llm):
    plain = [SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)] * len(PROMPTS)
    alone = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, plain)]
    llm.reset_prefix_cache()
    grammars = [
        StructuredOutputsParams(regex=CODE),
        StructuredOutputsParams(json=SIZE, whitespace_pattern=""),
    ]
    asked = [
        SamplingParams(max_tokens=60, temperature=1.0, seed=i, structured_outputs=grammars[i % 2])
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate(
        [p for p in PROMPTS for _ in range(2)], [s for pair in zip(asked, plain) for s in pair]
    )
    for i, output in enumerate(outputs[::2]):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert (
            re.fullmatch(CODE, answer.text)
            if i % 2 == 0
            else json.loads(answer.text)["size"] in ("s", "m", "l")
        )
    assert [o.outputs[0].token_ids for o in outputs[1::2]] == alone


def test_embeddings_are_the_oracles(llm, folder):
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS)):
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), tiny.embedding(folder, prompt), atol=1e-4, rtol=1e-3
        )

"""Graphs whose layers are copies of one captured layer: the same tokens as if every layer were captured."""

import random

import pytest
import torch

from shoal import SamplingParams
from shoal.kernels.layer_copies import LayerCopies
from shoal.models import copied_layers
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS = 9
PROMPTS = [random.Random(i).choices(range(256), k=3 + 7 * i % 90) for i in range(40)]
PARAMS = [SamplingParams(temperature=0.0, max_tokens=4 + i % 20, ignore_eos=True) for i in range(40)]


@pytest.fixture
def engine_options():
    return {"max_model_len": 256, "kv_cache_memory_bytes": 512 << 20, "max_num_seqs": 48}


def record_copies(monkeypatch):
    """The answers of LayerCopies.add from now on, and what it refused."""
    answers, add = [], LayerCopies.add

    def recorded(self, *arguments):
        answers.append((add(self, *arguments), self.refused))
        return answers[-1][0]

    monkeypatch.setattr(LayerCopies, "add", recorded)
    return answers


@pytest.mark.parametrize(
    "options",
    [dict(dtype="float32"), dict(dtype="bfloat16"), dict(kv_cache_dtype="fp8"), dict(quantization="fp8")],
    ids=str,
)
def test_copied_layers_change_no_token(options, build, monkeypatch):
    sizes = dict(hidden_size=1024, intermediate_size=1536, head_dim=128, num_hidden_layers=LAYERS)
    monkeypatch.setitem(tiny.MODELS, "deep", ("Qwen3Config", sizes))
    copied = record_copies(monkeypatch)
    tokens = []
    for fewest in (LAYERS, LAYERS + 1):
        monkeypatch.setattr(copied_layers, "FEWEST", fewest)
        outputs = build("deep", **options).generate(PROMPTS, PARAMS)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert copied and all(done for done, _ in copied), [why for done, why in copied if not done]
    assert tokens[0] == tokens[1]

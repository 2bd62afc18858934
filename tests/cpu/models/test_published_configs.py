"""Configs with the fields, spellings and nestings of published checkpoints, in small sizes: log-probabilities are what
transformers makes of the same config. data/published_configs.json has them, and for configs that transformers reads in
other words only, these words."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from shoal import LLM, SamplingParams
from tests import tiny
from tests.tiny_families import widen

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
PROMPT = random.Random(1).choices(range(256), k=100)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name, tmp_path):
    published = PUBLISHED[name]["config"]
    understood = published | PUBLISHED[name].get("transformers", {})
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(understood)))
    torch.manual_seed(1)
    model = tiny.model_class(config)(config).float().eval()
    widen(model)
    model.save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(published))
    model.set_attn_implementation("eager")
    # Llama 4's class with a vision tower cannot run without pictures.
    text_model = model.language_model if name.startswith("llama-4") else model
    with torch.no_grad():
        expected = text_model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    with LLM(str(tmp_path), dtype="float32", device="cpu", max_model_len=128) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    for i, position in enumerate(output.prompt_logprobs[1:]):
        assert abs(position[PROMPT[i + 1]].logprob - expected[i, PROMPT[i + 1]].item()) < 1e-3, i

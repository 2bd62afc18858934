"""Checkpoints whose tensors are not what their config or a causal model's names say."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError, RequestError
from tests import tiny

IDS = [5, 6, 7, 8, 9, 10]
OPTIONS = dict(device="cpu", dtype="float32", kv_cache_memory_bytes=8 << 20, max_num_seqs=2, max_model_len=64)


@pytest.fixture
def checkpoint(root, tmp_path):
    """Writes a tiny model whose config or tensors a test changes, and returns its folder."""

    def write(change, **fields):
        source = tiny.write_model(root, "qwen3")
        config = json.loads((source / "config.json").read_text()) | fields
        (tmp_path / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / file).write_bytes((source / file).read_bytes())
        weights = change(load_file(source / "model.safetensors"))
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return write


def greedy(folder):
    llm = LLM(str(folder), **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
    llm.exit()
    return list(outputs[0].outputs[0].token_ids)


def test_a_head_beside_a_tied_embedding_is_used(checkpoint, caplog):
    """Regression: the head was dropped without a word, and the tokens were others than transformers'."""

    def with_head(weights):
        table = weights["model.embed_tokens.weight"]
        return weights | {"lm_head.weight": table.flip(0).contiguous()}

    folder = checkpoint(with_head, tie_word_embeddings=True)
    assert greedy(folder) == tiny.greedy(folder, IDS, 8)
    assert "lm_head differs from the embedding" in caplog.text


def test_a_copy_of_the_embedding_as_head_leaves_it_tied(checkpoint, caplog):
    def with_copy(weights):
        return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}

    folder = checkpoint(with_copy, tie_word_embeddings=True)
    assert greedy(folder) == tiny.greedy(folder, IDS, 8)
    assert "lm_head" not in caplog.text


def test_names_without_model_before_them_are_read(checkpoint, root):
    """Regression: Qwen3-Embedding, saved from the model below the head, was refused at the start."""

    def without_model(weights):
        return {name.removeprefix("model."): w for name, w in weights.items() if name != "lm_head.weight"}

    folder = checkpoint(without_model, tie_word_embeddings=True)
    llm = LLM(str(folder), runner="pooling", **OPTIONS)
    found = llm.embed([{"prompt_token_ids": IDS}])[0].outputs.embedding
    llm.exit()
    wanted = tiny.embedding(tiny.write_model(root, "qwen3"), IDS)
    assert (torch.tensor(found) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_model_without_a_head_embeds_and_is_not_asked_to_generate(
    checkpoint, root, caplog, prefix, architecture
):
    """Regression: the larger Qwen3-Embedding models, whose config is untied, were refused as damaged."""

    def without_head(weights):
        del weights["lm_head.weight"]
        return {prefix + name.removeprefix("model."): weight for name, weight in weights.items()}

    folder = checkpoint(without_head, tie_word_embeddings=False, architectures=[architecture])
    llm = LLM(str(folder), runner="pooling", **OPTIONS)
    found = llm.embed([{"prompt_token_ids": IDS}])[0].outputs.embedding
    with pytest.raises(RequestError, match=r"output head.*ask for embeddings"):
        llm.generate([{"prompt_token_ids": IDS}], use_tqdm=False)
    assert llm.embed([{"prompt_token_ids": IDS}])[0].outputs.embedding == found
    llm.exit()
    wanted = tiny.embedding(tiny.write_model(root, "qwen3"), IDS)
    assert (torch.tensor(found) - wanted).abs().max() < 1e-3
    assert "has no output head" in caplog.text


def test_a_model_that_lacks_another_tensor_is_damaged(checkpoint):
    def damaged(weights):
        return {
            name: weight
            for name, weight in weights.items()
            if name not in ("lm_head.weight", "model.norm.weight")
        }

    folder = checkpoint(damaged, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.norm\.weight"):
        LLM(str(folder), **OPTIONS)

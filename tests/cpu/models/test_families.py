"""Families whose layers differ from Llama's, or from one another, against transformers in float32, however the
engine runs. A row of tests/tiny_families.py is a checkpoint in its publisher's layout."""

from __future__ import annotations

import random
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError
from shoal.models.config_json import config_from_json
from shoal.models.registry import ARCHITECTURES
from shoal.models.shapes import checkpoint_shapes
from shoal.weights.loader import is_draft, is_unread
from shoal.weights.quantized import tensor_headers
from shoal.weights.source import resolve
from tests import tiny
from tests.tiny_families import FAMILIES, LEAST_TOKENS, RECURRENT, TWO_HEAD_SIZES, WINDOW, write_family

COUNT = 12
# fields that a config class leaves null and its model needs, or whose other defaults go with one value alone
ALSO_GIVEN = {
    "deepseek-v2": dict(num_experts_per_tok=6),
    "deepseek-v3": dict(num_attention_heads=128),
    "kimi-k25": dict(num_attention_heads=128),
    "glm4-flash-halves": dict(num_attention_heads=20),
}
CLOSE = 1e-3  # difference of log-probabilities in float32
LENGTHS = (1, 15, 16, WINDOW, WINDOW + 1, 40, 90)


def prompts_of(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    least = LEAST_TOKENS.get(name, 1)
    return [random.Random(i).choices(range(256), k=max(n, least)) for i, n in enumerate(lengths)]


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options)


def run(folder, **options):
    return LLM(str(folder), **{"dtype": "float32", "device": "cpu", "max_model_len": 256} | options)


def assert_greedy(outputs, folder) -> None:
    """Each token is the oracle's best one after the tokens before it, or as good as that."""
    for output in outputs:
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        rows = tiny.logprobs(folder, ids)[len(output.prompt_token_ids) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(output.outputs[0].token_ids)[:, None])[:, 0]
        assert len(chosen) == COUNT
        assert (rows.max(dim=1).values - chosen).max() < CLOSE, len(output.prompt_token_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_holds_the_tensors_that_its_config_asks_for(name, root):
    files = resolve(str(write_family(root, name)))
    headers = tensor_headers(files.folder, files.config)
    config = files.config
    read = {
        key: header.shape
        for key, header in headers.items()
        if not is_unread(key, config) and not is_draft(key, config)
    }
    assert dict(checkpoint_shapes(files.config)) == read


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_and_greedy_tokens_are_the_oracles(name, root):
    folder = write_family(root, name)
    with run(folder, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(prompts_of(name), greedy(logprobs=3, prompt_logprobs=0))
            assert_greedy(outputs, folder)
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        expected = tiny.logprobs(folder, prompt + answer.token_ids)
        for i, position in enumerate((output.prompt_logprobs or [])[1:] + answer.logprobs):
            for token, found in position.items():
                assert abs(found.logprob - expected[i, token].item()) < CLOSE, (len(prompt), i)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v2",
        "deepseek-v3",
        "glm4-moe",
        "glm4-flash",
        "solar-open",
        "exaone-moe",
        "mistral4",
        "kimi-linear",
    ],
)
def test_mixtures_whose_config_says_no_shared_expert_run_without_one(name, root):
    """Regression: transformers writes such an expert's matrices with shape [D, 0], which were refused."""
    key = "num_shared_experts" if name == "exaone-moe" else "n_shared_experts"
    folder = write_family(root, name, **{key: 0})
    with run(folder) as llm:
        prompts = prompts_of(name, (40,))
        assert_greedy(llm.generate(prompts, greedy()), folder)
        llm.update_weights_from_tensors(load_file(folder / "model.safetensors"))
        assert_greedy(llm.generate(prompts, greedy()), folder)


def test_hunyuan_3_without_shared_experts_has_one_as_wide_as_a_dense_layer(root):
    """Regression: transformers gives it one, and the checkpoint was refused as it holds its matrices."""
    folder = write_family(root, "hunyuan3", num_shared_experts=0)
    with run(folder) as llm:
        assert_greedy(llm.generate(prompts_of("hunyuan3", (40,)), greedy()), folder)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=11, max_num_seqs=3, async_scheduling=True),  # chunks within a window
        dict(block_size=8, max_num_batched_tokens=64),
        dict(max_num_seqs=1, enable_prefix_caching=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_do_not_depend_on_chunks_blocks_and_neighbours(name, options, root):
    folder = write_family(root, name)
    shared = prompts_of(name, (70,))[0]
    prompts = [shared[:n] + prompt for n, prompt in zip((0, 16, 18, 40, 70), prompts_of(name))]
    with run(folder, **options) as llm:
        assert_greedy(llm.generate(prompts, greedy()), folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefixes_shorter_and_longer_than_a_window_are_found(name, root):
    folder = write_family(root, name)
    first, other = prompts_of(name, (100, 60))
    with run(folder, block_size=16) as llm:
        assert_greedy(llm.generate([first], greedy()), folder)
        for shared in (16, WINDOW + 15, 70):
            (output,) = llm.generate([first[:shared] + other], greedy())
            assert_greedy([output], folder)
            found = shared // 16 * 16
            slack = 16 if name in TWO_HEAD_SIZES else 0  # they may keep blocks of two sizes
            least = 0 if name in RECURRENT else found - slack
            assert least <= output.num_cached_tokens <= found


@pytest.mark.parametrize("name", {kind: name for name, (kind, _, _) in FAMILIES.items()}.values())
def test_missing_fields_get_the_defaults_of_the_config_class(name):
    """A field that a config leaves out is read as if it said what transformers fills in."""
    kind = FAMILIES[name][0]
    oracle_class = getattr(transformers, kind)
    if "text_config" in FAMILIES[name][1]:
        oracle_class = type(oracle_class().text_config)
    architecture = next(own for own in ARCHITECTURES if own.name == oracle_class.model_type)
    given = dict(
        architectures=[architecture.hf_class],
        vocab_size=100,
        hidden_size=2048,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=32,
    ) | ALSO_GIVEN.get(name, {})
    whole = oracle_class(**given).to_dict()
    try:
        expected = config_from_json(whole, "config.json")
    except CheckpointError as error:  # the class' own defaults are a model that is not supported
        with pytest.raises(CheckpointError, match=re.escape(str(error))):
            config_from_json(given, "config.json")
    else:
        assert config_from_json(given, "config.json") == expected


@pytest.mark.parametrize("name", ["mistral-vision", "phi3-window"])
def test_new_weights_come_under_the_names_that_the_publisher_has(name, root):
    """Tensors of other parts than the text model are left out."""
    folder = write_family(root, name)
    weights = load_file(folder / "model.safetensors")
    with run(folder) as llm:
        key = next(key for key in weights if key.endswith("layers.0.self_attn.o_proj.weight"))
        llm.update_weights_from_tensors({key: torch.zeros_like(weights[key])})
        llm.update_weights_from_tensors(weights)
        assert_greedy(llm.generate(prompts_of(name), greedy()), folder)

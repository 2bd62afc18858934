"""SpeculativeConfig: vLLM's fields and defaults; wrong values are refused by name."""

import dataclasses
import json

import msgspec
import pytest

from shoal.config import EngineConfig, SpeculativeConfig
from shoal.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def of(value):
    return EngineConfig(speculative_config=value).speculative_config


def test_no_value_and_null_are_no_speculation():
    assert EngineConfig().speculative_config is None
    assert of(None) is None and of("null") is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_sizes_of_ngrams_follow_each_other_as_in_vllm(given, expected):
    config = of(NGRAM | given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == expected
    assert config.queries == 4 and config.enable_adaptive_verification


def test_suffix_drafts_as_many_tokens_as_its_tree_is_deep():
    assert of({"method": "suffix"}).num_speculative_tokens == 24
    assert of({"method": "suffix", "suffix_decoding_max_tree_depth": 9}).queries == 10
    assert of({"method": "suffix", "num_speculative_tokens": 7}).queries == 8


def test_auto_has_good_numbers_that_may_be_changed():
    config = of({"method": "auto"})
    assert (config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max) == (8, 3, 8)
    assert of({"method": "auto", "num_speculative_tokens": 4}).queries == 5


def test_json_dict_and_config_are_the_same():
    config = of(NGRAM)
    assert of(json.dumps(NGRAM)) == of(config) == config
    # as the options of a core travel to its process
    assert of(msgspec.to_builtins(config)) == config
    assert dataclasses.replace(EngineConfig(speculative_config=NGRAM), seed=1).speculative_config == config


def test_vllms_other_names_of_a_method_are_read():
    assert of(NGRAM | {"method": "ngram_gpu"}).method == "ngram"
    assert of({"method": "qwen3_next_mtp"}).method == "mtp"
    assert of(NGRAM | {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}) == of(NGRAM)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "ngramm", "num_speculative_tokens": 3}, "method must be one of ngram, .*'ngramm'"),
        ({"num_speculative_tokens": 3}, "speculative_config.method must be one of .* got nothing"),
        ({"method": "ngram"}, "num_speculative_tokens must be an integer from 1 to 64 .* got None"),
        (
            NGRAM | {"num_speculative_tokens": 0},
            "num_speculative_tokens must be an integer from 1 to 64, got 0",
        ),
        (NGRAM | {"num_speculative_tokens": 65}, "integer from 1 to 64, got 65"),
        (NGRAM | {"num_speculative_tokens": 2.5}, "num_speculative_tokens must be an integer"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min must be an integer from 1"),
        (NGRAM | {"prompt_lookup_max": 0}, "prompt_lookup_max must be an integer from 1"),
        (
            NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min must be at most prompt_lookup_max, got 5 > 4",
        ),
        (NGRAM | {"num_speculative_token": 3}, "no field 'num_speculative_token'; did you mean"),
        (NGRAM | {"temperature": 0.5}, "no field 'temperature'"),
        (NGRAM | {"tensor_parallel_size": 2}, "tensor_parallel_size must be left out, got 2"),
        (NGRAM | {"rejection_sample_method": "synthetic"}, "rejection_sample_method must be"),
        (NGRAM | {"enable_adaptive_verification": "perhaps"}, "enable_adaptive_verification must be True or"),
        (NGRAM | {"model": "m"}, "model must be left out with method 'ngram', got 'm'"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, r"min_token_prob must .* \[0, 1\]"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "max_tree_depth must be an integer"),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": 10_001},
            "max_cached_requests must be an integer from 0 to 10000, got 10001",
        ),
        (
            NGRAM | {"suffix_decoding_max_cached_requests": 5},
            "max_cached_requests must be 0 with method 'ngram', got 5; choose method 'suffix'",
        ),
        ({"method": "eagle3"}, "model must be the checkpoint of the draft head with method 'eagle3'"),
        ("ngram", "speculative_config must be a dict or a JSON object, got 'ngram'"),
        ("7", "speculative_config must be a dict or a JSON object, got '7'"),
        (["ngram"], "speculative_config must be a dict or a JSON object"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(value, message):
    with pytest.raises(ConfigError, match=message):
        of(value)


def test_fields_have_help():
    for field in dataclasses.fields(SpeculativeConfig):
        assert field.metadata["help"]

"""A trace of the engine opens in Perfetto: it is Chrome's trace format, with our spans in it."""

import gzip
import json

import pytest

from shoal import LLM, SamplingParams
from shoal.errors import ConfigError
from tests import tiny


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(
        str(tiny.write_model(tmp_path_factory.mktemp("model"), "llama")), dtype="float32", max_model_len=64
    ) as llm:
        yield llm


def test_a_trace_names_the_steps(llm, tmp_path):
    llm.start_profile(str(tmp_path / "traces"))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    [path] = llm.stop_profile()
    with gzip.open(path) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("mixed step") == 1 and names.count("decode step") == 3
    assert {"schedule", "launch", "complete"} <= set(names)


def test_traces_begin_and_end_in_turn(llm, tmp_path):
    with pytest.raises(ConfigError, match="no trace"):
        llm.stop_profile()
    llm.start_profile(str(tmp_path))
    with pytest.raises(ConfigError, match="already"):
        llm.start_profile(str(tmp_path))
    llm.stop_profile()


def test_a_folder_that_cannot_be_made_is_named(llm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/traces"):
        llm.start_profile(str(tmp_path / "file" / "traces"))

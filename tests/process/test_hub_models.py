"""Models of the hub under the names that people type, from the first request to an answer."""

import os
import subprocess
import sys

import pytest

from shoal.weights.source import resolve
from tests import fake_hub
from tests.fake_hub import Repo

NAME = "small-Q4_1.gguf"
ASK = """
from shoal import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=8)
print(LLM(MODEL, max_model_len=256).generate(["The capital of France is"], params)[0].outputs[0].text)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment of a process with a hub that has the default model's file, and with an empty cache."""
    hub = fake_hub.start()
    files = {NAME: resolve("smollm2").path.read_bytes(), "README.md": b""}
    hub.repos["org/small-GGUF"] = Repo(files, gguf={"architecture": "llama"})
    hub.repos["bartowski/SmolLM2-135M-Instruct-GGUF"] = hub.repos["org/small-GGUF"]
    cache = str(tmp_path_factory.mktemp("cache"))
    yield os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": cache, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    hub.close()


def run(environment, *arguments, stdin=None):
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("name", ["org/small-GGUF", "hf.co/org/small-GGUF:Q4_1", "smollm2:135m"])
def test_a_chat_with_a_gguf_file_of_the_hub(name, environment):
    """Regression: a repository of GGUF files was downloaded without them, and then held no model."""
    options = ["--temperature", "0", "--max-tokens", "16", "--max-model-len", "256"]
    done = run(environment, "-m", "shoal", "chat", name, *options, stdin="What is the capital of France?\n")
    assert done.returncode == 0 and "Paris" in done.stdout, done


def test_llm_takes_such_a_name(environment):
    done = run(environment, "-c", ASK.replace("MODEL", "'org/small-GGUF:Q4_1'"))
    assert done.returncode == 0 and "Paris" in done.stdout, done

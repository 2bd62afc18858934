"""Every way to run Shoal on a machine without a GPU, where there is no Triton."""

import subprocess
import sys

import pytest

from tests.serving import Serve

SIZE = ("--max-model-len", "256")
LLM_SCRIPT = """
from shoal import LLM, SamplingParams
llm = LLM("smollm2", max_model_len=256)
print(llm.generate(["The capital of France is"], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].text)
llm.exit()
"""


@pytest.mark.parametrize(
    "command",
    [
        (
            "-m",
            "shoal",
            "generate",
            "The capital of France is",
            "--max-tokens",
            "4",
            "--temperature",
            "0",
            *SIZE,
        ),
        pytest.param(
            ("-m", "shoal", "chat", "--max-tokens", "24", "--temperature", "0", *SIZE), marks=pytest.mark.slow
        ),
        pytest.param(("-c", LLM_SCRIPT), marks=pytest.mark.slow),
    ],
    ids=["generate", "chat", "LLM"],
)
def test_text_is_generated(command, no_triton):
    done = subprocess.run(
        [sys.executable, *command],
        env=no_triton,
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Paris" in done.stdout, done


def test_a_server_answers(no_triton, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", no_triton["PYTHONPATH"])
    server = Serve(tmp_path, "smollm2", *SIZE)
    try:
        asked = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        status, text = server.ready().ask("/v1/completions", asked)
        assert status == 200 and "Paris" in text
    finally:
        server.stop()

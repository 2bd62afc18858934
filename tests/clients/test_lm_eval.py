"""lm-eval's local-completions on tasks of our own: choices by log-probability, generation, perplexity."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.slow
TASKS = Path(__file__).parent / "lm_eval_tasks"
NAMES = ("shoal_choices", "shoal_generation", "shoal_perplexity")


@pytest.fixture(scope="module")
def results(url, model, tmp_path_factory):
    """(figures by task, samples by task)"""
    folder = tmp_path_factory.mktemp("lm_eval")
    arguments = f"model={model},base_url={url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--include_path",
        ".",
        "--tasks",
        ",".join(NAMES),
        "--output_path",
        str(folder),
        "--log_samples",
    ]
    env = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, cwd=TASKS, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [figures] = folder.rglob("results_*.json")
    samples = {
        name: [
            json.loads(line)
            for path in folder.rglob(f"samples_{name}_*.jsonl")
            for line in path.read_text().splitlines()
        ]
        for name in NAMES
    }
    return json.loads(figures.read_text())["results"], samples


def test_the_likelier_choice_is_the_right_one(results, url, model):
    figures, samples = results
    assert figures["shoal_choices"]["acc,none"] == 1.0
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    for sample in samples["shoal_choices"]:
        doc = sample["doc"]
        for choice, [[said, _]] in zip(doc["choices"], sample["resps"]):
            assert float(said) == pytest.approx(
                likelihood(client, model, doc["question"], " " + choice), abs=1e-2
            )


def likelihood(client, model, context, continuation):
    """The same figure from the log-probabilities of an echoed text, whose tokens carry their offsets."""
    answer = client.completions.create(
        model=model, prompt=context + continuation, max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    found, length = answer.choices[0].logprobs, len(context + continuation)
    return sum(
        p for p, offset in zip(found.token_logprobs, found.text_offset) if len(context) <= offset < length
    )


def test_text_is_generated_until_the_stop(results):
    figures, samples = results
    assert figures["shoal_generation"]["exact_match,stripped"] >= 0.5
    for sample in samples["shoal_generation"]:
        assert "." not in sample["resps"][0][0] and "\n" not in sample["resps"][0][0]


def test_perplexity_is_that_of_a_language_model(results):
    figures, _ = results
    assert 1 < figures["shoal_perplexity"]["word_perplexity,none"] < math.exp(8)

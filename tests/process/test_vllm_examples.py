"""Scripts that use vLLM's offline API as its examples do run with the import changed; docs/compatibility.md
lists them."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "vllm_examples"


@pytest.fixture(scope="module")
def model(root):
    """A model with random weights: a script has to run and to pass its own checks; its output does not
    matter."""
    from tests import tiny

    return str(tiny.write_model(root, "llama"))


@pytest.fixture
def example(monkeypatch, capsys):
    """Runs a script as its command line would, in this process, which has torch already; returns what it
    printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_basic(example, model):
    lines = example("basic", model).splitlines()
    assert [line.split(" -> ")[0] for line in lines][2] == "'The capital of France is'" and len(lines) == 4


def test_generate_with_options_from_the_command_line(example, model):
    printed = example(
        "generate",
        "--model",
        model,
        "--max_model_len",
        "128",
        "--max-tokens=5",
        "--temperature",
        "0",
        "--top-k",
        "4",
    )
    assert printed.count("(5 tokens)") == 2


def test_engine_args_become_an_llm(example, model):
    assert example("engine_args", model).startswith("max_model_len=128")


def test_chat(example, model, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content[0] }}{% endfor %}")
    printed = example("chat", "--model", model, "--chat-template-path", template, "--max-tokens", "3")
    assert [printed.count(title) for title in ("one: ", "many: ", "unprompted: ")] == [1, 3, 1]
    assert "template: " in printed and printed.rstrip().endswith("after 4 tokens")


def test_embed(example, model):
    assert example("embed", "--model", model).count("(size=48)") == 2


def test_automatic_prefix_caching(example):
    assert example("automatic_prefix_caching", "smollm2").startswith("0 tokens cached")


def test_prefix_caching(example, model):
    assert example("prefix_caching", model) == "Generated answers are the same: True\n"


def test_structured_outputs(example):
    assert len(example("structured_outputs", "smollm2").splitlines()) >= 4


def test_chat_with_tools(example):
    printed = example("chat_with_tools", "smollm2").splitlines()
    assert "'unit': " in printed[0] and printed[1].startswith("The weather in ") and len(printed) > 2


def test_batch_inference(example, model, tmp_path):
    rows = [{"text": f"number {i}", "id": i} for i in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    example("batch_inference", model, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == list(range(6)) and all(
        row["text"] in row["prompt"] and row["answer"] for row in found
    )


def test_simple_profiling(example, model, tmp_path):
    assert "traces" in example("simple_profiling", model, tmp_path) and list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["logprobs", "reproducibility", "beam_search", "priorities", "sleep_mode"])
def test_others_hold_what_they_check(name, example, model):
    assert example(name, model)


def test_the_documentation_lists_every_script():
    said = (ROOT / "docs" / "compatibility.md").read_text()
    assert [path.stem for path in EXAMPLES.glob("*.py") if f"`{path.name}`" not in said] == []

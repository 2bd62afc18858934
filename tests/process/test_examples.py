"""The files in examples/: scripts run, settings name what the server has."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from shoal.server.routes import PUBLIC_ROUTES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PATHS = {route.path for route in PUBLIC_ROUTES}


def run(script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )


def test_a_file_of_conversations_is_answered_line_by_line(tmp_path):
    questions = [
        {"id": "fr", "messages": [{"role": "user", "content": "What is the capital of France?"}]},
        {"messages": [{"role": "user", "content": "Say\u2028hello."}]},
        {"id": "long", "messages": [{"role": "user", "content": "very " * 9000}]},
        {"id": "odd", "messages": [{"role": "user", "content": 7}]},
        {"id": "none"},
    ]
    lines = [json.dumps(question, ensure_ascii=False) for question in questions]
    (tmp_path / "in").write_text("\n".join([*lines, "{"]) + "\n\n", "utf-8")
    done = run("offline_batch.py", tmp_path / "in", tmp_path / "out", "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out").read_text("utf-8").split("\n")[:-1]]
    assert [answer["id"] for answer in answers] == ["fr", 1, "long", "odd", "none", 5]
    assert "Paris" in answers[0]["answer"] and answers[1]["answer"]
    errors = [answer["error"] for answer in answers[2:]]
    assert all(hint in error for hint, error in zip(("context of", "content", "'messages'", "JSON"), errors))


def test_a_file_without_conversations_has_no_answers(tmp_path):
    (tmp_path / "in").touch()
    done = run("offline_batch.py", tmp_path / "in", tmp_path / "out")
    assert done.returncode == 0 and (tmp_path / "out").read_text() == "", done.stderr


@pytest.mark.slow
def test_a_training_loop_changes_the_engines_weights(folder):
    done = run("rl_loop.py", folder, "--steps", "2", "--group-size", "2", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1"] and "weights version 2" in lines[1]


def test_settings_of_clients_point_at_what_the_server_offers():
    codex = tomllib.loads((EXAMPLES / "codex/config.toml").read_text())
    provider = codex["model_providers"][codex["model_provider"]]
    assert provider["base_url"].endswith(":8000/v1") and f"/v1/{provider['wire_api']}" in PATHS
    claude = json.loads((EXAMPLES / "claude-code/settings.json").read_text())["env"]
    assert claude["ANTHROPIC_BASE_URL"].endswith(":8000") and "/v1/messages" in PATHS
    [model] = yaml.safe_load((EXAMPLES / "continue/config.yaml").read_text())["models"]
    assert model["apiBase"].endswith(":8000/v1") and "/v1/chat/completions" in PATHS
    [service] = yaml.safe_load((EXAMPLES / "open-webui/compose.yaml").read_text())["services"].values()
    assert service["environment"]["OPENAI_API_BASE_URL"].endswith(":8000/v1")


@pytest.mark.parametrize("command", ["two_models.sh", "shoal.service"])
def test_the_options_in_an_example_exist(command):
    from shoal.cli.main import build_parser

    text = (EXAMPLES / command).read_text().replace('"$@"', "")
    [line] = [line for line in text.splitlines() if "shoal serve" in line and not line.startswith("#")]
    arguments = line.split("shoal serve ", 1)[1].split()
    build_parser().parse_args(["serve", *arguments])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
def test_systemd_takes_the_unit(tmp_path):
    unit = (EXAMPLES / "shoal.service").read_text().replace("/opt/shoal/bin/shoal", sys.executable)
    (tmp_path / "shoal.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "shoal.service")], capture_output=True, text=True
    )
    assert done.returncode == 0 and "Unknown" not in done.stderr, done.stderr

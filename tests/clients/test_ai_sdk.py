"""Vercel's AI SDK with its providers for OpenAI's two APIs, for servers with OpenAI's API, and for Anthropic's."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("npm"), reason="the AI SDK needs Node and npm; npm was not found"),
]


@pytest.mark.parametrize("provider", ["chat", "responses", "compatible", "anthropic"])
def test_the_sdk(provider, url, model):
    assert (FOLDER / "node_modules").is_dir(), "the AI SDK must be installed; run npm ci in tests/clients"
    env = os.environ | {"URL": url, "MODEL": model, "PROVIDER": provider, "AI_SDK_LOG_WARNINGS": "false"}
    command = ["node", "--test", "--test-reporter=tap", "ai_sdk.mjs"]
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# pass 5" in done.stdout or "# pass 6" in done.stdout, done.stdout

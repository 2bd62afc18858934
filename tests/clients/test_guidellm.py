"""guidellm's benchmark over chat and over completions."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark_completes_its_requests(path, url, model, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(6)))
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model={model},request_format={path},max_tokens=8"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"),
    ]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 6 and totals["errored"] == 0

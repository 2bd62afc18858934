"""The page "Operating it": its commands, in their order, in one shell on this machine. Requests that are asked
meanwhile are all answered."""

import http.client
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest

from tests import prometheus
from tests.serving import PYTHON, ROOT, free_port

PAGE = (ROOT / "docs/operating.md").read_text()
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(PAGE)
MARK = "### block "


def number_of(words):
    [found] = [number for number, (_, text) in enumerate(BLOCKS) if words in text]
    return found


def programs(folder):
    """`shoal`, `python` and `promtool` as commands."""
    (folder / "bin").mkdir()
    for name, words in (
        ("shoal", f'{PYTHON} -m shoal "$@"'),
        ("python", f'{PYTHON} "$@"'),
        ("promtool", f'{prometheus.find("promtool")} "$@"'),
    ):
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\nexec {words}\n")
        path.chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def script(ports):
    """All blocks, with free ports in place of the page's, and a mark before each."""
    lines = ["set -e"]
    for number, (language, text) in enumerate(BLOCKS):
        for port, free in ports.items():
            text = re.sub(rf"\b{port}\b", str(free), text)
        lines.append(f"printf '\\n{MARK}{number}\\n'")  # curl ends its last line without one
        lines.append(text if language == "bash" else f"python - <<'END'\n{text}END")
    return "\n".join([*lines, f"echo '{MARK}end'"])


class Clients(threading.Thread):
    """Asks one answer after the other, until `stop` is set; `failures` has the incomplete ones."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.stop, self.answers, self.failures = port, threading.Event(), 0, []
        self.start()

    def run(self):
        body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 48, "ignore_eos": True}
        while not self.stop.is_set():
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
                connection.request("POST", "/v1/completions", json.dumps(body))
                answer = connection.getresponse()
                told = json.loads(answer.read())
                if answer.status != 200 or told["usage"]["completion_tokens"] != 48:
                    self.failures.append(told)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failures.append(repr(error))
            self.answers += 1


@pytest.mark.slow
def test_every_command_of_the_page_works_and_no_request_is_lost_by_an_upgrade(tmp_path):
    path = programs(tmp_path)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    ports = {port: free_port() for port in (8000, 8001, 8010, 8011, 5600)}
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path / "log"
    with log.open("w") as errors:
        shell = subprocess.Popen(
            ["bash", "-c", script(ports)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        clients, said, seen = None, [], []
        begin, end = number_of("--worker-id new"), number_of("--port 8010")
        try:
            for line in shell.stdout:
                if not line.startswith(MARK):
                    said.append(line)
                    continue
                seen.append(line.removeprefix(MARK).strip())
                if seen[-1] == str(begin):
                    clients = Clients(ports[8000])
                if seen[-1] == str(end):
                    clients.stop.set()
                    clients.join(120)
            assert shell.wait() == 0 and seen[-1] == "end", "".join(said) + log.read_text()[-4000:]
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, 9)
    assert clients.answers > 2 and not clients.failures, (clients.answers, clients.failures)
    text = "".join(said)
    assert "SUCCESS" in text and "within the planner's targets" in text and '"version"' in text
    assert json.loads(Path(tmp_path / "smollm2.json").read_text())
    assert len((tmp_path / "keys.txt").read_text().split()) == 2


def test_the_table_of_symptoms_names_metrics_that_exist():
    from tests import exported_metrics

    section = PAGE.partition("## When it is slow")[2]
    named = exported_metrics.named_in(section)
    known = exported_metrics.names() | {name for _, name, _ in exported_metrics.families()}
    assert len(named) > 15 and named <= known, named - known

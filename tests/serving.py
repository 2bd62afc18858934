"""`shoal serve` and `shoal route`, each in a process of its own."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
DEADLINE_S = 120
PYTHON = os.environ.get("SHOAL_PYTHON", sys.executable)  # the tests' own environment may lack Shoal and torch
TINY = (
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--kv-cache-memory-bytes",
    str(1 << 22),
    "--max-num-seqs",
    "16",
    "--max-model-len",
    "512",
)


# Below the range that the kernel gives to outgoing connections: such a connection of some other test could have the
# port of a server by the time that it starts, or starts again.
PORTS = range(12_000, 32_000)
_given = set()


def free_port():
    """A port that nobody has."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def listens(port):
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


class Serve:
    command = "serve"

    def __init__(self, folder, *arguments):
        self.folder, self.port, self.admin = folder, free_port(), free_port()
        self.log = folder / f"log-{self.port}"
        ports = ("--port", str(self.port), "--admin-port", str(self.admin))
        command = [PYTHON, "-m", "shoal", self.command, *map(str, arguments), *ports]
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        env = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def ready(self):
        eventually(lambda: self.process.poll() is not None or "ready after" in self.text(), self.text)
        assert self.process.poll() is None, self.text()
        return self

    def text(self):
        return self.log.read_text()

    def client(self, **options):
        import openai  # Not above: benchmarks and GPU tests start servers on machines without it.

        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            max_retries=0,
            timeout=DEADLINE_S,
            **options,
        )

    def ask(self, path, body=None, port=None):
        """(status, text)"""
        return self.request(path, body, port=port)[:2]

    def request(self, path, body=None, headers=None, port=None):
        """(status, text, headers by lower-case name)"""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port}{path}",
            data,
            {"content-type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode(), _lower(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), _lower(error.headers)

    def metric(self, name):
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in self.ask("/metrics")[1].splitlines()
            if line.startswith((name + "{", name + " "))
        )

    def cores(self):
        return [
            p
            for p in psutil.Process(self.process.pid).children(recursive=True)
            if p.status() != psutil.STATUS_ZOMBIE
        ]

    def sockets(self):
        return list(self.folder.glob("shoal-*"))

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Route(Serve):
    command = "route"

    def fleet(self):
        return {worker["id"]: worker for worker in json.loads(self.ask("/fleet")[1])["workers"]}

    def operate(self, path, body=None):
        """On the admin port: (status, text)."""
        return self.ask(path, body, port=self.admin)

    def await_workers(self, count):
        eventually(lambda: [w["state"] for w in self.fleet().values()] == ["ready"] * count, self.text)
        return self


def _lower(headers):
    return {name.lower(): value for name, value in headers.items()}


class Scripted:
    """A server whose model writes given texts (tests/scripted_server.py), in a process of its own."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        self.process = subprocess.Popen(
            [PYTHON, "-m", "tests.scripted_server", str(folder)],
            env=os.environ | {"PYTHONPATH": path},
            cwd=ROOT,
            stdin=subprocess.PIPE,
        )
        deadline = time.monotonic() + 60
        while not (folder / "port").exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{(folder / 'port').read_text()}"

    def say(self, texts):
        (self.folder / "script.json").write_text(json.dumps(texts))
        (self.folder / "prompts.jsonl").write_text("")

    def prompts(self):
        """Returns the prompts with tools."""
        lines = (self.folder / "prompts.jsonl").read_text().splitlines()
        return [prompt for prompt in map(json.loads, lines) if prompt.startswith("<tools>")]

    def stop(self):
        self.process.stdin.close()
        self.process.wait(30)

"""`shoal fleet up` as a user runs it, in a process of its own."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess
import tempfile
import threading
import zlib
from pathlib import Path

import psutil

from tests.serving import PYTHON, ROOT, free_port
from tests.waiting import PATIENCE_S, eventually


def state_home(folder):
    """Returns a short path of this folder: a socket's may have 107 bytes, and pytest's folders have long names.

    Regression: with a three-digit number of the run, and a number of the process, no fleet under Circus started.
    """
    link = Path(tempfile.gettempdir(), f"shoal-{zlib.crc32(bytes(folder)):x}")
    with contextlib.suppress(FileExistsError):
        link.symlink_to(folder)
    return link


class Fleet:
    """The command with a file of this text behind two ports. `key`: what requests bring along."""

    def __init__(self, folder, text, key=None):
        self.port, self.admin, self.key = free_port(), free_port(), key
        self.folder, self.file, self.log = folder, folder / "fleet.toml", folder / "fleet.log"
        self.file.write_text(f"port = {self.port}\nadmin_port = {self.admin}\n{text}")
        self.process = self.start("fleet", "up", log=self.log)

    def start(self, *command, log):
        """A process of `shoal` with the fleet's file."""
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        folder = str(self.folder)
        env = os.environ | {
            "PYTHONPATH": path,
            "TMPDIR": folder,
            "XDG_STATE_HOME": str(state_home(self.folder)),
        }
        with log.open("w") as output:
            return subprocess.Popen(
                [PYTHON, "-m", "shoal", *command, str(self.file)],
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        left = self.descendants()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        left += [psutil.Process(int(file.read_text())) for file in self.folder.glob("shoal/*/circus.pid")]
        for process in left:
            if is_running(process.pid):
                process.kill()

    def text(self):
        return self.log.read_text()

    def descendants(self):
        if self.process.poll() is not None:
            return []
        return psutil.Process(self.process.pid).children(recursive=True)

    def until(self, condition):
        """Waits, and fails at once if the fleet has ended."""

        def met():
            assert self.process.poll() is None, self.text()
            try:
                return condition()
            except OSError:
                return False  # it does not listen yet

        eventually(met, self.text)

    def ready(self, count=2):
        self.until(lambda: [w["state"] for w in self.workers().values()].count("ready") >= count)
        self.until(lambda: self.json("/v1/models")["data"])
        return self

    def workers(self):
        return {worker["id"]: worker for worker in self.json("/fleet")["workers"]}

    def request(self, path, body=None, *, method=None, admin=False):
        """(status, headers, text)"""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.admin if admin else self.port, timeout=PATIENCE_S
        )
        try:
            data = None if body is None else json.dumps(body)
            headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            connection.close()

    def json(self, path, body=None, **more):
        status, _, text = self.request(path, body, **more)
        assert status == 200, (path, text, self.text())
        return json.loads(text)

    def operate(self, path, body=None):
        return self.json(path, body, method="POST", admin=True)

    def ask(self, prompt, max_tokens=8, **more):
        """(text, worker, cached tokens)"""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        status, headers, text = self.request("/v1/completions", body | {"ignore_eos": True} | more)
        assert status == 200, text
        answer = json.loads(text)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return answer["choices"][0]["text"], headers["x-shoal-worker"], cached

    def signal(self, number=signal.SIGINT):
        self.process.send_signal(number)


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def sized(folder, record, connector, enabled=True):
    """A fleet of a tiny model, which its planner sizes; not `enabled`: one beside it may.

    Each of a crowd's requests has at least one of the 280 blocks of two workers, so that a machine on which they
    grow slowly is not taken for an idle one.
    """
    return f"""
        [[workers]]
        model = "{folder}"
        name = "tiny"
        options = {{ dtype = "float32", device = "cpu", max_model_len = 512, num_gpu_blocks_override = 140 }}
        [planner]
        enabled = {str(enabled).lower()}
        connector = "{connector}"
        metric_pulling_interval = 0.2
        adjustment_interval = 2.0
        decode_kv_scale_up_threshold = 0.3
        decode_kv_scale_down_threshold = 0.01
        max_gpu_budget = 2
        record = "{record}"
    """


class Crowd:
    """Clients that ask for one long answer after the other, inside of the block. Each must have its 400 tokens."""

    def __init__(self, fleet, count=6, model="tiny"):
        self.fleet, self.count, self.model = fleet, count, model
        self._is_over = threading.Event()

    def __enter__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(self.count)
        self._clients = [self._pool.submit(self._run, number) for number in range(self.count)]
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()  # raises unless each of its requests had status 200

    def _run(self, number):
        while not self._is_over.is_set():
            text, _, _ = self.fleet.ask(f"Client {number}", 400, model=self.model)
            assert text

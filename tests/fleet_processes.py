"""A fleet as its users run it, in processes: `shoal route` with a plane, and `shoal serve --plane` workers."""

import http.client
import json
import os
import signal
import subprocess
import threading

from tests.serving import PYTHON, ROOT, free_port
from tests.waiting import PATIENCE_S, eventually

# 1 GiB of cache would be too much for several workers on a small machine.
SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "200000000")


class Asked(threading.Thread):
    """A request whose answer is a stream, read in a thread. `events` are its decoded lines so far."""

    def __init__(self, port, path, body):
        super().__init__(daemon=True)
        self.port, self.path, self.body = port, path, {**body, "stream": True}
        self.events, self.headers, self.status, self.error = [], {}, 0, None
        self.start()

    def run(self):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
            connection.request("POST", self.path, json.dumps(self.body), {"content-type": "application/json"})
            answer = connection.getresponse()
            self.status, self.headers = answer.status, {k.lower(): v for k, v in answer.getheaders()}
            for line in answer:
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))
                elif line.startswith(b"{"):
                    self.error = json.loads(line)["error"]
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)

    @property
    def worker(self):
        return self.headers.get("x-shoal-worker")

    def answer(self):
        """Returns the client's answer, its error included, in a form that can be compared."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the stream does not end"
        choices, usage, error = {}, None, self.error
        for event in self.events:
            error, usage = event.get("error", error), event.get("usage") or usage
            for choice in event.get("choices", ()):
                whole = choices.setdefault(choice["index"], {"text": "", "calls": "", "tokens": []})
                delta = choice.get("delta", {})
                whole["text"] += choice.get("text") or delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    function = call["function"]
                    whole["calls"] += (function.get("name") or "") + (function.get("arguments") or "")
                whole["tokens"] += (choice.get("logprobs") or {}).get("tokens", [])
                whole["finish"] = choice.get("finish_reason") or whole.get("finish")
        counts = usage and (usage["prompt_tokens"], usage["completion_tokens"])
        return {"choices": choices, "usage": counts, "error": error}


class Processes:
    """`plane`: its URL; None: an embedded one. Ends with the block."""

    def __init__(self, folder, plane=None):
        self.folder, self.plane = folder, plane or f"tcp://127.0.0.1:{free_port()}"
        self.port, self.admin_port = free_port(), free_port()
        self.running = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running.values():
            process.kill()
            process.wait()

    def _start(self, name, *command):
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = self._popen(
                list(map(str, command)),
                # Workers that share a machine wait for each other's threads: one each.
                env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _popen(self, command, **options):
        return subprocess.Popen([PYTHON, "-m", "shoal", *command], **options)

    def route(self, *options):
        ports = ("--port", self.port, "--admin-port", self.admin_port)
        self._start("router", "route", *ports, "--plane", self.plane, *options)
        return self

    def serve(self, name, *options, model="smollm2"):
        self._start(name, "serve", model, "--plane", self.plane, "--worker-id", name, *SMALL, *options)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def ask(self, path, body=None, *, admin=False):
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.admin_port if admin else self.port, timeout=PATIENCE_S
        )
        data = None if body is None else json.dumps(body)
        connection.request(
            "GET" if data is None else "POST", path, data, {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def operate(self, verb, name):
        status, text = self.ask(f"/fleet/{verb}/{name}", {}, admin=True)
        assert status == 200, text

    def stream(self, path, **body):
        return Asked(self.port, path, {"model": "smollm2", **body})

    def workers(self):
        """By id, as /fleet shows them; {} before the router listens."""
        try:
            status, text = self.ask("/fleet")
        except OSError:
            return {}
        return {worker["id"]: worker for worker in json.loads(text)["workers"]} if status == 200 else {}

    def wait_state(self, name, *states):
        """Waits until /fleet shows the worker in one of these states; None: it is not there."""

        def reached():
            if name in self.running and states == ("ready",):
                assert self.running[name].poll() is None, self.log(name)
            return self.workers().get(name, {}).get("state") in states

        eventually(reached, lambda: f"{name}: {self.workers()}\n{self.log('router')[-3000:]}")

    def kill(self, name):
        """As a power cut would."""
        process = self.running.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

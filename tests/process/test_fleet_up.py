"""`shoal fleet up` as a user runs it: real workers with the default model on the CPU, in processes of their own."""

import concurrent.futures
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests import nats_server
from tests.serving import PYTHON, ROOT, TINY, free_port

LAPTOP = ROOT / "examples" / "fleet" / "laptop.toml"
OPTIONS = "{ dtype = 'float32', max_model_len = 1024, kv_cache_memory_bytes = 200_000_000 }"
STORY = (
    "Every morning the fishermen went down to the harbour, looked at the sky, and talked about the wind. " * 5
)
PATIENCE_S = 240


def until(condition, say=lambda: ""):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.1)


class Fleet:
    """The command with a file of this text behind two ports. `key`: what requests bring along."""

    def __init__(self, folder, text, key=None):
        self.port, self.admin, self.key = free_port(), free_port(), key
        self.file, self.log = folder / "fleet.toml", folder / "fleet.log"
        self.file.write_text(f"port = {self.port}\nadmin_port = {self.admin}\n{text}")
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        env = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "shoal", "fleet", "up", str(self.file)],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        left = self.descendants()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
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

        until(met, self.text)

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


def two(more="", options=OPTIONS):
    return f"model = 'smollm2'\n[[workers]]\ncount = 2\noptions = {options}\n{more}"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Two workers, for tests that leave both as they were."""
    with Fleet(tmp_path_factory.mktemp("fleet"), two()) as fleet:
        yield fleet.ready()


def test_requests_follow_their_prefixes(fleet):
    stories = [f"Chapter {number}. {STORY}" for number in range(4)]
    first = [fleet.ask(story) for story in stories]
    assert {worker for _, worker, _ in first} == {"smollm2-1", "smollm2-2"}
    for story, (_, home, _) in zip(stories, first):
        question = {"model": "smollm2", "prompt": story}
        fleet.until(lambda q=question, home=home: fleet.json("/fleet/select", q)["worker"] == home)
        _, worker, cached = fleet.ask(story + "Then")
        assert worker == home and cached >= 64
    assert all(worker["cached_blocks"] > 0 for worker in fleet.workers().values())


def test_the_log_has_a_line_of_each_process_behind_its_name(fleet):
    names = {line.partition(" | ")[0].strip() for line in fleet.text().splitlines()}
    assert names == {"router", "smollm2-1", "smollm2-2"}


def test_a_rolling_update_under_load_fails_no_request(fleet, checkpoint):
    versions = {name: worker["weights_version"] for name, worker in fleet.workers().items()}
    rolling_done = False

    def client(number):
        answers = []
        while not rolling_done or not answers:
            answers.append(fleet.ask(f"Client {number} says: {STORY}", 8))
        return answers

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        answer = fleet.operate("/update_weights?rolling=true", {"path": checkpoint})
        rolling_done = True
        answers = [one for each in clients for one in each.result()]
    assert answers  # each of them had status 200
    assert set(answer["workers"]) == set(versions)
    for name, worker in fleet.workers().items():
        assert worker["weights_version"] == versions[name] + 1 == answer["workers"][name]["version"]
        assert worker["state"] == "ready"


def test_new_weights_empty_the_index(fleet, checkpoint):
    fleet.ask(f"Before. {STORY}")
    fleet.until(lambda: any(worker["cached_blocks"] for worker in fleet.workers().values()))
    fleet.operate("/update_weights", {"path": checkpoint})
    fleet.until(lambda: not any(worker["cached_blocks"] for worker in fleet.workers().values()))


def test_a_roll_that_fails_names_the_worker_and_the_versions(fleet):
    status, _, text = fleet.request(
        "/update_weights?rolling=true", {"path": "/none"}, method="POST", admin=True
    )
    told = json.loads(text)["error"]["message"]
    assert status == 400 and "/none" in told and "It ended there; not asked: smollm2-" in told
    assert "Versions of the weights: smollm2-" in told
    assert all(worker["state"] == "ready" for worker in fleet.workers().values())


def test_a_paused_worker_gets_nothing(fleet):
    fleet.operate("/pause?workers=smollm2-1")
    assert {name: w["asleep"] for name, w in fleet.workers().items()} == {
        "smollm2-1": True,
        "smollm2-2": False,
    }
    assert {fleet.ask(f"Paused {number}. {STORY}", 2)[1] for number in range(4)} == {"smollm2-2"}
    fleet.operate("/pause?workers=smollm2-2")
    status, headers, text = fleet.request("/v1/completions", {"model": "smollm2", "prompt": "x"})
    assert status == 503 and "sleep" in text and headers["retry-after"]
    fleet.operate("/resume")
    assert {fleet.ask(f"Resumed {number}. {STORY}", 2)[1] for number in range(6)} == set(fleet.workers())


def test_a_worker_that_dies_is_started_again(fleet):
    _, name, _ = fleet.ask(f"Death. {STORY}")
    pid = fleet.workers()[name]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert fleet.ask(f"Death. {STORY}")[1] != name
    fleet.until(lambda: f"{name} ended" in fleet.text())
    fleet.ready()
    assert fleet.workers()[name]["pid"] != pid
    assert re.search(
        rf"{name} ended after [\d.]+ s \(killed by SIGKILL\); it is started again in 1 s", fleet.text()
    )


SLEEPY = "{ dtype = 'float32', max_model_len = 512, kv_cache_memory_bytes = 200_000_000, enable_sleep_mode = true }"


@pytest.mark.parametrize("plane", ["embedded", "nats"])
def test_a_sleeping_fleet_wakes_for_a_request_and_one_ctrl_c_ends_it(tmp_path, plane, nats_url):
    more = "[router]\nwake_on_request = true\n"
    if plane == "nats":
        more += f"[plane]\nurl = '{nats_url()}'\n"
    with Fleet(tmp_path, two(more, SLEEPY)) as fleet:
        fleet.ready()
        text, _, _ = fleet.ask(STORY, 12)
        fleet.operate("/sleep?level=1")
        assert all(worker["asleep"] for worker in fleet.workers().values())
        assert fleet.ask(STORY, 12)[0] == text
        assert sorted(worker["asleep"] for worker in fleet.workers().values()) == [False, True]
        processes = fleet.descendants()
        assert len(processes) >= 4  # two workers, and an engine in each
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(fleet.ask, f"Last. {STORY}", 60)
            fleet.until(lambda: any(worker["active_requests"] for worker in fleet.workers().values()))
            fleet.signal()
            assert running.result()[0], "what runs is drained"
        assert fleet.process.wait(PATIENCE_S) == 0
        until(lambda: not [p for p in processes if is_running(p.pid)])
        assert "Traceback" not in fleet.text()


def test_a_second_ctrl_c_ends_all_at_once(fleet_of_one):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(fleet_of_one.request, "/v1/completions", ENDLESS)
        fleet_of_one.until(lambda: any(w["active_requests"] for w in fleet_of_one.workers().values()))
        processes = fleet_of_one.descendants()
        fleet_of_one.signal()
        until(
            lambda: "shutting down" in fleet_of_one.request("/v1/completions", ENDLESS | {"max_tokens": 1})[2]
        )
        fleet_of_one.signal()
        assert fleet_of_one.process.wait(PATIENCE_S) == 1
        until(lambda: not [p for p in processes if is_running(p.pid)])
        assert running.exception() or running.result()[0] != 200 or "length" not in running.result()[2]


ENDLESS = {"model": "smollm2", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "timeout": 600}


def test_nothing_is_left_of_a_fleet_that_is_killed(fleet_of_one):
    processes = fleet_of_one.descendants()
    fleet_of_one.process.kill()
    fleet_of_one.process.wait()
    until(lambda: not [p for p in processes if is_running(p.pid)])


@pytest.fixture
def fleet_of_one(tmp_path):
    options = "{ dtype = 'float32', max_model_len = 4096, kv_cache_memory_bytes = 200_000_000 }"
    text = f"shutdown_timeout = 300\n[[workers]]\noptions = {options}\n"
    with Fleet(tmp_path, text) as fleet:
        yield fleet.ready(1)


def test_two_models_are_behind_one_endpoint_and_its_key_guards_the_workers_too(tmp_path, folder):
    tiny = "{ dtype = 'float32', device = 'cpu', kv_cache_memory_bytes = 4_000_000, max_model_len = 512 }"
    workers = f"[[workers]]\nname = 'small'\noptions = {OPTIONS}\n"
    workers += f"[[workers]]\nmodel = '{folder}'\nname = 'tiny'\noptions = {tiny}\n"
    with Fleet(tmp_path, f"api_key = ['secret']\n{workers}", key="secret") as fleet:
        fleet.ready()
        assert {model["id"] for model in fleet.json("/v1/models")["data"]} == {"small", "tiny"}
        for name in ("small", "tiny", "small"):
            assert fleet.ask("Some words", model=name)[1] == f"{name}-1"
        assert fleet.request("/v1/completions", {"model": "other", "prompt": "x"})[0] == 404
        for url in [f"http://127.0.0.1:{fleet.port}", *[w["url"] for w in fleet.workers().values()]]:
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url + "/v1/models")


def test_the_laptop_of_the_examples_answers_as_the_readme_says(tmp_path):
    example = LAPTOP.read_text()
    ports = tomllib.loads(example)
    assert (ports["port"], ports["admin_port"]) == (8000, 8001)
    rest = re.sub(r"^(port|admin_port) = .*$", "", example, flags=re.MULTILINE)
    assert f"shoal fleet up {LAPTOP.relative_to(ROOT)}" in (ROOT / "README.md").read_text()
    with Fleet(tmp_path, rest) as fleet:
        fleet.ready()
        question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        assert "Paris" in fleet.json("/v1/chat/completions", question)["choices"][0]["message"]["content"]
        assert "<html" in fleet.request("/")[2]


def test_a_command_starts_workers_that_speak_http(tmp_path, folder):
    """Servers of ours stand for another engine's."""
    command = f"{PYTHON} -m shoal serve {folder} --served-model-name tiny --port {{port}} {' '.join(TINY)}"
    with Fleet(
        tmp_path, f"[[workers]]\ncount = 2\ncommand = '{command}'\n[router]\npolicy = 'round_robin'\n"
    ) as fleet:
        fleet.ready()
        name = Path(PYTHON).name
        assert set(fleet.workers()) == {f"{name}-1", f"{name}-2"}
        asked = [fleet.ask("Some words", model="tiny") for _ in range(4)]
        assert len({text for text, *_ in asked}) == 1
        assert {worker for _, worker, _ in asked} == {f"{name}-1", f"{name}-2"}
        status, _, text = fleet.request("/sleep", method="POST", admin=True)
        assert status == 503 and "no worker of ours" in text
        processes = fleet.descendants()
        fleet.signal(signal.SIGTERM)
        assert fleet.process.wait(PATIENCE_S) == 0
        until(lambda: not [p for p in processes if is_running(p.pid)])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[[workers]]\ncommand = 'no-such-engine --port {port}'\n", "'no-such-engine' is no program"),
        ("[[workers]]\n[[workers]]\nmodel = '/no/such/folder'\n", "[[workers]] 2: "),
        ("", "there is no worker; write [[workers]]"),
        ("[plane]\nurl = 'tcp://10.0.0.1:5600'\n[[workers]]\n", "10.0.0.1"),
        ("host = '0.0.0.0'\nadmin_host = '0.0.0.0'\n[[workers]]\n", "admin_host"),
    ],
    ids=["program", "model", "none", "plane", "admin"],
)
def test_what_cannot_work_is_told_before_a_process_starts(tmp_path, text, wrong):
    with Fleet(tmp_path, text) as fleet:
        assert fleet.process.wait(PATIENCE_S) == 1
        assert wrong in fleet.text()
        assert "Traceback" not in fleet.text() and "starts as process" not in fleet.text()


@pytest.mark.slow
def test_a_fleet_whose_workers_all_fail_to_start_ends(tmp_path):
    with Fleet(tmp_path, "[[workers]]\noptions = { kv_cache_memory_bytes = 1000 }\n") as fleet:
        assert fleet.process.wait(2 * PATIENCE_S) == 1
        assert "smollm2-1 has ended 5 times in succession" in fleet.text()
        assert "no worker is left" in fleet.text() and "Traceback" not in fleet.text()


@pytest.fixture
def nats_url(tmp_path):
    """Starts a server of its own when it is called."""
    started = []

    def start():
        port = free_port()
        command = [
            nats_server.find(),
            "-a",
            "127.0.0.1",
            "-p",
            str(port),
            "-js",
            "-sd",
            str(tmp_path / "nats"),
        ]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return f"nats://127.0.0.1:{port}"

    yield start
    for process in started:
        process.terminate()
        process.wait()


@pytest.fixture(scope="session")
def checkpoint():
    """Weights that fit the default model: its own."""
    from shoal.weights.source import resolve

    return str(resolve("smollm2").path)


@pytest.mark.slow
def test_a_fleet_grows_with_its_load_shrinks_behind_it_and_fails_no_request(tmp_path):
    record = tmp_path / "planner.jsonl"
    text = f"""
        model = "smollm2"
        [[workers]]
        options = {{ dtype = "float32", max_model_len = 1024, num_gpu_blocks_override = 140 }}
        [planner]
        enabled = true
        metric_pulling_interval = 0.5
        adjustment_interval = 3.0
        decode_kv_scale_up_threshold = 0.3
        decode_kv_scale_down_threshold = 0.05
        max_gpu_budget = 2
        record = "{record}"
    """
    with Fleet(tmp_path, text) as fleet:
        fleet.ready(1)
        has_grown = threading.Event()

        def client(number):
            while not has_grown.is_set():
                fleet.ask(f"Client {number} says: {STORY}", 200)  # raises unless its status is 200

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(client, number) for number in range(6)]
            fleet.ready(2)
            planner = fleet.json("/fleet")["planner"]
            has_grown.set()
            for each in clients:
                each.result()
        assert planner["mode"] == "load" and planner["desired"] == {"both": 2}
        fleet.until(lambda: [worker["state"] for worker in fleet.workers().values()] == ["ready"])
        assert fleet.ask("And then", 4)
    decisions = [entry["decision"] for entry in map(json.loads, record.open()) if "decision" in entry]
    command = [PYTHON, "-m", "shoal", "plan", "--replay", record, "--fleet", tmp_path / "fleet.toml"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(line)["decision"] for line in again] == decisions
    assert [change["count"] for decision in decisions for change in decision["changes"]] == [1, -1]

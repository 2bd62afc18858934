"""`shoal fleet up` as a user runs it: real workers with the default model on the CPU, in processes of their
own."""

import concurrent.futures
import contextlib
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
from tests.external_worker import written
from tests.fleet_up import PATIENCE_S, Crowd, Fleet, is_running, sized, state_home
from tests.serving import PYTHON, ROOT, TINY, free_port
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)

LAPTOP = ROOT / "examples" / "fleet" / "laptop.toml"
OPTIONS = "{ dtype = 'float32', max_model_len = 1024, kv_cache_memory_bytes = 200_000_000 }"
STORY = (
    "Every morning the fishermen went down to the harbour, looked at the sky, and talked about the wind. " * 5
)


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
    assert status == 503 and "paused" in text and headers["retry-after"]
    fleet.operate("/resume")
    assert {fleet.ask(f"Resumed {number}. {STORY}", 2)[1] for number in range(6)} == set(fleet.workers())


@pytest.mark.parametrize("what", ["the worker", "its engine"])
def test_a_worker_that_dies_is_started_again(fleet, what):
    _, name, _ = fleet.ask(f"Death. {STORY}")
    pid = killed = fleet.workers()[name]["pid"]
    if what == "its engine":
        children = psutil.Process(pid).children(recursive=True)
        [killed] = [one.pid for one in children if "shoal.engine.process.core_entry" in one.cmdline()]
    begun = len(fleet.text())
    os.kill(killed, signal.SIGKILL)
    assert fleet.ask(f"Death. {STORY}")[1] != name
    fleet.until(lambda: f"{name} ended" in fleet.text()[begun:])
    fleet.until(lambda: fleet.workers().get(name, {}).get("pid") not in (None, pid))
    fleet.ready()
    how = "killed by SIGKILL" if what == "the worker" else "exit code 1"
    assert re.search(
        rf"{name} ended after [\d.]+ s \({how}\); it is restarted in [12] s", fleet.text()[begun:]
    )


SLEEPY = "{ dtype = 'float32', max_model_len = 512, kv_cache_memory_bytes = 200_000_000, enable_sleep_mode = true }"


@pytest.mark.slow
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
        eventually(lambda: not [p for p in processes if is_running(p.pid)])
        assert "Traceback" not in fleet.text()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_at_once(fleet_of_one):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(fleet_of_one.request, "/v1/completions", ENDLESS)
        fleet_of_one.until(lambda: any(w["active_requests"] for w in fleet_of_one.workers().values()))
        processes = fleet_of_one.descendants()
        fleet_of_one.signal()
        eventually(
            lambda: "shutting down" in fleet_of_one.request("/v1/completions", ENDLESS | {"max_tokens": 1})[2]
        )
        fleet_of_one.signal()
        assert fleet_of_one.process.wait(PATIENCE_S) == 1
        eventually(lambda: not [p for p in processes if is_running(p.pid)])
        assert running.exception() or running.result()[0] != 200 or "length" not in running.result()[2]


def test_workers_take_leave_before_the_fleet_ends(tmp_path, folder):
    """Regression: workers ended after their plane, waited for it for a lease, and warned that it does not
    answer."""
    options = "{ dtype = 'float32', max_model_len = 256, kv_cache_memory_bytes = 8_000_000 }"
    with Fleet(tmp_path, f"[[workers]]\nmodel = '{folder}'\noptions = {options}\n") as fleet:
        fleet.ready(1)
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0
        assert "WARNING" not in fleet.text(), fleet.text()


ENDLESS = {"model": "smollm2", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "timeout": 600}


def test_nothing_is_left_of_a_fleet_that_is_killed(fleet_of_one):
    processes = fleet_of_one.descendants()
    fleet_of_one.process.kill()
    fleet_of_one.process.wait()
    eventually(lambda: not [p for p in processes if is_running(p.pid)])


@pytest.fixture
def fleet_of_one(tmp_path):
    options = "{ dtype = 'float32', max_model_len = 4096, kv_cache_memory_bytes = 200_000_000 }"
    text = f"shutdown_timeout = 300\n[[workers]]\noptions = {options}\n"
    with Fleet(tmp_path, text) as fleet:
        yield fleet.ready(1)


def test_two_models_are_behind_one_endpoint_and_its_key_guards_the_workers_too(tmp_path, folder):
    tiny = "{ dtype = 'float32', device = 'cpu', kv_cache_memory_bytes = 4_000_000, max_model_len = 512,"
    tiny += " worker_tags = ['blue'] }"
    workers = f"[[workers]]\nname = 'small'\noptions = {OPTIONS}\n"
    workers += f"[[workers]]\nmodel = '{folder}'\nname = 'tiny'\noptions = {tiny}\n"
    with Fleet(tmp_path, f"api_key = ['secret']\n{workers}", key="secret") as fleet:
        fleet.ready()
        assert {model["id"] for model in fleet.json("/v1/models")["data"]} == {"small", "tiny"}
        for name in ("small", "tiny", "small"):
            assert fleet.ask("Some words", model=name)[1] == f"{name}-1"
        assert [worker["tags"] for worker in fleet.workers().values()] == [[], ["blue"]]
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
    """Servers of Shoal stand for another engine's."""
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
        assert status == 503 and "needs a native worker" in text
        processes = fleet.descendants()
        fleet.signal(signal.SIGTERM)
        assert fleet.process.wait(PATIENCE_S) == 0
        eventually(lambda: not [p for p in processes if is_running(p.pid)])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            "[[workers]]\ncommand = 'no-such-engine --port {port}'\n",
            "must begin with a program, got 'no-such-engine'",
        ),
        ("[[workers]]\n[[workers]]\nmodel = '/no/such/folder'\n", "[[workers]] 2: "),
        ("", "must have at least one worker; write [[workers]]"),
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
        assert "smollm2-1 has ended 5 times in a row" in fleet.text()
        assert "all workers have failed" in fleet.text() and "Traceback" not in fleet.text()


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
def test_a_worker_that_sleeps_under_circus_is_woken_by_the_next_fleet(tmp_path, folder):
    """Regression: it started a third one, as only the fleet that was killed knew of the sleeper."""
    text = sized(folder, tmp_path / "planner.jsonl", "circus").replace(
        'device = "cpu",', 'device = "cpu", enable_sleep_mode = true,'
    )
    with Fleet(tmp_path, text + "park_level = 1\n") as fleet:

        def asleep():
            return sorted(worker["asleep"] for worker in fleet.workers().values())

        fleet.ready(1)
        with Crowd(fleet):
            fleet.ready(2)
        fleet.until(lambda: asleep() == [False, True])
        pids = {name: worker["pid"] for name, worker in fleet.workers().items()}
        fleet.process.kill()
        fleet.process.wait()
        with Fleet(tmp_path, text + "park_level = 1\n") as fleet:
            fleet.ready(2)  # before, one that was not asked yet counts as awake
            assert asleep() == [False, True]
            with Crowd(fleet):
                fleet.until(lambda: asleep() == [False, False])
            assert {name: worker["pid"] for name, worker in fleet.workers().items()} == pids
            fleet.signal()
            assert fleet.process.wait(PATIENCE_S) == 0 and "Traceback" not in fleet.text()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_that_is_not_needed_sleeps_and_wakes_with_the_next_load(tmp_path, folder, level):
    text = f"""
        model = "{folder}"
        [[workers]]
        name = "tiny"
        options = {{ dtype = "float32", max_model_len = 256, num_gpu_blocks_override = 40, enable_sleep_mode = true }}
        [planner]
        enabled = true
        park_level = {level}
        metric_pulling_interval = 0.3
        adjustment_interval = 1.0
        decode_kv_scale_up_threshold = 0.3
        decode_kv_scale_down_threshold = 0.05
        max_gpu_budget = 2
    """
    with Fleet(tmp_path, text) as fleet:
        fleet.ready(1)
        alone = fleet.ask("A prompt", 30, model="tiny")[0]

        def asleep():
            return sorted(worker["asleep"] for worker in fleet.workers().values())

        def under_load(number):
            while asleep() != [False, False]:
                fleet.ask(f"Client {number} says", 200, model="tiny")  # raises unless its status is 200

        pids = []
        for _ in range(2):
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                for each in [pool.submit(under_load, number) for number in range(8)]:
                    each.result()
            fleet.until(lambda: asleep() == [False, True])
            assert fleet.ask("A prompt", 30, model="tiny")[0] == alone
            pids.append({worker["pid"] for worker in fleet.workers().values()})
        assert pids[0] == pids[1]  # it was woken, not started
        if level == 1:
            [sleeper] = [name for name, worker in fleet.workers().items() if worker["asleep"]]
            fleet.operate(f"/wake_up?workers={sleeper}")  # a person's hand is taken as it is,
            fleet.until(lambda: asleep() == [False, True])  # and it is parked again


@pytest.mark.slow
def test_a_planner_sizes_workers_of_another_engine_by_their_metrics_and_fails_no_request(tmp_path):
    """The engine ends at a SIGTERM with all it has, so the router has to drain it first."""
    text = f"""
        [[workers]]
        command = "{PYTHON} {ROOT / "tests" / "external_worker.py"} {{port}}"
        name = "toy"
        [router]
        check_interval = 0.2
        [planner]
        enabled = true
        metric_pulling_interval = 0.2
        adjustment_interval = 1.0
        decode_kv_scale_up_threshold = 0.6
        decode_kv_scale_down_threshold = 0.4
        max_gpu_budget = 2
    """
    with Fleet(tmp_path, text) as fleet:
        fleet.ready(1)
        has_grown, has_shrunk = threading.Event(), threading.Event()

        def client(until):
            while not until.is_set():
                body = {"model": "toy", "prompt": STORY, "max_tokens": 50, "temperature": 0}
                answer = fleet.json("/v1/completions", body)
                assert answer["choices"][0]["text"] == written(STORY, 50)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, until) for until in (has_grown, has_grown, has_grown, has_shrunk)]
            fleet.ready(2)
            has_grown.set()
            fleet.until(lambda: [worker["state"] for worker in fleet.workers().values()] == ["ready"])
            assert fleet.json("/fleet")["planner"]["desired"] == {"both": 1}
            has_shrunk.set()
            for each in clients:
                each.result()


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["process", "circus"])
def test_a_fleet_follows_its_load_and_survives_a_killed_worker_without_a_failed_request(
    tmp_path, folder, connector
):
    record = tmp_path / "planner.jsonl"
    with Fleet(tmp_path, sized(folder, record, connector)) as fleet:
        fleet.ready(1)
        with Crowd(fleet):
            fleet.ready(2)
            planner = fleet.json("/fleet")["planner"]
            assert planner["mode"] == "load" and planner["desired"] == {"both": 2}
            victim = fleet.workers()["tiny-1"]["pid"]
            os.kill(victim, signal.SIGKILL)
            fleet.until(lambda: fleet.workers().get("tiny-1", {}).get("pid") not in (None, victim))
            fleet.ready(2)
        fleet.until(lambda: list(fleet.workers()) == ["tiny-1"])
        assert fleet.ask("And then", 4, model="tiny")
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0 and "Traceback" not in fleet.text()
    decisions = [entry["decision"] for entry in map(json.loads, record.open()) if "decision" in entry]
    command = [PYTHON, "-m", "shoal", "plan", "--replay", record, "--fleet", tmp_path / "fleet.toml"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(line)["decision"] for line in again] == decisions
    assert [change["count"] for decision in decisions for change in decision["changes"]] == [1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["process", "circus"])
def test_a_fleet_that_is_killed_starts_again_with_the_workers_that_it_had(tmp_path, folder, connector):
    text = sized(folder, tmp_path / "planner.jsonl", connector)
    with Fleet(tmp_path, text) as fleet:
        fleet.ready(1)
        with contextlib.suppress(OSError, http.client.HTTPException), Crowd(fleet):
            before = {name: worker["pid"] for name, worker in fleet.ready(2).workers().items()}
            fleet.process.kill()
            fleet.process.wait()
        with Fleet(tmp_path, text) as again:
            again.until(lambda: set(again.workers()) == {"tiny-1", "tiny-2"})
            after = {name: worker["pid"] for name, worker in again.workers().items()}
            assert (after == before) == (connector == "circus"), "Circus keeps them, ours die with the fleet"
            again.ready(1)
            assert again.ask("And then", 4, model="tiny")
            again.signal()
            assert again.process.wait(PATIENCE_S) == 0 and "Traceback" not in again.text()
        eventually(lambda: not [pid for pid in [*before.values(), *after.values()] if is_running(pid)])


@pytest.mark.slow
def test_prefill_workers_follow_the_prompts_that_wait_without_a_failed_request(tmp_path, folder):
    common = "dtype = 'float32', device = 'cpu', max_model_len = 512, num_gpu_blocks_override = 200"
    text = f"""
        model = "{folder}"
        [[workers]]
        name = "tiny"
        role = "prefill"
        options = {{ {common}, max_num_batched_tokens = 16, max_num_seqs = 1 }}
        [[workers]]
        name = "tiny"
        role = "decode"
        options = {{ {common} }}
        [router]
        max_local_prefill_length = 16
        max_prefill_queue_size = 1000
        [planner]
        enabled = true
        metric_pulling_interval = 0.2
        adjustment_interval = 2.0
        prefill_queue_scale_up_threshold = 1.0
        prefill_queue_scale_down_threshold = 0.1
        max_gpu_budget = 3
    """
    with Fleet(tmp_path, text) as fleet:
        fleet.ready(2)
        is_over = threading.Event()

        def client(number):
            prompt, count = [3 + (7 * number + i) % 290 for i in range(450)], 0
            while not is_over.is_set():
                count += 1
                fleet.ask(prompt, 2, model="tiny", cache_salt=f"{number}-{count}")

        def prefills():
            return sorted(name for name, worker in fleet.workers().items() if worker["role"] == "prefill")

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            clients = [pool.submit(client, number) for number in range(12)]
            try:
                while prefills() != ["tiny-prefill-1", "tiny-prefill-2"]:
                    assert not any(each.done() for each in clients)
                    time.sleep(0.1)
                fleet.ready(3)
            finally:
                is_over.set()
            for each in clients:
                each.result()  # raises unless each of its requests had status 200
        fleet.until(lambda: prefills() == ["tiny-prefill-1"])
        assert fleet.json("/fleet")["planner"]["desired"] == {"prefill": 1, "decode": 1}
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0 and "Traceback" not in fleet.text()


def test_a_second_command_for_one_file_is_refused(fleet):
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "XDG_STATE_HOME": str(state_home(fleet.folder))}
    command = [PYTHON, "-m", "shoal", "fleet", "up", str(fleet.file)]
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert second.returncode == 1 and f"process {fleet.process.pid} is the supervisor" in second.stderr
    assert "--state-dir" in second.stderr and fleet.ask(STORY)


def test_a_fleet_of_another_orchestrator_starts_nothing_and_needs_no_model_here(tmp_path):
    text = f"""
        [[workers]]
        model = "nobody/has-this-model"
        count = 3
        [plane]
        url = "tcp://127.0.0.1:{free_port()}"
        [planner]
        connector = "virtual"
    """
    with Fleet(tmp_path, text) as fleet:
        fleet.until(lambda: list(tmp_path.glob("shoal/*/decision.json")))
        [file] = tmp_path.glob("shoal/*/decision.json")
        decision = json.loads(file.read_text())
        assert decision["decision_id"] == 1 and decision["workers"] == {"nobody/has-this-model": {"both": 3}}
        fleet.until(lambda: fleet.workers() == {})
        assert f"/{file.relative_to(tmp_path)}" in fleet.text() and fleet.descendants() == []
        fleet.signal()
        assert fleet.process.wait(PATIENCE_S) == 0 and "Traceback" not in fleet.text()

"""`shoal fleet up --on ray` as a user runs it, on a real cluster in this machine: a head, and three nodes for
workers."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading

import psutil
import pytest

from shoal.fleet.connectors.state_file import digest_of
from shoal.fleet.planner.engine_profile import write_profile
from shoal.fleet.simulator.timing import profile_of
from tests import nats_server, ray_cluster
from tests.fleet_processes import PATIENCE_S, Asked
from tests.serving import PYTHON, ROOT, free_port
from tests.tiny import write_model
from tests.waiting import eventually

pytestmark = pytest.mark.slow

TOKENS = 440  # per answer; enough for a node to be lost in the middle of some, however quick the machine
NUM_CLIENTS = 8
CPUS = 1  # per node; a worker takes it, so there is one on a node, with one thread
OPTIONS = "{ dtype = 'float32', max_model_len = 512, kv_cache_memory_bytes = 8_000_000, skip_tokenizer_init = true }"
WORKERS = f"[[workers]]\ncount = 2\nname = 'tiny'\nresources = {{ CPU = {CPUS} }}\noptions = {OPTIONS}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster.started(cpus=[0, *[CPUS] * 3]) as cluster:
        yield cluster


@pytest.fixture
def cluster(nodes):
    """A head and three nodes for workers; one that a test has lost is replaced."""
    ray_cluster.fill(nodes, CPUS, 4)
    return nodes


class Fleet:
    """The command with a file of this text on the cluster."""

    def __init__(self, folder, cluster, model, text):
        self.port, self.log = free_port(), folder / "fleet.log"
        self.file = file = folder / "fleet.toml"
        file.write_text(f"port = {self.port}\nmodel = '{model}'\n{text}")
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "shoal", "fleet", "up", file, "--on", "ray", "--address", cluster.address],
                env=os.environ | {"PYTHONPATH": path},
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def text(self):
        return self.log.read_text()

    def get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def num_migrations(self):
        """Requests that went on at another worker, before their first token or behind it."""
        line = r"^dynamo_frontend_model_migration_total\{.*\} (\S+)$"
        return sum(float(value) for value in re.findall(line, self.get("/metrics"), re.MULTILINE))

    def workers(self):
        """Returns the ready workers by id; {} before the router listens."""
        assert self.process.poll() is None, self.text()
        try:
            found = json.loads(self.get("/fleet"))["workers"]
        except OSError:
            return {}
        return {worker["id"]: worker for worker in found if worker["state"] == "ready"}

    def ready(self, count=2):
        return eventually(lambda: len(found := self.workers()) >= count and found, self.text)

    def node_of_router(self, cluster):
        """Returns the node of the last router."""
        return ray_cluster.node_of(cluster, int(re.findall(r"\(router pid=(\d+)", self.text())[-1]))

    def stream(self, first_token, max_tokens):
        body = {"prompt": list(range(first_token, first_token + 24)), "max_tokens": max_tokens}
        return Asked(
            self.port,
            "/v1/completions",
            {"model": "tiny", **body, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
        )

    def tokens(self, first_token, max_tokens=TOKENS):
        """The ids of a whole answer."""
        asked = self.stream(first_token, max_tokens)
        answer = asked.answer()
        assert asked.status == 200 and answer["error"] is None, (asked.status, answer, self.text())
        return [id for event in asked.events for choice in event["choices"] for id in choice["token_ids"]]


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def cut_power_under_load(fleet, cluster):
    """One node with a worker is lost while eight clients ask without a pause; then there are two workers again,
    and no request has failed."""
    before, had_migrated = fleet.ready(), fleet.num_migrations()
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
        expected = dict(enumerate(clients.map(fleet.tokens, range(NUM_CLIENTS))))
    assert all(len(tokens) == TOKENS for tokens in expected.values())
    is_over, num_answers = threading.Event(), 0

    def ask(first):
        count = 0
        while not is_over.is_set():
            assert fleet.tokens(first) == expected[first]
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
        running = [clients.submit(ask, first) for first in expected]
        try:
            spared = [cluster.head_node, fleet.node_of_router(cluster)]
            nodes = {name: ray_cluster.node_of(cluster, worker["pid"]) for name, worker in before.items()}
            [lost, *_] = [name for name, node in nodes.items() if node not in spared]
            eventually(lambda: fleet.workers()[lost]["active_requests"] >= 2, fleet.text)
            ray_cluster.cut_power(cluster, nodes[lost])
            eventually(lambda: lost not in fleet.workers(), fleet.text)
            after = fleet.ready()
            assert after[lost]["pid"] != before[lost]["pid"]
            assert ray_cluster.node_of(cluster, after[lost]["pid"]) is not nodes[lost]
        finally:
            is_over.set()
        num_answers = sum(future.result() for future in running)
    assert num_answers >= len(expected) and fleet.num_migrations() > had_migrated
    return lost


def test_a_lost_node_fails_no_request_and_its_worker_comes_back(tmp_path, cluster, model):
    with Fleet(tmp_path, cluster, model, WORKERS) as fleet:
        fleet.ready()
        lost = cut_power_under_load(fleet, cluster)
        said = fleet.text()
        assert f"{lost} has lost its node" in said or f"{lost} ended" in said
        assert re.search(rf"\({lost} pid=\d+\).* serving tiny at", said), "Ray's log has the worker's words"


def test_a_router_that_dies_is_started_again_with_its_workers(tmp_path, cluster, model):
    """Its actor's process is killed. Its reservations must be free again for its successor's workers."""
    text = WORKERS.replace("count = 2", "count = 3")
    with Fleet(tmp_path, cluster, model, text) as fleet:
        before = {worker["pid"] for worker in fleet.ready(3).values()}
        os.kill(int(re.findall(r"\(router pid=(\d+)", fleet.text())[-1]), signal.SIGKILL)
        eventually(lambda: not any(map(is_running, before)))
        assert not before & {worker["pid"] for worker in fleet.ready(3).values()}
        assert "router ended after" in fleet.text()
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(PATIENCE_S) == 0, fleet.text()


ADVISER = """
    [planner]
    enabled = true
    no_operation = true
    mode = "sla"
    profile = "profile.json"
    record = "planner.jsonl"
"""


def test_ctrl_c_drains_and_leaves_nothing(tmp_path, cluster, model):
    """The planner's files are those beside the command, whatever folder its actor runs in."""
    write_profile(tmp_path / "profile.json", profile_of("h200", "qwen3-8b", 256, 300_000, 8192))
    with Fleet(tmp_path, cluster, model, WORKERS + ADVISER) as fleet:
        pids = [worker["pid"] for worker in fleet.ready().values()]
        eventually(lambda: '"decision"' in (tmp_path / "planner.jsonl").read_text(), fleet.text)
        running = fleet.stream(3, 400)
        eventually(lambda: len(running.events) > 2 or running.error, fleet.text)
        assert running.error is None, (running.status, running.error, fleet.text())
        fleet.process.send_signal(signal.SIGINT)
        answer = running.answer()
        assert answer["error"] is None and answer["usage"] is None
        assert sum(len(c["token_ids"]) for event in running.events for c in event["choices"]) == 400
        assert fleet.process.wait(PATIENCE_S) == 0, fleet.text()
        eventually(lambda: not any(map(is_running, pids)))


def test_a_killed_command_leaves_nothing_on_the_cluster(tmp_path, cluster, model):
    with Fleet(tmp_path, cluster, model, WORKERS) as fleet:
        pids = [worker["pid"] for worker in fleet.ready().values()]
        fleet.process.kill()
        eventually(lambda: not any(map(is_running, pids)))


def test_workers_without_room_wait_and_the_others_serve(tmp_path, cluster, model):
    """Three nodes, four workers. The fourth has no room, and the log names what is missing."""
    text = WORKERS.replace("count = 2", "count = 4")
    with Fleet(tmp_path, cluster, model, text) as fleet:
        assert len(fleet.ready(3)) == 3
        eventually(lambda: "waits for a node with free {'CPU': 1" in fleet.text(), fleet.text)
        assert len(fleet.tokens(1)) == TOKENS
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(PATIENCE_S) == 0, fleet.text()


def test_a_second_ctrl_c_ends_at_once(tmp_path, cluster, model):
    with Fleet(tmp_path, cluster, model, WORKERS) as fleet:
        pids = [worker["pid"] for worker in fleet.ready().values()]
        fleet.process.send_signal(signal.SIGINT)
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(PATIENCE_S) in (0, 1)
        eventually(lambda: not any(map(is_running, pids)))


def test_a_mistake_in_the_file_ends_the_command_with_its_reason(tmp_path, cluster):
    with Fleet(tmp_path, cluster, "/no/such/model", WORKERS) as fleet:
        assert fleet.process.wait(PATIENCE_S) == 1
        assert "[[workers]] 1: " in fleet.text() and "Traceback" not in fleet.text()


def test_nats_is_the_plane_of_a_fleet_on_many_hosts(tmp_path, cluster, model):
    """With NATS workers listen on their nodes' addresses, and the key keeps others out."""
    port = free_port()
    server = subprocess.Popen([nats_server.find(), "-js", "-p", str(port), "-sd", tmp_path / "nats"])
    try:
        text = WORKERS + f"[plane]\nurl = 'nats://127.0.0.1:{port}'\n"
        with Fleet(tmp_path, cluster, model, text) as fleet:
            workers = fleet.ready()
            prefix = f"{socket.gethostname().partition('.')[0]}-{digest_of(fleet.file)}"  # no other fleet's
            assert set(workers) == {f"{prefix}-tiny-1", f"{prefix}-tiny-2"}
            assert len(fleet.tokens(1)) == TOKENS
            host = cluster.head_node.node_ip_address
            eventually(lambda: f"its tokens are at tcp://{host}:" in fleet.text(), fleet.text)
            cut_power_under_load(fleet, cluster)
            fleet.process.send_signal(signal.SIGINT)
            assert fleet.process.wait(PATIENCE_S) == 0, fleet.text()
    finally:
        server.kill()
        server.wait()

"""`shoal fleet up --on ray`: what is refused before a cluster is needed."""

import functools
import subprocess
import sys
import threading

import pytest

from shoal.cli.main import main
from shoal.fleet.connectors import ray_metrics

FILE = "model = 'smollm2'\n[[workers]]\n"
PAGE = """\
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:request_success_total Ended.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0
# HELP vllm:time_to_first_token_seconds First token.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.5
# HELP process_open_fds Files.
# TYPE process_open_fds gauge
process_open_fds 12.0
"""


@pytest.fixture
def fleet_up(tmp_path, capsys):
    """(exit code, what it said) of the command with this text as its file."""

    def run(text, *options):
        (tmp_path / "fleet.toml").write_text(text)
        code = main(["fleet", "up", str(tmp_path / "fleet.toml"), *options])
        return code, capsys.readouterr().err

    return run


def test_without_ray_the_error_names_what_to_install(fleet_up, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("shoal.") and "_ray" in name]:
        monkeypatch.delitem(sys.modules, name)
    code, said = fleet_up(FILE, "--on", "ray")
    assert code == 1 and "pip install 'shoal[ray]'" in said


def test_an_address_without_ray_is_refused(fleet_up):
    code, said = fleet_up(FILE, "--address", "10.0.0.1:6379")
    assert code == 1 and "'10.0.0.1:6379' is for a Ray cluster; add --on ray" in said


def test_an_address_where_nobody_answers_is_given_up(fleet_up, monkeypatch):
    """Ray retries for minutes without a message."""
    fleet_ray = pytest.importorskip("shoal.apps.fleet_ray")
    silence = threading.Event()
    monkeypatch.setattr(fleet_ray.ray, "init", lambda *_, **__: silence.wait())
    monkeypatch.setattr(fleet_ray, "CONNECT_S", 0.1)
    code, said = fleet_up(FILE, "--on", "ray", "--address", "10.0.0.1:6379")
    silence.set()
    assert (
        code == 1 and "no Ray cluster is found at '10.0.0.1:6379': it has not answered within 0.1 s" in said
    )


def test_a_state_folder_on_ray_is_refused(fleet_up, tmp_path):
    code, said = fleet_up(FILE, "--on", "ray", "--state-dir", str(tmp_path))
    assert code == 1 and "leave it out" in said and str(tmp_path) in said


def test_no_cluster_is_named_with_the_way_out(fleet_up, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    # Ray looks among all processes of the machine, where another test may have a cluster.
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", functools.cache(set))
    code, said = fleet_up(FILE, "--on", "ray")
    assert code == 1 and "no Ray cluster is found here" in said and "--address HOST:PORT" in said


def test_the_connector_ray_needs_a_cluster(fleet_up):
    code, said = fleet_up(FILE + "[planner]\nconnector = 'ray'\n")
    assert code == 1 and "--on ray" in said


def test_another_connector_does_not_go_with_ray(fleet_up):
    code, said = fleet_up(FILE + "[planner]\nconnector = 'circus'\n", "--on", "ray")
    assert code == 1 and "connector 'circus' does not go with --on ray" in said


def test_a_fleet_of_one_host_does_not_import_ray():
    code = "import sys, shoal.apps.fleet; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_metrics_keep_their_names_and_labels_and_say_whose_they_are(monkeypatch):
    gauges = {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            assert name not in gauges, "a gauge is made once"
            gauges[name] = self
            self.description, self.tag_keys, self.values = description, set(tag_keys), {}

        def set(self, value, tags):
            assert set(tags) == self.tag_keys  # Ray insists
            self.values[tuple(sorted(tags.items()))] = value

    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    metrics = ray_metrics.RayMetrics("m-1")
    for page in (PAGE, PAGE.replace(" 3.0", " 4.0")):
        metrics.publish(page)
    common = {("engine", "0"), ("model_name", "m"), ("worker", "m-1")}
    [(labels, value)] = gauges["vllm_num_requests_running"].values.items()
    assert set(labels) == common and value == 4.0
    ended = gauges["vllm_request_success_total"].values
    assert {dict(labels)["finished_reason"]: value for labels, value in ended.items()} == {
        "stop": 7,
        "length": 2,
    }
    assert len(gauges["vllm_time_to_first_token_seconds_bucket"].values) == 2
    assert "vllm_time_to_first_token_seconds_sum" in gauges and "process_open_fds" not in gauges

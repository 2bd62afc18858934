"""A fleet's file on a Ray cluster: bundles, command lines, and errors that are reported before anything
starts. No Ray is needed here."""

import sys

import pytest

from shoal.errors import ConfigError
from shoal.fleet.connectors.by_name import connector_named
from shoal.fleet.file.fleet_file import ExternalWorkers, NativeWorkers, read_fleet_file
from shoal.fleet.file.ray_components import bundle_of, check_reach, hosts_of, ray_components

NATS = "nats://10.0.0.9:4222"


def node(address="10.0.0.1", gpus=0, cpus=8):
    resources = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
    return {"Alive": True, "NodeManagerAddress": address, "Resources": resources}


def own(**more):
    return NativeWorkers(model="smollm2", **more)


@pytest.mark.parametrize(
    "group, most_gpus, expected",
    [
        (own(), 0, {"CPU": 1}),
        (own(), 8, {"CPU": 1, "GPU": 1}),
        (own(options={"tensor_parallel_size": 4}), 4, {"CPU": 1, "GPU": 4}),
        (own(options={"device": "cpu"}), 8, {"CPU": 1}),
        (own(options={"device": "cuda"}), 0, {"CPU": 1, "GPU": 1}),  # an autoscaler may bring such nodes
        (own(resources={"CPU": 6, "accelerator_type:H200": 0.01}), 8, {"CPU": 6, "GPU": 1, "accelerator_type:H200": 0.01}),
        (own(resources={"CPU": 0}), 1, {"CPU": 0, "GPU": 1}),
    ],
)  # fmt: skip
def test_a_worker_reserves_its_gpus_and_a_core_in_one_bundle(group, most_gpus, expected):
    assert bundle_of(group, most_gpus) == expected


def test_more_gpus_than_a_node_has_are_refused_with_the_limit():
    workers = [own(), own(name="large", options={"tensor_parallel_size": 8})]
    with pytest.raises(ConfigError, match=r"\[\[workers\]\] 2: tensor_parallel_size 8 .* largest node has 4"):
        ray_components(workers, [node(gpus=4), node(gpus=2), node()], NATS)


@pytest.mark.parametrize(
    "group, said",
    [
        (own(devices=[0]), "must be left out on Ray"),
        (ExternalWorkers("vllm serve m --port {port}"), r"name them in \[router\]"),
    ],
)
def test_what_ray_does_not_start_is_refused(group, said):
    with pytest.raises(ConfigError, match=said):
        ray_components([group], [node()], NATS)


def test_commands_are_for_any_node():
    groups = [own(count=3), own(role="prefill", options={"max_model_len": 512})]
    both, prefill = ray_components(
        groups, [node()], NATS, more_words=["--verbose"], environment={"A": "b"}, prefix="ray-"
    )
    assert (both.name, both.count, both.model, both.role) == ("ray-smollm2", 3, "smollm2", "both")
    assert prefill.name == "ray-smollm2-prefill" and prefill.environment == {"A": "b"}
    words = " ".join(prefill.command)
    assert words.startswith("{python} -m shoal serve smollm2 --port {http_port} --plane " + NATS)
    assert "--max-model-len=512" in words and words.endswith("--verbose")
    assert "--fleet-key-file {fleet_key_file}" in words and sys.executable not in words


@pytest.mark.parametrize("given", [{}, {"fleet_host": "192.168.1.1"}])
def test_tokens_are_at_the_nodes_address_where_other_hosts_may_be(given):
    def hosts(plane):
        [component] = ray_components([own(options=given)], [node()], plane)
        return "--fleet-host {host}" in " ".join(component.command)

    assert hosts(NATS) == (not given)
    assert not hosts("ipc:///run/plane")


def test_nodes_of_one_host_may_have_any_plane():
    hosts = hosts_of([node(), node(gpus=1)])
    for url in (None, "tcp://127.0.0.1:5600", "nats://127.0.0.1:4222", NATS):
        check_reach(url, hosts)


@pytest.mark.parametrize(
    "url, said",
    [
        (None, r"embedded plane is for one host, and the Ray cluster has 2 \(10.0.0.1, 10.0.0.2\).*\[plane\] url"),
        ("tcp://127.0.0.1:5600", "'tcp://127.0.0.1:5600' is for one host"),
        ("nats://127.0.0.1:4222", "another one on each of the Ray cluster's 2 hosts"),
        (f"{NATS},nats://localhost:4222", "'nats://localhost:4222' is another one on each"),
    ],
)  # fmt: skip
def test_several_hosts_need_a_plane_that_all_reach(url, said):
    with pytest.raises(ConfigError, match=said):
        check_reach(url, hosts_of([node(), node("10.0.0.2")]))
    check_reach(NATS, hosts_of([node(), node("10.0.0.2")]))


@pytest.mark.parametrize(
    "resources, said",
    [
        ("{ GPU = 2 }", "tensor_parallel_size"),
        ("{ CPU = -1 }", "resources CPU must be above 0, got -1"),
        ("{ CPU = inf }", "resources CPU must be above 0, got inf"),
        ("{ CPU = 'x' }", "dict"),
    ],
)
def test_resources_of_a_file_are_checked(tmp_path, resources, said):
    file = tmp_path / "fleet.toml"
    file.write_text(f"[[workers]]\nresources = {resources}\n")
    with pytest.raises(ConfigError, match=said):
        read_fleet_file(file)


def test_whole_numbers_are_amounts_too(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text("[[workers]]\nresources = { CPU = 4, memory = 1_000.5 }\n")
    [group] = read_fleet_file(file).workers
    assert bundle_of(group, 0) == {"CPU": 4, "memory": 1000.5}


def test_the_connector_follows_from_where_the_fleet_runs():
    with pytest.raises(ConfigError, match="shoal fleet up FILE --on ray"):
        connector_named("ray")

"""A real Ray cluster of several nodes in this machine, small and without a dashboard."""

import contextlib

import psutil
import pytest

NODE = {"object_store_memory": 80_000_000, "include_dashboard": False}  # Ray's least store is 75 MB
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the way of future versions, which warn until then
    "RAY_enable_metrics_collection": "0",
    "RAY_AUTH_MODE": "disabled",
}
# A node that says nothing for six seconds is lost. Less would lose some on a machine that is busy.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 12,
}


@contextlib.contextmanager
def started(cpus):
    """Yields a `ray.cluster_utils.Cluster` whose nodes have `cpus` CPUs each; the first one is the head. All
    of its processes end with the block."""
    pytest.importorskip("ray", reason="pip install ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": cpus[0], "_system_config": HEALTH, **NODE}
        )
        try:
            for count in cpus[1:]:
                cluster.add_node(num_cpus=count, **NODE)
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def joined(cpus):
    """As `started`, with this process connected to the cluster."""
    with started(cpus) as cluster:
        import ray

        ray.init(address=cluster.address)
        try:
            yield cluster
        finally:
            ray.shutdown()


def fill(cluster, cpus, count):
    """Adds nodes until there are `count`."""
    while len(cluster.list_all_nodes()) < count:
        cluster.add_node(num_cpus=cpus, **NODE)


def node_of(cluster, pid):
    """The node on which this process runs, or what started it."""
    pids = {process.pid for process in [psutil.Process(pid), *psutil.Process(pid).parents()]}
    [node] = [node for node in cluster.list_all_nodes() if raylet_of(node) in pids]
    return node


def raylet_of(node):
    return node.all_processes["raylet"][0].process.pid


def cut_power(cluster, node):
    """Kills all processes of a node at once."""
    raylet = psutil.Process(raylet_of(node))
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.remove_node(node, allow_graceful=False)

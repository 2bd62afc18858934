"""The connector to Kubernetes against a fake API server; and the manifests against the published schemas."""

import asyncio
import contextlib
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from shoal.apps.fleet import fleet_up
from shoal.cli.main import main
from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connectors import kubernetes
from shoal.fleet.connectors.connector import Component, ConnectorContext
from shoal.fleet.connectors.kubernetes import KubernetesConnector, deployment_of
from shoal.fleet.file.components import components_of_pods
from shoal.fleet.file.fleet_file import read_fleet_file
from shoal.fleet_views import WorkerState
from tests.fake_kubernetes import FakeKubernetes, use

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
WORKER = Component("Tiny", ("shoal", "serve"), model="tiny", count=1)
PREFILL = Component("Tiny-prefill", ("shoal", "serve"), model="tiny", role="prefill", count=0)


class FakeRouterView:
    """The router's word of each worker."""

    def __init__(self):
        self.states, self.roles = {}, {}

    def role_of(self, worker_id):
        return self.roles.get(worker_id)

    def state_of(self, worker_id):
        return self.states.get(worker_id)


class Setup:
    def __init__(self):
        self.router = FakeRouterView()
        self.fake = FakeKubernetes(self._join, self._leave)
        self.never_ready = False

    async def _join(self, pod, deployment):
        await asyncio.sleep(0.02)
        if not self.never_ready:
            self.router.states[pod] = WorkerState.READY

    async def _leave(self, pod, deployment):
        self.router.states[pod] = WorkerState.DRAINING
        await asyncio.sleep(0.02)
        self.router.states.pop(pod)

    @contextlib.asynccontextmanager
    async def connector(self, tmp_path, monkeypatch, *components, start_timeout_s=10.0):
        async with self.fake.serving(tmp_path) as kubeconfig:
            use(monkeypatch, kubeconfig)
            context = ConnectorContext(components, self.router, LoopClock(), start_timeout_s, None, tmp_path)
            connector = KubernetesConnector(context)
            try:
                await connector.start()
                yield connector
            finally:
                await connector.close(1.0)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(kubernetes, "POLL_S", 0.02)


def run(tmp_path, monkeypatch, scenario, *components, deployed=(("tiny", 1), ("tiny-prefill", 0)), **options):
    async def body():
        setup = Setup()
        for name, replicas in deployed:
            setup.fake.deploy(name, replicas)
        async with setup.connector(
            tmp_path, monkeypatch, *(components or (WORKER, PREFILL)), **options
        ) as made:
            await scenario(setup, made)

    asyncio.run(asyncio.wait_for(body(), 30))


def test_add_returns_the_pod_when_it_is_ready_and_remove_when_it_is_gone(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        added = await connector.add("tiny", "both")
        assert setup.router.states[added] == WorkerState.READY
        assert setup.fake.replicas["tiny"] == 2
        assert await connector.remove("tiny", "both") == added  # the youngest
        assert added not in setup.router.states
        assert added not in setup.fake.pods
        assert setup.fake.replicas == {"tiny": 1, "tiny-prefill": 0}

    run(tmp_path, monkeypatch, scenario)


def test_the_router_has_the_right_to_all_that_the_connector_asks_of_the_api(tmp_path, monkeypatch):
    asked = set()

    async def scenario(setup, connector):
        await connector.add("tiny", "both")
        await connector.remove("tiny", "both")
        for request in setup.fake.requests:
            method, path = request.split()
            _, found = path.split("/namespaces/llm/")
            kind, *more = found.split("/")  # ["pods"], ["pods", NAME] or ["deployments", NAME, "scale"]
            verb = {"GET": "get" if more else "list", "PATCH": "patch"}[method]
            asked.add(("/".join([kind, *more[1:]]), verb))

    run(tmp_path, monkeypatch, scenario)
    rules = of_kind("router", "Role")["shoal-planner"]["rules"]
    assert asked == {
        (resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]
    }


def test_a_worker_that_a_person_drains_is_not_awaited_in_a_pod(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        for state, pending in ((WorkerState.DRAINING, 0), (WorkerState.BROKEN, 1)):
            setup.router.states["tiny-1"] = state
            while connector.pending("tiny") != pending:
                await asyncio.sleep(0.01)

    run(tmp_path, monkeypatch, scenario)


def test_a_pod_that_does_not_end_is_not_awaited_for_ever(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        added = await connector.add("tiny", "both")
        monkeypatch.setattr(setup.router, "state_of", lambda worker_id: WorkerState.DRAINING)
        with pytest.raises(UnavailableError, match=f"pod {added} has not ended within .*start_timeout"):
            await connector.remove("tiny", "both")

    run(tmp_path, monkeypatch, scenario, start_timeout_s=0.5)


def test_an_api_that_is_away_for_a_while_leaves_no_pod_that_nobody_awaits(tmp_path, monkeypatch):
    """Regression: the requested worker came, although its addition had failed."""

    async def scenario(setup, connector):
        async def away(change):
            asked = len(setup.fake.requests)
            changing = asyncio.create_task(change("tiny", "both"))
            while not any(request.startswith("PATCH") for request in setup.fake.requests[asked:]):
                await asyncio.sleep(0)
            setup.fake.status = 503
            await asyncio.sleep(0.2)
            assert not changing.done()
            setup.fake.status = 200
            return await changing

        assert await away(connector.add) == "tiny-2"
        assert await connector.remove("tiny", "both") == "tiny-2"

    run(tmp_path, monkeypatch, scenario)


def test_a_pod_that_is_not_ready_goes_before_those_that_serve(tmp_path, monkeypatch):
    """Kubernetes ends it in any case, and the youngest that serves would be awaited in vain."""

    async def scenario(setup, connector):
        setup.fake.has_room = False
        setup.fake.deploy("tiny", 2)
        setup.fake.has_room = True
        setup.fake.deploy("tiny", 3)
        while setup.router.states.get("tiny-3") != WorkerState.READY:
            await asyncio.sleep(0.01)
        assert await connector.remove("tiny", "both") == "tiny-2"
        assert set(setup.router.states) == {"tiny-1", "tiny-3"}

    run(tmp_path, monkeypatch, scenario)


def test_components_that_would_share_a_deployment_are_refused(tmp_path, monkeypatch):
    other = Component("tiny", ("shoal", "serve"), model="other")
    with pytest.raises(ConfigError, match="components 'Tiny' and 'tiny' have the same Deployment, 'tiny'"):
        run(tmp_path, monkeypatch, None, WORKER, other)


def test_a_role_returns_from_zero(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        with pytest.raises(UnavailableError, match="no prefill worker of tiny"):
            await connector.remove("tiny", "prefill")
        pod = await connector.add("tiny", "prefill")
        assert pod.startswith("tiny-prefill-")
        assert await connector.remove("tiny", "prefill") == pod
        assert setup.fake.replicas["tiny-prefill"] == 0

    run(tmp_path, monkeypatch, scenario)


def test_a_pod_that_is_not_ready_in_time_is_taken_back_and_no_other(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        first = setup.fake.pods_of("tiny")[0].name
        setup.never_ready = True
        with pytest.raises(UnavailableError, match=r"pod tiny-2 was not ready within 0\.2 s"):
            await connector.add("tiny", "both")
        assert [pod.name for pod in setup.fake.pods_of("tiny")] == [first]
        assert setup.fake.replicas["tiny"] == 1

    run(tmp_path, monkeypatch, scenario, start_timeout_s=0.2)


async def begin_in_vain(setup, connector, status):
    """An addition whose pod gets never ready, and whose API answers with this status from now on."""
    setup.never_ready = True
    adding = asyncio.create_task(connector.add("tiny", "both"))
    while "tiny-2" not in setup.fake.pods:
        await asyncio.sleep(0.01)
    setup.fake.status = status
    return adding


def test_a_pod_is_taken_back_when_an_api_that_was_away_at_its_deadline_is_there_again(
    tmp_path, monkeypatch, caplog
):
    """Regression: it stayed, and with it a replica too many."""

    async def scenario(setup, connector):
        adding = await begin_in_vain(setup, connector, 503)
        while "a replica of tiny cannot be taken back yet" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not adding.done() and caplog.text.count("taken back yet") == 1
        assert "503 Service Unavailable; kubectl get --raw '/readyz?verbose' shows" in caplog.text
        setup.fake.status = 200
        with pytest.raises(UnavailableError, match=r"not ready within 0\.2 s .*and is taken back"):
            await adding
        assert setup.fake.replicas["tiny"] == 1
        assert [pod.name for pod in setup.fake.pods_of("tiny")] == ["tiny-1"]

    run(tmp_path, monkeypatch, scenario, start_timeout_s=0.2)


def test_a_replica_that_can_never_be_taken_back_stays_and_keeps_no_other_deployment_waiting(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(kubernetes, "TAKE_BACK_S", 0.3)

    async def scenario(setup, connector):
        adding = await begin_in_vain(setup, connector, 403)
        while not connector._shrinking["tiny"].locked():
            await asyncio.sleep(0.01)
        assert not any(lock.locked() for name, lock in connector._shrinking.items() if name != "tiny")
        with pytest.raises(
            UnavailableError,
            match=r"a surplus replica of tiny stays: .*403.*give the service account the rights",
        ):
            await adding

    run(tmp_path, monkeypatch, scenario, start_timeout_s=0.2)


def test_a_replica_whose_end_was_not_confirmed_is_not_taken_back_twice(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        change, changes = connector._cluster.change_replicas, []

        async def loses_its_answer(deployment, by):
            changes.append(await change(deployment, by))
            if len(changes) == 2:
                raise UnavailableError("the Kubernetes API does not answer")

        setup.fake.deploy("tiny", 2)
        while set(setup.router.states) != {"tiny-1", "tiny-2"}:
            await asyncio.sleep(0.01)
        setup.never_ready = True
        monkeypatch.setattr(connector._cluster, "change_replicas", loses_its_answer)
        with pytest.raises(UnavailableError, match="is taken back"):
            await connector.add("tiny", "both")
        assert changes == [3, 2] and setup.fake.replicas["tiny"] == 2

    run(tmp_path, monkeypatch, scenario, start_timeout_s=0.2)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_pod_whose_removal_failed_is_not_the_first_to_go_when_a_person_lowers_the_count(
    tmp_path, monkeypatch, is_cancelled
):
    """Regression: it kept its mark, and an old pod with a full cache went in place of a new one."""

    async def scenario(setup, connector):
        setup.fake.conflicts = 1000 if is_cancelled else 100
        monkeypatch.setattr(kubernetes, "MAX_CONFLICTS", 1000 if is_cancelled else 8)
        removing = asyncio.create_task(connector.remove("tiny", "both"))
        while not setup.fake.pods["tiny-1"].annotations:
            await asyncio.sleep(0)
        if is_cancelled:
            removing.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else UnavailableError):
            await removing
        setup.fake.conflicts = 0
        while setup.fake.pods["tiny-1"].annotations:
            await asyncio.sleep(0.01)
        setup.fake.deploy("tiny", 2)
        setup.fake.deploy("tiny", 1)
        assert [pod.name for pod in setup.fake.pods_of("tiny")] == ["tiny-1"]

    run(tmp_path, monkeypatch, scenario)


def test_a_pod_keeps_its_mark_until_kubernetes_has_chosen_it(tmp_path, monkeypatch):
    """Kubernetes may choose a while after the count was lowered."""

    async def scenario(setup, connector):
        setup.fake.deploy("tiny", 3)
        while len(setup.router.states) < 3:
            await asyncio.sleep(0.01)
        reconcile = setup.fake._reconcile
        monkeypatch.setattr(setup.fake, "_reconcile", lambda name: None)
        removing = asyncio.create_task(connector.remove("tiny", "both"))
        while setup.fake.replicas["tiny"] == 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert setup.fake.pods["tiny-3"].annotations
        reconcile("tiny")
        assert await removing == "tiny-3"

    run(tmp_path, monkeypatch, scenario)


def test_pods_that_no_node_has_room_for_count_as_pending_until_the_start_timeout(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        async def settled(count):
            while connector.pending("tiny") != count:
                await asyncio.sleep(0.01)

        await settled(0)
        setup.fake.has_room = False
        setup.fake.deploy("tiny", 3)  # by another hand
        await settled(2)
        assert connector.pending("another") == 0
        await settled(0)  # half a second later they block nothing
        assert setup.fake.replicas["tiny"] == 3

    run(tmp_path, monkeypatch, scenario, start_timeout_s=0.5)


def test_a_scale_that_another_hand_changed_meanwhile_is_read_again(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        setup.fake.conflicts = 2
        await connector.add("tiny", "both")
        assert setup.fake.replicas["tiny"] == 2
        setup.fake.conflicts = 100
        with pytest.raises(UnavailableError, match="check that nothing else scales it"):
            await connector.add("tiny", "both")
        assert setup.fake.replicas["tiny"] == 2

    run(tmp_path, monkeypatch, scenario)


def test_closing_leaves_the_deployments_as_they_are(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        await connector.add("tiny", "both")
        await connector.close(1.0)
        assert setup.fake.replicas["tiny"] == 2
        assert len(setup.fake.pods_of("tiny")) == 2

    run(tmp_path, monkeypatch, scenario)


def test_a_deployment_that_is_not_there_is_named_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="namespace 'llm' has no Deployment 'tiny-prefill'"):
        run(tmp_path, monkeypatch, None, deployed=[("tiny", 1)])


def test_an_api_that_refuses_or_is_not_there_is_named(tmp_path, monkeypatch):
    async def scenario(setup, connector):
        setup.fake.status = 403
        with pytest.raises(UnavailableError, match="403 Forbidden; give the service account the rights"):
            await connector.add("tiny", "both")
        setup.fake.status = 200
        await connector.add("tiny", "both")  # the connector lives on

    run(tmp_path, monkeypatch, scenario)

    async def starting():
        connector = KubernetesConnector(
            ConnectorContext([WORKER], FakeRouterView(), LoopClock(), 1.0, None, tmp_path)
        )
        try:
            await connector.start()
        finally:
            await connector.close(1.0)

    # The kubeconfig still names the server, which has ended.
    with pytest.raises(UnavailableError, match="the Kubernetes API does not answer"):
        asyncio.run(starting())
    use(monkeypatch, tmp_path / "none")
    with pytest.raises(ConfigError, match="found no cluster"):
        asyncio.run(starting())
    monkeypatch.setattr(kubernetes, "NAMESPACE", tmp_path)  # as in a pod
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(
        ConfigError, match=r"found no cluster: Service host/port is not set.*; run it in a pod"
    ):
        asyncio.run(starting())


def test_what_cannot_run_in_pods_is_refused(tmp_path):
    path = tmp_path / "fleet.toml"
    external = "[[workers]]\ncommand = 'vllm serve m --port {port}'\nname = 'm'\n"
    planner = "[planner]\nconnector = 'kubernetes'\n"
    for text, told in (
        (external + planner + "[plane]\nurl = 'nats://127.0.0.1:4222'\n", "component 'vllm' has a command"),
        ("[[workers]]\n" + planner, "write [plane] url = "),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(told)):
            fleet_up(str(path), str(tmp_path))


def documents():
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield pytest.param(document, id=f"{path.stem}-{document['kind']}-{document['metadata']['name']}")


@pytest.mark.parametrize("document", list(documents()))
def test_a_manifest_keeps_the_published_schema(document):
    kubernetes_validate.validate(document, "1.32", strict=True)


def of_kind(stem, kind):
    found = [
        each for each in yaml.safe_load_all((MANIFESTS / f"{stem}.yaml").read_text()) if each["kind"] == kind
    ]
    return {each["metadata"]["name"]: each for each in found}


@pytest.mark.parametrize("stem", ["cpu", "gpu"])
def test_the_file_and_the_deployments_of_a_manifest_fit_together(stem, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(of_kind(stem, "ConfigMap")["shoal-fleet"]["data"]["fleet.toml"])
    file = read_fleet_file(path)
    assert file.planner.connector == "kubernetes"
    components = components_of_pods(file.workers, file.router.plane)
    deployments = of_kind(stem, "Deployment")
    assert {deployment_of(component) for component in components} == set(deployments)
    for component in components:
        deployment = deployments[deployment_of(component)]
        label = deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        assert label == deployment_of(component)
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        assert f"--role={component.role}" in arguments
        assert arguments[1] == file.workers[0].model
        assert f"--plane={file.router.plane}" in arguments


@pytest.mark.parametrize(
    "stem, name", [("cpu", "smollm2"), ("gpu", "qwen3-8b-decode"), ("gpu", "qwen3-8b-prefill")]
)
def test_the_arguments_of_a_manifest_are_options_that_the_command_has(stem, name, capsys):
    container = of_kind(stem, "Deployment")[name]["spec"]["template"]["spec"]["containers"][0]
    names = {each["name"] for each in container["env"]}
    used = {found for word in container["args"] for found in re.findall(r"\$\((\w+)\)", word)}
    assert used == names
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help-all"])
    assert ended.value.code == 0
    offered = capsys.readouterr().out
    for word in container["args"][2:]:
        assert word.partition("=")[0] in offered, word

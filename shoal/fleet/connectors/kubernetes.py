"""Workers as pods of a Kubernetes cluster: each component is a Deployment, and the connector patches how many
replicas it has.

Kubernetes itself starts pods, starts them again with a back-off, and finds a node for them. A pod's name is
the worker's id (`--worker-id=$(POD_NAME)`). A Deployment is named as its component, in small letters; its
pods have that name as the label `app.kubernetes.io/component`. deploy/kubernetes/ has the manifests.

Deployments outlive the fleet's router, as their counts are Kubernetes' to keep: `start` and `close` leave
them as they are.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.connectors.connector import Component, ConnectorContext, InFlight, component_of, is_missing
from shoal.fleet.tasks import start
from shoal.fleet_views import WorkerState

logger = logging.getLogger(__name__)

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
POLL_S = 1.0  # between two questions to the API server about the same Deployment
TAKE_BACK_S = 600.0  # in which a replica that is not wanted is tried to be taken back
TIMEOUT_S = 30.0  # for the API server's answer
MAX_CONFLICTS = 8  # others that change a Deployment's scale while it is being changed here
# Pods with a lower cost go first when a Deployment shrinks; 0 is that of all others.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIRST_TO_GO = "-1000"  # the cost by which a pod is marked here


class Cluster:
    """What the connector asks of the Kubernetes API, in one namespace. Raises UnavailableError where the
    server cannot be reached or refuses."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._apps, self._core = client.AppsV1Api(api), client.CoreV1Api(api)

    @classmethod
    async def connect(cls) -> Cluster:
        """By the pod's service account inside of a cluster, elsewhere by the user's kubeconfig. Raises
        ConfigError if there is neither."""
        configuration = client.Configuration()
        try:
            if NAMESPACE.exists():
                config.load_incluster_config(configuration)
                return cls(client.ApiClient(configuration), NAMESPACE.read_text().strip())
            loaded = await config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise ConfigError(
                f"connector 'kubernetes' found no cluster: {error}; run it in a pod with a service account "
                "and the environment that Kubernetes gives it, or elsewhere with a kubeconfig (KUBECONFIG)"
            ) from None
        context = loaded.current_context["context"] if loaded.current_context else {}
        namespace = context.get("namespace", "default")
        return cls(client.ApiClient(configuration), namespace)

    async def close(self) -> None:
        await self._api.close()

    async def replicas(self, deployment: str) -> tuple[int, str]:
        """How many there should be, and the version of that word. Raises ConfigError if there is no such
        Deployment."""
        with self._errors(deployment):
            scale = await self._apps.read_namespaced_deployment_scale(
                deployment, self._namespace, _request_timeout=TIMEOUT_S
            )
            return scale.spec.replicas or 0, scale.metadata.resource_version

    async def change_replicas(self, deployment: str, by: int) -> int:
        """Raises or lowers how many there should be, whatever others do at the same time. Returns the new
        count, which is never below 0."""
        for _ in range(MAX_CONFLICTS):
            count, version = await self.replicas(deployment)
            wanted = max(0, count + by)
            body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": wanted}}
            with self._errors(deployment, HTTPStatus.CONFLICT):
                await self._apps.patch_namespaced_deployment_scale(
                    deployment, self._namespace, body, _request_timeout=TIMEOUT_S
                )
                return wanted
        raise UnavailableError(
            f"Deployment {deployment!r} was changed by others {MAX_CONFLICTS} times while its scale was to "
            "be changed; is something else scaling it, a HorizontalPodAutoscaler say?"
        )

    async def pods(self, deployment: str) -> tuple[list[str], list[str], int]:
        """The names of its pods, the oldest first, without those that end; of these, the names of those that
        are marked to go first; and how many end."""
        with self._errors(deployment):
            found = await self._core.list_namespaced_pod(
                self._namespace,
                label_selector=f"app.kubernetes.io/component={deployment}",
                _request_timeout=TIMEOUT_S,
            )
            living = [pod.metadata for pod in found.items if pod.metadata.deletion_timestamp is None]
            living.sort(key=lambda pod: (pod.creation_timestamp, pod.name))
            marked = [pod.name for pod in living if (pod.annotations or {}).get(DELETION_COST) == FIRST_TO_GO]
            return [pod.name for pod in living], marked, len(found.items) - len(living)

    async def has_pod(self, name: str) -> bool:
        with self._errors(name, HTTPStatus.NOT_FOUND):
            await self._core.read_namespaced_pod(name, self._namespace, _request_timeout=TIMEOUT_S)
            return True
        return False

    async def let_go_first(self, pod: str) -> None:
        """Marks this pod, so that it is the one that ends when its Deployment shrinks by one."""
        await self._mark(pod, FIRST_TO_GO)

    async def let_stay(self, pod: str) -> None:
        """Takes that mark back."""
        await self._mark(pod, None)

    async def _mark(self, pod: str, cost: str | None) -> None:
        with self._errors(pod, HTTPStatus.NOT_FOUND):
            body = {"metadata": {"annotations": {DELETION_COST: cost}}}
            await self._core.patch_namespaced_pod(pod, self._namespace, body, _request_timeout=TIMEOUT_S)

    @contextlib.contextmanager
    def _errors(self, name: str, *passed_over: HTTPStatus) -> Iterator[None]:
        try:
            yield
        except ApiException as error:
            if error.status in passed_over:
                return
            if error.status == HTTPStatus.NOT_FOUND:
                raise ConfigError(
                    f"namespace {self._namespace!r} has no Deployment {name!r}; a component's Deployment has "
                    "its name in small letters, and must be applied before the fleet starts"
                ) from None
            if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                advice = "the service account needs the rights in deploy/kubernetes/router.yaml"
            else:
                advice = "kubectl get --raw '/readyz?verbose' says how the API server is"
            raise UnavailableError(
                f"the Kubernetes API refuses {name!r} in namespace {self._namespace!r}: {error.status} "
                f"{error.reason}; {advice}"
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"the Kubernetes API does not answer: {error!r}") from None


class KubernetesConnector:
    """See the module. `cluster` is connected by `start` where none is given."""

    def __init__(self, context: ConnectorContext, cluster: Cluster | None = None) -> None:
        self._components = context.components
        self._router, self._clock = context.router, context.clock
        self._start_timeout_s = context.start_timeout_s
        self._cluster = cluster
        self._seen: dict[str, _DeploymentStatus] = {}
        self._adding = InFlight()
        self._claimed: set[str] = set()  # pods that the present calls of `add` have got
        # By Deployment, from the mark of the pod that goes until the count is lowered
        self._shrinking: dict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Looks whether all Deployments are there, and lets them be as many as they are."""
        names: dict[str, str] = {}
        for component in self._components:
            other = names.setdefault(deployment_of(component), component.name)
            if other != component.name:
                raise ConfigError(
                    f"components {other!r} and {component.name!r} have one Deployment, "
                    f"{deployment_of(component)!r}; give these [[workers]] names that differ in small letters"
                )
        if self._cluster is None:
            self._cluster = await Cluster.connect()
        for component in self._components:
            await self._look(component)
        self._watching = start(self._watch())

    def pending(self, model: str) -> int:
        """Pods that start, or that end. A count that has not been reached within `start_timeout` is taken as
        it is: pods for which no node has room would block all decisions."""
        now, pending = self._clock.now(), 0
        for component in self._components:
            seen = self._seen.get(component.name)
            if component.model != model or seen is None:
                continue
            if now - seen.since < self._start_timeout_s:
                pending += abs(seen.replicas - self._num_there(seen.pods)) + seen.num_ending
        return pending

    async def add(self, model: str, role: str) -> str:
        component = component_of(self._components, model, role)
        if not self._adding.count:
            self._claimed.clear()
        with self._adding.one_more():
            return await self._add(component)

    async def remove(self, model: str, role: str) -> str:
        """The youngest pod goes: it is the one whose cache is likely to have least in it. Where some are not
        ready, Kubernetes takes one of these in any case, so the youngest of them does."""
        pods = [
            (component.role != role, component, pod)
            for component in self._components
            if component.model == model
            for pod in (await self._look(component)).pods
            if (self._router.role_of(pod) or component.role) == role
        ]
        if not pods:
            component_of(self._components, model, role)
            raise UnavailableError(f"this fleet has no {role} worker of {model} to remove")
        pods.sort(key=lambda each: (each[0], not self._ready([each[2]])))
        _, component, youngest = pods[-1]
        deployment, cluster = deployment_of(component), self._connected
        async with self._shrinking[deployment]:
            await cluster.let_go_first(youngest)
            await cluster.change_replicas(deployment, -1)
        deadline = self._clock.now() + self._start_timeout_s
        while await self._is_there(youngest):
            if self._clock.now() >= deadline:
                raise UnavailableError(
                    f"pod {youngest} has not ended within {self._start_timeout_s:g} s (start_timeout) and is "
                    f"left to Kubernetes; kubectl describe pod/{youngest} says why"
                )
            await self._look_again(component)
            await self._clock.sleep(POLL_S)
        await self._look_again(component)
        return youngest

    async def wait_until_all_failed(self) -> None:
        """Kubernetes does not give up."""
        await asyncio.Event().wait()

    async def close(self, grace_s: float) -> None:
        """Leaves the Deployments as they are: their pods serve whichever router comes next."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if self._cluster is not None:
            await self._cluster.close()
            self._cluster = None

    async def _add(self, component: Component) -> str:
        deployment, cluster = deployment_of(component), self._connected
        before = self._ready((await self._look(component)).pods)
        deadline = self._clock.now() + self._start_timeout_s
        await cluster.change_replicas(deployment, +1)
        while True:
            pods = (await self._look_again(component)).pods
            new = [pod for pod in pods if pod not in before and pod not in self._claimed]
            ready = self._ready(new)
            if ready:
                self._claimed.add(ready[0])
                return ready[0]
            if self._clock.now() >= deadline:
                await self._take_back(deployment, new[-1:])
                await self._look_again(component)
                pod = new[-1] if new else f"number {len(pods) + 1}"
                raise UnavailableError(
                    f"pod {pod} was not ready within {self._start_timeout_s:g} s (start_timeout) and is "
                    f"taken back; kubectl describe deployment/{deployment} says why"
                )
            await self._clock.sleep(POLL_S)

    async def _take_back(self, deployment: str, pods: Sequence[str]) -> None:
        """Lowers the count by one, and has this pod go where there is one. The API may be away, and a replica
        too many would stay, so this is tried for long. Raises UnavailableError where it stays."""
        cluster, wanted, has_told = self._connected, None, False
        deadline = self._clock.now() + TAKE_BACK_S
        async with self._shrinking[deployment]:
            while True:
                try:
                    count, _ = await cluster.replicas(deployment)
                    # A try whose answer was lost may have lowered it.
                    wanted = count - 1 if wanted is None else wanted
                    if count > wanted:
                        for pod in pods:
                            await cluster.let_go_first(pod)
                        await cluster.change_replicas(deployment, -1)
                    return
                except UnavailableError as error:
                    if self._clock.now() >= deadline:
                        raise UnavailableError(f"a replica of {deployment} too many stays: {error}") from None
                    if not has_told:
                        logger.warning("a replica of %s cannot be taken back yet: %s", deployment, error)
                    has_told = True
                await self._clock.sleep(POLL_S)

    async def _let_stay(self, component: Component) -> None:
        """Takes back the marks of pods that have stayed, as their removal failed or who began it has died.
        Else they would go when another hand lowers the count. Until a pod that is to go ends, there are more
        pods than the count says."""
        shrinking = self._shrinking[deployment_of(component)]
        if shrinking.locked() or not self._seen[component.name].marked:
            return
        async with shrinking:
            seen = await self._look(component)
            if len(seen.pods) <= seen.replicas:
                for pod in seen.marked:
                    await self._connected.let_stay(pod)

    @property
    def _connected(self) -> Cluster:
        assert self._cluster is not None, "start comes first"
        return self._cluster

    async def _watch(self) -> None:
        """Keeps what `pending` says up to date, also of what other hands do; and takes back marks."""
        while True:
            await self._clock.sleep(POLL_S)
            for component in self._components:
                with contextlib.suppress(ConfigError):  # somebody has taken the Deployment away
                    await self._look_again(component)
                    with contextlib.suppress(UnavailableError):
                        await self._let_stay(component)

    async def _look_again(self, component: Component) -> _DeploymentStatus:
        """What was seen last holds where the API does not answer for a while."""
        with contextlib.suppress(UnavailableError):
            return await self._look(component)
        return self._seen[component.name]

    async def _is_there(self, pod: str) -> bool:
        """Whether it may still be, as far as anybody can tell."""
        if self._router.state_of(pod) is None:
            with contextlib.suppress(UnavailableError):
                return await self._connected.has_pod(pod)
        return True

    async def _look(self, component: Component) -> _DeploymentStatus:
        deployment = deployment_of(component)
        replicas, _ = await self._connected.replicas(deployment)
        pods, marked, num_ending = await self._connected.pods(deployment)
        last = self._seen.get(component.name)
        now = self._clock.now()
        is_settled = replicas == self._num_there(pods) and not num_ending
        since = now if last is None or is_settled or last.replicas != replicas else last.since
        self._seen[component.name] = _DeploymentStatus(replicas, pods, marked, num_ending, since)
        return self._seen[component.name]

    def _ready(self, pods: Sequence[str]) -> list[str]:
        return [pod for pod in pods if self._router.state_of(pod) == WorkerState.READY]

    def _num_there(self, pods: Sequence[str]) -> int:
        return sum(not is_missing(self._router.state_of(pod)) for pod in pods)


@dataclass(frozen=True, slots=True)
class _DeploymentStatus:
    """A Deployment at the last look: how many pods it should have, which it has, which of these are marked to
    go first, how many more are ending, and since when it is not as it should be."""

    replicas: int
    pods: list[str]
    marked: list[str]
    num_ending: int
    since: float


def deployment_of(component: Component) -> str:
    """The name of its Deployment: the component's, as names are in Kubernetes ("qwen3-8b-prefill")."""
    return re.sub(r"[^a-z0-9]+", "-", component.name.lower()).strip("-")

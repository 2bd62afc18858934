"""`KubernetesConnector`: workers as pods: each Component is a Deployment, whose replicas the connector
patches. Kubernetes starts pods, restarts them with a back-off, and finds nodes for them.

A pod's name is the worker's id (`--worker-id=$(POD_NAME)`). A Deployment has the component's name in lower
case, which is also its pods' label `app.kubernetes.io/component`. deploy/kubernetes/ has the manifests.

Kubernetes owns the counts of Deployments, so `start` and `close` leave them unchanged.
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
from shoal.fleet_views import WorkerState
from shoal.tasks import start

logger = logging.getLogger(__name__)

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
POLL_S = 1.0  # between two API requests about the same Deployment
TAKE_BACK_S = 600.0  # limit for the retries of removing an unwanted replica
TIMEOUT_S = 30.0  # limit for the API server's answer
MAX_CONFLICTS = 8  # concurrent changes of a Deployment's scale by others
# Pods with a lower cost end first when a Deployment shrinks; other pods have 0.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
FIRST_TO_END = "-1000"  # cost of the pod that is to end


class Cluster:
    """The Kubernetes API in one namespace. Raises UnavailableError if the server cannot be reached or
    refuses."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._apps, self._core = client.AppsV1Api(api), client.CoreV1Api(api)

    @classmethod
    async def connect(cls) -> Cluster:
        """Connects with the pod's service account in a cluster, and with the user's kubeconfig elsewhere.
        Raises ConfigError without both."""
        configuration = client.Configuration()
        try:
            if NAMESPACE.exists():
                config.load_incluster_config(configuration)
                return cls(client.ApiClient(configuration), NAMESPACE.read_text().strip())
            loaded = await config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise ConfigError(
                f"connector 'kubernetes' found no cluster: {error}; run it in a pod with a service account "
                "and the environment that Kubernetes sets, or elsewhere with a kubeconfig (KUBECONFIG)"
            ) from None
        context = loaded.current_context["context"] if loaded.current_context else {}
        namespace = context.get("namespace", "default")
        return cls(client.ApiClient(configuration), namespace)

    async def close(self) -> None:
        await self._api.close()

    async def replicas(self, deployment: str) -> tuple[int, str]:
        """Returns the desired number of replicas and its resource version. Raises ConfigError for a missing
        Deployment."""
        with self._errors(deployment):
            scale = await self._apps.read_namespaced_deployment_scale(
                deployment, self._namespace, _request_timeout=TIMEOUT_S
            )
            return scale.spec.replicas or 0, scale.metadata.resource_version

    async def change_replicas(self, deployment: str, by: int) -> int:
        """Changes the desired number of replicas, also under concurrent changes by others. Returns the new
        count, which is at least 0."""
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
            f"others changed Deployment {deployment!r} {MAX_CONFLICTS} times during a change of its scale; "
            "check that nothing else scales it, such as a HorizontalPodAutoscaler"
        )

    async def pods(self, deployment: str) -> tuple[list[str], list[str], int]:
        """Returns the names of the Deployment's pods without ending ones, the oldest first; the names of pods
        that are marked to end first; and the number of ending pods."""
        with self._errors(deployment):
            found = await self._core.list_namespaced_pod(
                self._namespace,
                label_selector=f"app.kubernetes.io/component={deployment}",
                _request_timeout=TIMEOUT_S,
            )
            living = [pod.metadata for pod in found.items if pod.metadata.deletion_timestamp is None]
            living.sort(key=lambda pod: (pod.creation_timestamp, pod.name))
            marked = [
                pod.name for pod in living if (pod.annotations or {}).get(DELETION_COST) == FIRST_TO_END
            ]
            return [pod.name for pod in living], marked, len(found.items) - len(living)

    async def has_pod(self, name: str) -> bool:
        with self._errors(name, HTTPStatus.NOT_FOUND):
            await self._core.read_namespaced_pod(name, self._namespace, _request_timeout=TIMEOUT_S)
            return True
        return False

    async def mark(self, pod: str) -> None:
        """Marks the pod as the one that ends when its Deployment shrinks by one."""
        await self._set_cost(pod, FIRST_TO_END)

    async def unmark(self, pod: str) -> None:
        """Removes the mark."""
        await self._set_cost(pod, None)

    async def _set_cost(self, pod: str, cost: str | None) -> None:
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
                    f"namespace {self._namespace!r} has no Deployment {name!r}; apply one with the "
                    "component's name in lower case before the fleet starts"
                ) from None
            if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                advice = "give the service account the rights in deploy/kubernetes/router.yaml"
            else:
                advice = "kubectl get --raw '/readyz?verbose' shows the API server's state"
            raise UnavailableError(
                f"the Kubernetes API refuses {name!r} in namespace {self._namespace!r}: {error.status} "
                f"{error.reason}; {advice}"
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"the Kubernetes API does not answer: {error!r}") from None


class KubernetesConnector:
    """A Connector. `cluster`: None: `start` connects."""

    def __init__(self, context: ConnectorContext, cluster: Cluster | None = None) -> None:
        self._components = context.components
        self._router, self._clock = context.router, context.clock
        self._start_timeout_s = context.start_timeout_s
        self._cluster = cluster
        self._seen: dict[str, _DeploymentStatus] = {}
        self._adding = InFlight()
        self._claimed: set[str] = set()  # pods that present calls of `add` return
        # By Deployment; held from a pod's mark until the count is lowered.
        self._shrinking: dict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Checks that all Deployments exist, and leaves their counts unchanged."""
        names: dict[str, str] = {}
        for component in self._components:
            other = names.setdefault(deployment_of(component), component.name)
            if other != component.name:
                raise ConfigError(
                    f"components {other!r} and {component.name!r} have the same Deployment, "
                    f"{deployment_of(component)!r}; give these [[workers]] names that differ in lower case"
                )
        if self._cluster is None:
            self._cluster = await Cluster.connect()
        for component in self._components:
            await self._poll(component)
        self._watching = start(self._watch())

    def pending(self, model: str) -> int:
        """Returns the number of pods that start or end. After `start_timeout` a count that was not reached is
        accepted: pods for which no node has room would block all decisions."""
        now, pending = self._clock.now(), 0
        for component in self._components:
            seen = self._seen.get(component.name)
            if component.model != model or seen is None:
                continue
            if now - seen.since < self._start_timeout_s:
                pending += abs(seen.replicas - self._num_present(seen.pods)) + seen.num_ending
        return pending

    async def add(self, model: str, role: str) -> str:
        component = component_of(self._components, model, role)
        if not self._adding.count:
            self._claimed.clear()
        with self._adding.one_more():
            return await self._add(component)

    async def remove(self, model: str, role: str) -> str:
        """Ends the youngest pod, whose cache is likely the emptiest. If some pods are not ready, it ends the
        youngest unready one, as Kubernetes ends an unready pod first."""
        pods = [
            (component.role != role, component, pod)
            for component in self._components
            if component.model == model
            for pod in (await self._poll(component)).pods
            if (self._router.role_of(pod) or component.role) == role
        ]
        if not pods:
            component_of(self._components, model, role)
            raise UnavailableError(f"this fleet has no {role} worker of {model} to remove")
        pods.sort(key=lambda each: (each[0], not self._ready([each[2]])))
        _, component, youngest = pods[-1]
        deployment, cluster = deployment_of(component), self._connected
        async with self._shrinking[deployment]:
            await cluster.mark(youngest)
            await cluster.change_replicas(deployment, -1)
        deadline = self._clock.now() + self._start_timeout_s
        while await self._exists(youngest):
            if self._clock.now() >= deadline:
                raise UnavailableError(
                    f"pod {youngest} has not ended within {self._start_timeout_s:g} s (start_timeout) and is "
                    f"left to Kubernetes; kubectl describe pod/{youngest} says why"
                )
            await self._try_poll(component)
            await self._clock.sleep(POLL_S)
        await self._try_poll(component)
        return youngest

    async def wait_until_all_failed(self) -> None:
        """Never returns: Kubernetes restarts pods for ever."""
        await asyncio.Event().wait()

    async def close(self, grace_s: float) -> None:
        """Leaves the Deployments unchanged: their pods serve the next router."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if self._cluster is not None:
            await self._cluster.close()
            self._cluster = None

    async def _add(self, component: Component) -> str:
        deployment, cluster = deployment_of(component), self._connected
        before = self._ready((await self._poll(component)).pods)
        deadline = self._clock.now() + self._start_timeout_s
        await cluster.change_replicas(deployment, +1)
        while True:
            pods = (await self._try_poll(component)).pods
            new = [pod for pod in pods if pod not in before and pod not in self._claimed]
            ready = self._ready(new)
            if ready:
                self._claimed.add(ready[0])
                return ready[0]
            if self._clock.now() >= deadline:
                await self._take_back(deployment, new[-1:])
                await self._try_poll(component)
                pod = new[-1] if new else f"number {len(pods) + 1}"
                raise UnavailableError(
                    f"pod {pod} was not ready within {self._start_timeout_s:g} s (start_timeout) and is "
                    f"taken back; kubectl describe deployment/{deployment} says why"
                )
            await self._clock.sleep(POLL_S)

    async def _take_back(self, deployment: str, pods: Sequence[str]) -> None:
        """Lowers the count by one and ends this pod, if one exists. Retries for long while the API does not
        answer, as a surplus replica would stay. Raises UnavailableError if it stays."""
        cluster, wanted, has_logged = self._connected, None, False
        deadline = self._clock.now() + TAKE_BACK_S
        async with self._shrinking[deployment]:
            while True:
                try:
                    count, _ = await cluster.replicas(deployment)
                    # A request whose answer was lost may have lowered it.
                    wanted = count - 1 if wanted is None else wanted
                    if count > wanted:
                        for pod in pods:
                            await cluster.mark(pod)
                        await cluster.change_replicas(deployment, -1)
                    return
                except UnavailableError as error:
                    if self._clock.now() >= deadline:
                        raise UnavailableError(f"a surplus replica of {deployment} stays: {error}") from None
                    if not has_logged:
                        logger.warning("a replica of %s cannot be taken back yet: %s", deployment, error)
                    has_logged = True
                await self._clock.sleep(POLL_S)

    async def _unmark(self, component: Component) -> None:
        """Removes the marks of pods whose removal failed or whose remover has died, as they would end when
        someone else lowers the count. While a marked pod is ending, there are more pods than the count."""
        shrinking = self._shrinking[deployment_of(component)]
        if shrinking.locked() or not self._seen[component.name].marked:
            return
        async with shrinking:
            seen = await self._poll(component)
            if len(seen.pods) <= seen.replicas:
                for pod in seen.marked:
                    await self._connected.unmark(pod)

    @property
    def _connected(self) -> Cluster:
        assert self._cluster is not None, "start comes first"
        return self._cluster

    async def _watch(self) -> None:
        """Keeps the state for `pending` up to date, also under changes by others, and removes stale marks."""
        while True:
            await self._clock.sleep(POLL_S)
            for component in self._components:
                with contextlib.suppress(ConfigError):  # someone has deleted the Deployment
                    await self._try_poll(component)
                    with contextlib.suppress(UnavailableError):
                        await self._unmark(component)

    async def _try_poll(self, component: Component) -> _DeploymentStatus:
        """Polls the component; returns the last status if the API does not answer."""
        with contextlib.suppress(UnavailableError):
            return await self._poll(component)
        return self._seen[component.name]

    async def _exists(self, pod: str) -> bool:
        """Returns False if the router and Kubernetes report that the pod is gone."""
        if self._router.state_of(pod) is None:
            with contextlib.suppress(UnavailableError):
                return await self._connected.has_pod(pod)
        return True

    async def _poll(self, component: Component) -> _DeploymentStatus:
        deployment = deployment_of(component)
        replicas, _ = await self._connected.replicas(deployment)
        pods, marked, num_ending = await self._connected.pods(deployment)
        last = self._seen.get(component.name)
        now = self._clock.now()
        is_settled = replicas == self._num_present(pods) and not num_ending
        since = now if last is None or is_settled or last.replicas != replicas else last.since
        self._seen[component.name] = _DeploymentStatus(replicas, pods, marked, num_ending, since)
        return self._seen[component.name]

    def _ready(self, pods: Sequence[str]) -> list[str]:
        return [pod for pod in pods if self._router.state_of(pod) == WorkerState.READY]

    def _num_present(self, pods: Sequence[str]) -> int:
        return sum(not is_missing(self._router.state_of(pod)) for pod in pods)


@dataclass(frozen=True, slots=True)
class _DeploymentStatus:
    """A Deployment at the last poll: its desired number of pods, its pods, the pods marked to end first, the
    number of ending pods, and the time since when pods and count differ."""

    replicas: int
    pods: list[str]
    marked: list[str]
    num_ending: int
    since: float


def deployment_of(component: Component) -> str:
    """Returns the name of the component's Deployment in Kubernetes' form ("qwen3-8b-prefill")."""
    return re.sub(r"[^a-z0-9]+", "-", component.name.lower()).strip("-")

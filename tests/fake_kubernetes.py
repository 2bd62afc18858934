"""An API server with what the connector asks of one: Deployments with the scale subresource, and pods. A pod is
whatever the test's `start` and `stop` make of its name. It keeps Kubernetes' rules: versions and their conflicts,
merge patches, and which pod goes when a Deployment shrinks (not ready, then the lowest deletion cost, then the
youngest)."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import kubernetes_asyncio.config.kube_config
from aiohttp import web

COST = "controller.kubernetes.io/pod-deletion-cost"
KUBECONFIG = """apiVersion: v1
kind: Config
current-context: fake
contexts: [{{name: fake, context: {{cluster: fake, user: fake, namespace: {namespace}}}}}]
clusters: [{{name: fake, cluster: {{server: "{url}"}}}}]
users: [{{name: fake, user: {{token: secret}}}}]
"""


def use(monkeypatch, kubeconfig):
    """As the environment's KUBECONFIG would, which is read when the package is imported."""
    monkeypatch.setattr(
        kubernetes_asyncio.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig)
    )


@dataclass
class Pod:
    name: str
    deployment: str
    number: int
    annotations: dict[str, str] = field(default_factory=dict)
    is_ready: bool = True
    is_ending: bool = False

    def as_json(self, namespace):
        meta = {
            "name": self.name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/component": self.deployment},
            "annotations": self.annotations,
            "creationTimestamp": f"2026-01-01T{self.number // 3600:02}:{self.number // 60 % 60:02}:{self.number % 60:02}Z",
        }
        if self.is_ending:
            meta["deletionTimestamp"] = "2026-01-02T00:00:00Z"
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta}


class FakeKubernetes:
    """`start` and `stop` get a pod's name and its Deployment's; `stop` returns when the pod's process has ended."""

    def __init__(
        self,
        start: Callable[[str, str], Awaitable[None]],
        stop: Callable[[str, str], Awaitable[None]],
        namespace: str = "llm",
    ):
        self.start_pod, self.stop_pod, self.namespace = start, stop, namespace
        self.replicas: dict[str, int] = {}
        self.pods: dict[str, Pod] = {}
        self.has_room = True  # on a node, for further pods
        self.conflicts = 0  # patches that will find a newer version of the object
        self.status = 200  # the status of every answer
        self.version = 1
        self.requests: list[str] = []
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task] = set()

    @contextlib.asynccontextmanager
    async def serving(self, folder: Path):
        """Yields the path of a kubeconfig."""
        app = web.Application(middlewares=[self._front])
        scale = "/apis/apps/v1/namespaces/{namespace}/deployments/{name}/scale"
        app.router.add_get(scale, self._get_scale)
        app.router.add_patch(scale, self._patch_scale)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._list_pods)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", self._get_pod)
        app.router.add_patch("/api/v1/namespaces/{namespace}/pods/{name}", self._patch_pod)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        path = folder / "kubeconfig"
        path.write_text(KUBECONFIG.format(url=url, namespace=self.namespace))
        try:
            yield path
        finally:
            for pod in list(self.pods.values()):
                self._end(pod)
            await asyncio.gather(*self._tasks)
            await runner.cleanup()

    def deploy(self, name: str, replicas: int = 0):
        self.replicas[name] = replicas
        self._reconcile(name)

    def pods_of(self, deployment: str):
        return [pod for pod in self.pods.values() if pod.deployment == deployment and not pod.is_ending]

    def _reconcile(self, name):
        living = self.pods_of(name)
        for _ in range(self.replicas[name] - len(living)):
            place = next(n for n in itertools.count(1) if f"{name}-{n}" not in self.pods)
            pod = Pod(f"{name}-{place}", name, next(self._numbers), is_ready=self.has_room)
            self.pods[pod.name] = pod
            if self.has_room:
                self._run(self.start_pod(pod.name, name))
        living.sort(key=lambda pod: (pod.is_ready, int(pod.annotations.get(COST, 0)), -pod.number))
        for pod in living[: max(0, len(living) - self.replicas[name])]:
            self._end(pod)

    def _end(self, pod):
        async def end():
            if pod.is_ready:
                await self.stop_pod(pod.name, pod.deployment)
            self.pods.pop(pod.name, None)

        if not pod.is_ending:
            pod.is_ending = True
            self._run(end())

    def _run(self, work):
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @web.middleware
    async def _front(self, request, handler):
        self.requests.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != "Bearer secret":
            return _status(401, "Unauthorized")
        if self.status != 200:
            return _status(self.status, "Forbidden")
        if request.match_info["namespace"] != self.namespace:
            return _status(404, "NotFound")
        return await handler(request)

    async def _get_scale(self, request):
        name = request.match_info["name"]
        if name not in self.replicas:
            return _status(404, "NotFound")
        return web.json_response(
            {
                "apiVersion": "autoscaling/v1",
                "kind": "Scale",
                "metadata": {"name": name, "resourceVersion": str(self.version)},
                "spec": {"replicas": self.replicas[name]},
                "status": {"replicas": len(self.pods_of(name))},
            }
        )

    async def _patch_scale(self, request):
        assert request.content_type in (
            "application/merge-patch+json",
            "application/strategic-merge-patch+json",
        )
        body = json.loads(await request.read())
        if self.conflicts:
            self.conflicts -= 1
            self.version += 1
        if body["metadata"]["resourceVersion"] != str(self.version):
            return _status(409, "Conflict")
        self.version += 1
        self.replicas[request.match_info["name"]] = body["spec"]["replicas"]
        self._reconcile(request.match_info["name"])
        return await self._get_scale(request)

    async def _list_pods(self, request):
        key, _, value = request.query["labelSelector"].partition("=")
        assert key == "app.kubernetes.io/component"
        items = [pod.as_json(self.namespace) for pod in self.pods.values() if pod.deployment == value]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items})

    async def _get_pod(self, request):
        pod = self.pods.get(request.match_info["name"])
        return _status(404, "NotFound") if pod is None else web.json_response(pod.as_json(self.namespace))

    async def _patch_pod(self, request):
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "NotFound")
        for name, value in json.loads(await request.read())["metadata"]["annotations"].items():
            pod.annotations.pop(name, None)
            if value is not None:
                pod.annotations[name] = value
        return web.json_response(pod.as_json(self.namespace))


def _status(code, reason):
    body = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code}
    return web.json_response(body, status=code)

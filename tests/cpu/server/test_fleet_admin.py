"""The admin port of a fleet, over HTTP: paths and answers of one server's, for many workers."""

import asyncio
import json
import urllib.error
import urllib.request

from shoal.config import ServerConfig
from shoal.control import Sleep, UpdateWeights
from shoal.errors import CheckpointError
from shoal.fleet.clock import LoopClock
from shoal.fleet.config import FleetConfig
from shoal.fleet.native.fake_worker import FakeWorker
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.worker import Worker, WorkerInfo
from shoal.server.app import Server
from shoal.server.operator.admin import ADMIN_ROUTES
from shoal.server.operator.fleet_admin import fleet_admin_routes
from shoal.server.operator.fleet_routes import FleetRoutes
from shoal.server.run import open_ports, serve_until
from shoal.server.served.catalog import Catalog


class Site:
    def __init__(self, port, fleet, links):
        self.port, self.fleet, self.links = port, fleet, links

    def view(self):
        return {worker.id: worker for worker in self.fleet.view().workers}

    async def ask(self, path, body=None, method="POST"):
        """(status, JSON)"""

        def ask():
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as error:
                return error.code, json.loads(error.read())

        return await asyncio.to_thread(ask)


def on_site(test):
    """Runs a test with the workers a and b of the model m and c of the model other."""

    async def main():
        fleet = Fleet(FleetConfig(), LoopClock())
        await fleet.start()
        links = {}
        for name, model in (("a", "m"), ("b", "m"), ("c", "other")):
            info = WorkerInfo(id=name, url="http://w", models=(model,))
            links[name] = FakeWorker(info, fleet.clock)
            fleet.join(Worker(info, links[name], fleet.clock.now))
        config = ServerConfig(port=0)
        routes = [*FleetRoutes(fleet).admin(), *fleet_admin_routes(fleet)]
        app = Server(Catalog([]), config, routes, is_admin=True)
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        force = asyncio.Event()
        serving = asyncio.create_task(
            serve_until(
                asyncio.Event(),
                force,
                app,
                None,
                config,
                open_ports(config),
                ready=lambda port, _: listening.set_result(port),
            )
        )
        try:
            await test(Site(await listening, fleet, links))
        finally:
            force.set()
            await serving
            await fleet.close()

    return lambda: asyncio.run(asyncio.wait_for(main(), 60))


def test_the_paths_are_those_of_one_server_but_for_traces():
    fleet = Fleet(FleetConfig(), None)
    own = {(route.method, route.path) for route in ADMIN_ROUTES}
    ours = {(route.method, route.path) for route in fleet_admin_routes(fleet)}
    others = {"/start_profile", "/stop_profile", "/health", "/metrics"}
    assert ours == {(method, path) for method, path in own if path not in others}


@on_site
async def test_a_verb_reaches_all_workers_and_the_answer_has_what_they_have_in_common(site):
    assert await site.ask("/reset_prefix_cache") == (
        200,
        {"reset": True, "workers": {name: {"reset": True} for name in "abc"}},
    )
    status, answer = await site.ask("/sleep?level=2&tags=kv_cache&mode=wait")
    assert status == 200 and set(answer["workers"]) == set("abc")
    assert site.links["c"].commands[-1] == Sleep(2, ["kv_cache"], "wait")
    assert (await site.ask("/is_sleeping", method="GET"))[1]["is_sleeping"] is True
    assert all(worker.asleep for worker in site.view().values())
    await site.ask("/wake_up?workers=a")
    _, answer = await site.ask("/is_sleeping", method="GET")
    assert "is_sleeping" not in answer and answer["workers"]["a"] == {"is_sleeping": False}
    assert {name: worker.asleep for name, worker in site.view().items()} == {"a": False, "b": True, "c": True}


@on_site
async def test_some_workers_or_those_of_a_model_are_named(site):
    assert set((await site.ask("/reset_prefix_cache?workers=a,c"))[1]["workers"]) == {"a", "c"}
    assert set((await site.ask("/reset_prefix_cache?workers=a&workers=b"))[1]["workers"]) == {"a", "b"}
    assert set((await site.ask("/reset_prefix_cache?model=m"))[1]["workers"]) == {"a", "b"}
    for path, status, word in (
        ("?workers=a,x", 404, "'x'"),
        ("?workers=", 400, "workers"),
        ("?worker=a", 400, "worker"),
        ("?model=x", 503, "'x'"),
        ("?rolling=maybe", 400, "maybe"),
    ):
        told = await site.ask("/reset_prefix_cache" + path)
        assert told[0] == status and word in told[1]["error"]["message"], path


@on_site
async def test_a_field_that_is_misspelt_is_refused_and_changes_nothing(site):
    for path, body, name, known in (
        ("/fleet/workers", {"ad": []}, "ad", "add, remove"),
        ("/fleet/workers", {"add": ["http://127.0.0.1:9,id=d"], "removed": ["a"]}, "removed", "add, remove"),
        ("/fleet/role/a", {"role": "prefill", "force": True}, "force", "role"),
        ("/fleet/config", {"busy_kv_usge": 0.5}, "busy_kv_usge", "busy_kv_usage"),
    ):
        status, answer = await site.ask(path, body)
        message = answer["error"]["message"]
        assert status == 400 and name in message and known in message, (path, answer)
    assert set(site.view()) == set("abc")


@on_site
async def test_a_native_worker_is_not_removed_as_its_process_would_run_on_unknown(site):
    status, answer = await site.ask("/fleet/workers", {"remove": ["a"]})
    message = answer["error"]["message"]
    assert status == 400 and "worker a is native" in message and "POST /fleet/drain/a" in message
    assert set(site.view()) == set("abc")


@on_site
async def test_a_pause_is_lifted_by_resume(site):
    assert (await site.ask("/pause?model=m&mode=keep"))[1]["status"] == "paused"
    assert site.links["a"].commands[-1] == Sleep(0, None, "keep")
    assert (await site.ask("/is_paused", method="GET"))[1]["workers"]["b"] == {"is_paused": True}
    assert (await site.ask("/resume"))[1]["status"] == "resumed"
    assert (await site.ask("/is_paused", method="GET"))[1]["is_paused"] is False


@on_site
async def test_new_weights_are_of_one_model_and_their_versions_show(site):
    status, answer = await site.ask("/update_weights", {"path": "/new"})
    assert status == 400 and "model" in answer["error"]["message"]
    status, answer = await site.ask("/update_weights?model=m&rolling=true", {"path": "/new"})
    assert status == 200
    assert answer == {"version": 1, "workers": {"a": {"version": 1}, "b": {"version": 1}}}
    assert site.links["a"].commands == [UpdateWeights("/new")]
    assert {name: worker.weights_version for name, worker in site.view().items()} == {"a": 1, "b": 1, "c": 0}


@on_site
async def test_a_roll_that_fails_says_where_and_who_has_which_version(site):
    site.links["b"].command_error = CheckpointError("/new holds no config.json")
    status, answer = await site.ask("/update_weights?workers=a,b,c&rolling=true", {"path": "/new"})
    message = answer["error"]["message"]
    assert status == 400 and message.startswith("worker b: /new holds no config.json")
    assert "not asked: c" in message and "a 1, b 0, c 0" in message
    assert answer["workers"] == {"a": {"version": 1}, "b": {"error": "/new holds no config.json"}}
    assert site.links["c"].commands == []
    assert all(worker.state == "ready" for worker in site.view().values())

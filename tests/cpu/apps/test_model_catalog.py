"""Models of native workers are added to the catalog of a router."""

import asyncio
from types import SimpleNamespace

from shoal.apps import model_catalog as offer_module
from shoal.apps.model_catalog import RETRY_S, ModelCatalogSync
from shoal.config import ServerConfig
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.config import FleetConfig


class Model:
    """A model of the fleet of native workers."""

    is_external, name, names, workers = False, "m", ["m"], {"a": None}
    blocked_reason = None

    def block(self, why):
        self.blocked_reason = why


def test_a_model_whose_files_fail_in_any_way_is_tried_again(monkeypatch):
    model, added = Model(), []
    tries = iter([PermissionError("tokenizer.json"), ValueError("no JSON")])
    served = SimpleNamespace(names=["m"])

    async def own(self, model):
        error = next(tries, None)
        if error is not None:
            raise error
        return served

    monkeypatch.setattr(offer_module.ModelCatalogSync, "_native", own)

    async def run():
        changed = asyncio.Event()
        fleet = SimpleNamespace(models={"m": model}, unknown=[], changed=changed, clock=LoopClock())
        catalog = SimpleNamespace(add=added.append)
        following = asyncio.create_task(ModelCatalogSync(fleet, catalog, FleetConfig(), ServerConfig()).run())
        await asyncio.sleep(1.5 * RETRY_S)
        assert "no JSON" in model.blocked_reason and catalog.awaited == ["a"] and not added
        await asyncio.sleep(RETRY_S)
        assert model.blocked_reason == "" and added == [served]
        following.cancel()

    run_virtual(run())

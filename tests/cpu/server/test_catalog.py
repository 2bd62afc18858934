"""The catalog of a router: models are added and removed; a model that may still come is a 503, an unknown one a 404."""

import pytest

from shoal.errors import UnavailableError
from shoal.server.errors import ApiError
from shoal.server.served.catalog import Catalog
from shoal.server.served.external_model import ExternalModel


def model(name, *more):
    return ExternalModel([name, *more], forwarder=None)


def status_of(catalog, name):
    with pytest.raises(ApiError) as caught:
        catalog.find(name)
    return caught.value.status, caught.value.headers.get("retry-after"), caught.value.message


def test_an_empty_catalog_says_come_again():
    for name in (None, "m"):
        status, retry_after, _ = status_of(Catalog([]), name)
        assert status == 503 and int(retry_after) >= 0


def test_an_unknown_model_may_still_come_while_workers_were_not_reached():
    catalog = Catalog([])
    catalog.add(model("m"))
    catalog.awaited = ["late"]
    status, _, message = status_of(catalog, "other")
    assert status == 503 and "late" in message
    catalog.awaited = []
    status, _, message = status_of(catalog, "other")
    assert status == 404 and "m" in message


def test_models_come_and_go_with_all_their_names():
    catalog, one = Catalog([]), model("m", "adapter")
    catalog.add(one)
    assert catalog.names == ["m"]
    for name in ("m", "m:latest", "adapter", None):
        assert catalog.find_external(name) is one
    one.names[:] = ["m"]
    assert catalog.find_external("adapter") is None
    catalog.remove(one)
    assert catalog.names == [] and catalog.find_external("m") is None


def test_a_model_that_comes_while_the_server_drains_takes_nothing():
    catalog = Catalog([])
    catalog.drain()
    late = model("m")
    catalog.add(late)
    assert catalog.draining
    with pytest.raises(UnavailableError, match="shutting down"):
        late.admission.enter(1)

"""Workers as --worker names them, and the options of a router."""

import pytest

from shoal.errors import ConfigError
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.config import FleetConfig
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet.pool.model_pool import ModelPool
from shoal.fleet.routing.policy import RouterWeights
from shoal.fleet.worker_spec import parse_worker
from shoal.kv_events import GPU, BlockStored


def test_a_worker_is_a_url_with_keys(tmp_path):
    key = tmp_path / "key"
    key.write_text("sesame\n")
    spec = parse_worker(
        "http://127.0.0.1:9002/,kv_events=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5657,block_size=32,id=b,"
        f"tag=x,tag=y,dp_size=2,topic=kv,api_key_file={key}"
    )
    assert (spec.url, spec.id, spec.tags) == ("http://127.0.0.1:9002", "b", {"x", "y"})
    assert (spec.block_size, spec.dp_size, spec.topic, spec.api_key) == (32, 2, "kv", "sesame")
    assert "sesame" not in repr(spec)
    assert spec.event_endpoints() == [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"),
        ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658"),
    ]
    assert parse_worker("http://[::1]:9001").id == "::1:9001"
    plain = parse_worker("https://example.com/v1", block_size=64)
    assert (plain.id, plain.block_size, plain.event_endpoints()) == ("example.com:443.v1", 64, [])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("127.0.0.1:9002", "must begin with a URL"),
        ("ftp://127.0.0.1", "must begin with a URL"),
        ("http://user:word@127.0.0.1", "must begin with a URL"),
        ("http://127.0.0.1:99999", "URL"),
        ("http://a,kv_event=tcp://b:1", "; did you mean 'kv_events'?"),
        ("http://a,colour=red", "unknown key 'colour' in worker 'http://"),
        ("http://a,id", "id must have a value"),
        ("http://a,id=", "id must have a value"),
        ("http://a,id=x,id=y", "id must be given once"),
        ("http://a,id=two words", "got 'two words'"),
        ("http://a,block_size=0", "block_size must be from 1 to 1048576, got '0'"),
        ("http://a,dp_size=many", "dp_size must be from 1 to 1024, got 'many'"),
        ("http://a,kv_events=127.0.0.1:5557", "kv_events must be a ZMQ address .* got '127.0.0.1:5557'"),
        ("http://a,kv_events=tcp://a:65535,dp_size=2", "a port for each of 2 ranks"),
        ("http://a,kv_events=ipc:///x,dp_size=2", "a port for each of 2 ranks"),
        ("http://a,replay=tcp://a:5557", "replay needs kv_events"),
        ("http://a,api_key_file=/nowhere/at/all", "api_key_file cannot be read"),
    ],
)
def test_a_mistake_is_named(text, named):
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        parse_worker(text)


def test_two_workers_of_one_id_are_refused():
    with pytest.raises(ConfigError, match="'twin'"):
        FleetConfig(worker=["http://a,id=twin", "http://b,id=twin"])
    with pytest.raises(ConfigError, match="a:80"):
        FleetConfig(worker=["http://a", "http://a/"])


def test_the_weights_of_the_cost_are_options():
    assert FleetConfig().weights == RouterWeights()
    ids = list(range(64))

    async def ask(**options):
        model = ModelPool("m", True, FleetConfig(**options), LoopClock())
        for name in "ab":
            model.router.add_worker(WorkerRank(name))
        model.router.apply(WorkerRank("a"), BlockStored([1, 2], None, ids[:32], 16, None, GPU, None))
        return {rank.worker: cost for rank, cost in model.router.schedule(ids).costs.items()}

    def costs(**options):
        return run_virtual(ask(**options))

    assert costs() == {"a": 8.0, "b": 16.0}
    assert costs(overlap_score_credit=0.0) == {"a": 16.0, "b": 16.0}
    assert costs(prefill_load_scale=1.0, overlap_score_credit=1.0) == {"a": 2.0, "b": 4.0}

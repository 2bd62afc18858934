"""Sleep mode and new weights with two ranks on the CPU, and weights that come from another process."""

import random
import resource

import pytest
import torch
from safetensors.torch import load_file

from shoal import SamplingParams
from shoal.engine.runner import runner as runner_module
from shoal.engine.runner.rank_memory import CpuRegions
from shoal.errors import CheckpointError, ConfigError, UnavailableError
from shoal.models.loading import Loading
from tests import tiny
from tests.ranks import pids_of_ranks
from tests.serving import free_port
from tests.sleeping_engines import sleeping_engines
from tests.trainer import described, shared_handles

pytestmark = pytest.mark.usefixtures("quick_starts")

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((7, 33, 80))]
COUNT = 12


def tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def expected(folder):
    return [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.fixture(scope="module")
def changed(folder, root):
    """(checkpoint, its tokens): the same model with other weights."""
    target = tiny.write_changed(folder, root / "changed")
    return target, [tiny.greedy(target, p, COUNT) for p in PROMPTS]


@pytest.fixture
def build(folder):
    with sleeping_engines(32 << 20) as build:
        yield lambda ranks=2, **options: build(folder, tensor_parallel_size=ranks, **options)


def test_ranks_sleep_and_wake_together(build, expected, changed):
    llm = build()
    assert tokens(llm) == expected
    awake, sums = llm.memory_usage(), llm.check_weights()
    assert {name.partition(".")[0] for name in sums} == {"rank0", "rank1"}
    for level in (1, 2, 1):
        report = llm.sleep(level=level)
        assert (
            report.freed_bytes >= awake["kv_cache"]["device_bytes"]
            and llm.memory_usage()["kv_cache"]["device_bytes"] == 0
        )
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.update_weights(changed[0])
        llm.wake_up(tags=["kv_cache"])
        assert tokens(llm) == (expected if llm.weights_version == 0 else changed[1])
    assert llm.memory_usage() == awake and llm.check_weights() != sums
    llm.update_weights(llm.config.model)
    assert llm.check_weights() == sums and tokens(llm) == expected
    first, second = llm.collective_rpc("state_digest")
    assert first == second


def test_a_wake_that_fails_on_rank_1_is_undone_on_both(build, expected):
    llm = build(sleep_offload="file")
    llm.sleep(level=1)
    asleep = llm.memory_usage()
    [pid] = pids_of_ranks()
    # it can open no file
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with pytest.raises(CheckpointError, match="rank 1"):
        llm.wake_up()
    assert llm.is_sleeping and llm.memory_usage() == asleep
    with pytest.raises(UnavailableError, match="sleep"):
        tokens(llm)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    llm.wake_up()
    assert tokens(llm) == expected


@pytest.mark.parametrize("offload", ["host", "file"])
def test_a_wake_that_fails_on_rank_0_is_undone_on_both(build, expected, offload, monkeypatch):
    llm = build(sleep_offload=offload)
    llm.sleep(level=1)
    asleep = llm.memory_usage()

    def fails(self, tags):
        raise MemoryError("rank 0 finds its card full")

    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match="card full"):
        patch.setattr(CpuRegions, "take", fails)
        llm.wake_up()
    assert llm.is_sleeping and llm.memory_usage() == asleep
    llm.wake_up()
    assert tokens(llm) == expected


def test_an_update_that_fails_on_one_rank_stops_both(build, changed, monkeypatch):
    llm = build()
    load = Loading.take

    def fails(self, name, tensor):
        if "norm" in name:
            raise CheckpointError("rank 0 cannot read it")
        load(self, name, tensor)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="rank 0 cannot"):
        patch.setattr(Loading, "take", fails)
        llm.update_weights(changed[0])
    with pytest.raises(UnavailableError, match="weights"):
        tokens(llm)
    llm.update_weights(changed[0])
    assert tokens(llm) == changed[1]


def test_kept_requests_go_on_with_two_ranks(build, expected):
    llm = build(async_scheduling=True)
    streams = [
        llm.stream(p, SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)) for p in PROMPTS
    ]
    for stream in streams:
        next(stream), next(stream)
    llm.sleep(level=1, mode="keep")
    llm.wake_up()
    for stream, wanted in zip(streams, expected):
        *_, last = stream
        assert list(last.outputs[0].token_ids) == wanted


def test_tensors_of_this_process_reach_every_rank(build, changed):
    llm = build()
    llm.update_weights_from_tensors(load_file(changed[0] / "model.safetensors"))
    assert tokens(llm) == changed[1] and llm.weights_version == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_processs_shared_tensors_are_taken(build, changed, trainer, ranks):
    llm = build(ranks)
    process = trainer("share", changed[0])
    handles = shared_handles(process)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    assert llm.update_weights_from_tensors(handles) == 1
    process.communicate("done\n")
    llm.wake_up()
    assert tokens(llm) == changed[1]
    with pytest.raises(CheckpointError, match="cannot be opened"):  # its sender is gone
        llm.update_weights_from_tensors(handles)
    with pytest.raises(UnavailableError, match="weights"):
        tokens(llm)
    llm.update_weights(changed[0])
    assert tokens(llm) == changed[1]


@pytest.mark.parametrize(
    "mode, ranks",
    [
        ("shoal", 2),
        ("torch", 1),
        pytest.param("shoal", 1, marks=pytest.mark.slow),
        pytest.param("torch", 2, marks=pytest.mark.slow),
    ],
)
def test_a_trainer_broadcasts_new_weights(build, expected, changed, trainer, mode, ranks):
    llm, port = build(ranks), free_port()
    assert tokens(llm) == expected
    trainer(mode, changed[0], "cpu", port, 1 + ranks)
    llm.init_weights_update_group("127.0.0.1", port, 1, 1 + ranks, backend="gloo")
    with pytest.raises(ConfigError, match="in use"):
        llm.init_weights_update_group("127.0.0.1", port, 1, 1 + ranks, backend="gloo")
    names, dtypes, shapes = described(changed[0])
    with pytest.raises(CheckpointError, match="has shape"):  # refused before anything is received
        llm.update_weights_from_distributed(names, dtypes, [[1]] * len(names))
    assert llm.update_weights_from_distributed(names, dtypes, shapes) == 1
    assert tokens(llm) == changed[1]
    llm.destroy_weights_update_group()
    with pytest.raises(ConfigError, match=r"weights update group .* does not exist"):
        llm.update_weights_from_distributed(names, dtypes, shapes)


def test_a_trainer_that_dies_leaves_an_engine_that_says_so(build, expected, folder, changed, trainer):
    llm, port = build(1), free_port()
    trainer("die", changed[0], "cpu", port, 2)
    llm.init_weights_update_group("127.0.0.1", port, 1, 2, backend="gloo")
    with pytest.raises(CheckpointError, match="broke off"):
        llm.update_weights_from_distributed(*described(changed[0]))
    with pytest.raises(UnavailableError, match="weights"):
        tokens(llm)
    llm.update_weights(folder)
    assert tokens(llm) == expected


def test_checksums_tell_a_changed_tensor(build, folder):
    llm = build()
    sums = llm.check_weights()
    llm.update_weights_from_tensors({"model.norm.weight": torch.ones(48)})
    renewed = llm.check_weights()
    assert {name for name in sums if sums[name] != renewed[name]} == {
        "rank0.norm.weight",
        "rank1.norm.weight",
    }


def test_two_ranks_take_another_model_and_the_old_one_again(build, root, folder, expected):
    """Its ranks are new processes, which the old ones make room for."""
    other = tiny.write_model(root, "llama")
    threads = torch.get_num_threads()
    llm = build()
    divided, pids = torch.get_num_threads(), pids_of_ranks()
    for path, wanted in ((other, [tiny.greedy(other, p, COUNT) for p in PROMPTS]), (folder, expected)):
        llm.sleep(level=2)
        llm.update_weights(path)
        assert len(pids_of_ranks()) == 1 and pids_of_ranks() != pids
        llm.wake_up()
        assert tokens(llm) == wanted
        first, second = llm.collective_rpc("state_digest")
        assert first == second and torch.get_num_threads() == divided
    llm.exit()
    assert pids_of_ranks() == [] and torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_model_that_one_rank_cannot_load_leaves_both_ranks_asleep_and_well(
    build, root, expected, folder, monkeypatch
):
    llm, other = build(), tiny.write_model(root, "llama")
    divided, pids = torch.get_num_threads(), pids_of_ranks()
    llm.sleep(level=2)
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match=r"no room.*sleeps on with"):

        def fails(*args, **options):
            raise MemoryError("no room")

        patch.setattr(runner_module, "load_weights", fails)
        llm.update_weights(other)
    assert pids_of_ranks() == pids and torch.get_num_threads() == divided
    llm.wake_up()
    llm.update_weights(folder)
    assert tokens(llm) == expected

"""Sleep mode on a GPU: the memory really comes back, captured graphs stay valid, a wake-up without room loses
nothing."""

import gc
import random

import pytest
import torch
from safetensors.torch import load_file

from shoal import LLM, SamplingParams
from shoal.errors import ShoalError, UnavailableError
from shoal.memory.thread_stacks import STACKS
from shoal.weights.transfer import SharedTensors
from tests import tiny
from tests.cpu.engine.test_runner import Rank

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
alone = pytest.mark.usefixtures("alone_on_the_card")

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((3, 17, 40, 70))]
COUNT = 24
GIB = 2**30


def params(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options)


def tokens(llm):
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params(), use_tqdm=False)]


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module")
def expected(folder):
    return [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.fixture
def build(folder):
    engines = []

    def make(path=folder, **options):
        defaults = {
            "dtype": "float32",
            "max_model_len": 256,
            "gpu_memory_utilization": 0.3,
            "max_num_seqs": 16,
            "enable_sleep_mode": True,
        }
        engines.append(LLM(str(path), **defaults | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("offload", ["host", "file"])
def test_the_same_tokens_after_every_level_with_graphs(build, folder, expected, eager, offload):
    llm = build(enforce_eager=eager, sleep_offload=offload)
    assert tokens(llm) == expected
    for level in (1, 2, 1, 2):
        llm.sleep(level=level)
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.update_weights(folder)
        llm.wake_up(tags=["kv_cache"])
        assert tokens(llm) == expected


@alone
def test_the_memory_comes_back(build):
    before = free_bytes()
    llm = build(gpu_memory_utilization=0.5)
    tokens(llm)
    # the counts that penalties need go too
    llm.generate(PROMPTS, params(repetition_penalty=1.1), use_tqdm=False)
    awake = free_bytes()
    assert before - awake > 0.4 * torch.cuda.mem_get_info()[1]
    for level in (1, 2):
        report = llm.sleep(level=level)
        asleep = free_bytes()
        assert before - asleep < 1 * GIB, "all but a little comes back"
        assert abs(asleep - awake - report.freed_bytes) < 1 * GIB, "and the report says so"
        llm.wake_up()


@pytest.fixture
def start(folder):
    """Starts one rank of an engine on the GPU, its graphs captured."""
    ranks = []

    def make(**options):
        defaults = {"device": "cuda", "max_model_len": 256, "max_num_seqs": 16, "gpu_memory_utilization": 0.3}
        ranks.append(Rank(folder, **defaults | options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.runner.drop_graphs()
        rank.runner.exit()


def answers(rank):
    """Returns the rank's answers to all prompts, computed together."""
    seqs = [rank.add(prompt, max_tokens=COUNT) for prompt in PROMPTS]
    rank.run()
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]


def fill_the_card():
    """Overwrites the free memory and frees it again."""
    filler = torch.full((free_bytes() // 2,), 255, dtype=torch.uint8, device="cuda")
    del filler
    torch.cuda.empty_cache()


def test_weights_cache_and_buffers_stay_where_they_are(start, folder, expected):
    """Graphs have captured their addresses. Tables that no checkpoint holds keep their content too."""
    rank = start(enable_sleep_mode=True)
    runner = rank.runner

    def addresses():
        tensors = [*runner.model.parameters(), runner.cache.blocks, *runner.model.ropes]
        return [tensor.data_ptr() for tensor in tensors]

    before, sums = addresses(), runner.weights.checksums()
    ropes = [rope.clone() for rope in runner.model.ropes]
    assert ropes and not list(runner.model.named_buffers()) and answers(rank) == expected
    rank.scheduler.reset_prefix_cache()
    for kept in ((), ("weights",)):
        runner.memory.release(["weights", "kv_cache"], kept)
        fill_the_card()
        runner.memory.take(["weights", "kv_cache"])
        if not kept:
            runner.weights.load_checkpoint(str(folder), False)
        assert addresses() == before and runner.weights.checksums() == sums
        assert all(map(torch.equal, runner.model.ropes, ropes))
        assert answers(rank) == expected
        rank.scheduler.reset_prefix_cache()


def test_after_level_2_nothing_is_answered_without_weights(build, folder):
    llm = build()
    sums = llm.check_weights()
    llm.sleep(level=2)
    llm.wake_up()
    with pytest.raises(UnavailableError, match="weights"):
        tokens(llm)
    llm.update_weights(folder)
    assert llm.check_weights() == sums


@alone
def test_a_hundred_cycles_grow_nothing(build, folder, expected):
    import os

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    llm = build(kv_cache_memory_bytes=1 << 30)  # A larger cache takes longer to come and go.
    for _ in range(3):
        llm.sleep(level=1)
        llm.wake_up()
    awake, host = free_bytes(), resident()
    for i in range(100):
        llm.sleep(level=1 + i % 2)
        llm.wake_up()
        if i % 2:
            llm.update_weights(folder)
    assert abs(free_bytes() - awake) < 64 << 20 and resident() - host < 256 << 20
    assert tokens(llm) == expected


@alone
@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_without_room_loses_nothing(build, folder, expected, level):
    llm = build(gpu_memory_utilization=0.5)
    llm.sleep(level=level)
    asleep = free_bytes()
    hog = torch.empty(asleep - 2 * GIB, dtype=torch.uint8, device="cuda")
    full = free_bytes()
    for _ in range(2):
        with pytest.raises((ShoalError, RuntimeError, MemoryError)):
            llm.wake_up()
        assert llm.is_sleeping and abs(free_bytes() - full) < 64 << 20
    del hog
    torch.cuda.empty_cache()
    llm.wake_up()
    if level == 2:
        llm.update_weights(folder)
    assert tokens(llm) == expected


@pytest.mark.parametrize("eager", [False, True])
def test_what_lies_in_unused_cache_slots_reaches_no_answer(start, expected, eager):
    """A woken cache's content is undefined: NaN at worst."""
    rank = start(enforce_eager=eager)
    with torch.inference_mode():
        rank.runner.cache.blocks.fill_(float("nan"))
    assert answers(rank) == expected
    assert answers(rank) == expected  # prompts found in the cache


@pytest.mark.parametrize("backend, package", [("flash_attn", "flash_attn"), ("flashinfer", "flashinfer")])
def test_nor_with_attention_from_other_libraries(start, backend, package):
    pytest.importorskip(package)
    rank = start(attention_backend=backend, block_size=256, dtype="bfloat16")
    before = answers(rank)
    with torch.inference_mode():
        rank.runner.cache.blocks.fill_(float("nan"))
    rank.scheduler.reset_prefix_cache()
    assert answers(rank) == before and answers(rank) == before


def test_level_2_after_level_1_gives_the_hosts_memory_back(build, folder, expected):
    llm = build()
    llm.collective_rpc("wait_for_host")
    awake = llm.memory_usage()["weights"]
    llm.sleep(level=1)
    asleep = llm.memory_usage()["weights"]
    assert asleep["host_bytes"] > awake["host_bytes"] == 0 and asleep["ready_bytes"] < awake["ready_bytes"]
    assert llm.sleep(level=2).host_bytes == 0
    usage = llm.memory_usage()["weights"]
    assert usage["host_bytes"] == usage["ready_bytes"] == 0
    llm.wake_up()
    llm.update_weights(folder)
    for _ in range(2):
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm) == expected


@alone
def test_engines_that_do_not_start_leave_no_region(build, tmp_path, folder):
    """A process has room for 64 regions."""
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    with open(broken / "model.safetensors", "r+b") as file:
        file.truncate(4000)
    before = free_bytes()
    for _ in range(70):
        with pytest.raises(ShoalError):
            build(broken)
        gc.collect()
    torch.cuda.empty_cache()
    assert before - free_bytes() < GIB


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"]])
def test_kept_requests_go_on_after_waking(build, expected, tags):
    llm = build()
    streams = [llm.stream(p, params()) for p in PROMPTS]
    for i, stream in enumerate(streams):
        for _ in range(i + 1):
            next(stream)
    llm.sleep(level=1, tags=tags, mode="keep")
    llm.wake_up()
    for stream, wanted in zip(streams, expected):
        *_, last = stream
        assert list(last.outputs[0].token_ids) == wanted


def test_two_engines_take_turns_on_one_card(build, folder, expected):
    one = build(gpu_memory_utilization=0.6)
    one.sleep(level=1)
    two = build(gpu_memory_utilization=0.6)
    assert tokens(two) == expected
    for _ in range(2):
        two.sleep(level=1)
        one.wake_up()
        assert tokens(one) == expected
        one.sleep(level=1)
        two.wake_up()
        assert tokens(two) == expected


def test_graphs_read_no_memory_of_an_engine_that_ended_asleep(folder, root):
    """cuBLAS keeps the workspaces that it takes during a process's first captures. An engine's end asleep
    unmapped them, and the next engine's graphs ended in an illegal address."""
    import json
    import subprocess
    import sys

    other = tiny.write_model(root, "granite")
    code = """
import json, sys
from tests.gpu.test_sleep_gpu import LLM, tokens
options = dict(dtype="float32", max_model_len=256, max_num_seqs=16, gpu_memory_utilization=0.1)
first = LLM(sys.argv[1], enable_sleep_mode=True, **options)
tokens(first)
first.sleep(level=1)
first.exit()
print(json.dumps(tokens(LLM(sys.argv[2], **options))))
"""
    command = [sys.executable, "-c", code, str(folder), str(other)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == tokens_of(other)


def test_new_weights_leave_graphs_valid(build, folder, expected):
    llm = build()
    weights = load_file(folder / "model.safetensors")
    llm.update_weights_from_tensors(
        {name: torch.zeros_like(w) if "down_proj" in name else w for name, w in weights.items()}
    )
    assert tokens(llm) != expected
    llm.update_weights_from_tensors({name: w.cuda() for name, w in weights.items()})
    assert tokens(llm) == expected


def test_another_process_takes_cuda_tensors():
    """CUDA IPC needs two processes: a child opens what this one shares."""
    import json
    import subprocess
    import sys

    sent = {
        "a": torch.arange(1 << 20, dtype=torch.float32, device="cuda").view(1024, 1024),
        "b": torch.ones(7, device="cuda").bfloat16(),
    }
    code = """
import json, sys, torch
from shoal.weights.transfer import open_tensor
handles = json.loads(sys.stdin.readline())
for h in handles:
    if "cuda" in h:
        h["cuda"] = [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in h["cuda"]]
tensors = {h["name"]: open_tensor(h).clone() for h in handles}
torch.cuda.synchronize()
print([float(t.double().sum()) for t in tensors.values()])
"""
    with SharedTensors(sent) as shared:
        handles = [
            h | {"cuda": [{"hex": v.hex()} if isinstance(v, bytes) else v for v in h["cuda"]]}
            for h in shared.handles
        ]
        done = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(handles) + "\n", capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [float(t.double().sum()) for t in sent.values()]


# Another model


def tokens_of(folder):
    return [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.mark.parametrize("eager", [False, True])
def test_another_model_takes_the_place_of_one_that_sleeps(build, root, folder, expected, eager):
    other = tiny.write_model(root, "granite")
    llm = build(enforce_eager=eager, gpu_memory_utilization=0.05)
    assert tokens(llm) == expected
    for path in (other, folder, other):
        llm.sleep(level=2)
        llm.update_weights(path)
        assert llm.core.sleep_state().asleep == {"kv_cache"}
        with pytest.raises(UnavailableError, match="sleeps"):
            tokens(llm)
        llm.wake_up()
        assert tokens(llm) == tokens_of(path)
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm) == tokens_of(path)


@alone
def test_its_cache_is_as_large_as_a_fresh_engines_and_models_that_go_leave_no_memory(build, root, folder):
    other = tiny.write_model(root, "granite")
    llm = build(gpu_memory_utilization=0.5)
    asleep = []
    for path in (other, folder) * 4:
        llm.sleep(level=2)
        asleep.append(free_bytes())
        llm.update_weights(path)
        llm.wake_up()
    num_blocks = llm.stats().num_blocks
    # What the first models brought along, such as kernels, stays. Then it is the same each time.
    assert max(asleep[2:]) - min(asleep[2:]) < 256 << 20
    llm.exit()
    gc.collect()
    torch.cuda.empty_cache()
    fresh = build(folder, gpu_memory_utilization=0.5)
    assert abs(num_blocks - fresh.stats().num_blocks) < 0.02 * num_blocks


@alone
def test_another_model_that_finds_no_room_leaves_the_old_one_asleep_and_well(build, root, folder, expected):
    other = tiny.write_model(root, "granite")
    llm = build(gpu_memory_utilization=0.5)
    llm.sleep(level=2)
    asleep = free_bytes()
    hog = torch.empty(asleep - 2 * GIB, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        with pytest.raises(ShoalError, match="It sleeps on with"):
            llm.update_weights(other)
    del hog
    torch.cuda.empty_cache()
    assert abs(free_bytes() - asleep) < 256 << 20
    llm.wake_up()
    llm.update_weights(folder)
    assert tokens(llm) == expected
    llm.sleep(level=2)
    llm.update_weights(other)
    llm.wake_up()
    assert tokens(llm) == tokens_of(other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_take_another_model(build, root, folder, expected):
    other = tiny.write_model(root, "llama")
    llm = build(tensor_parallel_size=2)
    assert tokens(llm) == expected
    for path in (other, folder):
        llm.sleep(level=2)
        llm.update_weights(path)
        llm.wake_up()
        assert tokens(llm) == tokens_of(path)


# Two ranks


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_sleep_together(build, folder, expected):
    llm = build(tensor_parallel_size=2)
    assert tokens(llm) == expected
    awake = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    for level in (1, 2, 1):
        llm.sleep(level=level)
        assert all(
            torch.cuda.mem_get_info(i)[0] - awake[i] > 0.2 * torch.cuda.mem_get_info(i)[1] for i in range(2)
        )
        llm.wake_up()
        if level == 2:
            llm.update_weights(folder)
        assert tokens(llm) == expected
    hog = torch.empty(torch.cuda.mem_get_info(1)[0] // 2, dtype=torch.uint8, device="cuda:1")
    del hog
    torch.cuda.empty_cache()
    llm.sleep(level=1)
    hog = torch.empty(torch.cuda.mem_get_info(1)[0] - 2 * GIB, dtype=torch.uint8, device="cuda:1")
    # rank 1 finds no room: rank 0 goes back to sleep
    with pytest.raises((ShoalError, RuntimeError, MemoryError)):
        llm.wake_up()
    assert llm.is_sleeping and torch.cuda.mem_get_info(0)[0] - awake[0] > 0.2 * torch.cuda.mem_get_info(0)[1]
    del hog
    torch.cuda.empty_cache()
    llm.wake_up()
    assert tokens(llm) == expected
    llm.update_weights_from_tensors(
        {name: w.cuda() for name, w in load_file(folder / "model.safetensors").items()}
    )
    assert tokens(llm) == expected


@alone
def test_an_engine_that_owns_its_process_gives_back_the_stacks_of_threads(build, expected, monkeypatch):
    llm = build()
    assert tokens(llm) == expected
    llm.sleep()
    in_users_process = free_bytes()
    llm.wake_up()
    monkeypatch.setattr(STACKS, "is_own_process", True)
    for level in (1, 1, 0):
        llm.sleep(level=level)
        if level:
            assert free_bytes() - in_users_process > 64 << 20
        llm.wake_up()
        assert tokens(llm) == expected

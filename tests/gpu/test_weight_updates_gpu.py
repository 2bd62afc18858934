"""New weights from a trainer's process on GPUs: over NCCL, and by CUDA IPC."""

import random

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError, UnavailableError
from tests import tiny
from tests.serving import free_port
from tests.trainer import described, shared_handles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((3, 40))]
COUNT = 12


@pytest.fixture(scope="module")
def changed(folder, root):
    """The same model with other weights."""
    return tiny.write_changed(folder, root / "changed")


@pytest.fixture
def build(folder):
    engines = []

    def make(ranks=1):
        engines.append(
            LLM(
                str(folder),
                tensor_parallel_size=ranks,
                dtype="float32",
                max_model_len=128,
                max_num_seqs=4,
                max_num_batched_tokens=128,
                kv_cache_memory_bytes=16 << 20,
                gpu_memory_utilization=0.1,
                enable_sleep_mode=True,
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()


def tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, use_tqdm=False)]


def expected(checkpoint):
    return [tiny.greedy(checkpoint, p, COUNT) for p in PROMPTS]


@two_gpus
@pytest.mark.parametrize("mode", ["shoal", "torch"])
def test_a_trainer_on_the_next_gpu_broadcasts_over_nccl(build, folder, changed, trainer, mode):
    llm, port = build(), free_port()
    assert tokens(llm) == expected(folder)
    trainer(mode, changed, "cuda:1", port, 2)
    llm.init_weights_update_group("127.0.0.1", port, 1, 2, backend="nccl")
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    names, dtypes, shapes = described(changed)
    with pytest.raises(CheckpointError, match="has shape"):  # refused before anything is received
        llm.update_weights_from_distributed(names, dtypes, [[1]] * len(names))
    with pytest.raises(UnavailableError, match="sleeps"):
        tokens(llm)
    assert llm.update_weights_from_distributed(names, dtypes, shapes) == 1
    llm.wake_up()
    assert tokens(llm) == expected(changed)
    llm.destroy_weights_update_group()
    assert llm.update_weights(folder) == 2
    assert tokens(llm) == expected(folder)


@two_gpus
def test_a_second_trainer_can_be_met_after_the_first_has_left(build, folder, changed, trainer):
    llm = build()
    for checkpoint in (changed, folder):
        port = free_port()
        process = trainer("shoal", checkpoint, "cuda:1", port, 2)
        llm.init_weights_update_group("127.0.0.1", port, 1, 2, backend="nccl")
        llm.update_weights_from_distributed(*described(checkpoint))
        llm.destroy_weights_update_group()
        process.communicate("done\n")
        assert tokens(llm) == expected(checkpoint)


@pytest.mark.parametrize(
    "ranks, device",
    [
        (1, "cuda:0"),
        pytest.param(1, "cuda:1", marks=two_gpus),  # they are copied from card to card
        pytest.param(2, "cuda:0", marks=two_gpus),  # rank 1 opens what lies on rank 0's card
    ],
)
def test_a_trainers_cuda_tensors_are_taken_by_cuda_ipc(build, folder, changed, trainer, ranks, device):
    llm = build(ranks)
    assert tokens(llm) == expected(folder)
    process = trainer("share", changed, device)
    handles = shared_handles(process)
    assert all("cuda" in handle for handle in handles)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    assert llm.update_weights_from_tensors(handles) == 1
    process.communicate("done\n")  # what was shared is gone
    llm.wake_up()
    assert tokens(llm) == expected(changed)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        llm.update_weights_from_tensors(handles)
    with pytest.raises(UnavailableError, match="weights"):
        tokens(llm)
    llm.update_weights(folder)
    assert tokens(llm) == expected(folder)

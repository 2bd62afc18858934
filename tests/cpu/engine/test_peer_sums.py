"""All ranks use the process group where sums over peer memory are impossible, and rank 0 logs why. (Gloo, in
threads of one process.)"""

import pytest
import torch

from shoal.engine.ranks import peer_copies, peer_sums, shared_memory
from shoal.models.config_json import config_from_json
from tests import tiny, tiny_families
from tests.cpu.layers.test_parallel import ranks, together


@pytest.mark.parametrize(
    "far, words",
    [
        ((0, 1), "GPU 0 has no access to the memory of GPU 1"),
        ((1, 0), "another rank has no way to its peers"),
    ],
)
def test_gpus_without_access_to_each_other_leave_all_sums_to_the_group(far, words, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != far)
    monkeypatch.setattr(shared_memory, "_allocate", lambda *args: pytest.fail("nothing is to be allocated"))
    tps = ranks(2)
    assert together([lambda tp=tp: peer_sums.connect(tp, 64, torch.float32) for tp in tps]) == [None, None]
    assert [record.getMessage() for record in caplog.records] == [f"all sums over GPUs go by NCCL: {words}"]


def test_more_ranks_than_the_kernels_are_for_leave_all_sums_to_the_group(monkeypatch, caplog):
    monkeypatch.setattr("shoal.kernels.all_reduce.MAX_RANKS", 1)
    assert together([lambda tp=tp: peer_sums.connect(tp, 64, torch.float32) for tp in ranks(2)]) == [None] * 2
    assert "there are 2 ranks, and the kernels are for at most 1" in caplog.text


@pytest.mark.parametrize(
    "name, num_ranks, takes",
    [("seed-oss", 2, True), ("seed-oss", 4, False), ("mixtral", 2, False), ("gemma3", 2, False)],
)
def test_only_models_that_sum_in_pieces_get_memory_for_pieces(name, num_ranks, takes):
    """Regression: layers that never sum in pieces had slots of 160 MiB and more beside them."""
    fields = tiny_families.make_config(name)
    config = config_from_json(fields.to_dict() | {"architectures": [tiny.model_class(fields).__name__]}, name)
    assert peer_copies.takes_model(config, num_ranks) is takes

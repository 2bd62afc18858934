"""RanksLayer, on two ranks in threads: with sums piece by piece a step's results are as with whole sums,
whatever layers and norms stand between. Oracle: the same ranks without such sums."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from shoal.engine.ranks.rendezvous import Rendezvous, join
from shoal.kernels import reference
from shoal.kernels.layer_cache import LayerCache
from shoal.kinds.experts import ExpertsKind, Router
from shoal.kinds.rope import RopeConfig
from shoal.layers.pieces import Pieces
from shoal.model_config import AttentionKind, LayerKind, ModelConfig
from shoal.models.decoder_layers.ranks_layer import RanksLayer
from shoal.models.heads.hidden_states import read_states
from tests.cpu.models.test_layer_kinds import build, prompt

FULL = AttentionKind(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope=RopeConfig())
EXPERTS = ExpertsKind(num_experts=4, intermediate_size=12, router=Router(2, renormalize=True))
DENSE = ModelConfig(
    architecture="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    layers=(LayerKind(FULL),) * 3,
)
MIXED = replace(DENSE, layers=(LayerKind(FULL), LayerKind(FULL), LayerKind(FULL, EXPERTS), LayerKind(FULL)))


class BegunSum:
    def __init__(self, sums, part_TD):
        self.sums, self.part_TD = sums, part_TD

    def add(self, residual_TD):
        self.sums.order.remove(self)
        residual_TD += self.sums.tp.all_reduce(self.part_TD)

    def add_rms_norm(self, residual_TD, weight_D, eps):
        assert self.sums.order[0] is self, "pieces are finished in the order in which they were begun"
        self.add(residual_TD)
        return reference.rms_norm(residual_TD, weight_D, eps)


class PieceSums:
    """Large sums, and no small ones, by the group."""

    def __init__(self, tp):
        self.tp, self.order, self.begun = tp, [], 0

    def takes(self, x):
        return False

    takes_rows = takes

    def pieces(self, num_rows):
        return [slice(0, 7), slice(7, 13), slice(13, num_rows)] if num_rows > 15 else []

    def begin(self, part_TD):
        self.begun += 1
        self.order.append(BegunSum(self, part_TD))
        return self.order[-1]

    def release(self):
        pass


def on_two_ranks(run):
    rendezvous = Rendezvous()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: run(rendezvous.connect(0, 2, "cpu", timeout_s=20)))
        second = pool.submit(lambda: run(join(1, 2, "cpu", rendezvous.port, timeout_s=20)))
        return first.result(timeout=60), second.result(timeout=60)


def caches_of(config: ModelConfig) -> list[LayerCache]:
    kv = torch.zeros(8, len(config.layers), 2, 1, 4, 8)
    return [LayerCache(kv[:, i], window=kind.mixer.window) for i, kind in enumerate(config.layers)]


@pytest.mark.parametrize("select", [None, [], [19], [*range(20)]], ids=str)
@pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "mixed"])
def test_large_steps_are_those_of_whole_sums(config, select):
    @torch.inference_mode()
    def run(tp):
        whole, selected = (
            build(config, tp),
            None if select is None else torch.tensor(select, dtype=torch.int64),
        )
        tp.sums = tp.large_sums = sums = PieceSums(tp)
        pieces = build(config, tp)
        assert all(type(layer) is RanksLayer for layer in pieces.layers)
        pieces.load_state_dict(whole.state_dict())
        results = [
            [
                model(prompt(20), caches_of(config), selected),
                *(model(prompt(rows), caches_of(config)) for rows in (9, 1)),
                model(prompt(1), caches_of(config), torch.tensor([0])),
            ]
            for model in (whole, pieces)
        ]
        assert not sums.order
        for expected, found in zip(*results):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return results[1][0], sums.begun

    (hidden, begun), (other, _) = on_two_ranks(run)
    assert torch.equal(hidden, other)
    without = 0 if select is None or len(select) > 15 else 1  # the last layer, with few selected rows
    assert begun == 3 * 2 * (3 - without), "three pieces of two sums of each dense layer"


def test_hidden_states_between_layers_are_whole():
    @torch.inference_mode()
    def run(tp):
        found = []
        weights = None
        for sums in (None, PieceSums(tp)):
            tp.sums = tp.large_sums = sums
            model = build(DENSE, tp)
            states = read_states(model, [1, 2])
            if weights is not None:
                model.load_state_dict(weights)
            weights = model.state_dict()
            found.append((model(prompt(20), caches_of(DENSE)), states.states_TX))
        for tensor, expected in zip(found[1], found[0]):
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)

    on_two_ranks(run)


def test_pieces_are_added_to_their_rows():
    class Ones:
        def add(self, residual_TD):
            residual_TD += 1

    residual = torch.zeros(4, 2)
    Pieces([(slice(0, 1), Ones()), (slice(3, 4), Ones())]).add_to(residual)
    assert residual[:, 0].tolist() == [1, 0, 0, 1]

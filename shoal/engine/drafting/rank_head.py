"""`RankHead`: one rank's draft head: its module, the hidden states that it reads, and its weights, which are
in the target's region. When the target gets a new checkpoint, a head in that checkpoint is loaded, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shoal.attention.backend import Backends
from shoal.config import ResolvedConfig
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.ops import Ops
from shoal.layers.matrix import Holding
from shoal.layers.parallel import TensorParallel
from shoal.models.decoder import Decoder
from shoal.models.heads.head import DraftHead
from shoal.models.heads.hidden_states import read_states
from shoal.models.parallel import check_parallel
from shoal.weights.heads.head_files import HeadFiles, load_head
from shoal.weights.heads.mtp_files import MtpFiles
from shoal.weights.source import CheckpointFiles
from shoal.weights.update import weight_tensors


class RankHead:
    """A head is built where its target is, under the engine's device and dtype, before the target's weights
    are loaded."""

    def __init__(
        self,
        files: HeadFiles,
        target: Decoder,
        tp: TensorParallel,
        ops: Ops,
        backends: Backends,
        holding: Holding,
        config: ResolvedConfig,
    ) -> None:
        """`holding`: the weights' region. Raises CheckpointError, and ConfigError if the head can't be
        divided over the ranks."""
        check_parallel(files.decoder, tp.size)
        self.files, self.dummy = files, config.load_format == "dummy"
        first = target.config.num_layers
        self.layers = range(first, first + len(files.decoder.layers))  # numbered after the target's
        with holding():
            self.module: DraftHead = files.build(target, tp, ops, backends, config.quantizes_weights, holding)
        self.module.allocate_ropes(config.max_model_len)
        self.max_position = config.max_model_len
        self.states = read_states(target, self.module.state_layers)

    def load(self) -> None:
        """Fills the weights, at the start and after a sleep that dropped them."""
        load_head(self.module, self.files, dummy=self.dummy)

    def follow(self, files: CheckpointFiles, dummy: bool) -> None:
        """Loads the head that comes with new weights of the target. A head with files of its own stays."""
        head = files.following(self.files).head
        if head is not None and isinstance(head, MtpFiles):
            self.files, self.dummy = head, dummy
            self.load()

    def caches_of(self, layers: Sequence[Any]) -> Sequence[LayerCache]:
        """Its caches, among a cache's for all layers."""
        return layers[self.layers.start :]


def build_head(
    config: ResolvedConfig,
    files: CheckpointFiles,
    target: Decoder,
    tp: TensorParallel,
    ops: Ops,
    backends: Backends,
    holding: Holding,
) -> RankHead | None:
    """Returns the head that comes with the target's files. None: they have none."""
    if files.head is None:
        return None
    return RankHead(files.head, target, tp, ops, backends, holding, config)


def weights_of(target: Decoder, head: RankHead | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors that hold weights, the head's under names that no tensor of the target has."""
    yield from weight_tensors(target)
    if head is not None:
        yield from ((f"head.{name}", tensor) for name, tensor in weight_tensors(head.module))

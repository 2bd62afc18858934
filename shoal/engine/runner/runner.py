"""`ModelRunner`: one rank of an engine: its model, its KV cache, its batch state and its steps. steps.py runs
a step; the parts `kv`, `memory`, `weights`, `peers` and `profile` do the rest (rank_*.py).

Every rank gets the same commands in the same order.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack

import numpy as np
import torch

from shoal.config import ResolvedConfig
from shoal.engine.build_model import build_model
from shoal.engine.drafting.device import build_drafting
from shoal.engine.drafting.rank_head import weights_of
from shoal.engine.profile import RankProfile, span
from shoal.engine.runner.batch_state import BatchState
from shoal.engine.runner.cache_plan import may_share_prefixes, plan_cache, with_scales
from shoal.engine.runner.capture_sizes import captured_shapes
from shoal.engine.runner.kv_cache import KvCache
from shoal.engine.runner.layer_events import LayerEvents
from shoal.engine.runner.packed_step import StepHeader
from shoal.engine.runner.rank_export import take_export
from shoal.engine.runner.rank_kv import RankKv
from shoal.engine.runner.rank_memory import GpuShare, RankMemory, new_regions
from shoal.engine.runner.rank_peers import RankPeers
from shoal.engine.runner.rank_weights import RankWeights
from shoal.engine.runner.sampler_options import SamplerOptions
from shoal.engine.runner.sampling import Sampler
from shoal.engine.runner.state_rows import StateRows, plan_states
from shoal.engine.runner.step_buffers import StepBuffers, queue_copy
from shoal.engine.runner.steps import StepResult, Steps
from shoal.engine.runner.whole_rows import WholeRowSampler, whole_row_sizes
from shoal.engine.scheduling.scheduler import StepPlan
from shoal.kernels.ops import select_ops
from shoal.kernels.state import StateLayout
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig
from shoal.weights.loader import load_weights
from shoal.weights.source import CheckpointFiles


class ModelRunner:
    """Raises ConfigError or CheckpointError while it is built; afterwards only the device can fail.

    What it does once before the first step: start_up.py."""

    def __init__(
        self,
        config: ResolvedConfig,
        files: CheckpointFiles,
        tp: TensorParallel,
        peer_weights: bytes | None = None,
    ) -> None:
        """`peer_weights`: a RankExport of another worker's weights, encoded."""
        self.config, self.tp = config, tp
        self.model_config: ModelConfig = files.config
        self.device = torch.device(config.device, tp.rank) if config.device == "cuda" else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        max_num_seqs, max_model_len = config.max_num_seqs, config.max_model_len
        has_size = config.kv_cache_memory_bytes or config.num_gpu_blocks_override
        is_measured = self.device.type == "cuda" and not has_size
        self.share = GpuShare(self.device, config) if is_measured else None
        self.regions = new_regions(self.device, config.enable_sleep_mode)
        model = self.model_config
        plan, scales = with_scales(plan_cache(config, model, tp.rank), config, files, warns=tp.rank == 0)
        ops, holding = select_ops(self.device.type), self.regions.holding
        self.model, self.head, backend = build_model(config, files, tp, ops, self.device, holding)
        max_blocks = -(-max_model_len // plan.block_size)
        self.layout = StateLayout(max_num_seqs, max_blocks, len(plan.groups))
        self.state = state = BatchState(self.layout, self.device, config.queries)
        parts = state.table, state.active_B, state.sampled_S, state.block_tables
        self.drafting = build_drafting(config, self.head, ops, lambda: self.cache.layers, parts)
        # Steps with at least this many decodes look for groups that share a prefix. None: no step does.
        self.share_from = backend.share_from if may_share_prefixes(config, plan) else None
        self.mixed_shapes = captured_shapes(self.model, backend, config, self.share_from)
        # A kernel downloads tokens, because a copy engine keeps the next step waiting 5 us longer. With tiers
        # the engines may be busy with large copies of blocks, so a kernel makes uploads there, too.
        copy = ops.copy_ints if config.has_kv_tiers else queue_copy
        num_ints = max_num_seqs * (1 if self.drafting is None else self.drafting.report_size)
        buffers = StepBuffers(num_ints, config.max_num_batched_tokens, self.device, copy, ops.copy_ints)
        # Sizes of the chunks in which a step samples from whole rows, small to large.
        self.whole_row_sizes = whole_row_sizes(max_num_seqs, captures=self.device.type == "cuda")
        with holding("kv_cache"):
            self.whole_rows = WholeRowSampler(
                ops,
                tp,
                self.state,
                self.model.lm_head,
                self.whole_row_sizes,
                plan.groups[0].block_size,
                plan.keeps_all,
            )
            states = plan_states(config, model, plan.block_bytes)
            self.states = StateRows(states, max_num_seqs, ops, self.device, self.drafting, self.model)
        transfer = config.kv_transfer_config
        is_shared = transfer is not None and transfer.lends
        self.cache = KvCache(plan, model.cached_layers, scales, self.states.layers, self.device, is_shared)
        self.layer_events = LayerEvents(len(model.cached_layers), self.device)
        processes = config.logprobs_mode == "processed_logprobs"
        self.sampler = Sampler(ops, tp, self.state, self.whole_rows, self.model.lm_head, processes)
        self.steps = Steps(
            self.model,
            ops,
            self.state,
            self.cache,
            self.states,
            self.sampler,
            buffers,
            self.layer_events,
            self.mixed_shapes,
            max_model_len,
            self.drafting,
        )
        if peer_weights is None or not take_export(self.model, files, peer_weights, self.device, tp.rank):
            load_weights(self.model, files, dummy=config.load_format == "dummy", show_progress=tp.rank == 0)
        if self.head is not None:
            self.head.load()
        # On a CPU a region gets a function that returns its tensors; on a GPU it knows its content. It calls
        # the function whenever it needs them, because `allocate` makes another cache later.
        self.regions.adopt("weights", lambda: (tensor for _, tensor in weights_of(self.model, self.head)))
        self.regions.adopt("kv_cache", lambda: [self.cache.blocks, self.states.rows, self.states.kept])
        self.memory = RankMemory(self.regions, self.whole_rows, self.states, self.device, self.head)
        self.weights = RankWeights(self.model, tp, self.device, self.head)
        self.profile = RankProfile(tp.rank, self.device)
        self._kv: RankKv | None = None
        self._peers: RankPeers | None = None

    # Steps

    def step(self, packed: np.ndarray, options: SamplerOptions | None = None) -> StepResult:
        """Launches one packed step and returns without waiting for it (on a GPU). Rank 0 alone has
        `options`."""
        header = StepHeader.of(packed)
        name = "decode step" if header.decode_only else "mixed step"
        with span(name), self.profile.clocked():
            return self.steps.launch(header, packed, options)

    def padded_decodes(self, plan: StepPlan) -> int | None:
        """Returns the number of rows of the graph that will run the decode step `plan`. None: without
        graphs."""
        graphs = self.steps.decode_graphs
        return None if graphs is None else graphs.padded(plan.num_decodes, plan.queries)

    # KV blocks below the device

    def open_kv(self, num_host_blocks: int) -> None:
        """Makes `kv`, with a slab of `num_host_blocks` blocks on the host. Raises ConfigError."""
        assert self._kv is None
        self._kv = RankKv(self.config, self.cache, self.device, num_host_blocks)

    def close_kv(self) -> None:
        """The opposite of `open_kv`."""
        kv, self._kv = self.kv, None
        kv.close()

    @property
    def kv(self) -> RankKv:
        """The KV cache of this rank, between `open_kv` and `close_kv`."""
        assert self._kv is not None
        return self._kv

    # KV blocks of other workers

    def open_peers(self) -> None:
        """Makes `peers`, for the cache as it is now."""
        assert self._peers is None
        self._peers = RankPeers(self.config, self.model_config, self.cache.views(), self.device)

    @property
    def peers(self) -> RankPeers:
        """The copies from other workers, after `open_peers`."""
        assert self._peers is not None
        return self._peers

    # The end

    def drop_graphs(self) -> None:
        self.steps.drop_graphs()
        gc.collect()

    def exit(self) -> None:
        """Waits for the device and frees its memory, all of it even if a part of that fails. The runner is of
        no use afterwards."""
        with ExitStack() as ends:  # It runs the last entry first.
            ends.callback(self._free)
            ends.callback(self.weights.close)
            if self._kv is not None:
                ends.callback(self._kv.close)
            if self._peers is not None:
                ends.callback(self._peers.close)

    def _free(self) -> None:
        regions, device = self.regions, self.device
        vars(self).clear()  # Nothing may hold a tensor of a region when it is closed.
        gc.collect()
        regions.close()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()

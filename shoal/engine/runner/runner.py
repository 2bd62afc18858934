"""`ModelRunner`: one rank of an engine: its model, its KV cache, its batch state and its steps. steps.py runs
a step; the parts `kv`, `memory`, `weights`, `peers` and `profile` do the rest (rank_*.py).

Every rank gets the same commands in the same order.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace

from shoal.attention.select import select_backends
from shoal.config import ResolvedConfig
from shoal.engine.profile import RankProfile, span
from shoal.engine.runner.batch import Header, SamplerOptions
from shoal.engine.runner.batch_state import BatchState
from shoal.engine.runner.graphs import decode_sizes, mixed_shapes, most_captured_tokens
from shoal.engine.runner.kv_cache import FP8, KvCache, cache_scales, cache_spec
from shoal.engine.runner.layer_events import LayerEvents
from shoal.engine.runner.rank_export import RankExport, decode, read_export
from shoal.engine.runner.rank_kv import RankKv
from shoal.engine.runner.rank_memory import GpuShare, RankMemory, new_regions
from shoal.engine.runner.rank_peers import RankPeers
from shoal.engine.runner.rank_weights import RankWeights
from shoal.engine.runner.sampling import Sampler
from shoal.engine.runner.step_buffers import StepBuffers, queue_copy
from shoal.engine.runner.steps import Graphs, StepResult, Steps
from shoal.engine.runner.whole_rows import WholeRowSampler, whole_row_sizes
from shoal.errors import CheckpointError
from shoal.kernels.compilation import compiling_ahead
from shoal.kernels.launching import repeated_launches
from shoal.kernels.ops import select_ops
from shoal.kernels.reference import FP8_MAX
from shoal.kernels.state import StateLayout
from shoal.layers.attention import attention_shape
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig
from shoal.models.decoder import Decoder
from shoal.weights.kv_scales import name_of
from shoal.weights.loader import load_weights
from shoal.weights.source import CheckpointFiles
from shoal.weights.update import weight_tensors

logger = logging.getLogger(__name__)

# Prompt length used to measure `seconds_per_prompt_token`.
MEASURED_TOKENS = {"cuda": 512, "cpu": 64}
MEASURE_TRIES = 3


class ModelRunner:
    """Raises ConfigError or CheckpointError while it is built; afterwards only the device can fail.

    Before the first step, call `compile_ahead` (on a GPU), `num_blocks_that_fit` and `allocate`, once each,
    in this order."""

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
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = config.max_model_len
        self.max_num_tokens = config.max_num_batched_tokens
        has_size = config.kv_cache_memory_bytes or config.num_gpu_blocks_override
        is_measured = self.device.type == "cuda" and not has_size
        self._share = GpuShare(self.device, config) if is_measured else None
        self._regions = new_regions(self.device, config.enable_sleep_mode)
        model = self.model_config
        spec = cache_spec(config, model, tp.rank)
        scales_L2G = cache_scales(config, files) if spec.dtype == FP8 else None
        if scales_L2G is not None:
            spec = replace(spec, scales=name_of(scales_L2G))
            if tp.rank == 0 and (scales_L2G == 1).all():
                logger.warning(
                    "kv_cache_dtype %r: %s gives no scales (k_scale, v_scale), so keys and values beyond %g "
                    "are cut off",
                    config.kv_cache_dtype,
                    files.path,
                    FP8_MAX,
                )
        with self._building():
            ops = select_ops(self.device.type)
            backends = select_backends(
                config,
                self.device,
                self.dtype,
                [attention_shape(kind.mixer, tp.size) for kind in model.layers],
                # Partial results of attention are released with the cache: 0.2 GiB for 256 sequences.
                holding=partial(self._regions.holding, "kv_cache"),
            )
            backend = next(iter(backends.values()))  # all of them are of one class
            with self._regions.holding("weights"):
                self.model = Decoder(
                    model,
                    tp,
                    ops,
                    backends,
                    config.keep_quantized,
                    config.quantizes_weights,
                    partial(self._regions.holding, "weights"),
                )
            self.model.allocate_ropes(self.max_model_len)
        self.layout = StateLayout(self.max_num_seqs, -(-self.max_model_len // config.block_size))
        self.state = BatchState(self.layout, self.device)
        # Where decodes share a prefix, its keys are read once for all of them. A layer with a sliding window
        # reads only the last keys of a sequence, so a model of such layers alone has nothing to share.
        windows = [kind.mixer.window for kind in model.layers]
        never_shares = config.disable_cascade_attn or not config.enable_prefix_caching or all(windows)
        # Steps with at least this many decodes look for groups that share a prefix. None: no step does.
        self.share_from = None if never_shares else backend.share_from
        # The shapes of mixed steps that graphs capture, small to large.
        self.mixed_shapes = []
        if backend.captures_mixed and not config.enforce_eager:
            most = min(self.max_num_tokens, most_captured_tokens(self.model))
            self.mixed_shapes = mixed_shapes(most, self.max_num_seqs, self.share_from)
        # With tiers, the device's copy engines may be busy with large copies of blocks, behind which a step's
        # small copies would wait. There a kernel makes them.
        copy = ops.copy_ints if config.has_kv_tiers else queue_copy
        buffers = StepBuffers(self.max_num_seqs, self.max_num_tokens, self.device, copy)
        # Sizes of the chunks in which a step draws from whole rows, small to large.
        self.whole_row_sizes = whole_row_sizes(self.max_num_seqs, captures=self.device.type == "cuda")
        with self._regions.holding("kv_cache"):
            self.whole_rows = WholeRowSampler(
                ops, tp, self.state, self.model.lm_head, copy, self.whole_row_sizes, config.block_size
            )
        transfer = config.kv_transfer_config
        is_shared = transfer is not None and transfer.lends
        self.cache = KvCache(spec, windows, scales_L2G, self.device, is_shared)
        self.layer_events = LayerEvents(model.num_layers, self.device)
        processes_logprobs = config.logprobs_mode == "processed_logprobs"
        self.sampler = Sampler(
            ops, tp, self.state, self.whole_rows, self.model.lm_head, processes_logprobs=processes_logprobs
        )
        self.steps = Steps(
            self.model,
            ops,
            self.state,
            self.cache,
            self.sampler,
            self.whole_rows,
            buffers,
            self.layer_events,
            self.mixed_shapes,
            self.max_model_len,
        )
        if peer_weights is None or not self._read_export(files, peer_weights):
            load_weights(self.model, files, dummy=config.load_format == "dummy", show_progress=tp.rank == 0)
        # On a CPU a region gets a function that returns its tensors; on a GPU it knows its content. It calls
        # the function whenever it needs them, because `allocate` makes another cache later.
        self._regions.adopt("weights", lambda: (tensor for _, tensor in weight_tensors(self.model)))
        self._regions.adopt("kv_cache", lambda: [self.cache.blocks])
        self.memory = RankMemory(self._regions, self.whole_rows, self.device)
        self.weights = RankWeights(self.model, tp, self.device)
        self.profile = RankProfile(tp.rank, self.device)
        self._kv: RankKv | None = None
        self._peers: RankPeers | None = None

    def _read_export(self, files: CheckpointFiles, peer_weights: bytes) -> bool:
        """Reads the weights of another worker. Returns False, and logs why, if that fails."""
        try:
            done = read_export(self.model, files, decode(peer_weights, RankExport), self.device)
        except CheckpointError as error:
            logger.warning("rank %d reads the weights from files: %s", self.tp.rank, error)
            return False
        except Exception:  # The files are there, whatever it is.
            logger.exception("rank %d reads the weights from files", self.tp.rank)
            return False
        rate = done.num_bytes / 1e9 / done.seconds
        logger.info(
            "rank %d has its weights from another worker, by %s: %.2f GB in %.2f s (%.1f GB/s)",
            *(self.tp.rank, done.way, done.num_bytes / 1e9, done.seconds, rate),
        )
        return True

    @contextmanager
    def _building(self) -> Iterator[None]:
        """Makes the engine's device and dtype torch's defaults inside this context."""
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(dtype)

    # The start

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Compiles the model's kernels side by side if it has not run on this machine yet. One step of each
        kind shows whether any kernel is missing on disk. If one is missing on any rank, all ranks go on to
        the other steps, because they compute together."""
        graphs = () if self.config.enforce_eager else self._new_graphs()
        with compiling_ahead() as compiled, self.model.one_layer_of_each_kind():
            self.steps.rehearse(1, 1)
            for steps in graphs:
                steps.rehearse(1)
            if self.tp.all_reduce(torch.tensor(len(compiled), device=self.device)).item():
                for steps in graphs:
                    steps.rehearse()
                self.steps.rehearse_eager(self.max_num_seqs, self.max_num_tokens)
        self.state.reset()
        torch.cuda.empty_cache()  # a region may need this memory

    @torch.inference_mode()
    def num_blocks_that_fit(self) -> int:
        """Returns how many KV blocks fit into what this rank's share of memory has left. To know what is
        left, it runs the largest step that there can be and one at the end of the longest sequence, on a
        cache of one block, and measures the graphs. One layer of each kind shows the most memory that a step
        takes, because a layer uses the memory of the one before it."""
        if self._share is None:
            return self.config.kv_cache_memory_bytes // self.cache.spec.block_bytes
        num_seqs = min(self.max_num_seqs, self.max_num_tokens)
        query_len = min(self.max_num_tokens // num_seqs, self.max_model_len)
        with self.model.one_layer_of_each_kind():
            logits_SV = self.steps.rehearse(num_seqs, query_len)
        # The rare requests that ask for log-probabilities must find room too.
        rows_S = torch.arange(num_seqs, device=self.device)
        self.sampler.logprobs(logits_SV, rows_S, 1, None, filtered=[*range(num_seqs)])
        del logits_SV
        self.steps.rehearse_longest(self.max_num_tokens)
        self.state.reset()
        graph_bytes = 0
        if not self.config.enforce_eager:
            graph_bytes = sum(graphs.measure() for graphs in self._new_graphs())
        block_bytes = self.cache.spec.block_bytes + self.whole_rows.bytes_of_block(self.config.block_size)
        return self._share.room(graph_bytes) // block_bytes

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """Makes the cache and captures the graphs. Every rank must get the same number. Raises MemoryError or
        torch.OutOfMemoryError."""
        with self._regions.holding("kv_cache"):
            self.cache.allocate(num_blocks)
            self.whole_rows.allocate(num_blocks)
        self.state.reset()
        if self.device.type == "cuda":
            self._prepare_steps()
            torch.cuda.synchronize(self.device)
        if self.config.sleep_offload == "host":
            self._regions.prepare_host()

    def _prepare_steps(self) -> None:
        """Captures the graphs, and compiles or loads the kernels of eager steps, so that no request waits for
        them."""
        if not self.config.enforce_eager:
            # Nothing dead is to hold memory during the captures. What a start leaves is young; a full
            # collection looks at all modules.
            gc.collect(1)
            graphs = self._new_graphs()
            pool = self._regions.graph_pool("kv_cache") or torch.cuda.graph_pool_handle()
            with repeated_launches():
                self.steps.capture(graphs, pool)
        self.steps.rehearse_eager(self.max_num_seqs, self.max_num_tokens)
        self.state.reset()

    def _new_graphs(self) -> Graphs:
        sizes = decode_sizes(self.config.cudagraph_capture_sizes, self.max_num_seqs)
        return self.steps.new_graphs(sizes, self.share_from)

    def seconds_per_prompt_token(self) -> float:
        """Computes a made-up prompt and returns the seconds that each of its tokens took. To be called before
        the first request."""
        most = MEASURED_TOKENS[self.device.type]
        num_tokens = max(1, min(most, self.max_num_tokens, self.max_model_len // 2))
        seconds = float("inf")
        # The first try loads what it needs, and another program may disturb a later one: the quickest counts.
        for _ in range(MEASURE_TRIES):
            start = time.perf_counter()
            self.steps.rehearse(1, num_tokens)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = min(seconds, time.perf_counter() - start)
        self.state.reset()
        return seconds / num_tokens

    # Steps

    def step(self, packed: np.ndarray, options: SamplerOptions | None = None) -> StepResult:
        """Launches one packed step and returns without waiting for it (on a GPU). Rank 0 alone has
        `options`."""
        name = "decode step" if packed[Header.DECODE_ONLY] else "mixed step"
        with span(name), self.profile.clocked():
            return self.steps.launch(packed, options)

    def padded_decodes(self, num_decodes: int) -> int | None:
        """Returns the number of rows of the graph that will run a decode step of `num_decodes`. None: without
        graphs."""
        graphs = self.steps.decode_graphs
        return None if graphs is None else graphs.padded(num_decodes)

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
        """Only between `open_kv` and `close_kv`."""
        assert self._kv is not None
        return self._kv

    # KV blocks of other workers

    def open_peers(self) -> None:
        """Makes `peers`, for the cache as it is now."""
        assert self._peers is None
        self._peers = RankPeers(self.cache.view(), self.device)

    @property
    def peers(self) -> RankPeers:
        """Only after `open_peers`."""
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
        # Nothing may hold a tensor of a region when it is closed.
        del self.model, self.state, self.whole_rows, self.sampler, self.cache, self.steps, self.memory
        del self.weights, self._kv, self._peers
        gc.collect()
        self._regions.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

"""The model runner of one rank: the weights, the cache, the batch state, and the step that runs them.

Every rank gets the same packed steps (engine/runner/batch.py) in the same order. Rank 0 samples; its tokens
are broadcast, so one decision fixes each token. A decode step is one CUDA graph from the state rows to the
sampled token written back into them (engine/runner/graphs.py).
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from shoal.attention.select import select_backend
from shoal.config import ResolvedConfig
from shoal.engine.profile import NOTHING, Profiler, StepClock, span
from shoal.engine.runner.batch import (
    ALIGNMENT,
    HEADER_SIZE,
    Extras,
    Header,
    MixedShape,
    padded_size,
    section_spans,
    token_spans,
)
from shoal.engine.runner.device import DeviceMemory, PinnedRing, queue_copy
from shoal.engine.runner.graphs import DecodeGraphs, StepGraphs, mixed_shapes
from shoal.engine.runner.kv_commands import KvCommands
from shoal.engine.runner.rank_commands import RankCommands
from shoal.engine.runner.rank_memory import CpuRegions, GpuRegions
from shoal.engine.runner.sampling import (
    LogitShaper,
    LogprobTensors,
    concatenate,
    logprobs,
    row_pieces,
    start_copy,
    unit_rows,
    upload,
)
from shoal.errors import ConfigError
from shoal.kernels.compilation import compiling_ahead
from shoal.kernels.ops import select_ops
from shoal.kernels.state import Field, StateLayout
from shoal.kernels.step_input import SharedPrefixes, StepInput
from shoal.layers.parallel import TensorParallel
from shoal.model_config import ModelConfig
from shoal.models.decoder import Decoder
from shoal.weights.loader import load_weights
from shoal.weights.source import CheckpointFiles
from shoal.weights.transfer import WeightsGroup
from shoal.weights.update import weight_tensors

LAUNCH_S, FLOPS = 750e-6, 6e14  # a layer's launches from Python, half as much again; a fast GPU's products
RING = 4  # buffers of steps in flight, each guarded by an event
CUTS = 32, 64, 128, 192, 256, 1024, 2048  # tokens up to, or beyond, which kernels are cut alike


@dataclass(slots=True)
class StepResult:
    """A launched step. `wait` is the one host sync of a step; it raises if a rank died meanwhile."""

    tokens: torch.Tensor  # int32 [S] on the host, as the others; filled once `done` has passed
    done: torch.cuda.Event | None
    logprobs: LogprobTensors | None
    prompt_logprobs: LogprobTensors | None
    embeddings: torch.Tensor | None  # float32 [extras.embeds, D]

    def wait(self, check: Callable[[], None] | None = None) -> list[int]:
        if self.done is not None:
            if check is None:
                self.done.synchronize()
            else:
                while not self.done.query():
                    check()
                    time.sleep(20e-6)
        return self.tokens.tolist()


class ModelRunner(RankCommands, KvCommands):
    """Raises ConfigError or CheckpointError while it is built; afterwards only the device can fail."""

    def __init__(self, config: ResolvedConfig, files: CheckpointFiles, tp: TensorParallel) -> None:
        self.config, self.tp = config, tp
        self.model_config: ModelConfig = files.config
        self.device = torch.device(config.device, tp.rank) if config.device == "cuda" else torch.device("cpu")
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.max_num_seqs, self.max_model_len = config.max_num_seqs, config.max_model_len
        self.max_num_tokens = config.max_num_batched_tokens
        self.memory = DeviceMemory(self.device, config)
        self.regions = (
            GpuRegions() if config.enable_sleep_mode and self.device.type == "cuda" else CpuRegions()
        )
        self.weights_groups: dict[str, WeightsGroup] = {}
        model = self.model_config
        self.layout = StateLayout(self.max_num_seqs, -(-self.max_model_len // config.block_size))
        self.num_kv_heads = model.kv_heads_per_rank(tp.size)
        with self._building():
            self.ops = select_ops(self.device.type)
            self.backend = select_backend(
                config,
                self.device,
                self.dtype,
                num_heads=model.num_heads // tp.size,
                num_kv_heads=self.num_kv_heads,
                head_dim=model.head_dim,
                scale=model.attention_scale,
            )
            with self.regions.holding("weights"):
                self.model = Decoder(
                    model, tp, self.ops, self.backend, self.max_model_len, config.keep_quantized
                )
            # no checkpoint brings buffers back: they stay where they are while weights sleep
            for module in self.model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.clone())
            self._allocate_state()
        captures_mixed = self.backend.captures_mixed and not config.enforce_eager
        self.mixed_shapes = (
            mixed_shapes(self._most_captured_tokens(), self.max_num_seqs, self.share_from)
            if captures_mixed
            else []
        )
        size = max((end for shape in self.mixed_shapes for _, end in token_spans(shape).values()), default=0)
        # where captured mixed steps read
        self.mixed_inputs = torch.zeros(padded_size(size), dtype=torch.int32, device=self.device)
        load_weights(self.model, files, dummy=config.load_format == "dummy", show_progress=tp.rank == 0)
        self.shaper = LogitShaper(self.ops, self.max_num_seqs, model.vocab_size, self.device)
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: StepGraphs[MixedShape] | None = None
        self.profiler: Profiler | None = None
        self.clock: StepClock | None = None
        self.kv = self._new_cache(1)
        self.regions.adopt("weights", lambda: (tensor for _, tensor in weight_tensors(self.model)))
        self.regions.adopt("kv_cache", lambda: [self.kv])

    @contextmanager
    def _building(self) -> Iterator[None]:
        """The engine's device and dtype as torch's defaults, put back after."""
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(dtype)

    def _allocate_state(self) -> None:
        size, layout = self.max_num_seqs, self.layout
        self.state = torch.zeros(layout.size, dtype=torch.int32)
        self.active_B = layout.active(self.state)
        self.table = layout.table(self.state)
        self.block_tables = layout.block_tables(self.state)
        self.prefixes = SharedPrefixes(*layout.prefixes(self.state))
        config = self.config
        never = (
            config.disable_cascade_attn or not config.enable_prefix_caching or all(self.model_config.windows)
        )
        # decodes, for the host to look for groups
        self.share_from = None if never else self.backend.share_from
        self.tokens_B, self.positions_B, self.kv_lens_B, self.out_B = (
            torch.zeros(size, dtype=torch.int32) for _ in range(4)
        )
        self.query_starts_B = torch.arange(size + 1, dtype=torch.int32)
        pinned = self.device.type == "cuda"
        self.copy = self.ops.copy_ints if config.has_kv_tiers else queue_copy
        self.staging = PinnedRing(RING, self.device, self.copy) if pinned else None
        self.results = [
            torch.zeros(size, dtype=torch.int32, device="cpu", pin_memory=pinned) for _ in range(RING)
        ]
        self.num_steps = 0

    def _new_cache(self, num_blocks: int) -> torch.Tensor:
        shape = self.cache_shape(num_blocks)
        if self.device.type == "cuda":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy's zeros are the kernel's: memory is taken when it is written. torch's would touch a GiB at
        # every start.
        return (
            torch.from_numpy(np.zeros(num_blocks * self.block_bytes, np.uint8)).view(self.dtype).view(shape)
        )

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[blocks, layers, 2, kv heads, block_size, head_dim]: one block is one contiguous piece over all
        layers."""
        model = self.model_config
        return (num_blocks, model.num_layers, 2, self.num_kv_heads, self.config.block_size, model.head_dim)

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.cache_shape(1))) * self.dtype.itemsize

    # Compiling

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Where the model has not run yet, compiles its kernels side by side: a step of each sort tells.
        Ranks must agree on it, as they compute together."""
        graphs = () if self.config.enforce_eager else self._new_graphs()
        with compiling_ahead() as compiled, self.model.one_layer_of_each_kind():
            self._rehearse(1, 1, True)
            for steps in graphs:
                steps.rehearse(1)
            if self.tp.all_reduce(torch.tensor(len(compiled), device=self.device)).item():
                for steps in graphs:
                    steps.rehearse()
                self._rehearse_eager()
        self.reset_state()
        torch.cuda.empty_cache()  # whose memory may be wanted in a region

    # Sizing the cache

    @torch.inference_mode()
    def measure(self) -> int:
        """Runs the largest step there can be, on a cache of one block, and returns how many KV blocks this
        rank's share then holds."""
        config = self.config
        if self.device.type == "cpu":
            return config.kv_cache_memory_bytes // self.block_bytes
        self._largest_step()
        graph_bytes = 0
        if not config.enforce_eager:
            graph_bytes = sum(graphs.measure() for graphs in self._new_graphs())
        return (self.memory.room(graph_bytes) - self.shaper.reserved_bytes) // self.block_bytes

    def _largest_step(self) -> None:
        num_seqs = min(self.max_num_seqs, self.max_num_tokens)
        logits_SV = self._rehearse(
            num_seqs, min(self.max_num_tokens // num_seqs, self.max_model_len), fresh=True
        )
        if self.tp.rank == 0:  # the rare requests that ask for more must find room too
            logits_SV = self.shaper.shape(logits_SV, Extras(banned=[(0, 0)]))
            logprobs(logits_SV, self.out_B[:num_seqs], 1)
        self.reset_state()

    def _rehearse(self, num_seqs: int, query_len: int, fresh: bool) -> torch.Tensor:
        """A prefill step of made-up tokens, sampling included. Token rows of -1: no cache slot is written."""
        num_tokens, kv_len = num_seqs * query_len, query_len if fresh else 2 * query_len
        with torch.device(self.device):
            rows_S = torch.arange(num_seqs, dtype=torch.int32)
            starts_S = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
            positions_T = torch.arange(kv_len - query_len, kv_len, dtype=torch.int32).repeat(num_seqs)
            step = StepInput(
                token_ids_T=torch.zeros(num_tokens, dtype=torch.int32),
                positions_T=positions_T,
                rows_T=torch.full((num_tokens,), -1, dtype=torch.int32),
                rows_S=rows_S,
                query_starts_S=starts_S,
                kv_lens_S=torch.full((num_seqs,), kv_len, dtype=torch.int32),
                block_tables_RM=self.block_tables,
                num_decodes=0,
                max_query_len=query_len,
                max_kv_len=kv_len,
                fresh_prefills=fresh,
                host_query_starts=tuple(range(0, num_tokens + 1, query_len)),
                host_kv_lens=(kv_len,) * num_seqs,
            )
        self.backend.begin(step)
        last_S = (starts_S[1:] - 1).long()
        logits_SV = self.model.logits(self.model(step, self.kv, last_S))
        self._sample(logits_SV, rows_S, positions_T[last_S], None)
        return logits_SV

    def reset_state(self) -> None:
        """An empty batch: no row is active."""
        self.state.zero_()
        self.active_B.fill_(-1)

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """Makes the cache and captures the graphs; every rank is called with the same number."""
        with self.regions.holding("kv_cache"):
            self.kv = self._new_cache(num_blocks)
        self.reset_state()
        if self.device.type == "cuda":
            self._prepare_steps()
            torch.cuda.synchronize(self.device)
        if self.config.sleep_offload == "host":
            self.regions.prepare_host()

    def _prepare_steps(self) -> None:
        """Captures the graphs; compiles, or loads, the kernels of eager steps before a request waits for
        them."""
        if not self.config.enforce_eager:
            gc.collect()  # nothing dead is to hold memory meanwhile
            self.graphs, self.mixed_graphs = self._new_graphs()
            pool = self.regions.graph_pool("kv_cache") or torch.cuda.graph_pool_handle()
            self.mixed_graphs.capture(pool)  # the larger ones
            self.graphs.capture(pool)
        self._rehearse_eager()
        self.reset_state()

    def _rehearse_eager(self) -> None:
        """Launches what a step without a graph does."""
        for fresh in (True, False):
            self._rehearse(min(2, self.max_num_seqs), min(8, self.max_model_len // 2), fresh)
        captured = self.mixed_shapes[-1].tokens if self.mixed_shapes else 0
        with self.model.one_layer_of_each_kind():
            for length in CUTS:
                if captured < length <= min(self.max_num_tokens, self.max_model_len):
                    self._rehearse(1, length, True)
        self.ops.apply_updates(self.state, *torch.zeros(2, ALIGNMENT, dtype=torch.int32, device=self.device))
        self.copy(self.results[0], self.out_B)

    def _new_graphs(self) -> tuple[DecodeGraphs, StepGraphs[MixedShape]]:
        short = self.model.one_layer_of_each_kind
        decode = DecodeGraphs(
            lambda key: self._decode(key[0], self.max_model_len, key[1]),
            self.graph_sizes(),
            self.share_from,
            short,
        )
        return decode, StepGraphs(self._captured_mixed, self.mixed_shapes[::-1], short)

    def _most_captured_tokens(self) -> int:
        """Of a mixed step: beyond it the GPU takes longer than Python does to launch the step."""
        active = sum(p.numel() for name, p in self.model.layers.named_parameters() if ".experts." not in name)
        if (model := self.model_config).num_experts:
            experts = sum(
                p.numel() for name, p in self.model.layers.named_parameters() if ".experts." in name
            )
            active += experts * model.num_experts_per_tok // model.num_experts
        return min(self.max_num_tokens, int(LAUNCH_S * model.num_layers * FLOPS / (2 * active)))

    def graph_sizes(self) -> list[int]:
        """nano-vllm's ladder 1, 2, 4, 8, then every 16, up to max_num_seqs (itself included, so that no batch
        falls off its end)."""
        largest = self.max_num_seqs
        sizes = self.config.cudagraph_capture_sizes or [1, 2, 4, 8, *range(16, largest + 1, 16), largest]
        return sorted({min(s, largest) for s in sizes})

    # Steps

    @torch.inference_mode()
    def step(self, packed: np.ndarray, extras: Extras | None = None) -> StepResult:
        """Launches one packed step and returns without waiting for it (on a GPU). `extras` is rank 0's
        alone."""
        header = packed[:HEADER_SIZE]
        with (
            span("decode step" if header[Header.DECODE_ONLY] else "mixed step"),
            NOTHING if self.clock is None else self.clock.step(),
        ):
            return self._step(packed, header, extras)

    def _step(self, packed: np.ndarray, header: np.ndarray, extras: Extras | None) -> StepResult:
        sections: dict[str, torch.Tensor] = {}
        # most decode steps of a small batch send nothing
        if header[Header.NUM_UPDATES] or not header[Header.DECODE_ONLY]:
            on_device, spans = self._upload(packed), section_spans(header)
            sections = {name: on_device[start:end] for name, (start, end) in spans.items()}
        if header[Header.NUM_UPDATES]:
            self.ops.apply_updates(self.state, sections["addresses"], sections["values"])
        if extras is not None:
            self.shaper.start_rows(extras)
        logits_SV: torch.Tensor | None
        if header[Header.DECODE_ONLY]:
            logits_SV, prompt, embeddings = self._decode_step(header, extras), None, None
        elif header[Header.GRAPH_TOKENS]:
            logits_SV, prompt, embeddings = self._replay_mixed(
                on_device[spans["token_ids"][0] :], header, sections, extras
            )
        else:
            logits_SV, prompt, embeddings = self._mixed_step(packed, sections, extras)
        num_samples, chosen = int(header[Header.NUM_SAMPLES]), None
        if extras is not None:
            self.shaper.count(self.out_B, extras)
            if extras.num_logprobs is not None and logits_SV is not None:
                chosen = logprobs(
                    logits_SV[:num_samples], self.out_B[:num_samples], extras.num_logprobs
                ).to_host()
        return self._collect(
            num_samples,
            chosen,
            prompt.to_host() if prompt is not None else None,
            start_copy(embeddings) if embeddings is not None else None,
        )

    def _upload(self, packed: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(packed) if self.staging is None else self.staging.upload(packed)

    def _decode_step(self, header: np.ndarray, extras: Extras | None) -> torch.Tensor:
        size = int(header[Header.NUM_DECODES])
        sharing = bool(header[Header.NUM_GROUPS])
        fitting = self.graphs.fitting(size, sharing) if self.graphs is not None else None
        if fitting is not None:
            padded, graph = fitting
            graph.replay()
            logits_SV = graph.output
        else:
            padded, logits_SV = size, self._decode(size, int(header[Header.MAX_KV_LEN]), sharing)
        if header[Header.EXTRAS]:
            self._sample(logits_SV, self.active_B[:padded], self.positions_B[:padded], extras)
        return logits_SV

    def _decode(self, size: int, max_kv_len: int, sharing: bool) -> torch.Tensor:
        """One decode of the first `size` active rows, all inputs from the state; returns the logits. This is
        what a graph captures."""
        tokens, positions, kv_lens, rows = (
            self.tokens_B[:size],
            self.positions_B[:size],
            self.kv_lens_B[:size],
            self.active_B[:size],
        )
        self.ops.begin_decode(rows, self.table, tokens, positions, kv_lens)
        step = StepInput(
            token_ids_T=tokens,
            positions_T=positions,
            rows_T=rows,
            rows_S=rows,
            query_starts_S=self.query_starts_B[: size + 1],
            kv_lens_S=kv_lens,
            block_tables_RM=self.block_tables,
            num_decodes=size,
            max_query_len=1,
            max_kv_len=max_kv_len,
            prefixes=self.prefixes if sharing else None,
        )
        self.backend.begin(step)
        logits_SV = self.model.logits(self.model(step, self.kv))
        self._sample(logits_SV, rows, positions, None)
        return logits_SV

    def _mixed_step(
        self, packed: np.ndarray, sections: dict[str, torch.Tensor], extras: Extras | None
    ) -> tuple[torch.Tensor, LogprobTensors | None, torch.Tensor | None]:
        """Logits, log-probabilities of prompts, embeddings."""
        header, spans = packed[:HEADER_SIZE], section_spans(packed[:HEADER_SIZE])
        num_decodes = int(header[Header.NUM_DECODES])
        token_ids, rows = sections["token_ids"], sections["rows"]
        if num_decodes:
            token_ids[:num_decodes] = self.table[rows[:num_decodes].long(), Field.TOKEN]
        step = StepInput(
            token_ids_T=token_ids,
            positions_T=sections["positions"],
            rows_T=sections["token_rows"],
            rows_S=rows,
            query_starts_S=sections["query_starts"],
            kv_lens_S=sections["kv_lens"],
            block_tables_RM=self.block_tables,
            num_decodes=num_decodes,
            max_query_len=int(header[Header.MAX_QUERY_LEN]),
            max_kv_len=int(header[Header.MAX_KV_LEN]),
            fresh_prefills=bool(header[Header.FRESH_PREFILLS]),
            host_query_starts=tuple(packed[slice(*spans["query_starts"])].tolist()),
            host_kv_lens=tuple(packed[slice(*spans["kv_lens"])].tolist()),
            host_select=None if header[Header.NUM_PROMPT_LOGITS] else packed[slice(*spans["sample_index"])],
            upload=self._upload,
            prefixes=self.prefixes if header[Header.NUM_GROUPS] else None,
        )
        self.backend.begin(step)
        select_S, prompt = sections["sample_index"].long(), None
        if header[Header.NUM_PROMPT_LOGITS]:
            hidden_TD = self.model(step, self.kv)
            prompt = self._prompt_logprobs(hidden_TD[sections["prompt_logits"].long()], extras)
            hidden_SD = hidden_TD[select_S]
        else:
            hidden_SD = self.model(step, self.kv, select_S)
        logits_SV = self.model.logits(hidden_SD)
        self._sample(logits_SV, sections["sample_rows"], sections["sample_positions"], extras)
        return (
            logits_SV,
            prompt,
            unit_rows(hidden_SD, extras.embeds) if extras is not None and extras.embeds else None,
        )

    def _captured_mixed(self, shape: MixedShape) -> torch.Tensor:
        """A mixed step of what mixed_inputs holds; returns the hidden states of its samples. This is what a
        graph captures."""
        sections = {name: self.mixed_inputs[start:end] for name, (start, end) in token_spans(shape).items()}
        token_ids, token_rows = sections["token_ids"], sections["token_rows"]
        token_ids = torch.where(token_ids < 0, self.table[token_rows.long(), Field.TOKEN], token_ids)
        step = StepInput(
            token_ids_T=token_ids,
            positions_T=sections["positions"],
            rows_T=token_rows,
            rows_S=sections["rows"],
            query_starts_S=sections["query_starts"],
            kv_lens_S=sections["kv_lens"],
            block_tables_RM=self.block_tables,
            num_decodes=shape.decodes,
            max_query_len=shape.tokens,
            max_kv_len=self.max_model_len,
            captured_mixed=True,
            prefixes=self.prefixes if shape.sharing else None,
        )
        self.backend.begin(step)
        hidden_SD = self.model(step, self.kv, sections["sample_index"].long())
        self._sample(
            self.model.logits(hidden_SD), sections["sample_rows"], sections["sample_positions"], None
        )
        return hidden_SD

    def _replay_mixed(
        self,
        inputs: torch.Tensor,
        header: np.ndarray,
        sections: dict[str, torch.Tensor],
        extras: Extras | None,
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        assert self.mixed_graphs is not None
        self.copy(self.mixed_inputs[: inputs.shape[0]], inputs)
        graph = self.mixed_graphs.graphs[MixedShape.of(header)]
        graph.replay()
        hidden_SD, logits_SV = graph.output[: int(header[Header.NUM_SAMPLES])], None
        if header[Header.LOGITS]:
            logits_SV = self.model.logits(hidden_SD)
        if header[Header.EXTRAS] and logits_SV is not None:
            num_samples = hidden_SD.shape[0]
            self._sample(
                logits_SV,
                sections["sample_rows"][:num_samples],
                sections["sample_positions"][:num_samples],
                extras,
            )
        return (
            logits_SV,
            None,
            unit_rows(hidden_SD, extras.embeds) if extras is not None and extras.embeds else None,
        )

    def _prompt_logprobs(self, hidden_PD: torch.Tensor, extras: Extras | None) -> LogprobTensors | None:
        """Every rank joins the product; rank 0 keeps the figures. In pieces, so that no [P, V] tensor of a
        long prompt is made."""
        pieces = []
        for piece in row_pieces(hidden_PD.shape[0], self.model_config.vocab_size):
            logits_PV = self.model.logits(hidden_PD[piece])
            if extras is not None:
                targets = upload(torch.tensor(extras.prompt_targets[piece]), self.device)
                pieces.append(logprobs(logits_PV, targets, extras.num_prompt_logprobs or 0))
        return concatenate(pieces) if pieces else None

    def _sample(
        self, logits_SV: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor, extras: Extras | None
    ) -> None:
        """Draws into out_B and into the rows' TOKEN and POSITION. Rank 0 decides, the others are told."""
        num_samples = rows_S.shape[0]
        if num_samples == 0:
            return
        out_S = self.out_B[:num_samples]
        if self.tp.rank == 0:
            if extras is not None and extras.shapes_logits:
                logits_SV = self.shaper.shape(logits_SV, extras)
            self.ops.sample(logits_SV, rows_S, positions_S, self.table, out_S)
        if self.tp.size > 1:
            self.tp.broadcast(out_S)
            if self.tp.rank:  # padding rows of -1 land in the table's last row, which is nobody's
                at_S = rows_S.long()
                self.table[at_S, Field.TOKEN] = out_S
                self.table[at_S, Field.POSITION] = positions_S + 1

    def _collect(
        self,
        num_samples: int,
        chosen: LogprobTensors | None,
        prompt: LogprobTensors | None,
        embeddings: torch.Tensor | None,
    ) -> StepResult:
        """Starts the copy of the step's tokens to the host, after those of its log-probabilities."""
        tokens = self.results[self.num_steps % RING][:num_samples]
        self.num_steps += 1
        self.copy(tokens, self.out_B[:num_samples])
        if self.device.type == "cpu":
            return StepResult(tokens, None, chosen, prompt, embeddings)
        done = torch.cuda.Event()
        done.record()
        return StepResult(tokens, done, chosen, prompt, embeddings)

    # Other commands

    def state_digest(self) -> str:
        """A hash of the batch state: equal on all ranks between steps."""
        return hashlib.sha256(self.table[:-1].cpu().numpy().tobytes()).hexdigest()  # the last row is nobody's

    def start_profile(self, folder: str) -> None:
        if self.profiler is not None:
            raise ConfigError("a trace is being made already; end it with stop_profile first")
        self.profiler = Profiler(folder, self.tp.rank, self.device)

    def stop_profile(self) -> str:
        if self.profiler is None:
            raise ConfigError("no trace is being made; begin one with start_profile")
        profiler, self.profiler = self.profiler, None
        return profiler.stop()

    def start_clock(self) -> None:
        """On a GPU: from now on the time of each step is noted."""
        self.clock = StepClock() if self.device.type == "cuda" else None

    def stop_clock(self) -> tuple[float, float] | None:
        """Seconds since the first step, and those of them in which the GPU waited for the next step. None on
        a CPU."""
        clock, self.clock = self.clock, None
        return None if clock is None else clock.stop()

    def drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs = self.mixed_graphs = None
            gc.collect()

    def exit(self) -> None:
        """Waits for the device and frees its memory. The runner is of no use afterwards."""
        self.kv_close()
        for name in list(self.weights_groups):
            self.leave_weights_group(name)
        for name in (
            "model",
            "kv",
            "state",
            "active_B",
            "table",
            "block_tables",
            "prefixes",
            "backend",
            "shaper",
            "staging",
            "results",
        ):
            setattr(self, name, None)
        gc.collect()
        self.regions.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

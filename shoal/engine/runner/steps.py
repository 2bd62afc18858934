"""`Steps`: the four ways in which a step runs the model: decode, mixed, captured mixed and rehearsal.
batch.py packs the inputs, graphs.py holds the captures, sampling.py samples.

All of them end with the sampled tokens in the batch state, so that the next decode needs nothing from the
host.

decode          Every sequence decodes, and the batch state holds every input. Graphs have captured it for a
                ladder of batch sizes; without a graph that fits it runs eagerly.
mixed           Prompts are computed, perhaps with decodes. The inputs come with the step. It runs eagerly.
captured mixed  The same as a graph: inputs are copied into a static buffer, padded to the shape of the graph.
                Listeners to layers are notified at the end of the graph.
rehearsal       Made-up prompts, whose keys and values are not stored. It loads kernels, and measures the
                memory and time of a step.

A step arrives as one packed buffer of int32s (packed_step.py). Every rank gets the same ones in the same
order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.attention.step_input import HostView, StepInput
from shoal.engine.drafting.device import Drafting, read_reports
from shoal.engine.runner.batch_state import BatchState
from shoal.engine.runner.graphs import DecodeGraphs, StepGraphs
from shoal.engine.runner.kv_cache import KvCache
from shoal.engine.runner.layer_events import LayerEvents
from shoal.engine.runner.logprobs import LogprobTensors, Outcome, in_slices, more_results
from shoal.engine.runner.packed_step import MixedShape, StepHeader, padded_size, section_spans, token_spans
from shoal.engine.runner.sampler_options import SamplerOptions, decode_count
from shoal.engine.runner.sampling import Sampler
from shoal.engine.runner.state_rows import StateRows
from shoal.engine.runner.step_buffers import StepBuffers
from shoal.engine.runner.whole_rows import StepWholeRows, decode_places
from shoal.engine.scheduling.draft_lengths import DraftReport
from shoal.kernels.ops import Ops
from shoal.kernels.sampling.row_options import SamplePlaces
from shoal.kernels.state import Field
from shoal.models.decoder import AfterLayer, Decoder

POLL_S = 20e-6


@dataclass(slots=True)
class StepResult:
    """A launched step. Everything is on the host once `done` has passed."""

    tokens: torch.Tensor  # int32 [S]: the token of each sample; with drafts [S, X], their report
    done: torch.cuda.Event | None  # None: the step has run
    logprobs: LogprobTensors | None  # a row for each sample, or for each place of a sample (`first_row`)
    prompt_logprobs: LogprobTensors | None
    embeddings: torch.Tensor | None  # float32 [options.embeds, D]
    num_decodes: int = 0  # the first samples,
    queries: int = 1  # each of which has as many places for tokens
    reports: Sequence[DraftReport] = ()  # about the drafts of each sample, once `wait` has returned

    def first_row(self, sample: int) -> int:
        """Returns the row of the first of a sample's tokens in `logprobs`."""
        if sample >= self.num_decodes:
            return self.num_decodes * (self.queries - 1) + sample
        verified = self.reports[sample].num_verified if self.reports else 0
        return (sample + 1) * self.queries - 1 - verified

    def wait(self, check: Callable[[], None] | None = None) -> list[list[int]]:
        """The tokens of each sample. This is the one host sync of a step. `check` is called while it waits,
        and raises if a rank has died."""
        if self.done is not None:
            if check is None:
                self.done.synchronize()
            else:
                while not self.done.query():
                    check()
                    time.sleep(POLL_S)
        if self.tokens.dim() == 1:
            return self.tokens.unsqueeze(1).tolist()
        tokens, self.reports = read_reports(self.tokens)
        return tokens


class Steps:
    """The steps of one rank. A running engine calls `launch` alone; start_up.py rehearses and captures the
    others."""

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        state: BatchState,
        cache: KvCache,
        states: StateRows,
        sampler: Sampler,
        buffers: StepBuffers,
        layer_events: LayerEvents,
        mixed_shapes: list[MixedShape],
        max_model_len: int,
        drafting: Drafting | None = None,
    ) -> None:
        """`mixed_shapes`: shapes that graphs capture, small to large. `drafting`: None without
        speculation."""
        self.model, self.ops = model, ops
        self.state, self.cache, self.states = state, cache, states
        self.sampler, self.whole_rows = sampler, sampler.whole_rows
        self.buffers, self.layer_events = buffers, layer_events
        self.mixed_shapes, self.max_model_len = mixed_shapes, max_model_len
        self.drafting = drafting
        size = max((end for shape in mixed_shapes for _, end in token_spans(shape).values()), default=0)
        # The static buffer that captured mixed steps read.
        self.mixed_inputs = torch.zeros(padded_size(size), dtype=torch.int32, device=state.flat.device)
        self.decode_graphs: DecodeGraphs | None = None
        self.mixed_graphs: StepGraphs[MixedShape] | None = None

    # Launching

    @torch.inference_mode()
    def launch(self, header: StepHeader, packed: np.ndarray, options: SamplerOptions | None) -> StepResult:
        """Launches one packed step, and returns without waiting for it (on a GPU). Rank 0 alone has
        `options`, if any request asks for more than the state rows can say."""
        sections: dict[str, torch.Tensor] = {}
        on_host: dict[str, np.ndarray] = {}  # the same sections
        self.buffers.begin_step()
        # Most decode steps of a small batch send nothing.
        if header.num_updates or header.num_whole_rows or header.states_size or not header.decode_only:
            on_device, spans = self.buffers.upload(packed), section_spans(header)
            sections = {name: on_device[start:end] for name, (start, end) in spans.items()}
            on_host = {name: packed[start:end] for name, (start, end) in spans.items()}
        if header.num_updates:
            self.ops.apply_updates(self.state.flat, sections["addresses"], sections["values"])
        if header.histories_size and self.drafting is not None:
            self.drafting.start_rows(sections["histories"])
        if options is not None:
            self.whole_rows.start_rows(options)
        if header.restores_size:
            self.states.restore(sections["states"][: header.restores_size], self.cache.blocks)
        after_layer = self.layer_events.end_layer if self.layer_events.begin_step() else None
        if header.decode_only:
            outcome = self._run_decode(header, after_layer)
        elif (shape := header.shape) is not None:
            inputs = on_device[spans["token_ids"][0] :]
            outcome = self._run_captured_mixed(header, shape, inputs, after_layer)
        else:
            outcome = self._run_mixed(header, on_host, sections, after_layer)
        if header.num_whole_rows:
            rows = sections["whole_rows"], on_host["whole_rows"], header.num_whole_rows
            outcome.whole_rows = StepWholeRows(*rows, outcome.places, options)
            self.whole_rows.sample(outcome.logits_SV, outcome.whole_rows)
        report = None
        sizes = header.num_decodes, header.queries, header.num_samples
        if self.drafting is not None:
            ended = outcome.ended and not header.num_whole_rows
            report = self.drafting.report(sizes, sections, ended, after_layer, bool(header.head_rests))
        if header.states_size > header.restores_size:
            self.states.save(sections["states"][header.restores_size :], self.cache.blocks)
        return self._collect(header, outcome, options, report)

    def _collect(
        self,
        header: StepHeader,
        outcome: Outcome,
        options: SamplerOptions | None,
        report: torch.Tensor | None,
    ) -> StepResult:
        """Starts the copies to the host, the tokens' copy last. `report`: tokens and drafts, with
        speculation."""
        num_samples, num_logprobs = header.num_samples, decode_count(header.logprobs)
        more = more_results(self.sampler.logprobs, num_samples, num_logprobs, outcome, options)
        sampled = self.state.sampled_S[:num_samples] if report is None else report.flatten()
        tokens, done = self.buffers.download(sampled)
        if report is not None:
            tokens = tokens.view(report.shape)
        return StepResult(tokens, done, *more, header.num_decodes, header.queries)

    # Decode

    def _run_decode(self, header: StepHeader, after_layer: AfterLayer | None) -> Outcome:
        """Replays the graph of the fewest rows that suffice, or decodes eagerly."""
        num_rows, queries, sharing = header.num_decodes, header.queries, header.num_decode_groups > 0
        graphs = self.decode_graphs
        fitting = None if graphs is None else graphs.fitting(num_rows, queries, sharing)
        if fitting is not None:
            key, graph = fitting
            num_rows = key.rows
            graph.replay()
            if after_layer is not None:
                self.layer_events.end_graph()
            logits_SV = graph.outputs[0]
            if self.drafting is not None:
                self.drafting.replayed(key, graph.outputs)
        else:
            kind = header.max_kv_len, sharing, after_layer, header.samples_parts, queries
            logits_SV = self.decode(num_rows, *kind)
        if self.drafting is not None:
            return Outcome(logits_SV, self.drafting.places(num_rows, queries), ended=fitting is not None)
        return Outcome(logits_SV, decode_places(self.state, num_rows))

    def decode(
        self,
        num_rows: int,
        max_kv_len: int,
        sharing: bool,
        after_layer: AfterLayer | None = None,
        samples: bool = True,
        queries: int = 1,
    ) -> torch.Tensor:
        """`queries` tokens for each of the first `num_rows` active rows, if it `samples`; returns the logits
        of this rank's tokens, [num_rows * queries, V]. A graph captures this."""
        state = self.state
        rows_B, prefixes = state.active_B[:num_rows], state.prefixes if sharing else None
        if self.drafting is not None:
            step = self.drafting.decode_step(rows_B, queries, max_kv_len, prefixes)
        else:
            token_ids_B, positions_B = state.tokens_B[:num_rows], state.positions_B[:num_rows]
            kv_lens_B = state.kv_lens_B[:num_rows]
            self.ops.begin_decode(rows_B, state.table, token_ids_B, positions_B, kv_lens_B)
            step = StepInput(
                token_ids_T=token_ids_B,
                positions_T=positions_B,
                rows_T=rows_B,
                rows_S=rows_B,
                query_starts_S=state.query_starts_B[: num_rows + 1],
                kv_lens_S=kv_lens_B,
                block_tables=state.block_tables,
                num_decodes=num_rows,
                max_kv_len=max_kv_len,
                prefixes=prefixes,
            )
        logits_SV = self.model.logits(self.model(step, self.cache.layers, after_layer=after_layer))
        if samples:
            self.sampler.sample(logits_SV, step.rows_T, step.positions_T)
        return logits_SV

    # Mixed

    def _run_mixed(
        self,
        header: StepHeader,
        on_host: dict[str, np.ndarray],
        sections: dict[str, torch.Tensor],
        after_layer: AfterLayer | None,
    ) -> Outcome:
        num_decodes = header.num_decodes
        token_ids_T, rows_S = sections["token_ids"], sections["rows"]
        if self.drafting is not None:
            self.drafting.begin_mixed(num_decodes, header.queries, sections)
        elif num_decodes:
            token_ids_T[:num_decodes] = self.state.table[rows_S[:num_decodes].long(), Field.TOKEN]
        host = HostView(
            query_starts=tuple(on_host["query_starts"].tolist()),
            kv_lens=tuple(on_host["kv_lens"].tolist()),
            selected_tokens=None if header.num_prompt_logits else on_host["sample_index"],
            upload=self.buffers.upload,
        )
        step = StepInput(
            token_ids_T=token_ids_T,
            positions_T=sections["positions"],
            rows_T=sections["token_rows"],
            rows_S=rows_S,
            query_starts_S=sections["query_starts"],
            kv_lens_S=sections["kv_lens"],
            block_tables=self.state.block_tables,
            num_decodes=num_decodes,
            max_kv_len=header.max_kv_len,
            queries=header.queries,
            fresh_prefills=bool(header.fresh_prefills),
            host=host,
            prefixes=self.state.prefixes if header.num_decode_groups else None,
        )
        select_S = sections["sample_index"].long()
        prompt_logprobs = None
        if header.num_prompt_logits:
            hidden_TD = self.model(step, self.cache.layers, after_layer=after_layer)
            count = decode_count(header.prompt_logprobs) or 0
            hidden_PD, targets_P = hidden_TD[sections["prompt_logits"].long()], sections["prompt_targets"]
            prompt_logprobs = in_slices(self.model.logits, hidden_PD, targets_P, count, self.model.lm_head)
            hidden_SD = hidden_TD[select_S]
        else:
            hidden_SD = self.model(step, self.cache.layers, select_S, after_layer)
        logits_SV = self.model.logits(hidden_SD)
        rows_S, positions_S = sections["sample_rows"], sections["sample_positions"]
        if header.samples_parts:
            self.sampler.sample(logits_SV, rows_S, positions_S)
        places = SamplePlaces(rows_S, positions_S, token_ids_T[select_S])
        return Outcome(logits_SV, places, hidden_SD, prompt_logprobs)

    # Captured mixed

    def _run_captured_mixed(
        self, header: StepHeader, shape: MixedShape, inputs: torch.Tensor, after_layer: AfterLayer | None
    ) -> Outcome:
        """`inputs`: the sections that describe tokens, contiguous, as `mixed_inputs` takes them."""
        assert self.mixed_graphs is not None
        self.buffers.copy(self.mixed_inputs[: inputs.shape[0]], inputs)
        sections = self._static_sections(shape)
        if self.drafting is not None:
            self.drafting.begin_mixed(header.num_decodes, 1, sections)
        graph = self.mixed_graphs.graphs[shape]
        graph.replay()
        if after_layer is not None:
            self.layer_events.end_graph()
        if self.drafting is not None:
            self.drafting.replayed(shape, graph.outputs)
        hidden_SD, logits_SV, tokens_S = (output[: header.num_samples] for output in graph.outputs[:3])
        rows_S = sections["sample_rows"][: header.num_samples]
        positions_S = sections["sample_positions"][: header.num_samples]
        return Outcome(logits_SV, SamplePlaces(rows_S, positions_S, tokens_S), hidden_SD)

    def captured_mixed(
        self, shape: MixedShape, after_layer: AfterLayer | None = None
    ) -> tuple[torch.Tensor, ...]:
        """A mixed step of what `mixed_inputs` holds; returns the hidden states of its samples, their logits,
        and the tokens before them. A graph captures this."""
        sections = self._static_sections(shape)
        token_ids_T, rows_T = sections["token_ids"], sections["token_rows"]
        is_decode_T = token_ids_T < 0
        token_ids_T = torch.where(is_decode_T, self.state.table[rows_T.long(), Field.TOKEN], token_ids_T)
        step = StepInput(
            token_ids_T=token_ids_T,
            positions_T=sections["positions"],
            rows_T=rows_T,
            rows_S=sections["rows"],
            query_starts_S=sections["query_starts"],
            kv_lens_S=sections["kv_lens"],
            block_tables=self.state.block_tables,
            num_decodes=shape.decodes,
            max_kv_len=self.max_model_len,
            sparse_decodes=True,
            prefixes=self.state.prefixes if shape.sharing else None,
        )
        select_S = sections["sample_index"].long()
        hidden_SD = self.model(step, self.cache.layers, select_S, after_layer)
        logits_SV = self.model.logits(hidden_SD)
        self.sampler.sample(logits_SV, sections["sample_rows"], sections["sample_positions"])
        more = () if self.drafting is None else self.drafting.captured(shape, step)
        return hidden_SD, logits_SV, token_ids_T[select_S], *more

    def _static_sections(self, shape: MixedShape) -> dict[str, torch.Tensor]:
        """The sections of `mixed_inputs`."""
        return {name: self.mixed_inputs[slice(*span)] for name, span in token_spans(shape).items()}

    def drop_graphs(self) -> None:
        self.decode_graphs = self.mixed_graphs = self.whole_rows.graphs = None

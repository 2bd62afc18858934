"""`Sampler`: samples a step's tokens; `LogitShaper`: changes logits on rank 0 for the rare requests that need
it. kernels/sampling has the ops; engine/scheduling/grammar.py computes the grammars' masks.

Plain sampling (temperature, top-k, top-p, min-p, seed) is one op at the end of every step, captured with it.
If a request of the step asks for more (penalties, bias, allowed or banned ids, a grammar), the logits are
changed here after the step, and all rows are sampled again. With tensor parallelism the same happens when a
row needs the full vocabulary's logits. A sample depends on seed and position alone, so the other rows get the
same token twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from shoal.engine.runner.batch import SamplerOptions
from shoal.engine.runner.batch_state import BatchState
from shoal.kernels.ops import Ops
from shoal.kernels.sampling import logits as shaping
from shoal.kernels.state import FIELDS, MIN_TEMPERATURE, Field
from shoal.layers.embedding import Vocabulary
from shoal.layers.parallel import TensorParallel

# Elements of one [rows, V] float32 slice of prompt log-probabilities, or of rows under grammars: 64 MiB.
MAX_SLICE_ELEMENTS = 1 << 24
FEW_ELEMENTS = 1 << 22  # One thread takes some milliseconds for an operation on as many.


@dataclass(slots=True)
class LogprobLists:
    """LogprobTensors as Python's own numbers."""

    chosen: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top: list[list[float]]


@dataclass(slots=True)
class LogprobTensors:
    """Log-probability and rank of each chosen token, then the k best ids and their log-probabilities."""

    chosen: torch.Tensor  # [S] float32
    ranks: torch.Tensor  # [S] int64
    top_ids: torch.Tensor  # [S, k] int64
    top: torch.Tensor  # [S, k] float32

    def to_lists(self) -> LogprobLists:
        return LogprobLists(
            self.chosen.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top.tolist()
        )

    def to_host(self) -> LogprobTensors:
        """Starts the copies. They are complete when an event recorded after this call has passed."""
        return LogprobTensors(*(start_copy(x) for x in (self.chosen, self.ranks, self.top_ids, self.top)))


def start_copy(x: torch.Tensor) -> torch.Tensor:
    """Starts a copy to the host. It is complete when an event recorded after this call has passed."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


@contextmanager
def few_threads(device: torch.device, num_elements: int) -> Iterator[None]:
    """On a CPU, PyTorch's operations on few elements run on one thread inside this context.

    PyTorch's threads meet at the end of each operation. Where another process has the core of one of them,
    all wait, and beside a busy process that was most of a constrained token's time. Threads save such
    operations next to nothing.
    """
    if device.type != "cpu" or num_elements > FEW_ELEMENTS:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class Sampler:
    """Ends every step of one rank, with the same tokens on all ranks.

    Each rank has the logits of its own tokens. Where parts of them suffice to sample
    (kernels/sampling/split_sample.py), the ranks exchange these, and each joins the same parts to the same
    token.
    Otherwise rank 0 samples from whole rows, and broadcasts the tokens."""

    def __init__(
        self,
        ops: Ops,
        tp: TensorParallel,
        state: BatchState,
        shaper: LogitShaper,
        head: Vocabulary,
        processes_logprobs: bool,
    ) -> None:
        """`processes_logprobs`: log-probabilities belong to the distribution from which tokens are
        sampled, instead of the model's own."""
        self.ops, self.tp, self.state, self.shaper, self.head = ops, tp, state, shaper, head
        self.processes_logprobs = processes_logprobs

    def sample(self, logits_SV: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor) -> None:
        """Samples a token for each sample whose row is not -1, into `sampled_S` and into its row's TOKEN and
        POSITION. `positions_S`: the position of the last token before it. A row for which parts do not
        suffice gets some token, and has to be sampled by `sample_whole_rows`."""
        num_samples = rows_S.shape[0]
        if num_samples == 0:
            return
        table, sampled_S = self.state.table, self.state.sampled_S[:num_samples]
        if self.tp.size == 1:
            self.ops.sample(logits_SV, rows_S, positions_S, table, sampled_S)
            return
        parts = self.ops.sample_parts(logits_SV, self.head.first, rows_S, positions_S, table)
        parts_RSP = self.tp.all_gather(parts, dim=0).view(self.tp.size, *parts.shape)
        self.ops.join_parts(parts_RSP, rows_S, positions_S, table, sampled_S)

    def sample_whole_rows(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        options: SamplerOptions | None,
    ) -> None:
        """Samples from whole rows, which rank 0 changes by its `options` first."""
        num_samples = rows_S.shape[0]
        if num_samples == 0:
            return
        table, sampled_S = self.state.table, self.state.sampled_S[:num_samples]
        logits_SV = self.head.whole(logits_SV)
        if self.tp.rank == 0:
            if options is not None and options.shapes_logits:
                logits_SV = self.shaper.shape(logits_SV, options)
            self.ops.sample(logits_SV, rows_S, positions_S, table, sampled_S)
        if self.tp.size > 1:
            self.tp.broadcast(sampled_S)
            if self.tp.rank:  # Padding rows of -1 land in the table's last row, which no sequence has.
                at_S = rows_S.long()
                table[at_S, Field.TOKEN] = sampled_S
                table[at_S, Field.POSITION] = positions_S + 1

    def logprobs(
        self, logits_SV: torch.Tensor, rows_S: torch.Tensor, num: int, options: SamplerOptions | None
    ) -> LogprobTensors | None:
        """Returns log-probabilities of the tokens sampled from these logits, and of the `num` best (-1: of
        the whole vocabulary). All ranks make this call, and rank 0 gets them, before it counts the tokens."""
        tokens_S = self.state.sampled_S[: logits_SV.shape[0]]
        if not self.processes_logprobs:
            return logprobs(logits_SV, tokens_S, num, self.head)
        logits_SV = self.head.whole(logits_SV)
        if self.tp.rank:
            return None
        vocab_size = logits_SV.shape[1]
        with few_threads(logits_SV.device, logits_SV.numel()):
            logits_SV = self._sampled_from(logits_SV, rows_S, tokens_S, options)
            k = vocab_size if num < 0 else min(num, vocab_size)
            return LogprobTensors(*shaping.logprobs(logits_SV, tokens_S, k))

    def _sampled_from(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        tokens_S: torch.Tensor,
        options: SamplerOptions | None,
    ) -> torch.Tensor:
        """Returns the logits from whose softmax the tokens are sampled, float32. A greedy row has no
        temperature."""
        fields_SF = self.state.table[rows_S.long(), :FIELDS]
        floats_SF = fields_SF.view(torch.float32)
        temperature_S1 = floats_SF[:, Field.TEMPERATURE].unsqueeze(1)
        temperature_S1 = torch.where(temperature_S1 < MIN_TEMPERATURE, 1.0, temperature_S1)
        if options is not None and options.shapes_logits:
            logits_SV = self.shaper.shape(logits_SV, options).div_(temperature_S1)
        else:
            logits_SV = logits_SV.float() / temperature_S1
        filtered = options.filtered if options is not None else []
        for rows in row_slices(len(filtered), logits_SV.shape[1]):
            at = upload(torch.tensor(filtered[rows]), logits_SV.device)
            logits_SV[at] = shaping.keep_survivors(
                logits_SV[at],
                tokens_S[at],
                fields_SF[at, Field.TOP_K],
                floats_SF[at, Field.TOP_P],
                floats_SF[at, Field.MIN_P],
            )
        return logits_SV


class LogitShaper:
    """Changes logits for the requests that ask for it. It owns the token counts that penalties need, [rows,
    V], and allocates them when the first request with a penalty arrives."""

    def __init__(self, ops: Ops, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.ops, self.num_rows, self.vocab_size, self.device = ops, num_rows, vocab_size, device
        self.prompt_mask: torch.Tensor | None = None  # bool: the token is in the prompt
        self.output_counts: torch.Tensor | None = None  # int32: how often it was sampled

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the counts will take when a penalty is first asked for."""
        return self.num_rows * self.vocab_size * (torch.bool.itemsize + torch.int32.itemsize)

    def forget(self) -> None:
        """Gives the counts' memory back. This is for when no sequence has a row: each one that gets a row
        again brings its tokens (`start_rows`)."""
        self.prompt_mask = self.output_counts = None

    def shape(self, logits_SV: torch.Tensor, options: SamplerOptions) -> torch.Tensor:
        """The changed logits, float32 [S, V]. The order is vLLM's: grammars, allowed ids, bias, penalties,
        and banned ids last, because nothing may lift a ban."""
        with few_threads(self.device, logits_SV.numel()):
            return self._shape(logits_SV.float().clone(), options)

    def _shape(self, logits_SV: torch.Tensor, options: SamplerOptions) -> torch.Tensor:
        if options.masks is not None:
            self._mask(logits_SV, [row.sample for row in options.grammars], options.masks)
        if options.allowed:
            shaping.keep_only(logits_SV, [(sample, self._ids(ids)) for sample, ids in options.allowed])
        if options.bias:
            samples, ids, values = zip(*options.bias)
            shaping.add_bias(
                logits_SV, self._ids(samples), self._ids(ids), upload(torch.tensor(values), self.device)
            )
        if options.penalties:
            self._penalize(logits_SV, options)
        if options.banned:
            samples, ids = zip(*options.banned)
            shaping.ban(logits_SV, self._ids(samples), self._ids(ids))
        return logits_SV

    def start_rows(self, options: SamplerOptions) -> None:
        """Counts the known tokens of sequences that were admitted with a penalty."""
        if not options.new_penalty_rows:
            return
        if self.output_counts is None or self.prompt_mask is None:
            self.prompt_mask = torch.zeros(
                self.num_rows, self.vocab_size, dtype=torch.bool, device=self.device
            )
            self.output_counts = torch.zeros(
                self.num_rows, self.vocab_size, dtype=torch.int32, device=self.device
            )
        with few_threads(self.device, self.vocab_size):
            for new in options.new_penalty_rows:
                self.prompt_mask[new.row].zero_()[self._ids(new.prompt_ids)] = True
                # torch.bincount would wait for the device, as its result is as long as the largest id.
                ids = self._ids(new.output_ids)
                ones = torch.ones_like(ids, dtype=torch.int32)
                self.output_counts[new.row].zero_().index_add_(0, ids, ones)

    def count(self, tokens_S: torch.Tensor, options: SamplerOptions) -> None:
        """Adds the step's tokens to the counts of its rows with penalties."""
        if not options.penalties:
            return
        assert self.output_counts is not None
        samples, rows = zip(*((p[0], p[1]) for p in options.penalties))
        tokens = tokens_S[self._ids(samples)].long()
        self.output_counts.index_put_(
            (self._ids(rows), tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True
        )

    def _mask(self, logits_SV: torch.Tensor, samples: list[int], masks: np.ndarray) -> None:
        """Only tokens whose bit is set stay possible. One asynchronous copy is enough, because each row's
        sample index travels before its mask."""
        packed = upload(
            torch.from_numpy(np.concatenate([np.array(samples, np.int32)[:, None], masks], axis=1)),
            self.device,
        )
        for rows in row_slices(len(samples), self.vocab_size):
            self.ops.keep_bits(logits_SV, packed[rows, 0].long(), packed[rows, 1:])

    def _penalize(self, logits_SV: torch.Tensor, options: SamplerOptions) -> None:
        assert self.output_counts is not None and self.prompt_mask is not None
        samples, rows, repetition, presence, frequency = zip(*options.penalties)
        at, rows_P = self._ids(samples), self._ids(rows)
        strengths = upload(torch.tensor([repetition, presence, frequency]), self.device)
        logits_SV[at] = shaping.penalize(
            logits_SV[at], self.prompt_mask[rows_P], self.output_counts[rows_P], *strengths
        )

    def _ids(self, values: object) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.long), self.device)


def logprobs(logits_SV: torch.Tensor, tokens_S: torch.Tensor, num: int, head: Vocabulary) -> LogprobTensors:
    """Log-probabilities of the raw logits, as vLLM's default `raw_logprobs`: of `tokens_S`, and of the `num`
    best (-1: of the whole vocabulary). Each rank has the logits of its own tokens, and all make this call."""
    k = head.vocab_size if num < 0 else min(num, head.vocab_size)
    with few_threads(logits_SV.device, logits_SV.numel()):
        return LogprobTensors(*shaping.logprobs(logits_SV, tokens_S, k, head.columns()))


def unit_rows(hidden_SD: torch.Tensor, samples: list[int]) -> torch.Tensor:
    """Embeddings: these rows as float32, of unit length."""
    return torch.nn.functional.normalize(
        hidden_SD[upload(torch.tensor(samples), hidden_SD.device)].float(), dim=-1
    )


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies from the host, without waiting for what the device does."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def row_slices(num_rows: int, vocab_size: int) -> list[slice]:
    """Slices of rows whose float32 logits fit a bounded amount of memory."""
    rows = max(1, MAX_SLICE_ELEMENTS // vocab_size)
    return [slice(i, min(i + rows, num_rows)) for i in range(0, num_rows, rows)]


def concatenate(parts: list[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(
        *(torch.cat([getattr(p, name) for p in parts]) for name in ("chosen", "ranks", "top_ids", "top"))
    )

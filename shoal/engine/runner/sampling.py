"""`Sampler`: samples a step's tokens, and computes their log-probabilities. kernels/sampling has the ops.

Plain sampling (temperature, top-k, top-p, min-p, seed) is one op at the end of every step, captured with it.
Rows that need more (penalties, bias, allowed or banned ids, a grammar) are sampled once more: whole_rows.py.
"""

from __future__ import annotations

import torch

from shoal.engine.runner.batch_state import BatchState
from shoal.engine.runner.logprobs import LogprobTensors, logprobs, row_slices
from shoal.engine.runner.small_ops import few_threads, upload
from shoal.engine.runner.whole_rows import StepWholeRows, WholeRowSampler
from shoal.kernels.ops import Ops
from shoal.kernels.sampling import logprobs as rows_of_logits
from shoal.kernels.state import FIELDS, MIN_TEMPERATURE, Field
from shoal.layers.embedding import Vocabulary
from shoal.layers.parallel import TensorParallel


class Sampler:
    """Ends every step of one rank, with the same tokens on all ranks.

    Each rank has the logits of its own tokens. Where parts of them suffice to sample
    (kernels/sampling/split_sample.py), the ranks exchange these, and each joins the same parts to the same
    token. Otherwise rank 0 samples from whole rows, and broadcasts the tokens."""

    def __init__(
        self,
        ops: Ops,
        tp: TensorParallel,
        state: BatchState,
        whole_rows: WholeRowSampler,
        head: Vocabulary,
        processes_logprobs: bool,
    ) -> None:
        """`processes_logprobs`: log-probabilities belong to the distribution from which tokens are
        sampled, instead of the model's own."""
        self.ops, self.tp, self.state, self.head = ops, tp, state, head
        self.whole_rows = whole_rows
        self.processes_logprobs = processes_logprobs

    def sample(self, logits_SV: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor) -> None:
        """Samples a token for each sample whose row is not -1, into `sampled_S` and into its row's TOKEN and
        POSITION. `positions_S`: the position of the last token before it. A row for which this does not
        suffice gets some token, and is sampled again by `whole_rows`."""
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

    def logprobs(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        num: int,
        whole_rows: StepWholeRows | None,
        filtered: list[int],
    ) -> LogprobTensors | None:
        """Returns log-probabilities of the tokens sampled from these logits, and of the `num` best (-1: of
        the whole vocabulary). All ranks make this call, and rank 0 gets them. `whole_rows`: the samples that
        were sampled from whole rows. `filtered`: the ones that top_k, top_p or min_p restrict, which rank 0
        knows."""
        tokens_S = self.state.sampled_S[: logits_SV.shape[0]]
        if not self.processes_logprobs:
            return logprobs(logits_SV, tokens_S, num, self.head)
        logits_SV = self.head.whole(logits_SV)
        if self.tp.rank:
            return None
        vocab_size = logits_SV.shape[1]
        with few_threads(logits_SV.device, logits_SV.numel()):
            logits_SV = self._sampled_from(logits_SV, rows_S, tokens_S, whole_rows, filtered)
            k = vocab_size if num < 0 else min(num, vocab_size)
            return LogprobTensors(*rows_of_logits.logprobs(logits_SV, tokens_S, k))

    def _sampled_from(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        tokens_S: torch.Tensor,
        whole_rows: StepWholeRows | None,
        filtered: list[int],
    ) -> torch.Tensor:
        """Returns the logits from whose softmax the tokens are sampled, float32. A greedy row has no
        temperature."""
        fields_SF = self.state.table[rows_S.long(), :FIELDS]
        floats_SF = fields_SF.view(torch.float32)
        temperature_S1 = floats_SF[:, Field.TEMPERATURE].unsqueeze(1)
        temperature_S1 = torch.where(temperature_S1 < MIN_TEMPERATURE, 1.0, temperature_S1)
        found_SV = logits_SV.to(torch.float32, copy=True)
        if whole_rows is not None:
            for samples, rows_KV in self.whole_rows.shaped(logits_SV, whole_rows):
                found_SV[upload(torch.from_numpy(samples).long(), logits_SV.device)] = rows_KV
        found_SV /= temperature_S1
        for rows in row_slices(len(filtered), logits_SV.shape[1]):
            at = upload(torch.tensor(filtered[rows]), logits_SV.device)
            found_SV[at] = rows_of_logits.keep_survivors(
                found_SV[at],
                tokens_S[at],
                fields_SF[at, Field.TOP_K],
                floats_SF[at, Field.TOP_P],
                floats_SF[at, Field.MIN_P],
            )
        return found_SV

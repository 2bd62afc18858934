"""The GPU's attention backend: Triton kernels on the paged cache.

Owns the choice of kernel, the number of splits and the decode workspace; the kernels are in
kernels/attention.py, that for prefixes which decodes share in kernels/prefix_attention.py, that for large
prefills on Hopper in kernels/hopper_attention.py.
Shapes: T tokens of the step, H query heads, G kv heads, N head size.
"""

from __future__ import annotations

import torch

from shoal.kernels.attention import DecodeWorkspace, decode_attention, prefill_attention
from shoal.kernels.hopper import HAS_GLUON, empty_rows
from shoal.kernels.prefix_attention import prefix_attention
from shoal.kernels.step_input import StepInput

if HAS_GLUON:
    from shoal.kernels import hopper_attention as hopper

PROGRAMS_PER_SM = 4  # decode programs that fit on an SM at once
WAVES = 3  # a decode batch that just fills the GPU is cut this fine, so that unequal lengths even out
# times as many (sequence, kv head) as programs at once: results of a large batch need not be weighed,
LARGE = 1.4
CUT = 8  # but for the longest sequences, if they would keep the others waiting,
CUT_SPLITS = 4  # which are cut this fine
CAPTURED_WAVES = 4  # of decodes in a captured mixed step, most of them empty
MIN_SPLIT = 64  # fewest keys that are worth a program of their own
# and that the longest sequence gives each: many programs for few keys cost more than they bring
FULL_SPLIT = 160
SHARE_FROM = 9  # fewest decodes for which a shared prefix is worth one launch more a layer
PREFIX_PROGRAMS_PER_SM = 2
MAX_PARTS = 16  # most parts of a shared prefix: each is one result more to weigh
# prefill tokens of a step from which Hopper's own kernel gets them: it takes 30 us more to launch
HOPPER_FROM = 512


def decode_splits(num_seqs: int, num_kv_heads: int, max_kv_len: int, num_sms: int) -> int:
    """Into how many programs the keys of one (sequence, kv head) are cut: fixed by sizes that a captured
    graph fixes too."""
    tasks, slots = num_seqs * num_kv_heads, num_sms * PROGRAMS_PER_SM
    if is_large(num_seqs, num_kv_heads, num_sms):
        splits = 1
    else:
        # few tasks: one full wave of equal programs
        splits = slots // tasks if 2 * tasks <= slots else -(-WAVES * slots // tasks)
    return max(1, min(splits, -(-max_kv_len // FULL_SPLIT)))


def is_large(num_seqs: int, num_kv_heads: int, num_sms: int) -> bool:
    return num_seqs >= CUT and num_seqs * num_kv_heads >= LARGE * num_sms * PROGRAMS_PER_SM


def captured_splits(num_seqs: int, num_kv_heads: int, max_kv_len: int, num_sms: int) -> int:
    """Likewise in a captured mixed step, where most places for decodes are usually empty: several waves of
    programs, of which those leave at once."""
    return max(
        1,
        min(
            CAPTURED_WAVES * num_sms * PROGRAMS_PER_SM // (num_seqs * num_kv_heads),
            -(-max_kv_len // FULL_SPLIT),
        ),
    )


def prefix_parts(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Into how many parts a shared prefix may be cut. In a large batch a few sequences' parts do not fill the
    GPU, as the workspace has room for that many parts of every sequence."""
    if num_seqs < SHARE_FROM:
        return 0
    return min(MAX_PARTS, max(8, PREFIX_PROGRAMS_PER_SM * num_sms // (num_kv_heads * -(-num_seqs // 32))))


class TritonBackend:
    """Steps that share a backend must run one after the other: they share its workspace."""

    captures_mixed = True
    share_from: int | None = SHARE_FROM

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        scale: float | None = None,
    ) -> None:
        """Heads are this rank's. `scale`: what q k^T is multiplied by; None: 1 / sqrt(head_dim)."""
        self.scale = head_dim**-0.5 if scale is None else scale
        self.num_kv_heads = num_kv_heads
        on_gpu = device.type == "cuda"
        # without a GPU (Triton's interpreter) any number will do; 8 lets small cases split
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        self.hopper = HAS_GLUON and hopper.is_supported(device, dtype, head_dim, block_size)
        self.group = num_heads // num_kv_heads
        # of the step, if Hopper's kernel gets its prefills; tiles with selected tokens first
        self.work: torch.Tensor | None = None
        self.selected_work = 0  # how many those are
        self.taken = torch.zeros(1, dtype=torch.int32, device=device)
        partials = max(
            s
            * (
                max(
                    decode_splits(s, num_kv_heads, max_model_len, self.num_sms),
                    CUT_SPLITS,
                    captured_splits(s, num_kv_heads, max_model_len, self.num_sms),
                )
                + prefix_parts(s, num_kv_heads, self.num_sms)
            )
            for s in range(1, max_num_seqs + 1)
        )
        self.workspace = DecodeWorkspace.allocate(
            partials * num_heads, max_num_seqs * num_kv_heads, head_dim, device
        )

    def begin(self, step: StepInput) -> None:
        """Orders the work of a large step's prefills. Otherwise there is nothing to plan: kernels read
        lengths and block tables on the device."""
        self.work = None
        if self.hopper and step.host_query_starts and step.num_tokens - step.num_decodes >= HOPPER_FROM:
            work, self.selected_work = hopper.prefill_work(
                step.host_query_starts, step.host_kv_lens, step.num_decodes, self.group, step.host_select
            )
            self.work = (
                step.upload(work.reshape(-1)).to(step.rows_S.device, non_blocking=True).view(work.shape)
            )

    def reads_k(self, window: int | None) -> bool:
        return self.work is None or window is not None

    def attend(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor,
        v_TGN: torch.Tensor,
        kv_layer: torch.Tensor,
        step: StepInput,
        window: int | None,
        selected: bool = False,
    ) -> torch.Tensor:
        out_THN = empty_rows(q_THN, *q_THN.shape)
        if step.num_decodes:
            choose = captured_splits if step.captured_mixed else decode_splits
            splits = choose(step.num_decodes, self.num_kv_heads, step.max_kv_len, self.num_sms)
            num_cut = None
            if not step.captured_mixed and is_large(step.num_decodes, self.num_kv_heads, self.num_sms):
                num_cut, splits = CUT, CUT_SPLITS
            parts, prefix_lens_S = 0, None
            if step.prefixes is not None and window is None and step.num_decodes >= SHARE_FROM:
                parts, prefix_lens_S = (
                    prefix_parts(step.num_decodes, self.num_kv_heads, self.num_sms),
                    step.prefixes.lens_S,
                )
                prefix_attention(
                    q_THN,
                    kv_layer,
                    step.prefixes.groups,
                    step.prefixes.members_S,
                    step.block_tables_RM,
                    self.workspace,
                    step.num_decodes,
                    PREFIX_PROGRAMS_PER_SM * self.num_sms,
                    splits,
                    parts,
                    self.scale,
                )
            decode_attention(
                q_THN,
                kv_layer,
                out_THN,
                step.rows_S,
                step.kv_lens_S,
                step.block_tables_RM,
                self.workspace,
                step.num_decodes,
                splits,
                self.scale,
                window,
                min_split=MIN_SPLIT,
                prefix_lens_S=prefix_lens_S,
                max_parts=parts,
                num_cut=num_cut,
            )
        if step.num_seqs > step.num_decodes:
            self.prefill(q_THN, k_TGN, v_TGN, kv_layer, step, window, out_THN, selected)
        return out_THN

    def prefill(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor,
        v_TGN: torch.Tensor,
        kv_layer: torch.Tensor,
        step: StepInput,
        window: int | None,
        out_THN: torch.Tensor,
        selected: bool,
    ) -> None:
        """Writes out_THN of the step's prefill chunks, after the decodes': places for decodes that are empty
        wrote zeros there."""
        if self.work is not None and window is None:
            work = self.work[: self.selected_work] if selected else self.work
            if len(work):
                hopper.hopper_prefill_attention(
                    q_THN,
                    kv_layer,
                    out_THN,
                    work,
                    self.taken,
                    step.rows_S,
                    step.block_tables_RM,
                    self.scale,
                    self.num_sms,
                )
        else:
            num_queries = step.num_tokens if step.captured_mixed else step.num_tokens - step.num_decodes
            prefill_attention(
                q_THN,
                k_TGN,
                v_TGN,
                kv_layer,
                out_THN,
                step.query_starts_S,
                step.kv_lens_S,
                step.rows_S,
                step.block_tables_RM,
                step.num_decodes,
                num_queries,
                self.scale,
                window,
                paged=not step.fresh_prefills,
            )

"""The functions that a model's layers and the runner call. Each of triton_ops.py and cpu/ops.py has them all,
and an engine chooses one of the two. The reference.py of each room describes what its functions do.

T tokens · S sampled sequences · B decode batch · H query heads · G kv heads · N head size · D hidden · F
intermediate · V vocabulary · I inputs · O outputs · E experts · R state rows · M blocks of a sequence ·
K samples from whole rows. The reference.py of a room has its further letters.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import torch

from shoal.errors import ConfigError
from shoal.kernels.layer_cache import LayerCache, LayerState
from shoal.kernels.moe.mixture import NO_TENSORS, ExpertWeights, RouterTensors
from shoal.kernels.recurrent.mixers import DeltaWeights, MambaWeights
from shoal.kernels.recurrent.sequences import Sequences
from shoal.kernels.sampling.row_options import RowOptions
from shoal.kinds.attention import QueryScaling
from shoal.kinds.experts import Activation, Router


class Ops(Protocol):
    """A module with these functions."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def add_normed(
        self,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        residual_TD: torch.Tensor,
        next_weight_D: torch.Tensor | None = None,
        next_eps: float = 0.0,
    ) -> torch.Tensor | None: ...

    def fork_norms(
        self,
        x_TD: torch.Tensor,
        weight_D: torch.Tensor,
        residual_TD: torch.Tensor,
        next_weights: Sequence[torch.Tensor],
        eps: float,
    ) -> tuple[torch.Tensor, ...]: ...

    def join_norms(
        self,
        x_TD: torch.Tensor,
        beside_TD: torch.Tensor | None,
        branch_weights: Sequence[torch.Tensor],
        weight_D: torch.Tensor,
        residual_TD: torch.Tensor,
        eps: float,
        factor: torch.Tensor | None,
    ) -> None: ...

    def gate_mul(self, gate_up_T2F: torch.Tensor, activation: str = "silu") -> torch.Tensor: ...

    def soft_cap(self, logits_SV: torch.Tensor, cap: float) -> None: ...

    def linear(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor: ...

    def float_linear(
        self, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor: ...

    def linear_add(
        self,
        x_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        residual_TO: torch.Tensor,
    ) -> torch.Tensor | None: ...

    def linear_gated(
        self,
        x_TI: torch.Tensor,
        weight_2FI: torch.Tensor,
        bias_2F: torch.Tensor | None,
        activation: str = "silu",
    ) -> torch.Tensor: ...

    def add_norm_linear(
        self,
        x_TD: torch.Tensor | None,
        residual_TD: torch.Tensor,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def norm_linear(
        self,
        x_TD: torch.Tensor,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def norm_float_linear(
        self,
        x_TD: torch.Tensor,
        norm_weight_D: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def qk_norm_rope_store(
        self,
        qkv_TX: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor | None,
        positions_T: torch.Tensor,
        rows_T: torch.Tensor,
        block_tables_RM: torch.Tensor,
        cache: LayerCache,
        keep_k: bool = True,
        *,
        stores: bool = True,
        v_norm: bool = False,
        query_scaling: QueryScaling | None = None,
    ) -> None: ...

    def attend_new_tokens(
        self,
        qkv_TX: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor | None,
        positions_T: torch.Tensor,
        rows_T: torch.Tensor,
        block_tables_RM: torch.Tensor,
        cache: LayerCache,
        kv_lens_T: torch.Tensor,
        scale: float,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns None on devices without such a kernel. The layer then calls qk_norm_rope_store and its
        backend."""
        ...

    def gate_output(self, out_TX: torch.Tensor, gate_TY: torch.Tensor, activation: str) -> torch.Tensor: ...

    def latent_norm_rope_store(
        self,
        a_TY: torch.Tensor,
        q_weight: torch.Tensor | None,
        kv_weight: torch.Tensor,
        eps: float,
        cos_sin: torch.Tensor,
        positions_T: torch.Tensor,
        rows_T: torch.Tensor,
        block_tables_RM: torch.Tensor,
        cache: LayerCache,
        interleaved: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor]: ...

    def embed(self, ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor: ...

    def keep_bits(self, logits_SV: torch.Tensor, rows_G: torch.Tensor, masks_GW: torch.Tensor) -> None: ...

    def sample(
        self,
        logits_BV: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        table: torch.Tensor,
        out_tokens_S: torch.Tensor,
    ) -> None: ...

    def take_rows(self, logits_SV: torch.Tensor, samples_K: torch.Tensor, out_KV: torch.Tensor) -> None: ...

    def locate_rows(
        self,
        samples_K: torch.Tensor,
        shaped_K: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        tokens_S: torch.Tensor,
        out_XK: torch.Tensor,
    ) -> None: ...

    def store_tokens(
        self, rows_K: torch.Tensor, positions_K: torch.Tensor, tokens_K: torch.Tensor, options: RowOptions
    ) -> None: ...

    def keep_allowed(self, logits_KV: torch.Tensor, rows_K: torch.Tensor, options: RowOptions) -> None: ...

    def add_bias(self, logits_KV: torch.Tensor, rows_K: torch.Tensor, options: RowOptions) -> None: ...

    def penalize(
        self, logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
    ) -> None: ...

    def ban_stops(
        self, logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
    ) -> None: ...

    def ban_words(
        self, logits_KV: torch.Tensor, rows_K: torch.Tensor, positions_K: torch.Tensor, options: RowOptions
    ) -> None: ...

    def put_samples(
        self, samples_K: torch.Tensor, tokens_K: torch.Tensor, sampled_S: torch.Tensor
    ) -> None: ...

    def sample_parts(
        self,
        logits_SV: torch.Tensor,
        first: int,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor: ...

    def join_parts(
        self,
        parts_RSP: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        table: torch.Tensor,
        out_tokens_S: torch.Tensor,
    ) -> None: ...

    def moe(
        self,
        x_TD: torch.Tensor,
        router_logits_TE: torch.Tensor,
        router: Router,
        weights: ExpertWeights,
        activation: Activation,
        residual_TD: torch.Tensor | None = None,
        tensors: RouterTensors = NO_TENSORS,
    ) -> torch.Tensor: ...

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        silu: bool,
        inputs_RCW: torch.Tensor,
        sequences: Sequences,
        kept_RKC: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def gated_delta(
        self,
        q_TKN: torch.Tensor,
        k_TKN: torch.Tensor,
        v_THV: torch.Tensor,
        a_TH: torch.Tensor,
        b_TH: torch.Tensor,
        a_log_H: torch.Tensor,
        dt_bias_H: torch.Tensor,
        states_RHNV: torch.Tensor,
        sequences: Sequences,
        kept_RKX: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def mamba2(
        self,
        x_THV: torch.Tensor,
        dt_TH: torch.Tensor,
        b_TGN: torch.Tensor,
        c_TGN: torch.Tensor,
        a_log_H: torch.Tensor,
        d_H: torch.Tensor,
        dt_bias_H: torch.Tensor,
        limits: tuple[float, float],
        states_RHVN: torch.Tensor,
        sequences: Sequences,
        kept_RKX: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def gated_norm(
        self,
        x_TX: torch.Tensor,
        gate_TX: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        size: int,
        gate_first: bool,
        activation: str = "silu",
    ) -> torch.Tensor: ...

    def delta_mixer(
        self,
        qkv_TC: torch.Tensor,
        z_TX: torch.Tensor,
        a_TH: torch.Tensor,
        b_TH: torch.Tensor,
        weights: DeltaWeights,
        memory: LayerState,
        sequences: Sequences,
    ) -> torch.Tensor: ...

    def mamba_mixer(
        self,
        xbc_TC: torch.Tensor,
        z_TX: torch.Tensor,
        dt_TH: torch.Tensor,
        weights: MambaWeights,
        memory: LayerState,
        sequences: Sequences,
    ) -> torch.Tensor: ...

    def apply_updates(self, state: torch.Tensor, addresses: torch.Tensor, values: torch.Tensor) -> None: ...

    def copy_ints(self, dst: torch.Tensor, src: torch.Tensor) -> None: ...

    def copy_rows(
        self, dst: torch.Tensor, dst_rows_K: torch.Tensor, src: torch.Tensor, src_rows_K: torch.Tensor
    ) -> None: ...

    def begin_decode(
        self,
        rows_B: torch.Tensor,
        table: torch.Tensor,
        tokens_B: torch.Tensor,
        positions_B: torch.Tensor,
        kv_lens_B: torch.Tensor,
    ) -> None: ...


MODULES = {"cuda": "shoal.kernels.triton_ops", "cpu": "shoal.kernels.cpu.ops"}


def select_ops(device_type: str) -> Ops:
    """Returns the module for a kind of device. It is imported only now, because a CPU run must not pay for
    Triton. Raises ConfigError for a device that has none."""
    if device_type not in MODULES:
        raise ConfigError(f"no kernels for device {device_type!r}; choose one of {', '.join(MODULES)}")
    return cast(Ops, importlib.import_module(MODULES[device_type]))

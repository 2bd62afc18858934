"""RanksLayer: DecoderLayer on several ranks, which sums over the ranks while it multiplies.

In a large step the rows are cut into pieces. When a piece has been through an output matmul, the sum of its
parts over the ranks begins, and the next piece is multiplied meanwhile. The last piece is summed while the
norm and the matmul that follow take the first one. Attention alone takes all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from shoal.layers.attention import Attention
from shoal.layers.layer_step import CacheStep
from shoal.layers.linear import Linear
from shoal.layers.mlp import MLP
from shoal.layers.norm import RMSNorm
from shoal.layers.pieces import LargeSums, Piece, Pieces
from shoal.layers.weight_format import PlainWeight
from shoal.models.decoder_layers.decoder_layer import DecoderLayer


class RanksLayer(DecoderLayer):
    """Takes and returns pieces, too, as what is to be added to the residual."""

    def forward(  # type: ignore[override]
        self, x_TD: torch.Tensor | Pieces | None, residual_TD: torch.Tensor, step: CacheStep
    ) -> PieceStream:
        attention, mlp, tp = self.self_attn, self.mlp, self.input_layernorm.tp
        sums = None if tp is None else tp.large_sums
        if type(attention) is Attention and type(mlp) is MLP and sums and sums.pieces(len(residual_TD)):
            layer = Layer(attention, mlp, self.input_layernorm, self.post_attention_layernorm)
            return in_pieces(layer, sums, x_TD, residual_TD, step)
        if isinstance(x_TD, Pieces):
            x_TD.add_to(residual_TD)
            x_TD = None
        return super().forward(x_TD, residual_TD, step)


class Layer(NamedTuple):
    """The parts of a dense layer."""

    attention: Attention
    mlp: MLP
    attention_norm: RMSNorm
    mlp_norm: RMSNorm


# x and the residual, as a layer takes and returns them
PieceStream = tuple[torch.Tensor | Pieces | None, torch.Tensor]


def in_pieces(
    layer: Layer,
    sums: LargeSums,
    x_TD: torch.Tensor | Pieces | None,
    residual_TD: torch.Tensor,
    step: CacheStep,
) -> PieceStream:
    """Runs a dense layer on the rows of a large step. Takes and returns what RanksLayer.forward does."""
    attention, mlp, _, norm = layer
    qkv = projected(x_TD, residual_TD, layer.attention_norm, attention.qkv_proj)
    out, residual = attention.attend(qkv, residual_TD, step)
    del qkv
    if out is None:
        return None, residual
    cuts = sums.pieces(len(residual))
    if not cuts:  # few selected rows
        return mlp(attention.o_proj.add_to(out, residual), residual, norm)
    attended = begun(sums, cuts, (attention.o_proj.add_to(out[rows], residual[rows]) for rows in cuts))
    del out
    parts = (mlp_part(piece, residual[piece.rows], norm, mlp) for piece in attended)
    return Pieces(begun(sums, cuts, parts)), residual


def begun(sums: LargeSums, cuts: list[slice], parts: Iterable[torch.Tensor | None]) -> list[Piece]:
    """Begins to sum each part as soon as it is made. There are parts, because on several ranks no matmul adds
    itself to the residual."""
    return [Piece(rows, sums.begin(part_TD)) for rows, part_TD in zip(cuts, parts) if part_TD is not None]


def mlp_part(piece: Piece, residual_TD: torch.Tensor, norm: RMSNorm, mlp: MLP) -> torch.Tensor | None:
    """Adds a piece to its rows of the residual, and returns this rank's part of the MLP of them."""
    normed_TD = piece.sum.add_rms_norm(residual_TD, norm.weight, norm.eps)
    hidden_TF = mlp.gate_up_proj.gated(normed_TD, mlp.activation, mlp.down_proj)
    return mlp.down_proj.add_to(hidden_TF, residual_TD)


def projected(
    x_TD: torch.Tensor | Pieces | None, residual_TD: torch.Tensor, norm: RMSNorm, linear: Linear
) -> torch.Tensor:
    """Adds x to the residual in place, and returns `linear` of the norm of that."""
    if not isinstance(x_TD, Pieces):
        return norm.add_linear(x_TD, residual_TD, linear)[0]
    out_TO = residual_TD.new_empty(len(residual_TD), sum(linear.parts))
    for rows, piece in x_TD.pieces:
        matmul_into(linear, piece.add_rms_norm(residual_TD[rows], norm.weight, norm.eps), out_TO[rows])
    return out_TO


def matmul_into(linear: Linear, x_TI: torch.Tensor, out_TO: torch.Tensor) -> None:
    """out = x W^T + b, without a copy where cuBLAS multiplies."""
    if isinstance(linear.format, PlainWeight) and linear.bias is None and out_TO.shape[1] % 8 == 0:
        torch.mm(x_TI, linear.format.weight_OI.t(), out=out_TO)
    else:
        out_TO.copy_(linear.format.matmul(x_TI, linear.bias))

"""`HiddenStates`: the hidden states between a target's layers that a draft head reads. A decoder without a
head has none of this: the layers that are read run inside of wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.attention.step_input import StepInput
from shoal.models.decoder import Decoder


class HiddenStates:
    """The hidden states that the last step of `decoder` had before each of `layers`, side by side, for all
    tokens of the step: the last layer alone runs for selected ones."""

    def __init__(self, decoder: Decoder, layers: Sequence[int]) -> None:
        """To be made before weights are loaded, as layers that run as one call can't be read."""
        self._width = len(layers) * decoder.config.hidden_size
        self._states_TX = torch.empty(0, self._width)
        self._step: StepInput | None = None
        first = min(layers)
        wrapped = {
            i: _ReadLayer(
                decoder.layers[i], self, [p for p, layer in enumerate(layers) if layer == i], i == first
            )
            for i in layers
        }
        decoder.running = [(i, wrapped.get(i, layer)) for i, layer in decoder.running]

    @property
    def step(self) -> StepInput:
        """The step that has just run."""
        assert self._step is not None
        return self._step

    @property
    def states_TX(self) -> torch.Tensor:
        """The hidden states of all tokens of `step`, [T, X]."""
        return self._states_TX

    def begin(self, step: StepInput) -> None:
        self._step = step
        self._states_TX = self._states_TX.new_empty(step.num_tokens, self._width)

    def store(self, place: int, x_TD: torch.Tensor | None, residual_TD: torch.Tensor) -> None:
        size = residual_TD.shape[1]
        own_TD = self._states_TX[:, place * size : (place + 1) * size]
        if x_TD is None:
            own_TD.copy_(residual_TD)
        else:
            torch.add(residual_TD, x_TD, out=own_TD)


class _ReadLayer(nn.Module):
    """Stores what its layer is about to add up, and runs the layer."""

    def __init__(self, layer: Any, states: HiddenStates, places: list[int], is_first: bool) -> None:
        super().__init__()
        self.layer, self.states, self.places, self.is_first = layer, states, places, is_first

    def forward(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: StepInput, *others: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        if self.is_first:
            self.states.begin(step)
        tp = self.layer.input_layernorm.tp  # None: x is whole on every rank
        whole_TD = x_TD if x_TD is None or tp is None else tp.all_reduce(x_TD.clone())
        for place in self.places:
            self.states.store(place, whole_TD, residual_TD)
        return self.layer(x_TD, residual_TD, step, *others)

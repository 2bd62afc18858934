"""`HiddenStates`: the hidden states of a target that a draft head reads: `LayerStates`, between its layers,
or `FinalStates`, after its last norm. A decoder without a head has none of this: the layers that are read run
inside of wrappers, and final states are taken by hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shoal.attention.step_input import StepInput
from shoal.models.decoder import Decoder


class HiddenStates(Protocol):
    """The hidden states of all tokens of the last step."""

    @property
    def step(self) -> StepInput:
        """The step that has just run."""
        ...

    @property
    def states_TX(self) -> torch.Tensor:
        """The hidden states of all tokens of `step`, [T, X]."""
        ...


def read_states(decoder: Decoder, layers: Sequence[int]) -> HiddenStates:
    """Has the hidden states before each of these layers stored, or without layers, the final ones. To be
    called before weights are loaded, as layers that run as one call can't be read."""
    return LayerStates(decoder, layers) if layers else FinalStates(decoder)


class FinalStates:
    """The final hidden states. A decoder computes selected tokens' alone, and here all of them."""

    def __init__(self, decoder: Decoder) -> None:
        self._step: StepInput | None = None
        self._states_TD = torch.empty(0, decoder.config.hidden_size)
        self._select_S: torch.Tensor | None = None
        decoder.register_forward_pre_hook(self._select_all, with_kwargs=True)
        decoder.register_forward_hook(self._store)

    @property
    def step(self) -> StepInput:
        assert self._step is not None
        return self._step

    @property
    def states_TX(self) -> torch.Tensor:
        return self._states_TD

    def _select_all(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = ("step", "caches", "select_S", "after_layer")
        given = dict(zip(names, args)) | kwargs
        self._step, self._select_S = given["step"], given.pop("select_S", None)
        return (), given

    def _store(self, decoder: nn.Module, args: tuple[Any, ...], hidden_TD: torch.Tensor) -> torch.Tensor:
        self._states_TD = hidden_TD
        return hidden_TD if self._select_S is None else hidden_TD[self._select_S]


class LayerStates:
    """The hidden states that the last step of `decoder` had before each of `layers`, side by side, for all
    tokens of the step: the last layer alone runs for selected ones."""

    def __init__(self, decoder: Decoder, layers: Sequence[int]) -> None:
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
        assert self._step is not None
        return self._step

    @property
    def states_TX(self) -> torch.Tensor:
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

    def __init__(self, layer: Any, states: LayerStates, places: list[int], is_first: bool) -> None:
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

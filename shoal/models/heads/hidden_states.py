"""`HiddenStates`: the hidden states of a target that a draft head reads: `LayerStates`, between its layers,
or `FinalStates`, after its last norm. A decoder without a head has none of this: the layers that are read run
inside of wrappers, and final states are taken by hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.attention.step_input import StepInput
from shoal.layers.layer_step import CacheStep, Stream
from shoal.layers.pieces import Pieces
from shoal.models.decoder import Decoder


class HiddenStates:
    """The hidden states of all tokens of the last step."""

    def __init__(self, width: int) -> None:
        """`width`: the numbers of a token."""
        self._none = torch.empty(0, width)
        self._step: StepInput | None = None
        self.states_TX = self._none  # the hidden states of all tokens of `step`

    @property
    def step(self) -> StepInput:
        """The step that has just run."""
        assert self._step is not None
        return self._step

    def begin(self, step: StepInput) -> None:
        """To be called before a step. The memory of the last one's states is free for it."""
        self._step, self.states_TX = step, self._none

    def begin_without_layers(self, step: StepInput) -> None:
        """To be called after a rehearsal's step, which may leave out the layers that are read."""
        if self._step is not step:
            self._step = step
            self.states_TX = self._none.new_zeros(step.num_tokens, self._none.shape[1])

    def resume(self, step: StepInput, states_TX: torch.Tensor) -> None:
        """Takes the hidden states of a replayed graph, which has captured `step`."""
        self._step, self.states_TX = step, states_TX


def read_states(decoder: Decoder, layers: Sequence[int]) -> HiddenStates:
    """Has the decoder store the hidden states before each of these layers; without layers, its final ones. To
    be called before weights are loaded, as layers that run as one call can't be read."""
    return LayerStates(decoder, layers) if layers else FinalStates(decoder)


class FinalStates(HiddenStates):
    """The final hidden states. The decoder, which otherwise computes selected tokens alone, computes all."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.config.hidden_size)
        self._select_S: torch.Tensor | None = None
        decoder.register_forward_pre_hook(self._select_all, with_kwargs=True)
        decoder.register_forward_hook(self._store)

    def _select_all(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = ("step", "caches", "select_S", "after_layer")
        given = dict(zip(names, args)) | kwargs
        self.begin(given["step"])
        self._select_S = given.pop("select_S", None)
        return (), given

    def _store(self, decoder: nn.Module, args: tuple[Any, ...], hidden_TD: torch.Tensor) -> torch.Tensor:
        self.states_TX = hidden_TD
        return hidden_TD if self._select_S is None else hidden_TD[self._select_S]


class LayerStates(HiddenStates):
    """The hidden states that the last step of `decoder` had before each of `layers`, side by side, for all
    tokens of the step: the last layer alone runs for selected ones."""

    def __init__(self, decoder: Decoder, layers: Sequence[int]) -> None:
        super().__init__(len(layers) * decoder.config.hidden_size)
        first = min(layers)
        wrapped = {
            i: _ReadLayer(
                decoder.layers[i], self, [p for p, layer in enumerate(layers) if layer == i], i == first
            )
            for i in layers
        }
        decoder.running = [(i, wrapped.get(i, layer)) for i, layer in decoder.running]

    def begin(self, step: StepInput) -> None:
        super().begin(step)
        self.states_TX = self._none.new_empty(step.num_tokens, self._none.shape[1])

    def store(self, place: int, x_TD: torch.Tensor | None, residual_TD: torch.Tensor) -> None:
        size = residual_TD.shape[1]
        own_TD = self.states_TX[:, place * size : (place + 1) * size]
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
        self, x_TD: torch.Tensor | Pieces | None, residual_TD: torch.Tensor, step: CacheStep, *others: Any
    ) -> Stream:
        if self.is_first:
            self.states.begin(step.input)
        if isinstance(x_TD, Pieces):
            x_TD.add_to(residual_TD)
            x_TD = None
        tp = self.layer.input_layernorm.tp  # None: x is whole on every rank
        whole_TD = x_TD if x_TD is None or tp is None else tp.all_reduce(x_TD.clone())
        for place in self.places:
            self.states.store(place, whole_TD, residual_TD)
        return self.layer(x_TD, residual_TD, step, *others)

"""Captures run three layers and the last one, and all layers if the third cannot be copied."""

from types import SimpleNamespace

import pytest
import torch

from shoal.models import copied_layers
from shoal.models.copied_layers import CopiedLayers

NUM_LAYERS = 9


class Copies:
    """The copies of a driver that is not there."""

    missing, copies = None, True

    def __init__(self):
        self.marks, self.added = [], []
        self.refused = None

    def begin(self):
        self.marks.append(0)

    def mark(self, stream):
        self.marks[-1] += 1

    def add(self, stream, before, copied, others):
        self.added.append((before, copied, others))
        self.refused = None if self.copies else "kernel 1 is another one"
        return self.copies


@pytest.fixture
def copied(monkeypatch):
    layers = [torch.nn.Linear(1, 1) for _ in range(NUM_LAYERS)]
    model = SimpleNamespace(layers=layers, running=[*enumerate(layers)])
    model.config = SimpleNamespace(layers=["kind"] * NUM_LAYERS)
    copies = Copies()
    monkeypatch.setattr(copied_layers, "LayerCopies", lambda: copies)
    monkeypatch.setattr(copied_layers, "_spans", lambda layer, cache: layers.index(layer))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=5))
    copied = CopiedLayers(model, [None] * NUM_LAYERS)
    copied._copies_layers = True  # The constructor wants a cache on a GPU.
    return copied, model, copies


def run(model, ran):
    def launch(after_layer):
        for i, _ in model.running:
            ran.append(i)
            if after_layer is not None:
                after_layer(i)
        return "logits"

    return launch


def test_three_layers_and_the_last_are_launched(copied):
    copied, model, copies = copied
    for _ in range(2):
        ran = []
        assert copied.capture(run(model, ran)) == "logits"
        assert ran == [0, 1, 2, NUM_LAYERS - 1]
    assert copies.marks == [3, 3]
    assert copies.added == 2 * [(1, 2, [*range(3, NUM_LAYERS - 1)])]
    assert [i for i, _ in model.running] == [*range(NUM_LAYERS)]


def test_all_layers_are_launched_if_one_cannot_be_copied(copied):
    copied, model, copies = copied
    copies.copies, ran = False, []
    copied.capture(run(model, ran))
    assert ran == [*range(NUM_LAYERS)]
    copies.copies, ran = True, []  # A later capture may do better.
    copied.capture(run(model, ran))
    assert ran == [0, 1, 2, NUM_LAYERS - 1]


def test_all_layers_run_outside_of_captures_and_without_a_driver(copied, monkeypatch):
    copied, model, copies = copied
    copies.missing, ran = "CUDA's driver lacks cuGraphNodeGetType", []
    copied.capture(run(model, ran))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    copied.capture(run(model, ran))
    assert ran == 2 * [*range(NUM_LAYERS)] and not copies.marks

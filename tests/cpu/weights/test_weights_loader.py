"""load_weights: tensors that reach the model, tensors that are left out, and errors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from shoal.errors import CheckpointError
from shoal.weights import loader
from shoal.weights.loader import load_weights
from shoal.weights.source import resolve

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=8,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=2,
)


class Recorder:
    """Takes every tensor but "bad"; misses one at the end if `incomplete`. It is what loads a model and the
    model itself."""

    def __init__(self, monkeypatch, incomplete: bool = False) -> None:
        self.names: list[str] = []
        self.finished = self.dummy = False
        self.incomplete = incomplete
        monkeypatch.setattr(loader, "Loading", lambda model: model)
        monkeypatch.setattr(loader, "load_dummy_weights", Recorder.load_dummy)

    def take(self, name, tensor):
        if name == "bad":
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}")
        self.names.append(name)

    def finish(self):
        if self.incomplete:
            raise CheckpointError("model.norm.weight is missing")
        self.finished = True

    def load_dummy(self):
        self.dummy = True


def checkpoint(folder, names, tied=False):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    save_file({name: torch.zeros(2) for name in names}, folder / "model.safetensors")
    return resolve(str(folder))


def test_every_tensor_reaches_the_model(monkeypatch, tmp_path):
    model = Recorder(monkeypatch)
    load_weights(model, checkpoint(tmp_path, ["a", "lm_head.weight"]))
    assert sorted(model.names) == ["a", "lm_head.weight"] and model.finished


def test_tensors_that_follow_from_others_are_left_out(monkeypatch, tmp_path):
    model = Recorder(monkeypatch)
    load_weights(
        model,
        checkpoint(
            tmp_path, ["a", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"], tied=True
        ),
    )
    assert model.names == ["a"] and model.finished


@pytest.mark.parametrize(
    "names, incomplete, words",
    [(["bad"], False, r"bad has shape \[2\]"), (["a"], True, "norm.weight is missing")],
)
def test_a_model_that_refuses_names_the_checkpoint_too(monkeypatch, names, incomplete, words, tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*{words}"):
        load_weights(Recorder(monkeypatch, incomplete), checkpoint(tmp_path, names))


def test_dummy_weights_need_no_file(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = Recorder(monkeypatch)
    load_weights(model, resolve(str(tmp_path)), dummy=True)
    assert model.dummy and not model.names

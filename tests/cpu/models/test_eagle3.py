"""EAGLE-3 heads: configs and files in the published forms, the hidden states that they read, and what the module
computes, compared with a head made of the modules of `transformers`' Llama."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoal.attention.cpu import TorchBackend
from shoal.attention.step_input import StepInput
from shoal.errors import CheckpointError
from shoal.kernels.cpu import ops
from shoal.kernels.layer_cache import LayerCache
from shoal.layers.attention import attention_shape
from shoal.layers.parallel import TensorParallel
from shoal.models.decoder import Decoder
from shoal.models.heads.eagle3 import Eagle3Head
from shoal.models.heads.hidden_states import HiddenStates, read_states
from shoal.weights.heads.eagle3_files import EMBEDDING, IDS, Eagle3Files, resolve_eagle3
from shoal.weights.heads.head_files import load_head
from shoal.weights.loader import load_weights
from shoal.weights.source import resolve
from tests.eagle3_oracle import HeadOracle, TargetOracle, head_tensors, write_head
from tests.tiny import write_model

DRAFTED, BLOCK = 120, 4
FORMS = ("plain", "pickled", "speculators")
FLAGS = [
    {},
    dict(norm_before_residual=True),
    dict(norm_before_residual=True, norm_before_fc=True, norm_output=True),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


def layer_config(target: Path) -> dict:
    """The fields of a head's layer for this target. It is shorter than its target, as published heads are."""
    config = json.loads((target / "config.json").read_text())
    names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads rms_norm_eps hidden_act"
    return {name: config[name] for name in names.split()} | {
        "max_position_embeddings": 16,
        "rope_theta": 500.0,
    }


def tensors_of(target: Path, **flags) -> dict[str, torch.Tensor]:
    layer = layer_config(target)
    tensors = head_tensors(layer, layer["hidden_size"], DRAFTED)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(3 * layer["hidden_size"]) + 0.5
    return tensors


def built(target: Path, folder: Path) -> tuple[Decoder, Eagle3Head, HiddenStates]:
    config, files = resolve(str(target)).config, Eagle3Files(folder)
    files.config.check_target(config, str(folder))
    kinds = (*config.layers, *files.config.decoder.layers)
    shapes = [attention_shape(kind.mixer, 1) for kind in kinds]
    backends = {shape: TorchBackend(shape) for shape in shapes}
    tp = TensorParallel.single()
    model = Decoder(config, tp, ops, backends)
    embedding = None if EMBEDDING in files.names else model.embed_tokens
    head = Eagle3Head(files.config, config, tp, ops, backends, embedding, IDS in files.names)
    states = read_states(model, head.state_layers)
    load_weights(model, resolve(str(target)), show_progress=False)
    load_head(head, files)
    for module in (model, head):
        module.allocate_ropes(64)
    return model, head, states


def chunks(tokens: list[int], sizes: list[int]):
    tables, start = (torch.arange(16, dtype=torch.int32).view(1, 16),), 0
    for size in sizes:
        step = StepInput.rehearsal(1, size, cached_len=start, block_tables=tables)
        part = torch.tensor(tokens[start : start + size], dtype=torch.int32)
        yield start, replace(step, token_ids_T=part, rows_T=torch.zeros(size, dtype=torch.int32))
        start += size


def caches_of(kinds) -> list[LayerCache]:
    kv_heads, dim = kinds[0].mixer.num_kv_heads, kinds[0].mixer.head_dim
    return [LayerCache(torch.zeros(16, 2, kv_heads, BLOCK, dim)) for _ in kinds]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_head_computes_what_transformers_modules_do(form, flags, target, tmp_path):
    """Slots of a prompt in chunks, and then slots that begin with the head's own output."""
    layer, tensors = layer_config(target), tensors_of(target, **flags)
    folder = write_head(tmp_path, layer, tensors, form, **flags)
    model, head, states = built(target, folder)
    oracle = TargetOracle(target)
    plain = HeadOracle(layer, tensors, oracle.embedding, **flags)
    tokens = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    caches, own = caches_of(model.config.layers), caches_of(head.kinds)
    for start, step in chunks(tokens, [11, 1, 13]):
        select_S = torch.tensor([step.num_tokens - 1])
        model(step, caches, select_S)
        read = states.states_TX
        torch.testing.assert_close(
            read, oracle.states(tokens[:25])[start : start + step.num_tokens], rtol=1e-3, atol=1e-3
        )
        following = torch.tensor(tokens[start + 1 : start + step.num_tokens + 1], dtype=torch.int32)
        normed, back = head(following, head.fuse(read), step, own, select_S)
    hidden = plain.fuse(oracle.states(tokens[:25]))
    following = tokens[1:26]
    for length in (25, 26, 27):
        want, want_back = plain.run(following, hidden)
        torch.testing.assert_close(normed, want[-1:], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(back, want_back[-1:], rtol=1e-3, atol=1e-3)
        logits, want_logits = head.logits(normed), plain.logits(want[-1:])
        torch.testing.assert_close(logits, want_logits, rtol=1e-3, atol=1e-3)
        drafted = int(want_logits.argmax())
        assert drafted == int(logits.argmax())
        following.append(drafted)
        hidden = torch.cat((hidden, want_back[-1:]))
        [(_, step)] = [chunk for chunk in chunks(following, [length, 1]) if chunk[0]]
        normed, back = head(torch.tensor([drafted], dtype=torch.int32), back, step, own)


def test_an_embedding_of_its_own_is_used(target, tmp_path):
    tensors = tensors_of(target)
    tensors["embed_tokens.weight"] = torch.randn(300, layer_config(target)["hidden_size"])
    _, head, _ = built(target, write_head(tmp_path, layer_config(target), tensors))
    assert head.embed_tokens is not None
    ids = torch.tensor([3, 5])
    torch.testing.assert_close(head.embed_tokens.embed(ids), tensors["embed_tokens.weight"][ids])


def test_layers_that_are_read_run_the_same(target, tmp_path):
    model, _, _ = built(target, write_head(tmp_path, layer_config(target), tensors_of(target)))
    alone = TargetOracle(target)
    tokens = list(range(20))
    [(_, step)] = chunks(tokens, [20])
    hidden = model(step, caches_of(model.config.layers))
    want = alone.model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.logits(hidden), want, rtol=1e-3, atol=1e-3)


def test_the_layers_that_a_config_names_are_read(target, tmp_path):
    fields = dict(eagle_aux_hidden_state_layer_ids=[0, 1, 7])
    folder = write_head(tmp_path, layer_config(target), tensors_of(target), "speculators", **fields)
    model, _, states = built(target, folder)
    tokens = list(range(9))
    [(_, step)] = chunks(tokens, [9])
    model(step, caches_of(model.config.layers))
    want = TargetOracle(target, layers=(0, 1, 7)).states(tokens)
    torch.testing.assert_close(states.states_TX, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "changes, name",
    [
        (dict(hidden_size=24, head_dim=8, num_attention_heads=6), "hidden_size"),
        (dict(vocab_size=301), "vocab_size"),
        (dict(target_hidden_size=64), "target_hidden_size"),
        (dict(eagle_aux_hidden_state_layer_ids=[2, 3, 8]), "eagle_aux_hidden_state_layer_ids"),
        (dict(eagle_aux_hidden_state_layer_ids=[2, 3]), "eagle_aux_hidden_state_layer_ids"),
        (dict(eagle_aux_hidden_state_layer_ids=[3, 2, 5]), "ascending"),
        (dict(draft_vocab_size=None), "draft_vocab_size"),
        (dict(fc_norm=True), "fc_norm"),
        (dict(layer_types=["sliding_attention"], sliding_window=8), "layer_types"),
        (dict(norm_before_fc=1), "norm_before_fc"),
        (dict(architectures=["X"], model_type="mistral"), "model_type"),
        (
            dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128])),
            "quantization_config",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_does_not_fit_is_refused_by_name(changes, name, target, tmp_path):
    folder = write_head(tmp_path, layer_config(target), tensors_of(target))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=name):
        Eagle3Files(folder).config.check_target(resolve(str(target)).config, str(folder))


def test_a_head_that_was_made_for_another_architecture_is_refused(target, tmp_path):
    folder = write_head(tmp_path, layer_config(target), tensors_of(target), "speculators")
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"]["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"verifier architecture must be LlamaForCausalLM.*Qwen3ForCausalLM"
    ):
        Eagle3Files(folder).config.check_target(resolve(str(target)).config, str(folder))


@pytest.mark.parametrize("method", ["eagle", "dflash", None])
def test_other_speculators_are_refused(method, target, tmp_path):
    folder = write_head(tmp_path, layer_config(target), tensors_of(target), "speculators")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "speculators_model_type": method}))
    with pytest.raises(CheckpointError, match="speculators_model_type must be 'eagle3'"):
        _ = Eagle3Files(folder).config


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("fc.weight"), r"lacks 1 tensors, the first is model\.fc\.weight"),
        (lambda tensors: tensors.update(other=torch.zeros(1)), r"holds model\.other"),
        (
            lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}),
            r"model\.norm\.weight has shape \[3\]",
        ),
        (lambda tensors: tensors["d2t"].fill_(299), "model.d2t must map"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_the_tensors_name(change, message, target, tmp_path):
    tensors = tensors_of(target)
    change(tensors)
    folder = write_head(tmp_path, layer_config(target), tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        built(target, folder)
    assert str(folder) in str(caught.value)


def test_pickled_files_run_no_code(target, tmp_path):
    class Code:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    folder = write_head(tmp_path, layer_config(target), tensors_of(target), "pickled")
    torch.save({"fc.weight": Code()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        _ = Eagle3Files(folder).names
    assert not (tmp_path / "ran").exists()


def test_a_head_is_found_by_its_folder(target, tmp_path):
    folder = write_head(tmp_path / "head", layer_config(target), tensors_of(target))
    assert resolve_eagle3(str(folder)).folder == folder
    for wrong in (str(folder / "config.json"), "no such head"):
        with pytest.raises(CheckpointError, match="must be a folder or a model of the hub"):
            resolve_eagle3(wrong)

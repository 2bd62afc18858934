"""A trainer's tensors of each family, under the names of files or of transformers' parameters, are the checkpoint's
tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from shoal.errors import CheckpointError
from shoal.models.config_json import config_from_json
from shoal.weights.loader import is_derived, is_draft
from shoal.weights.quantized import folder_tensors
from shoal.weights.source import resolve
from shoal.weights.trainer_names import trainer_parts
from tests import tiny
from tests.tiny_families import FAMILIES, write_family

PLAIN = [name for name in FAMILIES if name != "gpt-oss"]  # its experts are in MXFP4


def parts_of(sent: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in sent.items():
        for part in trainer_parts(name, tuple(tensor.shape), config):
            if is_derived(part.name, config) or is_draft(part.name, config):
                continue
            assert part.name not in found
            found[part.name] = part.take(tensor.detach())
            assert tuple(found[part.name].shape) == part.shape
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_parameters_and_files_hold_the_decoders_tensors(name, root):
    """Regression: over shared memory and process groups, families whose tensors are merged or have other names were
    refused, and six families' parameters were on all ways."""
    folder = write_family(root, name)
    files = resolve(str(folder))
    expected = {
        key: tensor
        for key, tensor in folder_tensors(folder, files.config)
        if not (is_derived(key, files.config) or is_draft(key, files.config))
    }
    parameters = dict(tiny._oracle(folder).state_dict())
    for sent in (load_file(folder / "model.safetensors"), parameters):
        found = parts_of(sent, files.config)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor.float(), expected[key].float()), key


@pytest.mark.parametrize("rows", [1, 7])
def test_fused_experts_with_an_odd_number_of_rows_are_refused_with_their_name(rows):
    sizes = dict(
        vocab_size=10, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    fields = dict(
        architectures=["Qwen3MoeForCausalLM"], num_key_value_heads=2, moe_intermediate_size=8, **sizes
    )
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(CheckpointError, match=rf"{name} has {rows} rows"):
        list(trainer_parts(name, (2, rows, 4), config_from_json(fields, "test")))

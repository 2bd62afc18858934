"""Every registered architecture: it is tried and documented, its shapes match its checkpoints, and what it
computes is what transformers computes, however the engine runs and wherever its weights come from."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from shoal import LLM, SamplingParams
from shoal.models import fused
from shoal.models.registry import ARCHITECTURES, BY_GGUF, BY_HF_CLASS, BY_NAME
from shoal.models.shapes import checkpoint_shapes, num_weights
from shoal.weights.quantized import tensor_headers
from shoal.weights.source import resolve
from tests import tiny
from tests.cpu.weights.test_weights_gguf import MODELS as GGUF_MODELS
from tests.cpu.weights.test_weights_gguf import SIZES as GGUF_SIZES
from tests.cpu.weights.test_weights_gguf import ZERO_CENTRED, write_gguf
from tests.tiny_families import FAMILIES, make_config

COUNT = 12
PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 15, 16, 40, 90))]
UNLIKE_LLAMA_GGUF = [
    architecture.gguf.architecture
    for architecture in ARCHITECTURES
    if architecture.gguf
    and architecture.gguf.architecture in GGUF_MODELS
    and architecture.hf_class.replace("ForCausalLM", "Config") not in tiny.LLAMA_LINE
]

# other architectures whose packed layers are Llama's, and run in the same C call
LLAMA_LAYERS = ("seed_oss", "phi3", "ernie4_5")


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options)


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def test_no_two_architectures_share_a_name():
    assert len(BY_NAME) == len(ARCHITECTURES)
    # Their reader chooses by the number of experts, as tensors have other names with experts.
    several = {architecture.name for architecture in ARCHITECTURES if architecture.name.endswith("_experts")}
    assert several == {"granitemoehybrid_experts"} and len(BY_HF_CLASS) == len(ARCHITECTURES) - len(several)
    in_gguf = [architecture.gguf for architecture in ARCHITECTURES if architecture.gguf is not None]
    assert len(BY_GGUF) == sum(1 + len(names.also_named) for names in in_gguf)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_an_architecture_has_a_tiny_model(architecture):
    tried = {kind.removesuffix("Config") + "ForCausalLM" for kind, _ in tiny.MODELS.values()}
    in_families = {make_config(name).get_text_config().model_type for name in FAMILIES}
    assert architecture.hf_class in tried or architecture.name.removesuffix("_experts") in in_families, (
        f"add {architecture.name} to tests/tiny_families.py"
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_an_architecture_is_listed_in_the_docs(architecture):
    listed = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()
    assert f"| `{architecture.hf_class}`" in listed, f"add {architecture.hf_class} to docs/compatibility.md"


def test_reading_configs_loads_no_torch(root):
    """A server's own process reads them, and the list of models."""
    folders = [str(tiny.write_model(root, name)) for name in tiny.MODELS]
    code = (
        "import sys; from shoal.weights.source import resolve\n"
        f"for folder in {folders}: resolve(folder).config\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", tiny.MODELS)
def test_shapes_read_off_the_modules_are_those_that_transformers_writes(name, root):
    folder = tiny.write_model(root, name)
    files = resolve(str(folder))
    written = {name: header.shape for name, header in tensor_headers(folder, files.config).items()}
    assert dict(checkpoint_shapes(files.config)) == written
    matrices = [shape for shape in written.values() if len(shape) == 2]
    assert num_weights(files.config) == sum(rows * columns for rows, columns in matrices)


def test_shapes_are_read_off_the_modules_without_loading_more_of_torch(root):
    """A computation on the meta device would import hundreds of modules at every start."""
    code = (
        "import sys; from shoal.models.shapes import checkpoint_shapes, num_weights\n"
        "from shoal.weights.source import resolve\n"
        f"config = resolve({str(tiny.write_model(root, 'olmo2'))!r}).config\n"
        "before = len(sys.modules); num_weights(config); dict(checkpoint_shapes(config))\n"
        "sys.exit(len(sys.modules) - before > 10)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", tiny.MODELS)
def test_log_probabilities_are_the_oracles(name, root, build):
    folder = tiny.write_model(root, name)
    engine = build(name, max_num_batched_tokens=32, max_num_seqs=4)
    for output in engine.generate(PROMPTS, greedy(logprobs=3, prompt_logprobs=0)):
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        expected = tiny.logprobs(folder, prompt + answer.token_ids)
        for i, position in enumerate((output.prompt_logprobs or [])[1:] + answer.logprobs):
            for token, found in position.items():
                assert abs(found.logprob - expected[i, token].item()) < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        dict(async_scheduling=True),
        dict(max_num_batched_tokens=24, max_num_seqs=8, async_scheduling=True),
        dict(num_gpu_blocks_override=13, max_model_len=200, max_num_batched_tokens=40),
        dict(block_size=4, enable_prefix_caching=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", tiny.UNLIKE_LLAMA)
def test_tokens_do_not_depend_on_how_the_engine_runs(name, options, root, build):
    expected = [tiny.greedy(tiny.write_model(root, name), prompt, COUNT) for prompt in PROMPTS]
    engine = build(name, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert ids_of(engine.generate(PROMPTS, greedy())) == expected


def parts_of(key, weights):
    """The tensors, as the decoder has them, that are one of transformers'."""
    own = key.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    merged = next((name for name in parts if name in own), None)
    if own == "lm_head.weight" and own not in weights:
        own = "model.embed_tokens.weight"
    names = [own] if merged is None else [own.replace(merged, part) for part in parts[merged]]
    return [torch.from_numpy(weights[name]) for name in names]


@pytest.mark.parametrize(
    ("name", "kind", "close"),
    [
        *((name, "F32", 1e-3) for name in ("llama", *UNLIKE_LLAMA_GGUF, "olmo2-windows", "phi3-long")),
        *((name, "Q8_0", 2e-2) for name in ("llama", *UNLIKE_LLAMA_GGUF) if name not in LLAMA_LAYERS),
    ],
)
def test_a_gguf_file_computes_what_transformers_computes_with_its_weights(
    name, kind, close, tmp_path, monkeypatch
):
    """Q8_0 stays packed, where an architecture has no fused layers."""
    weights = write_gguf(tmp_path / "m.gguf", name, kind)
    if name in ZERO_CENTRED:
        weights = {key: weight - 1 if "norm" in key else weight for key, weight in weights.items()}
    config_class, changes = GGUF_MODELS[name]
    config = getattr(transformers, f"{config_class}Config")(**GGUF_SIZES | changes)
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    oracle.load_state_dict({key: torch.cat(parts_of(key, weights)) for key in oracle.state_dict()})
    prompt = random.Random(1).choices(range(96), k=40)
    fuse_layers, made = fused.fuse_layers, []
    monkeypatch.setattr(fused, "fuse_layers", lambda *args: made.append(fuse_layers(*args)) or made[-1])
    with LLM(str(tmp_path / "m.gguf"), device="cpu", max_model_len=64, skip_tokenizer_init=True) as llm:
        packed = any(tensor.endswith(".packed") for tensor in llm.check_weights())
        output = llm.generate([prompt], greedy(prompt_logprobs=0))[0]
    is_fused = any(layers is not None for layers in made)
    assert packed == (kind == "Q8_0") and is_fused == (packed and name in ("llama", "gemma", "gemma3"))
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for i, position in enumerate(output.prompt_logprobs[1:]):
        for token, found in position.items():
            assert found.logprob == pytest.approx(expected[i, token].item(), abs=close)

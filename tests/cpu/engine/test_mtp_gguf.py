"""MTP heads in GGUF files: they draft what `transformers` makes of the checkpoint that the file was written from."""

import shutil

import gguf
import pytest
from safetensors.torch import load_file, save_file

from shoal import SamplingParams
from shoal.api import Request
from shoal.engine.runner import commands
from shoal.errors import CheckpointError, ConfigError
from shoal.weights.source import resolve
from tests import gguf_files, mtp_gguf, tiny
from tests.cpu.models.test_gguf_mixtures import add_glm
from tests.mtp_heads import NEMOTRONS, PROMPT, K, LayersOracle, MtpOracle, answer, make_core

pytestmark = pytest.mark.usefixtures("quick_starts")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture
def build():
    cores = []

    def make(path, **options):
        cores.append(make_core(path, **options))
        return cores[-1]

    yield make
    for core in cores:
        core.exit()


def assert_drafts(core, folder) -> None:
    """The engine's drafts are the ones of the folder's model, and its tokens, too."""
    is_nemotron = any(name in str(folder) for name in NEMOTRONS)
    oracle, compared = (LayersOracle if is_nemotron else MtpOracle)(folder), []
    drafts_RK = core.ranks.runner.drafting.rows.drafts_RK

    def compare(tokens):
        if len(tokens) < 12:
            compared.append(drafts_RK[0].tolist())
            assert compared[-1] == oracle.drafts(PROMPT + tokens, K), len(tokens)

    assert answer(core, PROMPT, 12, compare) == tiny.greedy(folder, PROMPT, 12)
    assert len(compared) >= 3


@pytest.mark.parametrize(
    "name, ranks", [*((name, 1) for name in mtp_gguf.FILES), ("deepseek-v3", 2), ("qwen3.5-moe", 2)]
)
def test_drafts_are_those_of_transformers_head(name, ranks, root, build):
    folder, path = mtp_gguf.write(root, name)
    assert_drafts(build(path, max_num_batched_tokens=16, tensor_parallel_size=ranks), folder)


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3.5-moe"])
def test_a_head_with_fused_q_k_v_drafts_the_same(name, tmp_path, build, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFWriter", gguf_files.FusingWriter)
    folder, path = mtp_gguf.write(tmp_path, name)
    assert_drafts(build(path, max_num_batched_tokens=16), folder)


@pytest.mark.parametrize("name", mtp_gguf.FILES)
def test_without_drafts_the_head_is_passed_over(name, root, build):
    """Regression: the norm that Nemotron has in its head's block alone was refused."""
    folder, path = mtp_gguf.write(root, name)
    core = build(path, speculative_config=None)
    assert len(core.ranks.runner.cache.layers) == core.model_config.num_layers
    assert answer(core, PROMPT, 12) == tiny.greedy(folder, PROMPT, 12)


def test_bytes_are_those_of_the_tensors_that_are_read(root):
    """Regression: a head that no one uses counted, so that a model which fits was refused."""
    _, path = mtp_gguf.write(root, "glm4-moe")
    files, tensors = resolve(str(path)), gguf.GGUFReader(path).tensors
    of_head = sum(int(tensor.n_bytes) for tensor in tensors if tensor.name.startswith("blk.3."))
    whole = sum(int(tensor.n_bytes) for tensor in tensors)
    assert of_head and files.quantized_bytes == whole - of_head
    assert files.with_own_head().quantized_bytes == whole


WIDE = dict(hidden_size=64, moe_intermediate_size=32, intermediate_size=96)


def rounded(folder, target):
    """The checkpoint with the weights that its file in Q8_0 has."""
    shutil.copytree(folder, target)
    tensors, kind = load_file(folder / "model.safetensors"), gguf.GGMLQuantizationType.Q8_0
    for weight in tensors.values():
        if weight.dim() > 1 and weight.shape[-1] % 32 == 0:
            packed = gguf.quants.quantize(weight.numpy(), kind)
            weight.copy_(weight.new_tensor(gguf.quants.dequantize(packed, kind)))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_packed_head_stays_packed(root, build, tmp_path):
    """In float32 the head unpacks its numbers, and its drafts equal the drafts of the unpacked checkpoint. Packed, it
    rounds activations, so its drafts may differ, and the answer does not."""
    folder, path = mtp_gguf.write(root / "wide", "glm4-moe", "Q8_0", **WIDE)
    assert_drafts(build(path), rounded(folder, tmp_path / "rounded"))
    core = build(path, dtype="auto")
    head = core.ranks.runner.head.module
    assert head.fc.weight is None and head.layers[0].self_attn.o_proj.weight is None
    assert head.embed_tokens is None and head.lm_head is None  # the file's copies of the model's own
    assert answer(core, PROMPT, 12) == answer(build(path, dtype="auto", speculative_config=None), PROMPT, 12)


def write_other(root, path, change):
    """Writes the file of GLM-4.5 with its head's tensors changed: `change` takes a tensor of the checkpoint by name,
    and returns it or None."""
    folder, _ = mtp_gguf.write(root, "glm4-moe")
    other = path.with_suffix("")
    shutil.copytree(folder, other)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: change(name.removeprefix("model.layers.3."), tensor) for name, tensor in tensors.items()}
    changed = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    gguf_files.write(path, other, "glm4moe", add_glm, mtp_gguf.with_head(None, {}), num_heads=1)
    return other


def test_ends_of_the_vocabulary_may_be_the_heads_own(root, build, tmp_path):
    own = ("shared_head.head.weight", "embed_tokens.weight")
    path, drafts = tmp_path / "m.gguf", []
    other = write_other(root, path, lambda name, tensor: tensor * -1 if name in own else tensor)
    for model in (path, other):
        core, found = build(model), []
        head, rows = core.ranks.runner.head.module, core.ranks.runner.drafting.rows
        assert head.lm_head is not None and head.embed_tokens is not None
        answer(core, PROMPT, 12, lambda tokens, rows=rows, found=found: found.append(rows.drafts_RK.tolist()))
        drafts.append(found)
    assert drafts[0] == drafts[1]


def test_without_a_norm_of_its_own_a_head_has_the_models(root, build, tmp_path):
    path = tmp_path / "m.gguf"
    other = write_other(
        root, path, lambda name, tensor: None if name == "shared_head.norm.weight" else tensor
    )
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.3.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert_drafts(build(path), other)


@pytest.mark.parametrize("level", [1, 2])
def test_a_head_sleeps_wakes_and_is_updated(level, root, build, tmp_path):
    folder, path = mtp_gguf.write(root, "glm4-moe")
    core = build(path, enable_sleep_mode=True)
    core.sleep(level)
    core.wake_up()
    if level == 2:
        core.update_weights(str(path))
    assert_drafts(core, folder)
    (before,) = core.ranks.call(commands.CHECKSUMS)
    other = tmp_path / "other.gguf"
    write_other(root, other, lambda name, tensor: tensor * 2 if name == "eh_proj.weight" else tensor)
    core.update_weights(str(other))
    (after,) = core.ranks.call(commands.CHECKSUMS)
    assert [name for name in before if before[name] != after[name]] == ["head.fc.weight"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda name, tensor: None if name == "hnorm.weight" else tensor, "MTP head lacks model.hidden_norm"),
        (
            lambda name, tensor: tensor[:, :48] if name == "eh_proj.weight" else tensor,
            r"model\.fc\.weight of its MTP head has shape \[48, 48\]",
        ),
    ],
    ids=["missing", "shape"],
)
def test_files_that_do_not_fit_are_refused_by_the_tensors_name(change, message, root, build, tmp_path):
    path = tmp_path / "m.gguf"
    write_other(root, path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        build(path)
    assert str(path) in str(caught.value)


def test_a_file_whose_head_was_left_out_is_refused_by_name(root, build, tmp_path):
    """Converters may count the block without writing it."""
    path = tmp_path / "m.gguf"
    folder, _ = mtp_gguf.write(root, "glm4-moe")
    own = mtp_gguf.with_head(None, {})

    def without_head(name, tensor, config):
        return {} if ".layers.3." in name else own(name, tensor, config)

    gguf_files.write(path, folder, "glm4moe", add_glm, without_head, num_heads=1)
    with pytest.raises(ConfigError, match=rf"method must not be 'mtp' for {path}, which holds no MTP head"):
        build(path)
    assert answer(build(path, speculative_config=None), PROMPT, 8) == tiny.greedy(folder, PROMPT, 8)


def test_a_head_without_its_model_is_refused_by_name(root, build, tmp_path):
    path = tmp_path / "mtp-m.gguf"
    folder, _ = mtp_gguf.write(root, "glm4-moe")
    own = mtp_gguf.with_head(None, {})

    def head_alone(name, tensor, config):
        return {} if ".layers." in name and ".layers.3." not in name else own(name, tensor, config)

    gguf_files.write(path, folder, "glm4moe", add_glm, head_alone, num_heads=1)
    with pytest.raises(CheckpointError, match=rf"{path}: the file holds a draft head alone"):
        build(path)


def twice(convert):
    """A Convert that writes the head's block, and a second one of other numbers."""

    def converted(name, tensor, config):
        last = config["num_hidden_layers"]
        found = convert(name, tensor, config)
        own = {key: part for key, part in found.items() if f".layers.{last}." in key or f"blk.{last}." in key}
        second = {
            key.replace(f".layers.{last}.", f".layers.{last + 1}.").replace(
                f"blk.{last}.", f"blk.{last + 1}."
            ): part * -2
            for key, part in own.items()
        }
        return found | second

    return converted


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "qwen3.5"])
def test_of_several_blocks_the_first_drafts_all_tokens(name, root, build, tmp_path):
    folder, _ = mtp_gguf.write(root, name)
    architecture, metadata, convert = mtp_gguf.FILES[name]
    path = tmp_path / "m.gguf"
    gguf_files.write(path, folder, architecture, metadata, twice(convert), num_heads=2)
    assert_drafts(build(path, max_num_batched_tokens=16), folder)
    assert answer(build(path, speculative_config=None), PROMPT, 12) == tiny.greedy(folder, PROMPT, 12)


def write_apart(folder, name, tmp_path):
    """Writes the model without its head, and the head alone, as llama.cpp's converter does with --no-mtp and --mtp."""
    architecture, metadata, convert = mtp_gguf.FILES[name]

    def has_layer(key, number):
        return f".layers.{number}." in key or key.startswith(f"blk.{number}.")

    def model_alone(key, tensor, config):
        last, found = config["num_hidden_layers"], convert(key, tensor, config)
        return {own: part for own, part in found.items() if not has_layer(own, last)}

    def head_alone(key, tensor, config):
        found, layers = convert(key, tensor, config), range(config["num_hidden_layers"])
        return {own: part for own, part in found.items() if not any(has_layer(own, i) for i in layers)}

    model, head = tmp_path / "m.gguf", tmp_path / "mtp-m.gguf"
    gguf_files.write(model, folder, architecture, metadata, model_alone)
    gguf_files.write(head, folder, architecture, metadata, head_alone, num_heads=1)
    return model, head


def of_file(head, **options):
    options = dict(num_speculative_tokens=K, enable_adaptive_verification=False) | options
    return dict(method="mtp", model=str(head), **options)


@pytest.mark.parametrize(
    "name, ranks", [("glm4-moe", 1), ("glm4-moe", 2), ("qwen3.5-moe", 1), ("deepseek-v3", 1)]
)
def test_a_head_in_a_file_of_its_own_drafts_the_same(name, ranks, root, build, tmp_path):
    folder, _ = mtp_gguf.write(root, name)
    model, head = write_apart(folder, name, tmp_path)
    assert_drafts(build(model, speculative_config=of_file(head), tensor_parallel_size=ranks), folder)


def test_sampled_answers_with_a_head_in_a_file_of_its_own_are_those_without(root, build, tmp_path):
    folder, _ = mtp_gguf.write(root, "glm4-moe")
    model, head = write_apart(folder, "glm4-moe", tmp_path)
    answers = []
    for options in (of_file(head), None):
        core, found = build(model, speculative_config=options), []
        for seed in range(6):
            params = SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=16, ignore_eos=True)
            core.add(Request(str(seed), PROMPT, params))
            while core.has_work:
                found += [token for output in core.step() for token in output.token_ids]
        answers.append(found)
    assert answers[0] == answers[1]


def test_a_head_of_another_model_is_refused_by_name(root, build, tmp_path):
    (tmp_path / "other").mkdir()
    folder, _ = mtp_gguf.write(root, "glm4-moe")
    model, head = write_apart(folder, "glm4-moe", tmp_path)
    _, other = write_apart(mtp_gguf.write(root, "qwen3.5-moe")[0], "qwen3.5-moe", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"general\.architecture of an MTP head must be 'glm4moe'"):
        build(model, speculative_config=of_file(other))
    with pytest.raises(CheckpointError, match=f"{model} holds no MTP head"):
        build(model, speculative_config=of_file(model))
    with pytest.raises(ConfigError, match="a head in a file of its own goes with a model"):
        build(folder, speculative_config=of_file(head))
    wide = mtp_gguf.write(root / "wide", "glm4-moe", **WIDE)[1]
    with pytest.raises(CheckpointError, match=r"was made for 3 layers of size 48, and .* has 3 of 64"):
        build(wide, speculative_config=of_file(head))


def test_heads_of_unknown_form_are_refused_by_name(build, tmp_path):
    folder = tiny.write_model(tmp_path, "qwen3")
    tensors = load_file(folder / "model.safetensors")
    path = tmp_path / "m.gguf"

    def add(writer, config):
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_freq_base(10000.0)
        writer.add_tensor("blk.3.nextn.enorm.weight", tensors["model.norm.weight"].numpy())

    gguf_files.write(path, folder, "qwen3", add, num_heads=1)
    with pytest.raises(
        CheckpointError, match=r"nextn_predict_layers must be 0 .* got 1: the heads of qwen3 files"
    ):
        build(path)

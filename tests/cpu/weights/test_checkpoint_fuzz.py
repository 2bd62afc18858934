"""Checkpoints from strangers: whatever is damaged in them, they are taken or refused by name, in bounded time
and memory."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams
from shoal.config import EngineConfig
from shoal.engine import build_model
from shoal.engine.resolve import resolve_config
from shoal.errors import MAX_MESSAGE, CheckpointError, ConfigError
from shoal.models.config_json import config_from_json
from shoal.models.configs.fields import MOST
from shoal.text.gguf_tokenizer import MAX_TOKEN_LEN
from shoal.weights.gguf.header import MAX_VALUES
from shoal.weights.loader import check_shapes
from shoal.weights.source import resolve
from tests import tiny
from tests.checkpoint_fuzz import KINDS, Gguf, open_checkpoint, parse, write_case, write_whole

ROOT = Path(__file__).parents[3]
MAX_GROWTH_MIB = 300  # for a process that opens checkpoints of a tenth of a megabyte


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_whole(folder)
    return folder


def try_cases(whole: Path, seed: int, cases: int, *options: str) -> dict[str, Any]:
    """In a process of its own, which a crash, a hang or a claim on all memory ends."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.checkpoint_fuzz",
            str(whole),
            "--seed",
            str(seed),
            "--cases",
            str(cases),
            *options,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-4000:]}"
    result = json.loads(done.stdout)
    print(json.dumps(result, indent=1))
    return result


def assert_held(result: dict[str, Any], cases: int) -> None:
    assert result["failures"] == []
    assert sum(result["counts"].values()) == cases
    assert all(result["counts"][f"{kind} refused"] > cases // len(KINDS) // 3 for kind in KINDS), (
        "the damage reaches what is read"
    )
    assert result["grown_mib"] < MAX_GROWTH_MIB


def test_any_damage_is_refused_by_name_or_goes_unnoticed(whole):
    seed = random.randrange(2**32)
    assert_held(try_cases(whole, seed, 200), 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_much_damage_is_refused_by_name_or_goes_unnoticed(whole):
    seed, cases = random.randrange(2**32), int(os.environ.get("SHOAL_FUZZ_CASES", "4000"))
    assert_held(try_cases(whole, seed, cases), cases)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_is_taken_in_spite_of_damage_generates(whole):
    seed, cases = random.randrange(2**32), int(os.environ.get("SHOAL_FUZZ_CASES", "4000")) // 10
    assert_held(try_cases(whole, seed, cases, "--load"), cases)


@pytest.mark.parametrize("seed", range(2))
def test_an_engine_lives_on_unchanged_after_updates_with_damaged_checkpoints(whole, tmp_path, seed):
    print(f"seed {seed}")
    llm = LLM(
        str(whole / "hf"), device="cpu", dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 22
    )
    params, refused = SamplingParams(max_tokens=4, temperature=0), 0

    def tokens() -> list[int]:
        return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids

    with llm:
        before, sums = tokens(), llm.check_weights()
        for number in range(60):
            (into := tmp_path / str(number)).mkdir()
            path = write_case(KINDS[number % 4], random.Random(f"{seed}-{number}"), whole, into)
            try:
                llm.update_weights(path)
            except CheckpointError:
                refused += 1
                assert llm.check_weights() == sums
            assert tokens() == before, "what is taken has the same weights: their bytes were left whole"
    assert refused > 25


# Claims that would cost memory or time if they were believed


def set_dims(tree: Gguf, dims: list[int]) -> None:
    tree.tensors[3]["dims"] = dims


def set_value(tree: Gguf, key: str, kind: int, value: Any) -> None:
    next(entry for entry in tree.metadata if entry[0] == key)[1:] = [kind, value]


def nest(depth: int) -> Any:
    value: Any = (4, [1])
    for _ in range(depth):
        value = (9, [value])
    return value


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: set_dims(t, [1] * 1_000_000), "has 1000000 dimensions, not 1 to 4"),
        (lambda t: set_dims(t, []), "has 0 dimensions"),
        (lambda t: set_dims(t, [0, 64]), "does not divide"),
        (lambda t: set_dims(t, [2**62, 2**62]), "is truncated: the tensor"),
        (lambda t: setattr(t, "num_tensors", 2**63), "9223372036854775808 tensors are announced"),
        (lambda t: setattr(t, "num_values", 2**63), "9223372036854775808 key-value pairs are announced"),
        (lambda t: t.lies.__setitem__(1, 2**63), "a string of 9223372036854775808 bytes ends after"),
        (
            lambda t: set_value(t, "llama.block_count", 9, (0, [0] * (MAX_VALUES + 1))),
            "values of an array are announced",
        ),
        (lambda t: set_value(t, "llama.block_count", 9, nest(300)), "nested more than 4 deep"),
        (
            lambda t: set_value(t, "llama.block_count", 10, 2**31),
            "num_hidden_layers 2147483648 is more than 4096",
        ),
        (lambda t: set_value(t, "llama.block_count", 10, 4000), "lacks the tensor model.layers.2."),
        (
            lambda t: set_value(t, "llama.context_length", 10, 2**40),
            "max_position_embeddings 1099511627776 is more than",
        ),
        (lambda t: t.metadata.append(list(t.metadata[0])), "key 'general.architecture' (it is there twice)"),
        (lambda t: t.metadata.append(["general.alignment", 4, 2**31]), "general.alignment 2147483648"),
        (lambda t: t.metadata.append(["split.count", 8, "many"]), "is one of 'many' parts"),
        (lambda t: t.tensors[3].update(offset=t.tensors[3]["offset"] + 1), "not a multiple of 32"),
        (lambda t: t.tensors[3].update(offset=t.tensors[4]["offset"]), "overlap at byte"),
        (lambda t: t.tensors[3].update(offset=2**63), "is truncated"),
        (lambda t: t.tensors[3].update(name="blk.0.ffn_up.{0.__class__}"), "ffn_up.{0.__class__}"),
        (lambda t: t.tensors[3].update(name=t.tensors[4]["name"]), "(it is there twice)"),
    ],
)
def test_a_gguf_that_lies_is_refused_with_the_file_and_the_field(whole, tmp_path, change, words):
    tree = parse(whole / "bytes.gguf")
    change(tree)
    (tmp_path / "m.gguf").write_bytes(tree.pack())
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "m.gguf", load=False)
    assert words in str(error.value) and str(tmp_path / "m.gguf") in str(error.value)


def test_a_piece_of_a_megabyte_is_refused_before_it_is_cut_everywhere(whole, tmp_path):
    tree = parse(whole / "pieces.gguf")
    tokens = next(entry for entry in tree.metadata if entry[0] == "tokenizer.ggml.tokens")
    tokens[2][1][300] = "a" * 2**20
    (tmp_path / "m.gguf").write_bytes(tree.pack())
    with pytest.raises(
        CheckpointError,
        match=rf"m\.gguf: tokenizer\.ggml\.tokens has .*1048576 a token.*and "
        rf"{MAX_TOKEN_LEN}",
    ):
        open_checkpoint(tmp_path / "m.gguf", load=False)


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + content[8 + length :])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda h: h[NORM].update(dtype="I32"),
            "dtype 'I32', which is not supported; these are: F64, F32, F16, BF16",
        ),
        (lambda h: h[NORM].update(shape=[1] * 1_000_000), "which is not 1 to 5 integers of at least 0"),
        (lambda h: h[NORM].update(shape=[2**32, 2**32]), "takes 73786976294838206464 bytes"),
        (
            lambda h: h[NORM].update(data_offsets=[2**62, 2**62 + 192]),
            "it is truncated: the tensor model.norm.weight ends at byte",
        ),
        (lambda h: h[NORM].update(data_offsets=[0, 192]), "of the data, but"),
        (lambda h: h[NORM].update(data_offsets=[0, -192]), "data_offsets [0, -192]"),
        (lambda h: h[NORM].pop("data_offsets"), "data_offsets None"),
        (lambda h: h.update({NORM: 3}), "has dtype None"),
    ],
)
def test_a_safetensors_header_that_lies_is_refused_with_the_tensor(root, tmp_path, change, words):
    folder = copy_of(root, tmp_path)
    with_header(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError) as error:
        check_shapes(resolve(str(folder)))
    assert all(word in str(error.value) for word in (words, "model.safetensors", "model.norm.weight"))


@pytest.mark.parametrize("length", [2**64 - 1, 2**33, 10**6])
def test_a_safetensors_header_longer_than_its_file_is_refused(root, tmp_path, length):
    folder = copy_of(root, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(
        CheckpointError,
        match=rf"model\.safetensors: the header says that it has {length} "
        rf"bytes",
    ):
        check_shapes(resolve(str(folder)))


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "passwd", "", None, 3, "a\0.safetensors"],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(root, tmp_path, name):
    folder = copy_of(root, tmp_path)
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: name}}))
    with pytest.raises(
        CheckpointError,
        match=r"index\.json.*model\.norm\.weight.*must name a \.safetensors "
        r"file next to it",
    ):
        check_shapes(resolve(str(folder)))


def test_a_shard_may_be_a_link_as_in_the_hubs_cache(root, tmp_path):
    folder = copy_of(root, tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    check_shapes(resolve(str(folder)))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(root, tmp_path, name):
    folder = copy_of(root, tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(folder, load=False)
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        resolve(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 100_000, "a\0b", "/proc/1/root/x"])
def test_a_path_that_cannot_be_looked_at_is_a_checkpoint_error(model):
    with pytest.raises(CheckpointError, match="the model path"):
        resolve(model)


def copy_of(root: Path, into: Path) -> Path:
    folder = into / "m"
    folder.mkdir()
    for path in tiny.write_model(root, "llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
)


# fields that a config of DeepSeek has, and a config of Qwen3-MoE has not
LATENT_KEYS = [key for key in MOST if key.startswith("n_") or key.endswith(("_rank", "_head_dim"))]


@pytest.mark.parametrize("key", [*MOST, "sliding_window", "rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [2**62, 10**400, 1e400, float("nan"), -1, 0, "64", [64], {}, True])
def test_a_config_that_is_absurd_anywhere_is_refused_with_the_field(key, value):
    config = {
        **CONFIG,
        "architectures": ["DeepseekV3ForCausalLM" if key in LATENT_KEYS else "Qwen3MoeForCausalLM"],
        "use_sliding_window": True,
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    } | {key: value}
    if (key, value) in (("num_experts", 0), ("n_shared_experts", 0)):
        return  # a dense model; one without shared experts
    with pytest.raises(CheckpointError, match=f"folder/config.json: .*{key}"):
        config_from_json(config, "folder/config.json")


def test_dummy_weights_of_a_model_that_no_machine_holds_are_refused_before_they_are_made(
    tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | dict(hidden_size=2**18, head_dim=64, num_hidden_layers=4096))
    )
    monkeypatch.setattr(build_model, "Decoder", lambda *args: pytest.fail("something was made"))
    with pytest.raises(
        ConfigError,
        match=r"weights of \d+ bytes, .* are more than the \d+ bytes that this "
        r"machine has",
    ):
        LLM(str(tmp_path), load_format="dummy", device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            dict(max_num_seqs=65536, max_model_len=2**28),
            r"max_num_seqs 65536 needs \d+ bytes for each sequence's state",
        ),
        (
            dict(max_model_len=2**28),
            r"tables of \d+ bytes for max_model_len \d+ and max_num_seqs \d+, are more",
        ),
    ],
)
def test_tables_that_no_machine_holds_are_refused_before_they_are_made(option, words):
    model = config_from_json(
        CONFIG | {"max_position_embeddings": 2**28, "num_attention_heads": 1, "head_dim": 4096}, "config.json"
    )
    with pytest.raises(ConfigError, match=words):
        resolve_config(EngineConfig(device="cpu", **option), model)


HEAD = dict(method="eagle3", model="head", num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("free", "whole", "words"),
    [
        (1 << 28, 1 << 40, r"max_num_seqs 256 needs \d+ bytes for each sequence's state"),
        (1 << 40, 1 << 30, r"tables of \d+ bytes for max_model_len 1048576 and max_num_seqs 256, are more"),
    ],
)
def test_the_tokens_that_a_draft_head_reads_count_as_memory(free, whole, words, monkeypatch):
    """Regression: 4 bytes for each position of each sequence were left out, here a gibibyte."""
    monkeypatch.setattr("shoal.engine.resolve.available_bytes", lambda: free)
    monkeypatch.setattr("shoal.engine.resolve.total_bytes", lambda: whole)
    model = config_from_json(CONFIG | {"max_position_embeddings": 1 << 20}, "config.json")
    options = dict(device="cpu", max_num_seqs=256, max_num_batched_tokens=1024)
    resolve_config(EngineConfig(**options), model)
    resolve_config(EngineConfig(**options, speculative_config=HEAD | dict(method="ngram", model=None)), model)
    with pytest.raises(ConfigError, match=words):
        resolve_config(EngineConfig(**options, speculative_config=HEAD), model)


def test_what_a_stranger_wrote_reaches_a_log_printable_and_short():
    error = CheckpointError("the tensor \x1b[2J\ud800\n" + "x" * 10**6)
    assert str(error).isprintable() and len(str(error)) <= MAX_MESSAGE
    assert str(error).startswith(r"the tensor \x1b[2J\ud800\nxxx")
    assert str(CheckpointError(str(error))) == str(error)

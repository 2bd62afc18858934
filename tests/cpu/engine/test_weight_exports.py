"""An engine that begins with the weights of another one: it is what files would have made of it, whatever the
owner does meanwhile."""

import logging
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal import LLM
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.lifecycle import weight_exports
from shoal.engine.runner import rank_export
from shoal.engine.runner.rank_export import RankExport, WeightsExport
from shoal.errors import CheckpointError, UnavailableError
from shoal.models.shapes import checkpoint_shapes
from shoal.weights.fingerprint import tensors_fingerprint
from shoal.weights.source import CheckpointFiles, resolve
from tests import quantized, tiny
from tests.cpu.weights.test_weights_gguf import write_gguf

KINDS = [*quantized.SCHEMES, *quantized.BY_INPUTS, "fp8-blocks", "fp8-auto", "fp8-fbgemm"]
FP8 = [kind for kind in KINDS if "fp8" in kind]
OPTIONS = {"device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 4}
READ_FROM_PEER, FROM_FILES = "has its weights from another worker, by", "reads the weights from files"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture
def owner(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: caplog.text


def lend(llm, folder, borrower="b"):
    return llm.core.exports.export(tensors_fingerprint(resolve(str(folder))), borrower)


def begin(folder, data, **options):
    """The checksums of an engine that begins with this loan."""
    config = EngineConfig(model=str(folder), **OPTIONS | options)
    core = EngineCore(config, resolve(str(folder)), peer_weights=data)
    try:
        return core.check_weights()
    finally:
        core.exit()


def only(name, monkeypatch):
    """Weights travel by this way alone."""
    ways = rank_export._ways
    monkeypatch.setattr(
        rank_export, "_ways", lambda device: [way for way in ways(device) if way.name == name]
    )


@pytest.mark.parametrize("way", ["shared memory", "NIXL"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_come_by_each_way_as_they_lie_in_the_owners_memory(folder, said, monkeypatch, way, dtype):
    if way == "NIXL":
        pytest.importorskip("nixl")
    only(way, monkeypatch)
    with LLM(str(folder), dtype=dtype, **OPTIONS) as owner:
        found = begin(folder, lend(owner, folder), dtype=dtype)
        assert found == owner.core.check_weights()
    assert f"{READ_FROM_PEER} {way}" in said()


@pytest.mark.parametrize("kind", FP8)
def test_checkpoints_in_fp8_come_as_they_lie(kind, tmp_path, said):
    quantized.write(tmp_path, kind)
    with LLM(str(tmp_path), **OPTIONS) as owner:
        assert owner.config.keep_quantized
        assert begin(tmp_path, lend(owner, tmp_path)) == owner.core.check_weights()
    assert READ_FROM_PEER in said()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FP8] + ["gguf"])
def test_weights_whose_numbers_decide_how_they_lie_are_not_lent(kind, tmp_path, said):
    path = tmp_path
    if kind == "gguf":
        write_gguf(path := tmp_path / "model.gguf", "qwen3", "Q8_0")
    else:
        quantized.write(path, kind)
    layout = weight_exports.layout_of
    with LLM(str(path), skip_tokenizer_init=True, **OPTIONS) as owner:
        with pytest.raises(UnavailableError, match="depends on their values"):
            owner.core.exports.export(b"any", "b")
        data = rank_export.encode(WeightsExport(layout(owner.config), [b""]))
        assert begin(path, data, skip_tokenizer_init=True) == owner.core.check_weights()
    assert "depends on their values" in said()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "llama"])
def test_what_becomes_fp8_while_it_loads_comes_as_fp8(name, tmp_path, said):
    folder = tiny.write_model(tmp_path, name)
    with LLM(str(folder), quantization="fp8", **OPTIONS) as owner:
        assert begin(folder, lend(owner, folder), quantization="fp8") == owner.core.check_weights()
    assert READ_FROM_PEER in said()


def test_each_rank_has_its_shard_from_the_owners_rank(folder, said, capfd):
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as owner:
        found = begin(folder, lend(owner, folder), tensor_parallel_size=2)
        assert found == owner.core.check_weights()
        assert {name.split(".")[0] for name in found} == {"rank0", "rank1"}
    told = said() + capfd.readouterr().err
    assert f"rank 0 {READ_FROM_PEER}" in told and FROM_FILES not in told  # which rank 1 would say aloud


def test_other_weights_are_not_lent(owner, folder, tmp_path):
    other = tiny.write_changed(folder, tmp_path / "other")
    with pytest.raises(UnavailableError, match="this engine has other weights"):
        lend(owner, other)
    assert lend(owner, shutil.copytree(folder, tmp_path / "same"))  # whatever their path


def test_weights_that_are_no_checkpoints_are_not_lent(owner, folder):
    tensor = torch.zeros(tiny_shape(owner))
    owner.update_weights_from_tensors({"model.norm.weight": tensor})
    with pytest.raises(UnavailableError, match="differ from every checkpoint"):
        lend(owner, folder)
    with LLM(str(folder), load_format="dummy", **OPTIONS) as dummy, pytest.raises(UnavailableError):
        lend(dummy, folder)


def tiny_shape(llm):
    return dict(checkpoint_shapes(llm.core.model_config))["model.norm.weight"]


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_sleep_are_not_lent(folder, level):
    with LLM(str(folder), enable_sleep_mode=True, **OPTIONS) as owner:
        lend(owner, folder)
        owner.sleep(level)
        with pytest.raises(UnavailableError):
            lend(owner, folder)
        owner.wake_up()
        if level == 1:
            assert lend(owner, folder)


def test_numbers_that_changed_meanwhile_are_found_out_and_files_are_read(owner, folder, said, monkeypatch):
    pytest.importorskip("nixl")
    only("NIXL", monkeypatch)  # it reads the owner's own memory
    before, data = owner.core.check_weights(), lend(owner, folder)
    owner.core.ranks.runner.model.norm.weight.data.mul_(2)
    assert begin(folder, data) == before
    assert "1 tensors changed" in said() and FROM_FILES in said()


@pytest.mark.parametrize("end", ["taken back", "new weights", "too old"])
def test_a_loan_that_ended_makes_the_next_one_read_files(owner, folder, said, monkeypatch, end):
    only("shared memory", monkeypatch)
    data, exports = lend(owner, folder), owner.core.exports
    if end == "taken back":
        lend(owner, folder, "another")
        exports.end("b")
        exports.end("b")
        assert (
            begin(folder, data) == owner.core.check_weights() and READ_FROM_PEER in said()
        )  # there is another
        exports.end("another")
    elif end == "new weights":
        owner.update_weights(str(folder))
    else:
        monkeypatch.setattr(weight_exports, "EXPORT_S", -1.0)
        lend(owner, folder)
        owner.core.stats()  # a fleet asks for them all the time
    assert begin(folder, data) == owner.core.check_weights()
    assert FROM_FILES in said()
    assert lend(owner, folder)


def test_weights_that_lie_otherwise_are_read_from_files(owner, folder, said):
    found = begin(folder, lend(owner, folder), dtype="float16")
    assert found != owner.core.check_weights()
    assert "float16" in said() and "cannot be used" in said() and READ_FROM_PEER not in said()


def damaged(data):
    """Malformed exports, and the error of each."""
    whole = rank_export.decode(data, WeightsExport)
    rank = rank_export.decode(whole.ranks[0], RankExport)
    first, *rest = rank.tensors

    def with_rank(**changes):
        changed = RankExport(**{"tensors": rank.tensors, "ways": rank.ways} | changes)
        return rank_export.encode(WeightsExport(whole.layout, [rank_export.encode(changed)]))

    yield b"\x00nonsense", "cannot decode"
    yield rank_export.encode(WeightsExport(whole.layout, [])), "0 ranks"
    yield rank_export.encode(WeightsExport(whole.layout, [b"x"])), "cannot decode"
    yield with_rank(tensors=rest), "nothing"
    yield with_rank(tensors=[type(first)(first.name, first.dtype, (1, 2), first.checksum), *rest]), "(1, 2)"
    yield with_rank(ways={}), "does not offer it"
    yield with_rank(ways={"shared memory": b"x", "NIXL": b"\x91\x01"}), "cannot be read"


@pytest.mark.parametrize("number", range(7))
def test_a_loan_that_makes_no_sense_is_named_and_files_are_read(owner, folder, said, number):
    data, words = list(damaged(lend(owner, folder)))[number]
    assert begin(folder, data) == owner.core.check_weights()
    assert words in said() and READ_FROM_PEER not in said()


def test_an_owner_without_memory_for_a_copy_lends_by_other_ways_or_not(owner, folder, monkeypatch):
    only("shared memory", monkeypatch)
    monkeypatch.setattr(rank_export, "available_bytes", lambda: 1000)
    with pytest.raises(UnavailableError, match="no room in 1000 bytes"):
        lend(owner, folder)
    monkeypatch.undo()
    assert lend(owner, folder)


def test_a_way_that_fails_leaves_nothing_open(owner, folder, monkeypatch):
    def fail(self, tensors):
        raise AssertionError("a bug")

    monkeypatch.setattr(rank_export.NixlWay, "offer", fail)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(AssertionError):
            lend(owner, folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_whatever_fails_in_a_loan_the_files_are_read(owner, folder, said, monkeypatch):
    def fail(self, address, into):
        raise AssertionError("a bug")

    monkeypatch.setattr(rank_export.SharedMemoryWay, "read", fail)
    assert begin(folder, lend(owner, folder)) == owner.core.check_weights()
    assert FROM_FILES in said() and "a bug" in said()


def test_weights_are_named_by_what_each_tensor_holds(folder, tmp_path):
    name = tensors_fingerprint(CheckpointFiles(folder))
    copy = CheckpointFiles(shutil.copytree(folder, tmp_path / "copy"))
    assert tensors_fingerprint(copy) == name
    weights, names = load_file(folder / "model.safetensors"), {name}
    for tensor in weights.values():
        tensor.add_(1)
        save_file(weights, copy.folder / "model.safetensors", metadata={"format": "pt"})
        names.add(tensors_fingerprint(copy))
    assert len(names) == len(weights) + 1
    (copy.folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        tensors_fingerprint(copy)


def test_tensors_of_any_size_are_sampled_from_end_to_end(tmp_path, folder, monkeypatch):
    copy = CheckpointFiles(shutil.copytree(folder, tmp_path / "copy"))
    weights = {"a": torch.zeros(300, 300), "b": torch.zeros(70_000), "c": torch.zeros(3)}
    found = set()
    for name, index in [(None, 0), ("a", 0), ("a", -1), ("b", 0), ("b", -1), ("c", 2)]:
        changed = {key: tensor.clone() for key, tensor in weights.items()}
        if name is not None:
            changed[name].view(-1)[index] = 1
        save_file(changed, copy.folder / "model.safetensors")
        found.add(tensors_fingerprint(copy))
    assert len(found) == 6

"""Tensors of a process that does not keep to the rules: the engine says what is wrong and lives on."""

import fcntl
import mmap
import os
import socket
import threading

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.errors import CheckpointError, ConfigError, ShoalError, UnavailableError
from shoal.weights import transfer
from shoal.weights.transfer import SharedTensors, open_tensor
from tests import tiny

NAME = "model.norm.weight"
PROMPT = [1, 2, 3]


def generate(llm):
    return list(
        llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
        .outputs[0]
        .token_ids
    )


@pytest.fixture(scope="module")
def llm(folder):
    llm = LLM(str(folder), dtype="float32", max_model_len=256, device="cpu", kv_cache_memory_bytes=8 << 20)
    yield llm
    llm.exit()


@pytest.fixture
def handle():
    with SharedTensors({NAME: torch.ones(48)}) as shared:
        yield dict(shared.handles[0])


def test_a_handle_that_is_right_is_taken(llm, folder, handle):
    assert generate(llm) == tiny.greedy(folder, PROMPT, 8)
    llm.update_weights_from_tensors([handle])
    assert generate(llm) != tiny.greedy(folder, PROMPT, 8)
    llm.update_weights(str(folder))


WRONG = {
    "dtype": ["nn", "float33", "int64", "complex64", 5, None, "__class__"],
    "shape": [[47], [-48], [2**62, 4], ["48"], None, [], [48.0], 48],
    "name": ["other", None, ["a"], "x" * 10_000, "model.norm.weight\0"],
    "offset": [-4, 1, 1 << 40, 10**30, "0", None],
    "pid": [0, -1, 2**31, "self", "../../etc", None, 10**40],
    "fd": [0, -1, 10**9, "../environ", None],
    "cuda": [[], [1, 2, 3], None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_a_wrong_handle_is_refused_and_the_engine_lives(field, value, llm, folder, handle):
    before = generate(llm)
    with pytest.raises(ShoalError) as error:
        llm.update_weights_from_tensors([handle | {field: value}])
    assert isinstance(error.value, CheckpointError | ConfigError) and len(str(error.value)) < 20_000
    try:
        assert generate(llm) == before  # nothing had begun ...
    except UnavailableError as gone:  # ... or it says that the weights are gone
        assert "update_weights" in str(gone)
    llm.update_weights(str(folder))
    assert generate(llm) == tiny.greedy(folder, PROMPT, 8)


@pytest.mark.parametrize(
    "given",
    [[], [{}], [None], [[]], ["x"], "handles", [{"name": NAME}], {"a": 1}, {1: torch.ones(1)}],
    ids=str,
)
def test_what_is_no_list_of_handles_changes_nothing(given, llm, folder):
    try:
        llm.update_weights_from_tensors(given)
    except (CheckpointError, ConfigError):
        pass
    assert generate(llm) == tiny.greedy(folder, PROMPT, 8)


@pytest.mark.parametrize("kind", ["memory that may shrink", "a file", "a pipe", "a device"])
def test_memory_that_its_sender_may_take_away_is_refused(kind, handle, tmp_path):
    """A read of a missing page would end the process by a signal."""
    if kind == "memory that may shrink":
        fd = os.memfd_create("shrinks", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, mmap.PAGESIZE)
    elif kind == "a file":
        (tmp_path / "file").write_bytes(bytes(mmap.PAGESIZE))
        fd = os.open(tmp_path / "file", os.O_RDWR)
    elif kind == "a pipe":
        os.mkfifo(tmp_path / "pipe")
        fd = os.open(tmp_path / "pipe", os.O_RDWR)
    else:
        fd = os.open("/dev/zero", os.O_RDWR)
    try:
        with pytest.raises(CheckpointError, match="cannot be opened"):
            open_tensor(handle | {"fd": fd, "offset": 0})
    finally:
        os.close(fd)


def test_a_sender_cannot_shrink_what_it_shares(handle):
    with pytest.raises(PermissionError):
        os.ftruncate(handle["fd"], 0)
    assert fcntl.fcntl(handle["fd"], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_weights_that_are_no_numbers_end_no_engine(llm, folder):
    for value in (float("nan"), float("inf"), -float("inf"), 1e38):
        llm.update_weights_from_tensors({NAME: torch.full((48,), value)})
        for params in (
            SamplingParams(temperature=0.0, max_tokens=4),
            SamplingParams(temperature=1.0, seed=1, max_tokens=4, logprobs=3),
        ):
            ids = llm.generate([PROMPT], params)[0].outputs[0].token_ids
            assert all(0 <= token < tiny.VOCAB for token in ids)
    llm.update_weights(str(folder))
    assert generate(llm) == tiny.greedy(folder, PROMPT, 8)


@pytest.mark.parametrize(
    "says",
    [None, b"", b"\xff" * 64, b"HTTP/1.1 400 Bad Request\r\n\r\n"],
    ids=["nothing", "goodbye", "ones", "http"],
)
def test_a_trainer_that_is_none_is_given_up_in_time(says, llm, folder, monkeypatch):
    monkeypatch.setattr(transfer, "MEET_GRACE_S", 0.5)
    monkeypatch.setattr(transfer.WeightsGroup.__init__, "__defaults__", (1.0,))
    held = []

    def peer(listener):
        while True:
            try:
                held.append(listener.accept()[0])
                if says is not None:
                    held[-1].sendall(says)
                if says == b"":
                    held[-1].close()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=peer, args=(listener,), daemon=True).start()
        with pytest.raises(UnavailableError, match="was not formed"):
            llm.init_weights_update_group("127.0.0.1", listener.getsockname()[1], 1, 2, backend="gloo")
    for connection in held:
        connection.close()
    assert generate(llm) == tiny.greedy(folder, PROMPT, 8)

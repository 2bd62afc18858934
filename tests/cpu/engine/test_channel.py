"""Messages arrive unchanged through the ring: any size, any number of readers, nothing overwritten before it is read."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from shoal.engine.ranks.channel import PREFIX, ChannelReader, ChannelWriter, pack, unpack
from shoal.errors import EngineDeadError


def through(message):
    data = b"".join(pack(message))
    head_size, body_size = PREFIX.unpack_from(data)
    assert len(data) == PREFIX.size + head_size + body_size
    return unpack(
        data[PREFIX.size : PREFIX.size + head_size],
        np.frombuffer(bytearray(data[PREFIX.size + head_size :]), np.uint8),
    )


@pytest.fixture
def channel():
    """(writer, readers) of a ring of 256 bytes, so that everything wraps around."""
    made = []

    def make(num_readers=1, ring_bytes=256, on_interrupt=lambda: None):
        interrupt_fd = os.eventfd(0)
        writer = ChannelWriter(num_readers, interrupt_fd, on_interrupt, ring_bytes)
        readers = [ChannelReader(*writer.reader_fds(i)) for i in range(num_readers)]
        made.append((interrupt_fd, writer, readers))
        return writer, readers

    yield make
    for interrupt_fd, writer, readers in made:
        for reader in readers:
            reader.close()
        writer.close()
        os.close(interrupt_fd)


@pytest.mark.parametrize(
    "message",
    [
        None,
        True,
        0,
        -1,
        2**63,
        1.5,
        "",
        "ünï",
        b"",
        b"\x00\xff",
        [],
        [1, [2, [3]]],
        {},
        {"a": {"b": [None]}},
        {1: "one"},
        ["method", 1, {"kv_cache_memory_bytes": None, "device": "cpu"}],
    ],
    ids=repr,
)
def test_plain_data_arrives_as_it_was(message):
    assert through(message) == message


def test_tuples_arrive_as_lists_and_numpy_scalars_as_numbers():
    assert through((1, (np.int64(2), np.float32(0.5), np.bool_(True)))) == [1, [2, 0.5, True]]


@pytest.mark.parametrize(
    "dtype", ["int8", "int32", "int64", "uint64", "float16", "float32", "float64", "bool", "complex64", ">i4"]
)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0, 2), (5, 3, 2)], ids=str)
def test_arrays_arrive_as_they_were(dtype, shape):
    array = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    arrived = through({"x": [array, 1]})["x"][0]
    assert arrived.dtype == array.dtype and arrived.shape == array.shape and np.array_equal(arrived, array)
    assert arrived.flags.writeable


def test_strided_arrays_and_several_in_one_message_arrive_as_they_were():
    base = np.arange(60, dtype=np.int32).reshape(6, 10)
    first, second, third = through([base[::2, 1::3], base.T, {"deep": base[0]}])
    assert (
        np.array_equal(first, base[::2, 1::3])
        and np.array_equal(second, base.T)
        and np.array_equal(third["deep"], base[0])
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)], ids=str)
def test_tensors_arrive_as_they_were(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    arrived = through([tensor])[0]
    assert (
        arrived.dtype == dtype
        and arrived.shape == tensor.shape
        and torch.equal(arrived.float(), tensor.float())
    )


def test_transposed_tensors_that_need_gradients_arrive_as_they_were():
    tensor = torch.nn.Parameter(torch.randn(4, 6)).T
    assert torch.equal(through(tensor), tensor)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, 1j, np.array([object()]), np.zeros(2, "i4,f4"), torch.empty(1, device="meta")],
    ids=["object", "function", "complex", "objects", "records", "meta tensor"],
)
def test_what_is_not_plain_data_is_refused_with_its_type(value):
    with pytest.raises(TypeError) as error:
        pack(["x", {"y": value}])
    assert type(value).__name__ in str(error.value) or "meta" in str(error.value)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 100_000])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_messages_of_any_size_reach_every_reader(size, num_readers, channel):
    writer, readers = channel(num_readers)
    message = {"array": np.arange(size, dtype=np.uint8), "name": "x" * (size % 999)}
    thread = threading.Thread(target=lambda: [writer.put(pack(message)) for _ in range(3)])
    thread.start()
    for _ in range(3):
        # Each reader must run while the writer waits for the others: in threads, as in processes.
        results = in_threads([reader.get for reader in readers])
        assert all(
            np.array_equal(r["array"], message["array"]) and r["name"] == message["name"] for r in results
        )
    thread.join()


def test_a_random_stream_arrives_in_order_at_readers_of_different_speed(channel):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    writer, readers = channel(2, ring_bytes=1024)
    sizes = [rng.choice((0, 1, 50, 300, 1024, 5000)) for _ in range(300)]
    pauses = [rng.random() < 0.05 for _ in sizes]

    def read(reader, slow):
        for i, size in enumerate(sizes):
            number, array = reader.get()
            assert number == i and len(array) == size and (array == i % 251).all()
            if slow and pauses[i]:
                threading.Event().wait(0.001)
        return True

    thread = threading.Thread(
        target=lambda: [writer.put(pack((i, np.full(n, i % 251, np.uint8)))) for i, n in enumerate(sizes)]
    )
    thread.start()
    assert in_threads([lambda: read(readers[0], False), lambda: read(readers[1], True)]) == [True, True]
    thread.join()


def test_the_writer_waits_for_the_slowest_reader(channel):
    writer, (fast, slow) = channel(2)
    thread = threading.Thread(target=lambda: [writer.put(pack(i)) for i in range(100)])
    thread.start()
    first = [fast.get() for _ in range(5)]
    thread.join(0.05)
    assert thread.is_alive(), "256 bytes cannot hold 100 messages"
    assert [slow.get() for _ in range(5)] == first
    rest = in_threads([lambda r=r: [r.get() for _ in range(95)] for r in (fast, slow)])
    thread.join()
    assert rest == [list(range(5, 100))] * 2


def test_an_interrupt_ends_the_wait_for_room_and_the_channel_with_it(channel):
    def dead():
        raise EngineDeadError("rank 1 died")

    writer, _ = channel(1, on_interrupt=dead)
    os.eventfd_write(writer.interrupt_fd, 1)
    writer.put(pack("fits, so nobody waits"))
    with pytest.raises(EngineDeadError, match="rank 1 died"):
        writer.put(pack(bytes(1000)))
    with pytest.raises(EngineDeadError, match="half way"):
        writer.put(pack(1))


def in_threads(functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(f) for f in functions]]

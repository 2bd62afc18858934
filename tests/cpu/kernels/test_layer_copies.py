"""Copies of a captured layer, over a driver with graphs of kernels and memsets: the same nodes as if every layer were
captured, and no copies where layers differ by more than their addresses."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from shoal.kernels.layer_copies import LayerCopies
from tests.cpu.fake_memory import needs_compiler

pytestmark = needs_compiler
NUM_LAYERS, SIZE, SHARED = 9, 4096, 0x500000
KERNELS, NODES = 3, 5  # A layer sets memory of its own and shared memory, too.
# The last kernel of a layer has its parameters as one buffer.


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).with_name("fake_graphs.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)
    library = ctypes.CDLL(str(path))
    library.fake_stream.restype = ctypes.c_void_p
    words = 2 * [ctypes.c_uint64]
    library.fake_launch.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
        *words,
        ctypes.c_int,
        ctypes.c_int,
    )
    library.fake_set.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    library.fake_nodes.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))
    library.path = str(path)
    return library


def spans(layer):
    """Weights and cache, whose distances from one layer to the next are not the same."""
    return [(0x10000 * (1 + layer * layer), SIZE), (0x9000000 + 0x2000 * layer, SIZE)]


def launch_layer(driver, stream, layer, **changed):
    (weights, _), (cache, _) = spans(layer)
    width = changed.pop("width", 64)
    for kernel in range(KERNELS):
        arguments = (
            dict(grid=7 + kernel, address=weights + 16 * kernel, described=cache + 64, number=5) | changed
        )
        if kernel == 1:
            arguments["described"] = SHARED
        driver.fake_launch(stream, 100 + kernel, *arguments.values(), kernel == 2)
    driver.fake_set(stream, weights + 32, width)
    driver.fake_set(stream, SHARED, 8)


def nodes(driver, stream):
    table = (ctypes.c_uint64 * 6000)()
    count = driver.fake_nodes(stream, table)
    return [tuple(table[6 * i : 6 * i + 6]) for i in range(count)][::-1]


def capture(driver, **changed):
    """The first layer and the last one have a kernel of their own. Returns the stream and the copies."""
    copies, stream = LayerCopies(driver.path), driver.fake_stream()
    copies.begin()
    driver.fake_launch(stream, 1, 1, SHARED, SHARED, 0, False)
    for layer in range(3):
        launch_layer(driver, stream, layer, **(changed if layer == 2 else {}))
        copies.mark(stream)
    added = copies.add(stream, spans(1), spans(2), [spans(layer) for layer in range(3, NUM_LAYERS - 1)])
    return stream, copies, added


def test_copies_are_the_kernels_that_every_layer_would_launch(driver):
    stream, copies, added = capture(driver)
    assert added and copies.refused is None
    launch_layer(driver, stream, NUM_LAYERS - 1)
    expected = driver.fake_stream()
    driver.fake_launch(expected, 1, 1, SHARED, SHARED, 0, False)
    for layer in range(NUM_LAYERS):
        launch_layer(driver, expected, layer)
    assert nodes(driver, stream) == nodes(driver, expected)
    assert len(nodes(driver, stream)) == 1 + NODES * NUM_LAYERS


@pytest.mark.parametrize(
    "changed",
    [dict(grid=8), dict(address=0x10000 * 5 + 8), dict(described=0x77), dict(number=6), dict(width=32)],
    ids=str,
)
def test_layers_that_differ_by_more_than_addresses_are_not_copied(driver, changed):
    stream, copies, added = capture(driver, **changed)
    assert not added and "kernel" in copies.refused
    assert len(nodes(driver, stream)) == 1 + 3 * NODES


def test_layers_of_unequal_memory_are_not_copied(driver):
    copies, stream = LayerCopies(driver.path), driver.fake_stream()
    copies.begin()
    for layer in range(3):
        launch_layer(driver, stream, layer)
        copies.mark(stream)
    other = [(start, 2 * size) for start, size in spans(3)]
    assert not copies.add(stream, spans(1), spans(2), [other]) and copies.refused


def test_a_driver_without_these_functions_is_refused(tmp_path):
    assert "nothing.so" in LayerCopies(str(tmp_path / "nothing.so")).refused

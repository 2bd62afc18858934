"""Arithmetic of views: strides, offsets, bounds, slices; elements; copies between kinds; torch, numpy and
DLPack."""

import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from shoal.kv.layout import CacheSpec, Layout, LayoutError
from shoal.kv.library.files import DirectFile, mapped_file
from shoal.kv.library.tensor_view import TensorView, blocks_of, layer_of
from shoal.kv.storage import Storage, StorageError, host_memory
from shoal.kv.view import BlockView, ViewError

F32 = torch.float32


@pytest.fixture(params=["host", "mapped", "direct"])
def make(request, tmp_path):
    def new(num_bytes: int) -> Storage:
        new.count += 1
        path = tmp_path / str(new.count)
        return {
            "host": lambda: host_memory(num_bytes),
            "mapped": lambda: mapped_file(path, num_bytes),
            "direct": lambda: DirectFile(path, num_bytes),
        }[request.param]()

    new.count = 0
    return new


def test_rows_are_strided_from_the_last_dimension():
    memory = host_memory(96)
    view = TensorView(memory, (2, 3, 4), F32)
    assert (view.strides, view.num_items, view.span, view.is_contiguous) == ((12, 4, 1), 24, 96, True)
    assert view.byte_offset(1, 2, 3) == 92
    assert not TensorView(memory, (2, 2, 4), F32, (12, 4, 1)).is_contiguous
    assert not TensorView(memory, (2, 3, 3), F32, (12, 4, 1)).is_contiguous
    assert TensorView(memory, (1, 3, 4), F32, (99, 4, 1)).is_contiguous
    assert TensorView(memory, (2, 0, 4), F32).is_contiguous


def test_a_slice_begins_where_its_first_item_is():
    view = TensorView(host_memory(96), (2, 3, 4), F32)
    part = view.slice(1, 1, 3)
    assert (part.offset, part.shape, part.strides, part.is_contiguous) == (16, (2, 2, 4), (12, 4, 1), False)
    assert part.byte_offset(1, 1, 3) == view.byte_offset(1, 2, 3)
    assert part.slice(0, 1, 2).slice(2, 3, 4).byte_offset(0, 0, 0) == view.byte_offset(1, 1, 3)
    assert view.slice(1, 2, 2).num_items == 0
    for wrong in ((3, 0, 1), (-1, 0, 1), (1, 0, 4), (1, 2, 1), (1, -1, 1)):
        with pytest.raises(ViewError, match="no slice"):
            view.slice(*wrong)


def test_bounds_hold_to_the_last_item():
    memory = host_memory(100)
    with pytest.raises(ViewError, match=r"up to byte offset 108, but the storage has 100 bytes"):
        TensorView(memory, (3, 3, 3), F32)
    TensorView(memory, (25,), F32)
    with pytest.raises(ViewError, match="104"):
        TensorView(memory, (25,), F32, offset=4)
    # 24 * 4 + 4: the last item ends where the storage does, whatever the strides would allow.
    TensorView(memory, (3, 5), F32, (10, 1))
    with pytest.raises(ViewError, match="104"):
        TensorView(memory, (3, 6), F32, (10, 1))
    TensorView(memory, (0, 1000), F32)
    for shape, strides, offset in (((2,), (1, 1), 0), ((-1,), (1,), 0), ((2,), (-1,), 0), ((2,), (1,), -4)):
        with pytest.raises(ViewError, match="make no view"):
            TensorView(memory, shape, F32, strides, offset)
    with pytest.raises(ViewError, match="not aligned"):
        TensorView(memory, (2,), F32, offset=2)


def test_items_one_by_one(make):
    view = TensorView(make(200), (2, 3, 4), F32, offset=8)
    view.fill(0)
    view[1, 2, 3], view[0, 0, 0] = 5, -1.5
    assert (view[1, 2, 3], view[0, 0, 0], view[0, 0, 1]) == (5, -1.5, 0)
    assert view.slice(0, 1, 2).slice(1, 2, 3)[0, 0, 3] == 5
    line = TensorView(view.storage, (3,), torch.int16, offset=2)
    line[2] = -7
    assert line[2] == -7
    for index in ((2, 0, 0), (0, 0), (0, 0, -1), (0, 3, 0)):
        with pytest.raises(ViewError, match="outside of shape"):
            view[index]
        with pytest.raises(ViewError):
            view[index] = 1


def test_fill_touches_what_the_view_has_and_nothing_else(make):
    whole = TensorView(make(400), (10, 10), F32)
    whole.fill(1)
    whole.slice(0, 2, 4).slice(1, 3, 9).fill(2)
    expected = np.ones((10, 10))
    expected[2:4, 3:9] = 2
    assert [[whole[i, j] for j in range(10)] for i in range(10)] == expected.tolist()


def test_random_slices_copied_between_any_two_kinds(tmp_path):
    seed = 11
    rng = random.Random(seed)
    print("seed", seed)
    kinds = [
        host_memory,
        lambda n: mapped_file(tmp_path / f"m{rng.random()}", n),
        lambda n: DirectFile(tmp_path / f"d{rng.random()}", n),
    ]
    for _ in range(60):
        shape = [rng.randint(1, 6) for _ in range(3)]
        views, arrays = [], []
        for _ in range(2):
            size = [n + rng.randrange(4) for n in shape]
            offset = 4 * rng.randrange(5)
            view = TensorView(
                rng.choice(kinds)(offset + 4 * int(np.prod(size))), size, torch.int32, offset=offset
            )
            array = np.random.default_rng(rng.randrange(1 << 30)).integers(-100, 100, size).astype(np.int32)
            TensorView.of(array).copy_to(view)
            starts = [rng.randint(0, big - n) for big, n in zip(size, shape)]
            part = view
            for dim, (start, n) in enumerate(zip(starts, shape)):
                part = part.slice(dim, start, start + n)
            views.append((view, part))
            arrays.append((array, array[tuple(slice(start, start + n) for start, n in zip(starts, shape))]))
        (_, src), (whole, dst) = views
        src.copy_to(dst)
        arrays[1][1][...] = arrays[0][1]
        got = np.zeros_like(arrays[1][0])
        whole.copy_to(TensorView.of(got))
        assert (got == arrays[1][0]).all()


def test_copies_within_one_storage_do_not_run_into_themselves(make):
    view = TensorView(make(40), (10,), F32)
    for i in range(10):
        view[i] = i
    view.slice(0, 0, 8).copy_to(view.slice(0, 2, 10))
    assert [view[i] for i in range(10)] == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]


def test_copies_between_two_storages_over_one_memory_do_not_run_into_themselves():
    numbers = torch.arange(10.0)
    TensorView.of(numbers[:8]).copy_to(TensorView.of(numbers[2:]))
    assert numbers.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]


def test_views_that_do_not_match_are_not_copied():
    memory = host_memory(100)
    view = TensorView(memory, (2, 3), F32)
    with pytest.raises(ViewError, match=r"\(2, 3\).*\(3, 2\)"):
        view.copy_to(TensorView(memory, (3, 2), F32))
    with pytest.raises(ViewError, match="int32"):
        view.copy_to(TensorView(memory, (2, 3), torch.int32))
    with pytest.raises(ViewError, match="from host to host"):
        view.h2d(TensorView(memory, (2, 3), F32))


def test_torch_and_numpy_share_the_memory():
    view = TensorView(host_memory(400), (4, 5), F32, (20, 2), offset=40)
    view.tensor()[3, 4] = 7
    assert (
        view[3, 4] == 7
        and view.array()[3, 4] == 7
        and np.from_dlpack(view)[3, 4] == 7
        and torch.from_dlpack(view)[3, 4] == 7
    )
    view.array()[1, 2] = 5
    assert view.tensor()[1, 2] == 5 and view[1, 2] == 5
    assert view.tensor().stride() == (20, 2) and view.array().strides == (80, 8)
    halves = TensorView(view.storage, (4,), torch.bfloat16)
    halves.tensor()[0] = 1
    with pytest.raises(ViewError, match="numpy has no"):
        halves.array()
    numbers = np.arange(12, dtype=np.int64).reshape(3, 4)[:, 1:]
    over = TensorView.of(numbers)
    over[2, 0] = 99
    assert numbers[2, 0] == 99 and over.strides == (4, 1)
    tensor = torch.zeros(3, 4, 5).permute(2, 0, 1)[1:]
    TensorView.of(tensor).slice(0, 0, 1).fill(3)
    assert (tensor[0] == 3).all() and not tensor[1:].any()


def test_a_file_past_the_page_cache_shares_nothing(tmp_path):
    view = TensorView(DirectFile(tmp_path / "blocks", 100), (5,), F32)
    for take in (view.tensor, view.array, lambda: np.from_dlpack(view)):
        with pytest.raises(StorageError, match="no memory to share"):
            take()


def test_read_only_views_can_be_read():
    memory = host_memory(100)
    TensorView(memory, (5,), F32).fill(2)
    view = TensorView(memory, (5,), F32, mutable=False)
    assert view[3] == 2 and view.array().sum() == 10 and view.slice(0, 1, 3).array().tolist() == [2, 2]
    for write in (
        lambda: view.fill(1),
        lambda: view.__setitem__(0, 1),
        view.tensor,
        lambda: view.slice(0, 0, 2).fill(1),
        lambda: TensorView(memory, (5,), F32).copy_to(view),
        lambda: torch.from_dlpack(view),
    ):
        with pytest.raises(ViewError, match="read-only"):
            write()
    with pytest.raises(ValueError, match="read-only"):
        view.array()[0] = 1


SPEC = CacheSpec(Layout.KV_FIRST, 2, 4, 8, "float16", 4, num_blocks=3)


def test_layers_are_read_only_unless_asked_for():
    cache = BlockView.over(SPEC, host_memory(SPEC.num_bytes))
    with pytest.raises(ViewError, match="read-only"):
        layer_of(cache, 1).fill(1)
    layer_of(cache, 1, mutable=True).fill(1)
    assert layer_of(cache, 1).array().all() and not layer_of(cache, 0).array().any()
    with pytest.raises(LayoutError, match="layers go from 0 to 1"):
        layer_of(cache, 2)
    with pytest.raises(ViewError, match="byte offset"):
        BlockView.over(replace(SPEC, num_blocks=4), cache.storage)


def test_an_engines_cache_as_blocks():
    kv = torch.arange(5 * 2 * 2 * 4 * 4 * 8).view(5, 2, 2, 4, 4, 8).half()
    spec = CacheSpec(Layout.WHOLE_BLOCKS, 2, 4, 8, "float16", 4, num_blocks=5)
    cache = blocks_of(spec, kv)
    assert all(torch.equal(layer_of(cache, i, mutable=True).tensor(), kv[:, i]) for i in range(2))
    same = BlockView.over(spec, cache.storage)
    assert [layer.strides for layer in (layer_of(same, 1), layer_of(cache, 1))] == [kv[:, 1].stride()] * 2
    assert (same.addresses == cache.addresses).all()
    with pytest.raises(LayoutError, match="whole_blocks"):
        blocks_of(SPEC, kv)
    with pytest.raises(LayoutError, match="layer 0 has shape"):
        blocks_of(spec, kv[:, :, :, :2])
    with pytest.raises(LayoutError, match="layer 0 has shape"):
        blocks_of(spec, kv[:4])
    with pytest.raises(LayoutError, match="1 layers"):
        blocks_of(spec, kv[:, :1])
    with pytest.raises(LayoutError, match=r"6 dimensions .* not 1"):
        blocks_of(spec, kv.view(-1))


def test_layers_that_make_no_cache():
    memory = host_memory(1 << 16)
    layer = TensorView(memory, SPEC.layer_shape, torch.float16)
    BlockView(SPEC, [layer, TensorView(host_memory(1 << 16), SPEC.layer_shape, torch.float16)])
    for second, said in (
        (TensorView(memory, replace(SPEC, num_blocks=4).layer_shape, torch.float16), "layer 1 has shape"),
        (TensorView(memory, SPEC.layer_shape, torch.bfloat16), "layer 1 has shape"),
        (TensorView(memory, SPEC.layer_shape, torch.float16, (4096, 256, 64, 8, 1)), "strides"),
    ):
        with pytest.raises(LayoutError, match=said):
            BlockView(SPEC, [layer, second])


def test_layers_of_one_cache_lie_in_one_kind_of_storage(tmp_path):
    storages = (host_memory(1 << 16), mapped_file(tmp_path / "m", 1 << 16))
    layers = [TensorView(storage, SPEC.layer_shape, torch.float16) for storage in storages]
    with pytest.raises(LayoutError, match="is in mapped storage"):
        BlockView(SPEC, layers)

"""Snapshots of one tensor-parallel size become snapshots of another: by heads and channels, as each size has them."""

import pytest
import torch

from shoal.engine.runner.state_rows import plan_states
from shoal.kinds.recurrent import ChannelDeltaKind
from shoal.kv.layout import CacheSpec, Layout, LayoutError
from shoal.kv.storage import host_memory
from shoal.kv.transfer.states import StateInbox
from shoal.kv.view import BlockView
from shoal.model_config import LayerKind, ModelConfig
from tests.cpu.engine.test_state_rows import CONV, DELTA, MAMBA, Options

KIMI = ChannelDeltaKind(4, 8, key_dim=8, value_dim=4, conv_width=3)
KINDS = [DELTA, MAMBA, CONV, KIMI]
BLOCK_BYTES = {1: 4096, 2: 2048, 4: 1536, 3: 1536}  # not in proportion, as where KV heads are copied


def plan(tp_size):
    model = ModelConfig("llama", 100, 48, 96, 512, 1e-5, tuple(map(LayerKind, KINDS)))
    return plan_states(Options(tensor_parallel_size=tp_size), model, BLOCK_BYTES[tp_size])


def share(whole, num_heads, rank, tp_size):
    """The heads of a rank, of a tensor whose first axis has the heads of the model. Ranks share a head if there are
    more ranks."""
    width, held = len(whole) // num_heads, max(1, num_heads // tp_size)
    first = rank * num_heads // tp_size
    return whole[first * width : (first + held) * width]


def row_of(rank, tp_size):
    """A row as the layers of a rank would write it, from numbers that are the same for all sizes."""
    row = torch.zeros(plan(tp_size).row_bytes, dtype=torch.uint8)
    torch.manual_seed(5)
    for (conv, state), kind in zip(plan(tp_size).layers.values(), KINDS):
        if kind is MAMBA:
            sections = [(8, 8 * 4), (1, 16), (1, 16)]
        elif kind is CONV:
            sections = [(48, 48)]
        else:
            keys, values = kind.num_key_heads, kind.num_value_heads
            sections = [(keys, keys * kind.key_dim)] * 2 + [(values, values * kind.value_dim)]
        whole = [(torch.randn(size, kind.conv_width - 1), heads) for heads, size in sections]
        channels = torch.cat([share(one, heads, rank, tp_size) for one, heads in whole])
        conv.view(row[None])[0].copy_(channels)
        if state is not None:
            heads = kind.state_shape(1)[0]
            state.view(row[None])[0].copy_(share(torch.randn(kind.state_shape(1)), heads, rank, tp_size))
    return row


def cache(tp_size, rank, num_blocks):
    size = BLOCK_BYTES[tp_size]
    spec = CacheSpec(Layout.WHOLE_BLOCKS, 1, tp_size, size, "uint8", 1, num_blocks, rank, tp_size, planes=1)
    return BlockView.over(spec, host_memory(num_blocks * size))


@pytest.mark.parametrize("theirs, own", [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_a_snapshot_becomes_each_ranks_own(theirs, own):
    layouts = [plan(size).row_layout(size) for size in (theirs, own)]
    for rank in range(own):
        into = cache(own, rank, 100)
        inbox = StateInbox(*layouts, into)
        first, num_ranks = inbox.view.spec.first_head, inbox.view.spec.heads
        assert num_ranks == max(1, theirs // own)
        rows = [row_of(src_rank, theirs).view(-1, BLOCK_BYTES[theirs]) for src_rank in range(theirs)]
        arrived = torch.stack(rows[first : first + num_ranks], 1)
        inbox.view.storage.tensor().copy_(arrived.flatten())
        blocks = list(range(3, 3 + 2 * layouts[1].num_blocks, 2))
        inbox.unpack(blocks)
        written = into.storage.tensor().view(100, -1)
        assert torch.equal(written[blocks].flatten(), row_of(rank, own))
        assert not written[[i for i in range(100) if i not in blocks]].any()


def test_sizes_that_do_not_divide_each_other_are_refused():
    layouts = [plan(2).row_layout(2), plan(4).row_layout(3)]
    with pytest.raises(LayoutError, match="tp_size 3 neither divides 2"):
        StateInbox(*layouts, cache(3, 0, 4))

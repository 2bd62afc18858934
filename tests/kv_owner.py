"""A worker that offers KV blocks, for tests: in this process, or in one of its own that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
from msgspec.structs import replace

from shoal.kv.blocks import BlockPool
from shoal.kv.layout import ITEM_BYTES, CacheSpec
from shoal.kv.library.tensor_view import TensorView, layer_of
from shoal.kv.storage import device_memory, host_memory, pinned_memory, shared_memory
from shoal.kv.transfer.advance import Advancer
from shoal.kv.transfer.offer_server import OfferServer
from shoal.kv.transfer.offers import Offers
from shoal.kv.transfer.registry import TRANSPORTS, Exports, Transports
from shoal.kv.transfer.ticket import ExportAddress
from shoal.kv.transfer.transport import Reach
from shoal.kv.view import BlockView
from tests.kv_cases import AXES, on_host

MODEL = b"the model of tests"
SPAWN = multiprocessing.get_context("spawn")
KINDS = {kind.name: kind for kind in TRANSPORTS}
ALLOCATE = {
    "host": host_memory,
    "shared": shared_memory,
    "pinned": pinned_memory,
    "device": device_memory,
    "last device": lambda num_bytes: device_memory(num_bytes, f"cuda:{torch.cuda.device_count() - 1}"),
}


def logical(spec: CacheSpec, seed: int) -> torch.Tensor:
    """Content of all ranks' caches together: random bytes, [layers, blocks, planes, tokens, heads, bytes of
    a head]."""
    shape = (spec.num_layers, spec.num_blocks, spec.planes, spec.block_size, spec.num_heads)
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (*shape, spec.head_dim * ITEM_BYTES[spec.dtype]), np.uint8))


def share_of(content: torch.Tensor, spec: CacheSpec) -> torch.Tensor:
    """The heads that one rank has."""
    return content[..., spec.first_head : spec.first_head + spec.heads, :]


def fill(view: BlockView, content: torch.Tensor, blocks: Sequence[int] | None = None) -> None:
    """Writes a rank's share of `content` into its cache, or into some blocks of it."""
    order = [AXES.index(axis) for axis in view.spec.layout.axes]
    block_axis = view.spec.layout.axes.index("block")
    which = list(range(view.spec.num_blocks)) if blocks is None else list(blocks)
    for i in range(view.spec.num_layers):
        fill_layer(layer_of(view, i, mutable=True), share_of(content[i], view.spec), order, block_axis, which)


def fill_layer(
    layer: TensorView, content: torch.Tensor, order: list[int], block_axis: int, which: list[int]
) -> None:
    items, ids = content.contiguous().view(layer.dtype).permute(order), torch.tensor(which)
    tensor = on_host(layer)
    tensor.index_copy_(block_axis, ids, items.index_select(block_axis, ids))
    TensorView.of(tensor).copy_to(layer)


def ranks_of(spec: CacheSpec, tp_size: int) -> list[CacheSpec]:
    return [replace(spec, tp_size=tp_size, tp_rank=rank) for rank in range(tp_size)]


def with_equal_blocks(specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """A rank's groups of layers, with the padding that makes their blocks as large."""
    block_bytes = max(spec.block_bytes for spec in specs)
    return [replace(spec, padding=block_bytes - spec.block_bytes) for spec in specs]


class Owner:
    """All ranks of one worker, whose caches hold `logical(spec, seed)`, with exports of some transports."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        seed: int,
        memory: str,
        transports: Sequence[str],
        reach: Reach = Reach.PROCESS,
        lease_s: float = 30.0,
    ) -> None:
        allocate: Callable = ALLOCATE[memory]
        self.views = [BlockView.over(spec, allocate(spec.num_bytes)) for spec in specs]
        self.content = logical(specs[0], seed)
        for view in self.views:
            fill(view, self.content)
        if "device" in memory:
            torch.cuda.synchronize(self.views[0].storage.device)
        chosen = [KINDS[name] for name in transports]
        self.exports: list[Exports] = [Transports(chosen).export_cache([view], reach) for view in self.views]
        self.grouped: list[tuple[list[BlockView], Exports]] = []
        self.ranks: list[tuple[ExportAddress, ...]] = [exports.addresses for exports in self.exports]
        self.pool = BlockPool(specs[0].num_blocks)
        self.skipped_s = 0.0
        self.offers = Offers(MODEL, self.ranks, self.pool.generation, self.now, lease_s)
        self.server = OfferServer(self.offers)

    def export_groups(
        self, kinds: Sequence[CacheSpec], tp_size: int, memory: str, transport: str
    ) -> list[tuple[ExportAddress, ...]]:
        """Exports ranks whose memory holds groups of layers: block `b` belongs to group `b % len(kinds)`
        and holds `logical(kind, group)`. The groups of the last call are closed."""
        self.close_groups()
        for rank in range(tp_size):
            specs = with_equal_blocks([ranks_of(kind, tp_size)[rank] for kind in kinds])
            storage = ALLOCATE[memory](specs[0].num_bytes)
            views = [BlockView.over(spec, storage) for spec in specs]
            for group, view in enumerate(views):
                blocks = range(group, view.spec.num_blocks, len(kinds))
                fill(view, logical(kinds[group], group), blocks)
            if "device" in memory:
                torch.cuda.synchronize(storage.device)
            self.grouped.append((views, Transports([KINDS[transport]]).export_cache(views, Reach.PROCESS)))
        return [exports.addresses for _, exports in self.grouped]

    def close_groups(self) -> None:
        for _, exports in self.grouped:
            exports.close()
        self.grouped.clear()

    def now(self) -> float:
        return time.monotonic() + self.skipped_s

    def skip(self, seconds: float) -> None:
        """Advances the owner's clock."""
        self.skipped_s += seconds

    def offer(self, num_blocks: int, whole: int) -> tuple[bytes, list[int]]:
        """Takes blocks, as a sequence does."""
        blocks = self.pool.try_allocate(num_blocks)
        assert blocks is not None
        return self.offers.offer(blocks, whole), blocks

    def release_ended(self) -> list[tuple[str | None, int]]:
        """Does a worker's work between steps. Returns why offers ended, and how many blocks they had."""
        self.offers.expire()
        ended = self.offers.take_ended()
        for one in ended:
            self.pool.release(one.blocks)
        self.pool.check(self.offers.held())
        return [(one.failure and one.failure.value, len(one.blocks)) for one in ended]

    def reuse(self, seed: int) -> None:
        """Takes every free block and overwrites it."""
        num_free = self.pool.num_free
        taken = self.pool.try_allocate(num_free)
        self.content = logical(self.views[0].spec, seed)
        for view in self.views:
            fill(view, self.content, taken)
        self.pool.release(taken)

    def compute(self, ticket_id: bytes, blocks: Sequence[int], seed: int) -> None:
        """As a prefill on a GPU: queues work that lasts some ms and then writes a layer of the blocks, layer
        after layer, and returns before any of it is done."""
        self.content = logical(self.views[0].spec, seed)
        [view] = self.views
        device = view.storage.device
        contents = [self.content[i].to(device) for i in range(view.spec.num_layers)]
        self.advancer = Advancer(self.offers)
        order = [AXES.index(axis) for axis in view.spec.layout.axes]
        ids = torch.tensor(blocks, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            for i, content in enumerate(contents):
                layer = layer_of(view, i, mutable=True)
                torch.cuda._sleep(10_000_000)
                items = content.view(layer.dtype).permute(order)
                axis = view.spec.layout.axes.index("block")
                layer.tensor().index_copy_(axis, ids, items.index_select(axis, ids))
                event = torch.cuda.Event(blocking=True)
                event.record()
                self.advancer.put(event, [(ticket_id, len(blocks))], i + 1)

    def advance(self, ticket_id: bytes, num_blocks: int, num_layers: int) -> None:
        self.offers.advance(ticket_id, num_blocks, num_layers)

    def withdraw(self, why: str) -> None:
        self.offers.withdraw(why)

    def num_free(self) -> int:
        return self.pool.num_free

    def addresses(self) -> list[tuple[ExportAddress, ...]]:
        return self.ranks

    def close_windows(self) -> None:
        for exports in self.exports:
            exports.close()
        self.close_groups()

    def close(self) -> None:
        self.server.close()
        self.close_windows()


class OwnerProcess:
    """A process that has one owner at a time, whose methods are called there."""

    def __init__(self) -> None:
        self._connection, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    def become(self, *arguments: object, **options: object) -> OwnerProcess:
        """A new owner takes the place of the one before."""
        self._connection.send(("become", (arguments, options)))
        self._answer()
        return self

    def _answer(self) -> object:
        if not self._connection.poll(120):
            raise TimeoutError("the owner's process has not answered")
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __getattr__(self, name: str) -> Callable:
        def call(*arguments: object) -> object:
            self._connection.send((name, arguments))
            return self._answer()

        return call

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(60)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    owner = None
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            return
        try:
            if name == "become":
                if owner is not None:
                    owner.close()
                owner, answer = Owner(*given[0], **given[1]), None
            else:
                answer = getattr(owner, name)(*given)
        except Exception as error:  # noqa: BLE001 (the caller gets it)
            answer = error
        connection.send(answer)

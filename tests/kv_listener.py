"""A strict listener to KV events that knows pyzmq, msgpack and vLLM's published schema, and nothing of
Shoal."""

import msgpack
import zmq

END = (-1).to_bytes(8, "big", signed=True)
STORED = {
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
}


class View:
    """A cache as its events describe it, built from nothing. Events that make no sense fail. `reachable` False:
    parents may be in another tier."""

    def __init__(self, block_size, reachable=True):
        self.block_size, self.reachable = block_size, reachable
        self.blocks = {}  # (medium, name) -> (parent, tokens)
        self.snapshots = set()  # (medium, name) of the blocks after which there is a snapshot of states

    def apply(self, payload):
        ts, events, rank = msgpack.unpackb(payload)
        assert isinstance(ts, float) and rank == 0 and events
        for event in events:
            medium = event.get("medium")
            if event["type"] == "AllBlocksCleared":
                assert event == {"type": "AllBlocksCleared"}
                self.blocks.clear()
                self.snapshots.clear()
            elif event["type"] == "BlockRemoved":
                assert event.keys() == {"type", "block_hashes", "medium"}
                for name in event["block_hashes"]:
                    del self.blocks[medium, name]
                    self.snapshots.discard((medium, name))
            else:
                own = {"extra_keys", "snapshot_hashes"}
                assert event["type"] == "BlockStored" and event.keys() - own == STORED
                hashes, tokens, size, parent = (
                    event[k] for k in ("block_hashes", "token_ids", "block_size", "parent_block_hash")
                )
                assert size == self.block_size and len(tokens) == size * len(hashes) > 0
                for i, name in enumerate(hashes):
                    assert not self.reachable or parent is None or (medium, parent) in self.blocks, (
                        "a child before its parent"
                    )
                    block, is_kept = (parent, tuple(tokens[i * size : (i + 1) * size])), None
                    if (kept := event.get("snapshot_hashes")) is not None:
                        is_kept = name in kept
                    changes = is_kept is not None and is_kept != ((medium, name) in self.snapshots)
                    known = self.blocks.setdefault((medium, name), block)
                    assert known is block or (known == block and changes), "stored twice"
                    if is_kept:
                        self.snapshots.add((medium, name))
                    else:
                        self.snapshots.discard((medium, name))
                    parent = name
        return self

    def names(self, medium="GPU"):
        return {name for m, name in self.blocks if m == medium}


class Listener:
    def __init__(self, endpoint, replay=None, topic=b""):
        self.topic = topic
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.ask = self.context.socket(zmq.DEALER)
        if replay:
            self.ask.connect(replay)

    def hear(self, seconds=10.0):
        """(number, payload); None if nothing comes."""
        if not self.sub.poll(int(seconds * 1000)):
            return None
        topic, number, payload = self.sub.recv_multipart()
        assert topic == self.topic and len(number) == 8
        return int.from_bytes(number, "big"), payload

    def replay(self, start):
        """[(number, payload)]"""
        self.ask.send_multipart([b"", (start % 2**64).to_bytes(8, "big")])
        batches = []
        while True:
            assert self.ask.poll(10_000), "no answer"
            empty, topic, number, payload = self.ask.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return batches
            assert topic == self.topic
            batches.append((int.from_bytes(number, "big"), payload))

    def close(self):
        self.context.destroy(linger=0)


class Follower:
    """A listener with a view that it keeps right whatever it misses: it asks for gaps, and takes a snapshot
    as all up to its number."""

    def __init__(self, endpoint, replay, block_size, topic=b"", reachable=True):
        self.listener = Listener(endpoint, replay, topic)
        self.view, self.block_size, self.reachable = View(block_size, reachable), block_size, reachable
        self.next = 0  # the number of the batch that comes next
        self.num_replayed = self.num_snapshots = 0

    def follow(self, seconds=0.2, hears=lambda: True):
        """Takes in what comes until nothing comes for so long. `hears` says which batches arrive."""
        while (heard := self.listener.hear(seconds)) is not None:
            if hears():
                self._take(*heard)
        return self

    def newest(self):
        """Returns the number of the newest batch, -1 without one. A request for a batch that does not exist yet
        gets a snapshot with this number."""
        batches = self.listener.replay(2**64 - 1)
        return batches[-1][0] if batches else -1

    def catch_up(self):
        """Asks for what may be missing at the end."""
        for number, payload in self.listener.replay(self.next):
            self.num_replayed += 1
            if number > self.next:
                self.num_snapshots += 1
                assert msgpack.unpackb(payload)[1][0] == {"type": "AllBlocksCleared"}
            self._apply(number, payload)
        return self

    def _take(self, number, payload):
        if number > self.next:
            self.catch_up()
        if number == self.next:
            self._apply(number, payload)

    def _apply(self, number, payload):
        self.view.apply(payload)
        self.next = number + 1

    def close(self):
        self.listener.close()

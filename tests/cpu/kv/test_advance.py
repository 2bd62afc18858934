"""Events of a device become progress of offers."""

import threading
import time

import pytest

from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.transfer.advance import Advancer
from shoal.kv.transfer.offers import Offers
from shoal.kv.transfer.ticket import ExportAddress, Progress, TransferError, unseal

SPEC = CacheSpec(Layout.WHOLE_BLOCKS, 3, 4, 8, "bfloat16", 4, num_blocks=32)


class Event(threading.Event):
    """A fake device event, which completes or fails."""

    error = None

    def synchronize(self):
        assert self.wait(10)
        if self.error:
            raise self.error


@pytest.fixture
def offers():
    return Offers(b"m", [[ExportAddress("in_process", (SPEC,), b"")]], lambda block: 0, time.monotonic)


def test_a_layer_is_reported_when_its_event_has_completed(offers):
    first, second = (unseal(offers.offer(blocks)).id for blocks in (range(4), range(4, 9)))
    advancer, events = Advancer(offers), [Event() for _ in range(3)]
    for layer, event in enumerate(events):
        advancer.put(event, [(first, 4), (second, 2)], layer + 1)
    events[1].set()  # not before the first
    time.sleep(0.02)
    assert offers.progress(first) == Progress()
    events[0].set()
    until = time.monotonic() + 10
    while offers.progress(second) != Progress(0, 2, 2):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert offers.progress(first) == Progress(0, 4, 2)
    events[2].set()
    advancer.close()
    advancer.close()
    assert offers.progress(first) == Progress(4, 4, 0) and offers.progress(second) == Progress(2, 2, 0)


def test_a_device_that_fails_ends_all_offers(offers):
    ticket_id = unseal(offers.offer([0])).id
    advancer, event = Advancer(offers), Event()
    event.error = RuntimeError("an illegal memory access")
    event.set()
    advancer.put(event, [(ticket_id, 1)], 3)
    advancer.close()
    with pytest.raises(TransferError, match="device failed: an illegal"):
        offers.progress(ticket_id)

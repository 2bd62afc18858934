"""KV blocks between real processes: tickets, layer by layer, and what is left when either side is killed."""

import os

import pytest

from shoal.kv.storage import host_memory
from shoal.kv.transport_registry import TRANSPORTS
from tests import transport_cases
from tests.transport_cases import MEMORY, SPEC, owner_process

ACROSS = [kind.name for kind in TRANSPORTS if kind.name != "in_process"]
NAMES = pytest.mark.parametrize("name", transport_cases.transports_here(ACROSS))


@pytest.fixture(autouse=True)
def nothing_in_dev_shm():
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


def owner_of(name, specs=(SPEC,), **options):
    return owner_process().become(specs, 1, MEMORY[name], [name], **options)


@NAMES
def test_a_killed_owner_can_not_be_read_and_leaves_nothing(name):
    transport_cases.check_an_owner_that_was_killed_can_not_be_read(name, host_memory)

"""What every transport does, whatever is behind it (kv/transport.py). A transport that is registered and has
no entry in MEMORY fails here. Those that need a GPU: tests/gpu/test_transport_gpu.py."""

import pytest

from shoal.kv.storage import host_memory
from tests import transport_cases

NAMES = pytest.mark.parametrize("name", transport_cases.transports_here())


def test_every_transport_has_its_contract_tested():
    assert transport_cases.MEMORY.keys() == set(transport_cases.NAMES)


@NAMES
@pytest.mark.parametrize("seed", [1, 2])
def test_blocks_come_as_they_are(name, seed):
    transport_cases.check_blocks_come_as_they_are(name, host_memory, seed)


@NAMES
@pytest.mark.parametrize("case", transport_cases.CASES, ids=lambda case: case.__name__.removeprefix("check_"))
def test_what_every_transport_does(name, case):
    case(name, host_memory)

"""Hosts that only this machine can reach."""

import pytest

from shoal.hosts import is_address, is_loopback


@pytest.mark.parametrize(
    "host, address, loopback",
    [
        ("127.0.0.1", True, True),
        ("127.8.0.1", True, True),
        ("::1", True, True),
        ("[::1]", False, True),
        ("localhost", False, True),
        ("0.0.0.0", True, False),
        ("::", True, False),
        ("10.0.0.1", True, False),
        ("localhost.example.org", False, False),
        ("", False, False),
    ],
)
def test_hosts_that_only_this_machine_reaches(host, address, loopback):
    assert is_address(host) == address
    assert is_loopback(host) == loopback

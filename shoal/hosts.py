"""Names and addresses of hosts: which are addresses, and which only this machine can reach."""

from __future__ import annotations

import ipaddress


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the host. An IPv6 address may be in brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

"""Which addresses never leave this machine: only there may credentials travel in the clear."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """True for `localhost`, 127.0.0.0/8 and ::1; every other name counts as far away, whatever it resolves to."""
    bare = host.strip().strip("[]").lower()
    if bare == "localhost":
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False

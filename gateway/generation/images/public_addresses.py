"""Which IP addresses are hosts of the public internet.

Sources: IANA's registries of special-purpose addresses for IPv4 (RFC 6890, as of 2024) and IPv6 (as
of 2025), of multicast addresses, and of the IPv6 address space, which assigns hosts only within
2000::/3. A block that IANA does not call globally reachable is none; nor are the blocks for
protocols, some of whose addresses are globally reachable, but answer for the nearest router.
"""

from __future__ import annotations

import ipaddress

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# What an address within these is depends on the IPv4 address in its last 32 bits: mapped addresses,
# and NAT64's, by which networks with IPv6 alone reach hosts with IPv4 alone.
_EMBEDDING_IPV4 = [ipaddress.IPv6Network(each) for each in ("::ffff:0:0/96", "64:ff9b::/96")]
_SPECIAL = [
    ipaddress.ip_network(each)
    for each in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private use
        "100.64.0.0/10",  # shared with a provider's customers
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link local, and clouds' metadata
        "172.16.0.0/12",  # private use
        "192.0.0.0/24",  # protocols
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private use
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
        "2001::/23",  # protocols, among them Teredo
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: leads to an IPv4 address
        "3fff::/20",  # documentation
    )
]


def is_public(address: str) -> bool:
    """Whether an IP address is a host's of the public internet. Raises: ValueError."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if any(found in block for block in _EMBEDDING_IPV4):
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if found not in _GLOBAL_UNICAST:
            return False
    return not any(found.version == block.version and found in block for block in _SPECIAL)

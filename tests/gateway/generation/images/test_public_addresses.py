"""Public addresses, against IANA's registries of special-purpose addresses."""

from __future__ import annotations

import ipaddress

import pytest

from penstock.gateway.generation.images.public_addresses import is_public

# Every row of https://www.iana.org/assignments/iana-ipv4-special-registry and of
# https://www.iana.org/assignments/iana-ipv6-special-registry: whether it is globally reachable.
# None: the registry says neither, because the block is deprecated or depends on what is embedded.
REGISTRIES: dict[str, bool | None] = {
    "0.0.0.0/8": False,
    "0.0.0.0/32": False,
    "10.0.0.0/8": False,
    "100.64.0.0/10": False,
    "127.0.0.0/8": False,
    "169.254.0.0/16": False,
    "172.16.0.0/12": False,
    "192.0.0.0/24": False,
    "192.0.0.0/29": False,
    "192.0.0.8/32": False,
    "192.0.0.9/32": True,
    "192.0.0.10/32": True,
    "192.0.0.170/32": False,
    "192.0.0.171/32": False,
    "192.0.2.0/24": False,
    "192.31.196.0/24": True,
    "192.52.193.0/24": True,
    "192.88.99.0/24": None,
    "192.88.99.2/32": False,
    "192.168.0.0/16": False,
    "192.175.48.0/24": True,
    "198.18.0.0/15": False,
    "198.51.100.0/24": False,
    "203.0.113.0/24": False,
    "240.0.0.0/4": False,
    "255.255.255.255/32": False,
    "::1/128": False,
    "::/128": False,
    "::ffff:0:0/96": False,
    "64:ff9b::/96": True,
    "64:ff9b:1::/48": False,
    "100::/64": False,
    "100:0:0:1::/64": False,
    "2001::/23": False,
    "2001::/32": None,
    "2001:1::1/128": True,
    "2001:1::2/128": True,
    "2001:1::3/128": True,
    "2001:2::/48": False,
    "2001:3::/32": True,
    "2001:4:112::/48": True,
    "2001:10::/28": None,
    "2001:20::/28": True,
    "2001:30::/28": True,
    "2001:db8::/32": False,
    "2002::/16": None,
    "2620:4f:8000::/48": True,
    "3fff::/20": False,
    "5f00::/16": False,
    "fc00::/7": False,
    "fe80::/10": False,
}
# What the registries do not list: multicast, and addresses that were of a site (RFC 3879).
OTHERS = ("224.0.0.0/4", "ff00::/8", "fec0::/10")
# In these an IPv4 address decides.
EMBEDDING = ("::ffff:0:0/96", "64:ff9b::/96")
# Of protocols: globally reachable, but nobody's host.
OF_PROTOCOLS = tuple(ipaddress.ip_network(each) for each in ("192.0.0.0/24", "2001::/23"))


def some_of(block: str) -> list[str]:
    network = ipaddress.ip_network(block)
    middle = network.network_address + network.num_addresses // 2
    return [str(each) for each in (network[0], middle, network[-1])]


@pytest.mark.parametrize(
    "block", [block for block, is_reachable in REGISTRIES.items() if not is_reachable]
)
def test_what_is_not_globally_reachable_is_not_public(block: str) -> None:
    if block not in EMBEDDING:
        assert not any(map(is_public, some_of(block)))


@pytest.mark.parametrize("block", OTHERS)
def test_nor_is_what_no_host_has(block: str) -> None:
    assert not any(map(is_public, some_of(block)))


def test_what_is_globally_reachable_is_public_unless_of_a_protocol() -> None:
    for block, is_reachable in REGISTRIES.items():
        if is_reachable and block not in EMBEDDING:
            network = ipaddress.ip_network(block)
            is_of_protocol = any(
                network.version == other.version and network[0] in other for other in OF_PROTOCOLS
            )
            assert [is_public(each) for each in some_of(block)] == [not is_of_protocol] * 3, block


@pytest.mark.parametrize("block", REGISTRIES)
def test_beside_a_block_of_ipv4_is_the_public_internet(block: str) -> None:
    network = ipaddress.ip_network(block)
    special = [
        ipaddress.ip_network(each)
        for each in (*REGISTRIES, *OTHERS)
        if ipaddress.ip_network(each).version == 4
    ]
    if network.version == 4:
        for beside in (int(network[0]) - 1, int(network[-1]) + 1):
            if 0 <= beside < 1 << 32:
                address = ipaddress.IPv4Address(beside)
                if not any(address in each for each in special):
                    assert is_public(str(address))


@pytest.mark.parametrize(
    "form",
    [
        "::ffff:{}",  # mapped
        "64:ff9b::{}",  # NAT64
        "::ffff:0:{}",  # translated (RFC 2765)
        "::{}",  # compatible (RFC 4291, deprecated)
        "64:ff9b:1::{}",  # NAT64 of a network's own
        "fe80::5efe:{}",  # ISATAP
    ],
)
def test_an_ipv4_address_within_ipv6_is_what_it_is_outside(form: str) -> None:
    for inner in ("127.0.0.1", "169.254.169.254", "10.0.0.1", "192.0.0.8", "0.0.0.0"):
        assert not is_public(form.format(inner))
    if form in ("::ffff:{}", "64:ff9b::{}"):
        assert is_public(form.format("93.184.216.34"))


@pytest.mark.parametrize(
    "address",
    ["2002:7f00:1::", "2002:5db8:d822::1", "2001:0:5db8:d822::1", "fe80::1%eth0", "::127.0.0.1"],
)
def test_what_leads_into_ipv4_by_a_tunnel_is_not_public(address: str) -> None:
    assert not is_public(address)


def test_hosts_of_the_public_internet_are_public() -> None:
    for address in ("93.184.216.34", "1.1.1.1", "2606:2800:220:1:248:1893:25c8:1946", "2a00::1"):
        assert is_public(address)

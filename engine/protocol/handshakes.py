"""The TLS handshakes under way, few enough that peers who never finish theirs keep nobody out.

Anybody who reaches the port can open connections. A new one is always accepted; where there is no
room, the oldest unfinished handshake of its address, or of a stranger, is given up for it. An
honest peer's takes milliseconds, so it is not the oldest for long.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

MAX_HANDSHAKES = 64  # at once
MAX_PER_ADDRESS = 16
NUM_KEPT = 16  # places for addresses that have shown a right certificate before
_MAX_KNOWN = 1024  # addresses, the most recent ones


@dataclass(slots=True, eq=False)
class Handshake:
    """The handshake of a gateway that has not shown its certificate yet.

    Attributes:
        address: as `address_of` gives it.
    """

    connection: ssl.SSLSocket
    address: str
    num_beats: int = 0


def address_of(host: str) -> str:
    """What counts as one peer's address: of IPv6, where each peer has many, the network."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class Handshakes:
    """The handshakes under way, the oldest first."""

    def __init__(self) -> None:
        self._all: dict[Handshake, None] = {}
        self._known: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, handshake: Handshake) -> bool:
        return handshake in self._all

    def __iter__(self) -> Iterator[Handshake]:
        return iter(list(self._all))

    def add(self, handshake: Handshake) -> Handshake | None:
        """Begin one; the one to give up for it, if there was no room."""
        given_up = self._in_the_way_of(handshake.address)
        if given_up is not None:
            del self._all[given_up]
        self._all[handshake] = None
        return given_up

    def finish(self, handshake: Handshake) -> None:
        """The peer is one of ours."""
        del self._all[handshake]
        self._known[handshake.address] = None
        self._known.move_to_end(handshake.address)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def remove(self, handshake: Handshake) -> None:
        """The peer is gone, or none of ours."""
        del self._all[handshake]

    def _in_the_way_of(self, address: str) -> Handshake | None:
        own = [each for each in self._all if each.address == address]
        if len(own) >= MAX_PER_ADDRESS:
            return own[0]
        strangers = [each for each in self._all if each.address not in self._known]
        room = MAX_HANDSHAKES - (0 if address in self._known else NUM_KEPT)
        if address not in self._known and len(strangers) >= room:
            return strangers[0]
        if len(self._all) >= MAX_HANDSHAKES:
            return (strangers or list(self._all))[0]
        return None

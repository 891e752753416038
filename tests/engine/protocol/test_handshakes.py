"""Whose unfinished handshake is given up for a new one."""

from __future__ import annotations

import socket
import ssl

import pytest

from penstock.engine.protocol.handshakes import (
    MAX_HANDSHAKES,
    MAX_PER_ADDRESS,
    NUM_KEPT,
    Handshake,
    Handshakes,
    address_of,
)


def _of(address: str) -> Handshake:
    connection = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).wrap_socket(
        socket.socket(), server_side=True, do_handshake_on_connect=False
    )
    connection.close()
    return Handshake(connection, address)


def test_an_address_gives_up_its_own_oldest() -> None:
    handshakes, other = Handshakes(), _of("b")
    handshakes.add(other)
    own = [_of("a") for _ in range(MAX_PER_ADDRESS + 2)]
    given_up = [handshakes.add(each) for each in own]
    assert given_up == [None] * MAX_PER_ADDRESS + own[:2]
    assert other in handshakes


def test_strangers_leave_room_for_addresses_of_ours() -> None:
    handshakes = Handshakes()
    ours = _of("ours")
    handshakes.add(ours)
    handshakes.finish(ours)
    strangers = [_of(str(number)) for number in range(200)]
    for each in strangers:
        handshakes.add(each)
    assert len(handshakes) == MAX_HANDSHAKES - NUM_KEPT
    mine = [_of("ours") for _ in range(MAX_PER_ADDRESS)]
    assert [handshakes.add(each) for each in mine] == [None] * NUM_KEPT
    assert handshakes.add(_of("stranger")) is strangers[200 - MAX_HANDSHAKES + NUM_KEPT]
    assert all(each in handshakes for each in mine)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_peer_has_a_whole_network(host: str, address: str) -> None:
    assert address_of(host) == address

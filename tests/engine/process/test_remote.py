"""An engine that listens for gateways on other machines: who gets in, and who does not."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.engine.config import TlsFiles
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.protocol import sockets
from penstock.engine.protocol.frames import encode, framed
from penstock.engine.protocol.handshakes import MAX_HANDSHAKES
from penstock.engine.protocol.messages import CachedKeys, Draining, Failure, Hello, WantKeys
from penstock.engine.protocol.tls import CurrentContext, engine_context, gateway_context
from penstock.gateway.engines.engine_link import EngineSocket, Tls
from tests.certificate import Authority

from ..scheduling.fake_device import expected_output
from ..structured_outputs.test_grammar_sandbox import BOMB
from .stack import INFO, PATIENCE_S, Engine, Gateway, wait_until

Port = int
_INFO = replace(INFO, model_path=str(DEMO_MODEL_PATH), vocab_size=1024)  # for its grammars


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.certificate("node")


@pytest.fixture
def remote(
    tmp_path: Path, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Port]]:
    monkeypatch.setattr(sockets, "MAX_SILENT_BEATS", 1000)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Engine(
        f"{tmp_path}/e.sock",
        _INFO,
        remote=(listener, partial(engine_context, files)),
        drain_s=PATIENCE_S,
    ) as engine:
        yield engine, port


def _dial(port: Port, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def _nobody_is_in(engine: Engine) -> bool:
    transport = engine.server.transport
    return not transport.num_connections and not transport.num_unread


def test_a_gateway_of_ours_is_served(remote: tuple[Engine, Port], files: TlsFiles) -> None:
    _, port = remote
    with contextlib.closing(_dial(port, gateway_context(files))) as connection:
        gateway = Gateway(connection)
        assert gateway.hello() == _INFO
        gateway.submit("r", tuple(range(40)), max_tokens=5)
        tokens, _, _ = gateway.finish("r")
        assert len(tokens) == 5


def test_a_long_prompt_passes_in_many_records(remote: tuple[Engine, Port], files: TlsFiles) -> None:
    _, port = remote
    with contextlib.closing(_dial(port, gateway_context(files))) as connection:
        gateway = Gateway(connection)
        gateway.hello()
        gateway.submit("r", tuple([70_000] * 60_000), max_tokens=1)  # refused by its length
        _, output, _ = gateway.finish("r")
        assert output.is_refused


def test_a_grammar_that_takes_minutes_holds_up_nobody(
    remote: tuple[Engine, Port], files: TlsFiles
) -> None:
    """A peer need not have checked it, as gateways do."""
    _, port = remote
    with contextlib.closing(_dial(port, gateway_context(files))) as connection:
        gateway = Gateway(connection)
        gateway.hello()
        gateway.submit("slow", (1,), 30, grammar=BOMB)
        gateway.submit("quick", (2,), 30, regex="a")
        _, output, _ = gateway.finish("slow")
        assert output.is_refused
        assert output.param == "structured_outputs"
        assert "takes too long" in (output.error or "")
        assert gateway.finish("quick")[0] == expected_output([2], 30)


def test_a_plain_peer_is_refused(remote: tuple[Engine, Port]) -> None:
    engine, port = remote
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as peer:
        peer.sendall(framed(encode(Hello())))
        peer.settimeout(PATIENCE_S)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(4096):
                received += data
    assert received[:1] in (b"", b"\x15")  # nothing, or TLS' alert
    assert INFO.model.encode() not in received
    wait_until(lambda: _nobody_is_in(engine))


@pytest.mark.parametrize("who", ["another authority's", "no certificate", "an engine's", "old TLS"])
def test_a_peer_without_a_right_certificate_is_refused(
    remote: tuple[Engine, Port],
    authority: Authority,
    stranger: Authority,
    files: TlsFiles,
    who: str,
) -> None:
    engine, port = remote
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    if who == "another authority's":
        context.load_cert_chain(*stranger.certificate("gateway")[:2])
    elif who == "an engine's":
        context.load_cert_chain(*authority.certificate("engine", usage="serverAuth")[:2])
    elif who == "old TLS":
        context.load_cert_chain(*files[:2])
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    received = b""
    with (
        contextlib.suppress(ssl.SSLError, ConnectionError),
        contextlib.closing(_dial(port, context)) as connection,
    ):
        connection.sendall(framed(encode(Hello())))
        received = connection.recv(4096)
    assert received == b""
    wait_until(lambda: _nobody_is_in(engine))


def test_a_recording_of_a_gateway_opens_nothing(
    remote: tuple[Engine, Port], files: TlsFiles
) -> None:
    engine, port = remote
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        thread = threading.Thread(target=_record, args=(proxy, port, recorded))
        thread.start()
        connection = _dial(proxy.getsockname()[1], gateway_context(files))
        gateway = Gateway(connection)
        gateway.hello()
        gateway.submit("r", (1, 2, 3), max_tokens=2)
        gateway.finish("r")
        connection.close()
        thread.join(PATIENCE_S)
    wait_until(lambda: _nobody_is_in(engine))
    num_steps = len(engine.device.begun)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as replay,
        contextlib.suppress(ConnectionError),
    ):
        for data in recorded:
            replay.sendall(data)
        while replay.recv(4096):
            pass
    wait_until(lambda: _nobody_is_in(engine))
    assert len(engine.device.begun) == num_steps


def _record(proxy: socket.socket, port: Port, recorded: list[bytes]) -> None:
    near, _ = proxy.accept()
    with near, socket.create_connection(("127.0.0.1", port)) as far:

        def back() -> None:
            with contextlib.suppress(OSError):
                while data := far.recv(65536):
                    near.sendall(data)

        thread = threading.Thread(target=back)
        thread.start()
        while data := near.recv(65536):
            recorded.append(data)
            far.sendall(data)
        far.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


def test_a_peer_that_says_nothing_is_let_go(
    remote: tuple[Engine, Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, port = remote
    monkeypatch.setattr(sockets, "HEARTBEAT_INTERVAL_S", 0.01)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as peer:
        assert peer.recv(1) == b""
    wait_until(lambda: _nobody_is_in(engine))


@pytest.mark.parametrize("num_addresses", [1, 100])
def test_idle_connections_keep_no_gateway_out(
    remote: tuple[Engine, Port], files: TlsFiles, num_addresses: int
) -> None:
    engine, port = remote
    with contextlib.ExitStack() as idle:
        for number in range(300):
            source = (f"127.0.1.{1 + number % num_addresses}", 0)
            peer = socket.create_connection(("127.0.0.1", port), PATIENCE_S, source)
            idle.enter_context(peer)
        with contextlib.closing(_dial(port, gateway_context(files))) as connection:
            gateway = Gateway(connection)
            assert gateway.hello() == _INFO
            gateway.submit("r", (1,), max_tokens=5)
            assert len(gateway.finish("r")[0]) == 5
    assert engine.server.transport.num_connections <= MAX_HANDSHAKES + 1


@pytest.mark.parametrize("who", ["another authority's", "another host's", "a gateway's"])
async def test_a_gateway_tells_nothing_to_a_wrong_engine(
    tmp_path: Path, authority: Authority, stranger: Authority, files: TlsFiles, who: str
) -> None:
    if who == "another authority's":
        own = stranger.certificate("node")
    elif who == "another host's":
        own = authority.certificate("other", names="DNS:other.example")
    else:
        own = authority.certificate("gateway", usage="clientAuth")
    listener = socket.create_server(("127.0.0.1", 0))
    context = partial(engine_context, own._replace(ca=files.ca))
    with Engine(f"{tmp_path}/e.sock", remote=(listener, context)) as engine:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            await EngineSocket.connect(
                address, lambda _: None, tls=Tls(partial(gateway_context, files))
            )
        assert not engine.server.transport.num_unread


def test_replaced_certificates_are_those_of_the_next_connections(
    tmp_path: Path, authority: Authority, stranger: Authority, files: TlsFiles
) -> None:
    """Both sides move to another authority while a connection is open."""
    own = TlsFiles(*(str(tmp_path / Path(name).name) for name in files))
    later = stranger.certificate("later")
    _replace(own, files)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    engines, gateways = (
        CurrentContext(partial(make, own), own) for make in (engine_context, gateway_context)
    )
    with (
        Engine(f"{tmp_path}/e.sock", remote=(listener, engines)),
        contextlib.closing(_dial(port, gateways())) as open_before,
    ):
        old = Gateway(open_before)
        assert old.hello() == INFO
        shutil.copy(later.cert, own.cert)  # its key is not there yet
        with contextlib.closing(_dial(port, gateways())) as connection:
            assert connection.getpeercert(True) == open_before.getpeercert(True)
        _replace(own, later)
        with contextlib.closing(_dial(port, gateways())) as connection:
            assert connection.getpeercert(True) != open_before.getpeercert(True)
            assert Gateway(connection).hello() == INFO
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            _dial(port, gateway_context(files))
        old.submit("r", tuple(range(40)), max_tokens=5)
        tokens, _, _ = old.finish("r")
        assert len(tokens) == 5


def _replace(old: TlsFiles, new: TlsFiles) -> None:
    for target, source in zip(old, new, strict=True):
        shutil.copy(source, f"{target}.new")
        Path(f"{target}.new").replace(target)


def test_files_that_cannot_be_used_are_named(files: TlsFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tls-cert, --tls-key, --tls-ca .*no such"):
        engine_context(files._replace(cert=f"{tmp_path}/no such"))
    with pytest.raises(ConfigError, match="--tls-ca"):
        gateway_context(files._replace(ca=files.key))


# -- draining, and keys ---------------------------------------------------------------------------


def test_an_engine_that_drains_waits_for_its_requests_to_leave(
    remote: tuple[Engine, Port],
) -> None:
    engine, _ = remote
    gateway, late = Gateway(engine.address), Gateway(engine.address)
    gateway.hello()
    engine.device.step_s = 0.01
    gateway.submit("r", (1, 2, 3), max_tokens=20)
    gateway.receive()
    engine.server.stop()
    while not isinstance(gateway.receive(), Draining):
        pass
    late.send(Hello())
    answers = [late.receive(), late.receive()]
    assert Failure(message="the engine is about to end") in answers
    tokens, _, _ = gateway.finish("r")
    assert tokens  # its last ones: the engine had not ended
    engine.thread.join(PATIENCE_S)
    assert not engine.thread.is_alive()
    gateway.socket.close()
    late.socket.close()


def test_who_asks_gets_the_keys_and_then_each_change(remote: tuple[Engine, Port]) -> None:
    engine, _ = remote
    gateway = Gateway(engine.address)
    gateway.hello()
    size = engine.blocks.block_size
    gateway.submit("a", tuple(range(2 * size + 1)), max_tokens=1)
    gateway.finish("a")
    gateway.send(WantKeys())
    snapshot = gateway.receive()
    while not isinstance(snapshot, CachedKeys):
        snapshot = gateway.receive()
    assert snapshot.is_snapshot
    assert len(snapshot.added) == 2 * 4
    gateway.submit("b", tuple(range(20, 21 + size)), max_tokens=1)
    change = gateway.receive()
    while not isinstance(change, CachedKeys):
        change = gateway.receive()
    assert (change.number, change.is_snapshot) == (snapshot.number + 1, False)
    assert (len(change.added), change.removed) == (4, b"")
    gateway.socket.close()

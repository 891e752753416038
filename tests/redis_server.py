"""A real `redis-server` of a test's own, that can be killed and come back.

    with RedisServer(tmp_path) as server:
        client = redis.asyncio.Redis.from_url(server.url)
        server.kill()       # -9: what was not written is lost
        server.start()      # the same port, the same files

A `RedisCluster` is several of them:

    with RedisCluster(tmp_path) as cluster:
        cluster.node_of(key).kill()

Mark tests that use it `redis`: they are skipped where there is none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import redis
from redis.crc import key_slot

from .held_port import held_port, number_of

_PATIENCE_S = 60.0
_ALL_SLOTS = (0, 16383)
_THIRDS = ((0, 5460), (5461, 10922), (10923, 16383))


class RedisServer:
    """One server, in a directory of its own.

    Args:
        directory: for its files; made if it is not there. Servers do not share one.
        password: of the default user; none asks for none.
        is_tls: speaks TLS alone, under a certificate for 127.0.0.1 that signs itself (`ca_file`).
        is_cluster: a node of a cluster; alone unless told, so it serves all slots.
        slots: of a cluster's node, the first and the last; None: it is to serve none.
        appends: keeps an append-only file, synced on every write.
        options: further settings, as `redis.conf` names them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        password: str | None = None,
        is_tls: bool = False,
        is_cluster: bool = False,
        slots: tuple[int, int] | None = _ALL_SLOTS,
        appends: bool = True,
        options: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self._held = held_port()
        self.port = number_of(self._held)
        self.ca_file = directory / "redis.crt" if is_tls else None
        # Of a cluster's bus: its own plus 10,000 unless told, which may be no port at all.
        self._held_for_bus = held_port()
        self._password = password
        self._is_cluster = is_cluster
        self._slots = slots
        self._appends = appends
        self._options = options or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """As `redis.from_url` and `--redis-url` take it (a cluster's too, as one of its nodes)."""
        password = f":{self._password}@" if self._password else ""
        scheme, query = (
            ("rediss", f"?ssl_ca_certs={self.ca_file}") if self.ca_file else ("redis", "")
        )
        return f"{scheme}://{password}127.0.0.1:{self.port}/0{query}"

    @property
    def patient_url(self) -> str:
        """The same, for a client that waits long: a machine that stands still is no outage."""
        separator = "&" if "?" in self.url else "?"
        return f"{self.url}{separator}socket_timeout=60&socket_connect_timeout=60"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None

    def __enter__(self) -> RedisServer:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.ca_file is not None:
            _write_certificate(self.directory)
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self._held.close()
        self._held_for_bus.close()

    def start(self) -> None:
        """Start it, or start it again, and wait until it serves."""
        assert self._process is None
        command = ["redis-server"]
        for name, value in self._settings().items():
            command += [f"--{name}", *value.split(" ")]
        with (self.directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with self.client() as client:
                _wait(lambda: self._answers(client))
                if self._is_cluster and self._slots is not None:
                    self._serve_slots(client, *self._slots)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it as a crash would. One that is not running is left alone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It keeps its connections, takes new ones, and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A client to look and meddle with, from outside of what is tested; replies are bytes."""
        return redis.Redis.from_url(self.url, socket_timeout=_PATIENCE_S, retry=None)

    @property
    def bus_port(self) -> int:
        """Of a cluster's node: where the others reach it."""
        return number_of(self._held_for_bus)

    def _serve_slots(self, client: redis.Redis, first: int, last: int) -> None:
        # A node that comes back knows its slots; telling it so again would be an error.
        if client.execute_command("CLUSTER INFO")["cluster_slots_assigned"] == "0":
            client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        if self._slots == _ALL_SLOTS:
            _wait(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")

    def _answers(self, client: redis.Redis) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError((self.directory / "redis.log").read_text())
        try:
            return bool(client.ping())
        except redis.exceptions.ConnectionError:  # not yet, or still reading its file
            return False

    def _settings(self) -> dict[str, str]:
        settings = {
            "dir": str(self.directory),
            "bind": "127.0.0.1",
            "port": str(self.port),
            "save": "",
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if self._appends else "no",
            "appendfsync": "always",
        }
        if self.ca_file is not None:
            certificate, key = str(self.ca_file), str(self.directory / "redis.key")
            settings |= {"port": "0", "tls-port": str(self.port), "tls-auth-clients": "no"}
            settings |= {"tls-cert-file": certificate, "tls-key-file": key}
            settings |= {"tls-ca-cert-file": certificate}
        if self._is_cluster:
            settings |= {"cluster-enabled": "yes", "cluster-announce-ip": "127.0.0.1"}
            settings |= {"cluster-port": str(self.bus_port)}
        if self._password is not None:
            settings["requirepass"] = self._password
        return settings | self._options


class RedisCluster:
    """Three nodes that share the slots, and perhaps a replica of each.

    Args:
        directory: for their files.
        has_replicas: a killed node's replica takes over. Without, its slots wait for it.
    """

    def __init__(self, directory: Path, *, has_replicas: bool = False) -> None:
        options = {
            "cluster-node-timeout": "1000",
            "cluster-require-full-coverage": "no",
            "cluster-replica-validity-factor": "0",  # it was away for too long only by bad luck
            "repl-diskless-sync-delay": "0",
            "appendfsync": "no",  # what is killed, and not the machine, loses nothing by it
        }
        names = [(slots, f"{slots[0]}") for slots in _THIRDS]
        self.nodes = [
            RedisServer(directory / name, is_cluster=True, slots=slots, options=options)
            for slots, name in names
        ]
        self.replicas = [
            RedisServer(directory / f"replica-{name}", is_cluster=True, slots=None, options=options)
            for _, name in names
            if has_replicas
        ]
        self._running = contextlib.ExitStack()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def node_of(self, key: str) -> RedisServer:
        """The node that serves a key at first."""
        return self.nodes[next(i for i, (_, last) in enumerate(_THIRDS) if slot_of(key) <= last)]

    def __enter__(self) -> RedisCluster:
        try:
            for node in (*self.nodes, *self.replicas):
                self._running.enter_context(node)
            self._meet()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._running.close()

    def configure(self, name: str, value: str) -> None:
        """A setting of all nodes, until they are started again."""
        for node in self.nodes:
            with node.client() as client:
                client.config_set(name, value)

    def wait_until_ok(self) -> None:
        """All slots are served, and every node that runs knows it."""
        for node in (*self.nodes, *self.replicas):
            if node.runs:
                with node.client() as client:
                    _wait(lambda client=client: _is_ok(client))

    def wait_until_promoted(self, node: RedisServer) -> None:
        """Its replica serves its slots."""
        with self.replicas[self.nodes.index(node)].client() as client:
            _wait(lambda: client.info("replication")["role"] == "master")
        self.wait_until_ok()

    def _meet(self) -> None:
        servers = (*self.nodes, *self.replicas)
        for epoch, server in enumerate(servers, start=1):
            with server.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
        with servers[0].client() as client:
            for other in servers[1:]:
                meet = ("CLUSTER MEET", "127.0.0.1", other.port, other.bus_port)
                client.execute_command(*meet)
        for server in servers:
            with server.client() as client:
                _wait(lambda client=client: _num_known(client) == len(servers))
        for replica, master in zip(self.replicas, self.nodes, strict=False):
            with master.client() as client:
                master_id = client.execute_command("CLUSTER MYID")
            with replica.client() as client:
                client.execute_command("CLUSTER REPLICATE", master_id)
        for replica in self.replicas:
            with replica.client() as client:
                _wait(
                    lambda client=client: client.info("replication")["master_link_status"] == "up"
                )
        self.wait_until_ok()


def slot_of(key: str) -> int:
    """Of a cluster's 16,384."""
    return key_slot(key.encode())


def _num_known(client: redis.Redis) -> int:
    return int(client.execute_command("CLUSTER INFO")["cluster_known_nodes"])


def _follows(replica: redis.Redis) -> bool:
    return bool(replica.info("replication").get("master_link_status") == "up")


def _is_ok(client: redis.Redis) -> bool:
    found = client.execute_command("CLUSTER INFO")
    is_whole = found["cluster_slots_ok"] == found["cluster_slots_assigned"] == "16384"
    return bool(found["cluster_state"] == "ok" and is_whole)


def _write_certificate(directory: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(directory / "redis.key"), "-out", str(directory / "redis.crt")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("redis-server does not serve")
        time.sleep(0.02)

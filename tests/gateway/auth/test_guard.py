"""Who comes in: Host, Origin, key, and the page's policy."""

from __future__ import annotations

import pytest
import websockets

from penstock.engine.errors import ConfigError
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.settings import resolve_settings

from ..conftest import PATIENCE_S, Serve, Served

ASK = {"prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize(
    ("host", "is_let_in"),
    [
        ("localhost:1", True),
        ("127.0.0.1", True),
        ("[::1]:8000", True),
        ("127.0.0.2:8000", True),
        ("evil.example", False),
        ("host.docker.internal:8000", False),  # a hostile network's DNS may have a name like it
        ("localhost.evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
    ],
)
async def test_rebound_names_are_refused(served: Served, host: str, is_let_in: bool) -> None:
    response = await served.http.get("/v1/models", headers={"Host": host})
    assert response.status_code == (200 if is_let_in else 403)
    if not is_let_in:
        error = response.json()["error"]
        assert error["code"] == "host_not_allowed"
        name = host.partition(":")[0]
        for remedy in ("--host 0.0.0.0", f"--allowed-origins http://{name}"):
            assert remedy in error["message"]


async def test_a_proxy_may_pass_an_allowed_name_on(serve: Serve) -> None:
    async with serve(allowed_origins=("https://chat.example", "*")) as served:
        for host, status in (("chat.example", 200), ("other.example", 403), ("*", 403)):
            response = await served.http.get("/v1/models", headers={"Host": host})
            assert response.status_code == status


async def test_any_name_when_bound_to_the_world(serve: Serve) -> None:
    async with serve(host="0.0.0.0") as served:
        response = await served.http.get("/v1/models", headers={"Host": "my.server"})
        assert response.status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
async def test_foreign_pages_are_refused(served: Served, origin: str) -> None:
    response = await served.http.post("/v1/completions", json=ASK, headers={"Origin": origin})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    with pytest.raises(websockets.InvalidStatus) as caught:
        await served.connect(origin=origin)
    assert caught.value.response.status_code == 403


async def test_a_refused_handshake_is_no_error_of_the_server(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:
        with pytest.raises(websockets.InvalidStatus):
            await served.connect(origin="https://evil.example")
    assert "handshake" not in caplog.text


async def test_own_page_is_let_in(served: Served) -> None:
    origin = f"http://127.0.0.1:{served.port}"
    response = await served.http.post("/v1/completions", json=ASK, headers={"Origin": origin})
    assert response.status_code == 200
    async with served.connect(origin=origin):
        pass


async def test_allowed_origin_gets_cors(serve: Serve) -> None:
    origin = "https://app.example"
    async with serve(allowed_origins=(origin,), api_keys=("k",)) as served:
        preflight = await served.http.options(
            "/v1/completions",
            headers={
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type",
            },
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        response = await served.http.post("/v1/completions", json=ASK, headers={"Origin": origin})
        assert response.headers["access-control-allow-origin"] == origin
        exposed = response.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= {*exposed}
        delete = {"Origin": origin, "Access-Control-Request-Method": "DELETE"}
        assert (await served.http.options("/v1/responses/r", headers=delete)).status_code == 200
        refused = await served.http.post(
            "/v1/completions", json=ASK, headers={"Origin": origin, "Authorization": "Bearer no"}
        )
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic secret", "Bearer é"])
async def test_key_is_required(serve: Serve, header: str | None) -> None:
    async with serve(api_keys=("other", "secret")) as served:
        served.http.headers.pop("Authorization")
        headers = [] if header is None else [("Authorization", header.encode("latin-1"))]
        for path in ("/tokenize", "/detokenize", "/v1/chat/completions", "/v1/unknown"):
            assert (await served.http.post(path, headers=headers)).status_code == 401
        response = await served.http.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer secret"}
        assert (await served.http.get("/v1/models", headers=good)).status_code == 200
        for path in ("/", "/health", "/live", "/ready", "/metrics", "/version"):
            assert (await served.http.get(path)).status_code == 200


async def test_the_page_and_its_policy(served: Served) -> None:
    response = await served.http.get("/")
    assert response.status_code == 200
    assert "<title>penstock" in response.text
    assert response.headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'"
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    url = f"ws://127.0.0.1:{served.port}/elsewhere"
    with pytest.raises(websockets.InvalidStatus):
        await websockets.connect(url, open_timeout=PATIENCE_S)
    # What a model's HTML makes has an origin of its own, wherever it is opened.
    preview = await served.http.get("/preview.html")
    policy = preview.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none'; ")
    assert "frame-ancestors 'self'" in policy


@pytest.mark.parametrize("origin", ["http://[", "http://", "null", "[", "http://a b"])
async def test_an_origin_that_is_none_is_refused(served: Served, origin: str) -> None:
    response = await served.http.post("/v1/completions", json=ASK, headers={"Origin": origin})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_which_addresses_are_loopback(host: str, is_loopback: bool) -> None:
    assert GatewayConfig(engine_address="", host=host).is_loopback is is_loopback


def test_allowed_origins_are_read_as_browsers_write_them() -> None:
    def read(text: str) -> tuple[str, ...]:
        settings = resolve_settings({}, {"PENSTOCK_ALLOWED_ORIGINS": text})
        others = {"engine_address": "", "model": {}}
        return GatewayConfig.from_settings({**settings, **others}).allowed_origins

    assert read("HTTPS://Chat.Example/") == ("https://chat.example",)
    assert read("http://localhost:3000") == ("http://localhost:3000",)
    assert read("*") == ("*",)
    for wrong in ("chat.example", "http://[", "https://chat.example/path", ""):
        with pytest.raises(ConfigError, match="PENSTOCK_ALLOWED_ORIGINS must be an origin"):
            read(wrong)

"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import asyncio
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from penstock.engine.errors import ConfigError
from penstock.gateway.telemetry.tracing import Tracing

from ..conftest import PATIENCE_S, Serve

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_PARENT = "b7ad6b7169203331"
_PROMPT = "the prompt nobody may trace"


class _Collector:
    """An OTLP collector over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.bodies = b""
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def take(self, body: bytes) -> None:
        self.bodies += body
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            [name] = [a.value.string_value for a in resource.resource.attributes
                      if a.key == "service.name"]  # fmt: skip
            assert name == "penstock"
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Collector]:
    # Else it sends again.
    monkeypatch.setattr("penstock.gateway.telemetry.tracing._TIMEOUT_S", PATIENCE_S)
    collector = _Collector()
    yield collector
    collector.close()


def _attributes(span: Span) -> dict[str, Any]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value") or "")
        for item in span.attributes
    }


async def test_a_request_is_a_span(serve: Serve, collector: _Collector) -> None:
    headers = {"traceparent": f"00-{_TRACE}-{_PARENT}-01", "x-request-id": "mine"}
    chat = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 5}
    async with serve(otlp_endpoint=collector.endpoint, api_keys=("sk-secret",)) as served:
        await served.http.post("/v1/chat/completions", json=chat, headers=headers)
        await served.http.get("/v1/responses/resp_nobody")
    answered, missed = collector.spans  # sent at the latest when the gateway closed
    assert (answered.name, answered.kind) == ("chat tiny", Span.SPAN_KIND_SERVER)
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == (_TRACE, _PARENT)
    assert answered.start_time_unix_nano < answered.end_time_unix_nano
    found = _attributes(answered)
    assert found.pop("gen_ai.usage.input_tokens") > 5
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < 60
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.output_tokens": 5,
        "penstock.request_id": "mine",
        "penstock.tenant": "default",
    }
    assert missed.name == "GET /v1/responses/{response_id}"
    assert missed.parent_span_id == b""
    assert _attributes(missed)["error.type"] == "response_not_found"
    for secret in (_PROMPT, "sk-secret", "resp_nobody"):
        assert secret.encode() not in collector.bodies


async def test_a_caller_that_does_not_sample_is_not_traced(
    serve: Serve, collector: _Collector
) -> None:
    headers = {"traceparent": f"00-{_TRACE}-{_PARENT}-00"}
    async with serve(otlp_endpoint=collector.endpoint) as served:
        await served.http.get("/v1/models", headers=headers)
        await served.http.get("/v1/models", headers={"traceparent": "nonsense"})
    [span] = collector.spans
    assert span.trace_id.hex() != _TRACE


async def test_a_collector_that_is_not_there_harms_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.telemetry.tracing._TIMEOUT_S", 0.2)
    async with serve(otlp_endpoint="http://127.0.0.1:1") as served:
        assert (await served.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        Tracing(endpoint)


async def test_without_the_extra_the_flag_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from penstock.engine.errors import ConfigError\n"
        "try:\n    import penstock.gateway.telemetry.tracing\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pip install 'penstock-llm[otel]'" in done.stdout

"""OpenTelemetry: one span per request, made when the request ends, sent in batches by a thread.

Loaded only with `--otlp-endpoint`; needs `pip install 'penstock-llm[otel]'`. Attributes follow the
semantic conventions for HTTP servers and generative AI, and contain no part of prompts or answers.
A caller's `traceparent` names the parent span, and its sampling decision is honoured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from urllib.parse import urlsplit

from penstock.engine.errors import ConfigError
from penstock.gateway.telemetry.request_record import RequestRecord

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(
        "--otlp-endpoint needs OpenTelemetry: pip install 'penstock-llm[otel]'"
    ) from error

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
_PATH = "/v1/traces"  # defined by OTLP over HTTP
_TIMEOUT_S = 5.0
_CARRIED = ("traceparent", "tracestate")


class Tracing:
    """Makes spans from requests' records.

    Args:
        endpoint: of the collector, such as `http://localhost:4318`; a path in it is kept.

    Raises:
        ConfigError: the endpoint is not an HTTP URL.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--otlp-endpoint: {endpoint!r} is not a URL such as "
                              "http://localhost:4318")  # fmt: skip
        # Its warnings quote the collector's answer, for every batch.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "penstock"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("penstock.gateway")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: RequestRecord) -> None:
        """Make the span of a request that has ended."""
        headers = request.headers
        carrier = {name: headers[name] for name in _CARRIED if name in headers}
        span = self._tracer.start_span(
            _name(request),
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=request.began_ns,
            attributes=dict(_attributes(request)),
        )
        if request.status is not None and request.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(request.began_ns + round(request.duration_s * 1e9))

    def close(self) -> None:
        """Send the remaining spans; waits for the collector."""
        self._provider.shutdown()


def _name(request: RequestRecord) -> str:
    operation = _OPERATIONS.get(request.route or "")
    if operation is not None and request.model is not None:
        return f"{operation} {request.model}"
    return f"{request.method} {request.route}" if request.route else request.method


def _attributes(request: RequestRecord) -> Iterator[tuple[str, str | int | float]]:
    yield "http.request.method", request.method
    yield "penstock.request_id", request.request_id
    if request.route is not None:
        yield "http.route", request.route
    if request.status is not None:
        yield "http.response.status_code", request.status
    if request.tenant is not None:
        yield "penstock.tenant", request.tenant
    if request.error is not None:
        yield "error.type", request.error
    if request.model is not None:
        yield "gen_ai.provider.name", "penstock"
        yield "gen_ai.request.model", request.model
        yield "gen_ai.usage.input_tokens", request.input_tokens
        yield "gen_ai.usage.output_tokens", request.output_tokens
        if (operation := _OPERATIONS.get(request.route or "")) is not None:
            yield "gen_ai.operation.name", operation
    if request.first_token_s is not None:
        yield "gen_ai.response.time_to_first_chunk", request.first_token_s

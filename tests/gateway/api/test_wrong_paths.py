"""404 and 405 say what is there."""

from __future__ import annotations

import pytest

from ..conftest import Served


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        # a base URL without /v1, with /v1 twice, or with a prefix
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/completions", "did you mean /v1/completions?"),
        ("POST", "/responses", "did you mean /v1/responses?"),
        ("POST", "/embeddings", "did you mean /v1/embeddings?"),
        ("GET", "/models", "did you mean /v1/models?"),
        ("GET", "/models/tiny", "did you mean /v1/models/tiny?"),
        ("DELETE", "/responses/resp_1", "did you mean /v1/responses/resp_1?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/openai/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/tokenize", "did you mean /tokenize?"),
        ("GET", "/v1/health", "did you mean /health?"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/v1/conversation", "did you mean /v1/conversations?"),
        ("POST", "/v1/audio/speech", "GET /openapi.json lists all there are"),
        ("GET", "/wp-login.php", "GET /openapi.json lists all there are"),
        ("GET", "/" + "/x" * 5000, "GET /openapi.json lists all there are"),
    ],
)
async def test_the_path_that_was_probably_meant(
    served: Served, method: str, path: str, hint: str
) -> None:
    response = await served.http.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert hint in error["message"]
    assert "allow" not in response.headers


async def test_a_method_is_told_the_others(served: Served) -> None:
    response = await served.http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == (
        "GET /v1/chat/completions: the method is not allowed; this path allows POST"
    )

"""A server below a path of a proxy."""

from __future__ import annotations

from typing import Any

from ..conftest import Serve


async def test_a_server_below_a_path(serve: Serve) -> None:
    async with serve(root_path="/llm", api_keys=("k",)) as served:
        for path in ("/v1/models", "/llm/v1/models"):
            assert (await served.http.get(path)).status_code == 200
            refused = await served.http.get(path, headers={"Authorization": "none"})
            assert refused.status_code == 401, "its key is asked for, however it is reached"
        assert (await served.http.get("/llm")).status_code == 200
        assert (await served.http.get("/llmx/v1/models")).status_code == 404
        document: dict[str, Any] = (await served.http.get("/llm/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]

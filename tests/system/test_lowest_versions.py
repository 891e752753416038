"""The lowest versions that pyproject.toml allows of what the gateway imports, and its client's: a
server starts with them and answers over every transport. torch, transformers and what belongs to
them are left out: they are a gigabyte, and the machine with a GPU has older ones than this."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import chain
from pathlib import Path

import httpx
import openai
import pytest
import websockets

from ..redis_server import RedisServer
from ..support.fetched import python_packages
from .processes import END_S, serve

_ROOT = Path(__file__).parents[2]
_PYPROJECTS = (_ROOT / "pyproject.toml", _ROOT / "clients" / "python" / "pyproject.toml")
_OF_THE_ENGINE = {
    "huggingface_hub", "numpy", "safetensors", "tokenizers", "torch", "transformers", "triton",
}  # fmt: skip


def _lowest() -> list[str]:
    """As pip takes them: `redis[hiredis]==8.1`."""
    declared = [tomllib.loads(path.read_text())["project"]["dependencies"] for path in _PYPROJECTS]
    lines = sorted({line for line in chain(*declared) if not line.startswith("penstock-client")})
    found = [re.match(r"([\w.-]+)(\[\w+\])?>=([\d.]+)", line) for line in lines]
    assert all(found), "a package without a lowest version"
    return [
        f"{match[1]}{match[2] or ''}=={match[3]}"
        for match in found
        if match and match[1] not in _OF_THE_ENGINE
    ]


@pytest.fixture
def lowest(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which new processes import them."""
    folder = python_packages(_lowest())
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.redis
@pytest.mark.external
@pytest.mark.timeout(600)
async def test_a_server_with_the_lowest_versions(lowest: Path, tmp_path: Path) -> None:
    assert (lowest / "uvicorn").is_dir()
    with (
        RedisServer(tmp_path / "redis") as redis,
        serve("--redis-url", redis.patient_url, log=tmp_path / "log") as served,
    ):
        async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=8,
                stream=True,
            )
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason
            first = await client.responses.create(model="demo", input="Hi", max_output_tokens=8)
        address = served.base_url.replace("http", "ws") + "/v1/responses"
        async with websockets.connect(address, open_timeout=END_S) as web:
            request = {"previous_response_id": first.id, "input": "And?", "max_output_tokens": 8}
            await web.send(json.dumps({"type": "response.create", **request}))
            while json.loads(await web.recv())["type"] != "response.incomplete":
                pass
        async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as http:
            assert "penstock:redis_up" in (await http.get("/metrics")).text
            for path in ("/", "/openapi.json"):
                assert (await http.get(path)).status_code == 200
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log

"""Compressed bodies are read, within the limit of any body; other codings are refused by name."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import tracemalloc
import zlib
from typing import Any

import pytest

from penstock.gateway.http.content_encoding import ACCEPTED, decoded
from tests.support.tiers import tiered

from ..conftest import Serve, Served

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hällo"}], "max_tokens": 2}).encode()
LIMIT = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


def zstd(data: bytes, **options: Any) -> bytes:
    module = pytest.importorskip(
        "compression.zstd" if importlib.util.find_spec("compression") else "backports.zstd"
    )
    return bytes(module.compress(data, **options))


def _id(value: str | bytes) -> str:
    return value if isinstance(value, str) else f"{len(value)} bytes"


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", gzip.compress(BODY)),
        ("GZIP", gzip.compress(BODY)),
        ("x-gzip", gzip.compress(BODY)),
        ("gzip", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
        ("", BODY),
        ("deflate, gzip", gzip.compress(zlib.compress(BODY))),
        ("gzip, identity, gzip", gzip.compress(gzip.compress(BODY))),
    ],
    ids=_id,  # bytes of gzip have the time of day, which differs between workers
)
async def test_a_compressed_body_is_read(served: Served, encoding: str, content: bytes) -> None:
    response = await served.http.post(CHAT, content=content, headers={"content-encoding": encoding})
    assert response.status_code == 200, response.text
    assert served.prompt_of() == "<user>Hällo\n<assistant>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/v1/conversations", {}),
        ("/v1/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
async def test_so_is_that_of_every_operation(served: Served, path: str, body: Any) -> None:
    content = gzip.compress(json.dumps(body).encode())
    response = await served.http.post(path, content=content, headers={"content-encoding": "gzip"})
    assert response.status_code == 200, response.text


async def test_zstd_is_read_where_python_has_it(served: Served) -> None:
    content = zstd(BODY)
    response = await served.http.post(CHAT, content=content, headers={"content-encoding": "zstd"})
    assert response.status_code == 200, response.text
    assert decoded(zstd(b"x" * (LIMIT + 1)), ["zstd"], LIMIT) is None
    assert decoded(zstd(b"x" * LIMIT) + zstd(b""), ["zstd"], LIMIT) == b"x" * LIMIT


@pytest.mark.parametrize(
    "encoding", ["br", "compress", "gzip, br", "aes128gcm", "gzip," * 3 + "gzip"]
)
async def test_other_codings_are_refused_by_name(served: Served, encoding: str) -> None:
    response = await served.http.post(CHAT, content=BODY, headers={"content-encoding": encoding})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_content_encoding")
    assert error["param"] == "Content-Encoding"
    assert f"Content-Encoding '{encoding}'" in error["message"]
    assert "gzip, deflate" in error["message"]
    assert response.headers["accept-encoding"] == ACCEPTED


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("gzip", BODY),
        ("gzip", b""),
        ("gzip", gzip.compress(BODY)[:-1]),
        ("gzip", gzip.compress(BODY) + b"x"),
        ("gzip", gzip.compress(b"") * 1000),
        ("gzip", gzip.compress(BODY)[:-8] + bytes(8)),  # a wrong sum
        ("deflate", BODY),
        ("deflate", zlib.compress(BODY)[:-5]),
        ("gzip, gzip", gzip.compress(BODY)),
    ],
    ids=_id,  # bytes of gzip have the time of day, which differs between workers
)
async def test_what_is_not_what_it_says_is_refused(
    served: Served, encoding: str, content: bytes
) -> None:
    response = await served.http.post(CHAT, content=content, headers={"content-encoding": encoding})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "invalid_content_encoding",
        "Content-Encoding",
    )


async def test_what_is_too_large_is_not_unpacked(serve: Serve) -> None:
    async with serve(max_body_bytes=1000) as served:
        for encoding, content in (
            ("gzip", gzip.compress(b" " * 1001)),
            ("gzip", gzip.compress(b" " * 600) * 2),
            ("gzip, gzip", gzip.compress(gzip.compress(os.urandom(2000)))),
            ("gzip", gzip.compress(os.urandom(2000))),
        ):
            response = await served.http.post(
                CHAT, content=content, headers={"content-encoding": encoding}
            )
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (413, "request_too_large")
        content = gzip.compress(BODY + b" " * (1000 - len(BODY)))
        response = await served.http.post(
            CHAT, content=content, headers={"content-encoding": "gzip"}
        )
        assert response.status_code == 200


@pytest.mark.parametrize("num_codings", tiered([1, 2, 3], [2]))
def test_a_bomb_costs_no_memory(num_codings: int) -> None:
    bomb = bytes(256 << 20)
    for _ in range(num_codings):
        bomb = gzip.compress(bomb)
    tracemalloc.start()
    try:
        assert decoded(bomb, ["gzip"] * num_codings, LIMIT) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * LIMIT

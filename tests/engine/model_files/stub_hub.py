"""A Hugging Face Hub small enough to read: one public, one private repository, on localhost."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
TOKEN = "hf_stub"
_REVISIONS = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD_COMMIT, OLD_COMMIT: OLD_COMMIT}


class _Handler(BaseHTTPRequestHandler):
    files: dict[str, dict[str, bytes]] = {}  # noqa: RUF012  (set per server)
    requests: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.requests.append(path)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, action, revision, *rest = parts[2:] if is_api else parts
        if name == "private" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        if f"{owner}/{name}" not in ("acme/tiny", "acme/private"):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        commit = _REVISIONS.get(revision)
        if commit is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
        files = self.files[commit]
        if action == "revision":
            siblings = [{"rfilename": file} for file in files]
            body = {"id": f"{owner}/{name}", "sha": commit, "siblings": siblings}
            return self._send(200, json.dumps(body).encode(), {}, with_body)
        if action == "tree":
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
                for file, data in files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), {}, with_body)
        data = files.get("/".join(rest))
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit}
        return self._send(200, data, headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def stub_hub(model: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a model directory as `acme/tiny` (and `acme/private`, which wants `TOKEN`).

    Revision `v1` has another `generation_config.json`. Yields the endpoint and the paths asked
    for so far.
    """
    files = {
        str(file.relative_to(model)): file.read_bytes()
        for file in model.rglob("*")
        if file.is_file()
    }
    files["README.md"] = b"not needed for serving"
    old = {**files, "generation_config.json": b'{"eos_token_id": 7}'}
    handler = type(
        "Handler", (_Handler,), {"files": {COMMIT: files, OLD_COMMIT: old}, "requests": []}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

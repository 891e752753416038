"""The files of the chat page: how long browsers keep them, and what a document loads at once."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from penstock.gateway.http.page import ChatPage

_FILES = {
    "index.html": """<html><head>
  <link rel="stylesheet" href="./style.css">
  <script type="module" src="./chat.js"></script>
</head><body><a href="./dashboard/">Dashboard</a></body></html>
""",
    "style.css": "p { color: red }",
    "chat.js": """import { one } from "./one.js";
import {
  two,
} from "./parts/two.js";
one(two); const later = () => import("./later.js");
""",
    "one.js": 'export * from "./parts/two.js";\nexport const one = 1;\n',
    "parts/two.js": 'import "../three.js";\nexport const two = 2;\n',
    "three.js": "",
    "later.js": "",
    "dashboard/index.html": """<head>
  <script type="module" src="./dashboard.js"></script>
</head>
""",
    "dashboard/dashboard.js": 'import { one } from "../one.js";\n',
    "README.md": "not served",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in _FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def _client(folder: Path, **options: str) -> httpx.AsyncClient:
    app = Starlette(routes=[Mount("/", app=ChatPage(folder))])
    transport = httpx.ASGITransport(app, **options)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def _addresses(text: str, rel: str) -> list[str]:
    return re.findall(rf'(?:rel="{rel}"|script type="{rel}") (?:href|src)="([^"]+)"', text)


async def test_documents_are_revalidated_and_name_files_that_are_kept(folder: Path) -> None:
    async with _client(folder) as http:
        document = await http.get("/")
        assert document.headers["cache-control"] == "no-cache"
        assert document.headers["content-type"] == "text/html; charset=utf-8"
        assert "require-trusted-types-for" in document.headers["content-security-policy"]
        assert '<a href="./dashboard/">' in document.text
        [style] = _addresses(document.text, "stylesheet")
        kept = await http.get(f"/{style}")
        assert (kept.status_code, kept.text) == (200, _FILES["style.css"])
        assert kept.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert "require-trusted-types-for" in kept.headers["content-security-policy"]
        same = await http.get("/", headers={"If-None-Match": document.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        # What imports the library by its own name gets it as it is.
        assert (await http.get("/one.js")).headers["cache-control"] == "no-cache"
        for path in ("/README.md", "/v/0123456789abcdef/README.md", "/nothing.js", "/parts/"):
            assert (await http.get(path)).status_code == 404, path
        assert (await http.head("/")).status_code == 200
        assert (await http.post("/")).status_code == 405
        for name in ("%00", "a" * 3000):  # of no file
            assert (await http.post(f"/{name}")).status_code == 404


async def test_all_that_a_script_imports_is_asked_for_at_once(folder: Path) -> None:
    async with _client(folder) as http:
        text = (await http.get("/")).text
        [script] = _addresses(text, "module")
        version = script.removesuffix("/chat.js")
        loaded = _addresses(text, "modulepreload")
        names = ["one.js", "parts/two.js", "three.js"]
        assert sorted(loaded) == [f"{version}/{name}" for name in names]
        for name in loaded:
            assert (await http.get(f"/{name}")).status_code == 200
        dashboard = await http.get("/dashboard", follow_redirects=True)
        assert dashboard.url.path == "/dashboard/"
        [script] = _addresses(dashboard.text, "module")
        assert (await http.get(str(dashboard.url.join(script)))).text.startswith("import")
        assert len(_addresses(dashboard.text, "modulepreload")) == 3


async def test_an_upgrade_shows_at_once(folder: Path) -> None:
    """And a page that was loaded before it still gets what it loads later."""
    async with _client(folder) as http:
        [old] = _addresses((await http.get("/")).text, "module")
        (folder / "later.js").write_text("export const changed = 1;")
        [new] = _addresses((await http.get("/")).text, "module")
        assert new != old
        later = await http.get("/" + old.replace("chat.js", "later.js"))
        assert (later.text, later.headers["cache-control"]) == (
            "export const changed = 1;",
            "no-cache",
        )


async def test_below_a_path_of_a_proxy(folder: Path) -> None:
    async with _client(folder, root_path="/llm") as http:
        page = await http.get("/llm/")
        [style] = _addresses(page.text, "stylesheet")
        assert (await http.get(str(page.url.join(style)))).text == _FILES["style.css"]

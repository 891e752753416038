"""The chat page at `/`: static files of `penstock.clients.browser` under a strict policy.

Its documents are revalidated, so that an upgrade shows at once. They name every other file below
`/v/{version}/`, where it is kept by browsers for good: a version is a digest of all files.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import Path, PurePosixPath

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PAGE_DIRECTORY = Path(__file__).parents[2] / "clients" / "browser"
_SERVED = frozenset({"", ".html", ".css", ".js", ".svg", ".woff2"})  # not the notes and screenshots
_METHODS = ("GET", "HEAD")
_HOST = re.compile(r"[A-Za-z0-9.\-\[\]:]+")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'{sockets}; frame-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
# Here the page shows what a model's HTML makes. It has an origin of its own, and no network; where
# its frame may lead is in the page's policy.
_PREVIEW = "preview.html"
_PREVIEW_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; font-src data:; media-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_VERSIONED = re.compile(r"/v/(?P<version>[0-9a-f]{16})(?P<path>/.+)")
_KEPT = "public, max-age=31536000, immutable"
_REVALIDATED = "no-cache"
_ADDRESS = re.compile(r'(?P<before> (?:href|src)=")(?P<path>\.\.?/[^"]+\.[a-z0-9]+)(?=")')
_SCRIPT = re.compile(r'^ *<script type="module" src="(?P<path>[^"]+)"></script>\n', re.MULTILINE)
_IMPORT = re.compile(r'^(?:import|export)\s(?:[^;"]*?\sfrom\s)?"(?P<path>\.[^"]+)"', re.MULTILINE)


class ChatPage:
    """An ASGI application for the files in a directory."""

    def __init__(self, directory: Path = PAGE_DIRECTORY) -> None:
        self._static = StaticFiles(directory=directory)
        self._files = GZipMiddleware(self._static)
        self._versions = _Versions(directory)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _METHODS:
            if not self._has(scope):
                raise HTTPException(status_code=404)
            raise HTTPException(status_code=405, headers={"Allow": ", ".join(_METHODS)})
        path = self._static.get_path(scope)
        is_preview = PurePosixPath(path).name == _PREVIEW
        policy = _PREVIEW_POLICY if is_preview else _policy(Headers(scope=scope).get("host", ""))
        versioned = _VERSIONED.fullmatch("/" + path)
        cached = _REVALIDATED
        if versioned:
            # That of a page which was loaded before an upgrade gets the file as it is now.
            if versioned["version"] == self._versions.current.name:
                cached = _KEPT
            scope = _at(scope, versioned["path"])
        elif document := self._document(scope):
            await GZipMiddleware(document)(scope, receive, _guarded(send, policy, _REVALIDATED))
            return
        if PurePosixPath(scope["path"]).suffix not in _SERVED:
            raise HTTPException(status_code=404)
        await self._files(scope, receive, _guarded(send, policy, cached))

    def _document(self, scope: Scope) -> Response | None:
        """The HTML at this path, if there is one."""
        path = _document_path(self._static.get_path(scope), is_folder=scope["path"].endswith("/"))
        self._versions.refresh()
        body = self._versions.current.documents.get(path)
        if body is None:
            if f"{path}/index.html" not in self._versions.current.documents:
                return None
            return Response(status_code=307, headers={"Location": f"{PurePosixPath(path).name}/"})
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if tag in Headers(scope=scope).get("if-none-match", ""):
            return Response(status_code=304, headers={"ETag": tag})
        return Response(body, media_type="text/html", headers={"ETag": tag})

    def _has(self, scope: Scope) -> bool:
        path = self._static.get_path(scope)
        if path == "." or PurePosixPath(path).suffix not in _SERVED:
            return path == "."
        try:
            return self._static.lookup_path(path)[1] is not None
        except (OSError, ValueError):  # no file can have such a name
            return False


class _Version:
    """The files as they are.

    Attributes:
        name: a digest of all of them.
        documents: the HTML files by path, which name the others by this version.
    """

    def __init__(self, directory: Path, paths: list[Path]) -> None:
        digest = hashlib.sha256()
        texts: dict[str, str] = {}
        for path in paths:
            name, content = path.relative_to(directory).as_posix(), path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
            if path.suffix in (".html", ".js"):
                texts[name] = content.decode("utf-8")
        self.name = digest.hexdigest()[:16]
        self.documents = {
            name: self._document(name, texts) for name in texts if name.endswith(".html")
        }

    def _document(self, name: str, texts: dict[str, str]) -> bytes:
        folder = posixpath.dirname(name)

        def preloaded(script: re.Match[str]) -> str:
            first = posixpath.normpath(posixpath.join(folder, script["path"]))
            links = [
                f'  <link rel="modulepreload" href="./{posixpath.relpath(each, folder or ".")}">\n'
                for each in _imported(first, texts)
            ]
            return "".join(links) + script[0]

        def versioned(address: re.Match[str]) -> str:
            path = posixpath.normpath(posixpath.join(folder, address["path"]))
            return address["before"] + posixpath.relpath(f"v/{self.name}/{path}", folder or ".")

        text = _SCRIPT.sub(preloaded, texts[name])
        return _ADDRESS.sub(versioned, text).encode()


class _Versions:
    """Notices when the files change, as they do for who works on them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stamp: list[tuple[str, int, int]] = []
        self.refresh()

    def refresh(self) -> None:
        paths = sorted(
            path
            for path in self._directory.rglob("*")
            if path.suffix in _SERVED - {""} and path.is_file()
        )
        stats = [(str(path), path.stat()) for path in paths]
        stamp = [(path, stat.st_mtime_ns, stat.st_size) for path, stat in stats]
        if stamp != self._stamp:
            self.current = _Version(self._directory, paths)
            self._stamp = stamp


def _imported(first: str, texts: dict[str, str]) -> list[str]:
    """The modules that a script imports when it is loaded, and those that they import."""
    found = [first]
    for name in found:
        for each in _IMPORT.finditer(texts.get(name, "")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), each["path"]))
            if path not in found and path in texts:
                found.append(path)
    return found[1:]


def _document_path(path: str, *, is_folder: bool) -> str:
    if path == ".":
        return "index.html"
    return f"{path}/index.html" if is_folder else path


def _at(scope: Scope, path: str) -> Scope:
    return {**scope, "path": scope.get("root_path", "") + path}


def _guarded(send: Send, policy: str, cached: str) -> Send:
    async def send_guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Content-Security-Policy"] = policy
            headers["X-Content-Type-Options"] = "nosniff"
            headers["Referrer-Policy"] = "no-referrer"
            headers["Cache-Control"] = cached
        await send(message)

    return send_guarded


def _policy(host: str) -> str:
    # Not every browser lets 'self' include this server's WebSockets.
    sockets = f" ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    return _POLICY.format(sockets=sockets)

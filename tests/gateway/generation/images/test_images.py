"""Images of requests: what is hostile is refused by name, and costs nothing."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.engine.errors import ConfigError
from penstock.engine.vision.image_file import open_image
from penstock.engine.vision.image_tokens import ImageTokens
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.images import fetch as image_fetch
from penstock.gateway.generation.images.fetch import ImageFetcher
from penstock.gateway.generation.images.loader import ImageLoader, ImageSource
from penstock.gateway.generation.images.local import LocalImages

from ....support.stream_server import stream_server

TOKENS = ImageTokens(
    placeholder="<image>", token="<image>", token_id=7, expand=lambda *_: "<image>" * 3
)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def small(size: tuple[int, int] = (8, 6), mode: str = "RGB") -> Image.Image:
    return Image.radial_gradient("L").resize(size).convert(mode)


def png_of(width: int, height: int, pixels: bytes, *others: bytes) -> bytes:
    """A PNG file whose header says what it likes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [chunk(b"IHDR", header), *others, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def many_scans() -> bytes:
    """A progressive JPEG that goes over its picture two hundred times."""
    data = file_of(small(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * 200 + data[-2:]


def animated(kind: str, **options: Any) -> bytes:
    frames = [small(), small().rotate(90)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "bomb": (lambda: png_of(50_000, 50_000, zlib.compress(bytes(1 << 20))), "more than|pixels"),
    "100 megapixels": (lambda: file_of(Image.new("1", (10_000, 10_000))), "10000 × 10000 pixels"),
    "truncated": (lambda: file_of(small((64, 64)))[:-40], "damaged"),
    "truncated jpeg": (lambda: file_of(small((64, 64)), "JPEG")[:-300], "damaged"),
    "no pixels": (lambda: png_of(8, 8, b""), "damaged"),
    "empty": (lambda: b"", "not an image"),
    "text": (lambda: b"hello", "not an image"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image"),
    "pdf": (lambda: file_of(small(), "PDF"), "not an image"),
    "tiff": (lambda: file_of(small(), "TIFF"), "not an image"),
    "eps": (lambda: file_of(small(), "EPS"), "not an image"),
    "animated gif": (lambda: animated("GIF"), "animated"),
    "animated png": (lambda: animated("PNG"), "animated"),
    "animated webp": (lambda: animated("WEBP"), "animated"),
    "many scans": (many_scans, "scans"),
    "a line": (lambda: file_of(Image.new("L", (16_000, 1))), "times as long"),
    "too many bytes": (lambda: file_of(small()) + bytes(1 << 16), "bytes"),
}


def loader(
    *domains: str,
    tokens: ImageTokens | None = TOKENS,
    timeout_s: float = 5.0,
    directory: Path | None = None,
) -> ImageLoader:
    fetcher = ImageFetcher(domains, max_bytes=1 << 16, timeout_s=timeout_s)
    local = LocalImages(None if directory is None else str(directory), max_bytes=1 << 16)
    return ImageLoader(tokens, fetcher, local, max_images=4, max_bytes=1 << 16)


async def refusal(images: ImageLoader, *urls: str) -> RequestRefusedError:
    sources = [
        ImageSource(url=url, param=f"messages[0].content[{at}].image_url")
        for at, url in enumerate(urls)
    ]
    with pytest.raises(RequestRefusedError) as caught:
        await images.load(sources)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_image_is_refused_by_name(name: str) -> None:
    make, message = HOSTILE[name]
    data = make()
    images = loader()
    good = data_url(file_of(small()))
    error = await refusal(images, good, data_url(data))
    assert error.param == "messages[0].content[1].image_url"
    assert any(part in str(error) for part in message.split("|"))
    six = await asyncio.gather(*(refusal(images, data_url(data)) for _ in range(6)))
    assert len({str(each) for each in six}) == 1


@pytest.mark.parametrize(
    "url", ["", "cat.png", "file:///etc/passwd", "data:image/png", "data:image/png,x",
            "data:image/png;base64,@@@", "sha256:00;1x1", "ftp://example.org/x", "DATA:;base64,"]
)  # fmt: skip
async def test_what_is_no_image_url_is_refused(url: str) -> None:
    assert (await refusal(loader(), url)).param == "messages[0].content[0].image_url"


async def test_a_model_without_images_and_too_many_are_refused() -> None:
    url = data_url(file_of(small()))
    assert "takes no images" in str(await refusal(loader(tokens=None), url))
    error = await refusal(loader(), *[url] * 5)
    assert "limit-mm-per-prompt" in str(error)
    assert error.param == "messages[0].content[4].image_url"


async def test_what_a_file_carries_besides_is_not_looked_at() -> None:
    """Broken colour profiles and metadata do no harm; the orientation is honoured, as the size in
    tokens depends on it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = file_of(small((8, 6)), "JPEG", exif=exif, icc_profile=b"\x00" * 500)
    broken = file_of(
        small((8, 6)), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + b"\xff" * 64
    )
    loaded = await loader().load(
        [ImageSource(url=data_url(each), param="") for each in (turned, broken)]
    )
    assert [(each.width, each.height) for each in loaded] == [(6, 8), (8, 6)]
    for mode in ("1", "L", "P", "I;16", "RGBA", "LA"):
        made = small(mode="L").convert(mode) if mode != "I;16" else Image.new(mode, (8, 6))
        assert open_image(file_of(made)).mode == "RGB"
    clear = open_image(file_of(Image.new("RGBA", (1, 1), (9, 9, 9, 0))))
    assert clear.getpixel((0, 0)) == (255, 255, 255)


async def test_the_loop_goes_on_while_images_are_checked() -> None:
    """And one image is checked at a time."""
    images = loader()
    large = data_url(file_of(Image.new("1", (4000, 4000))))
    source = ImageSource(url=large, param="")
    task = asyncio.gather(*(images.load([source]) for _ in range(6)))
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 100
    assert len(images._thread._threads) == 1


def test_image_tokens_have_their_places() -> None:
    images = loader()
    pictures = [open_image(file_of(small((size, 6)))) for size in (8, 9)]
    assert pictures
    made: Any = [
        type("Loaded", (), {"digest": str(n), "data": b"", "width": 8, "height": 6})()
        for n in (0, 1)
    ]
    text = images.expanded("a<image>b<image>c", made, param="messages")
    assert text == "a<image><image><image>b<image><image><image>c"
    found = images.located([1, 7, 7, 7, 2, 7, 7, 7, 3], made, param="messages")
    assert [(each.offset, each.num_tokens, each.num_features) for each in found] == [
        (1, 3, 3), (5, 3, 3),
    ]  # fmt: skip
    for text in ("a<image>", "<image><image><image>"):
        with pytest.raises(RequestRefusedError, match="stands"):
            images.expanded(text, made, param="messages")
    for ids in ([7] * 5, [7] * 7):
        with pytest.raises(RequestRefusedError, match="not whole"):
            images.located(ids, made, param="messages")


# -- fetching -------------------------------------------------------------------------------------


@asynccontextmanager
async def host(answer: bytes, *, then: str = "close") -> AsyncIterator[tuple[str, list[bytes]]]:
    """A host that gives every request this answer, then goes on as told."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        while then == "endless":
            writer.write(bytes(4096))
            await writer.drain()
        if then == "silence":
            await reader.read()

    async with stream_server(serve) as port:
        yield f"127.0.0.1:{port}", seen


def http(body: bytes = b"", status: str = "200 OK", *headers: str) -> bytes:
    head = "\r\n".join((f"HTTP/1.1 {status}", *headers, "", ""))
    return head.encode() + body


async def test_a_listed_host_is_asked() -> None:
    picture = file_of(small())
    chunked = b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(picture), picture)
    for answer in (
        http(picture),
        http(picture, "200 OK", f"Content-Length: {len(picture)}"),
        http(chunked, "200 OK", "Transfer-Encoding: chunked"),
    ):
        async with host(answer) as (address, seen):
            source = ImageSource(url=f"http://{address}/a.png?b=c", param="")
            (found,) = await loader(address).load([source])
            assert found.data == picture
            assert seen[0].startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: " + address.encode())


@pytest.mark.parametrize(
    ("answer", "then", "message"),
    [
        (http(b"", "404 Not Found"), "close", "status 404"),
        (http(b"", "204 No Content"), "close", "status 204"),
        (http(b"<html>"), "close", "not an image"),
        (http(bytes(1 << 17)), "close", "more than 65536 bytes"),
        (http(b"", "200 OK", "Content-Length: 99999999999"), "silence", "more than 65536 bytes"),
        (http(b"", "200 OK", "Content-Length: -1"), "silence", "not valid HTTP"),
        (http(b"zz\r\n", "200 OK", "Transfer-Encoding: chunked"), "silence", "not valid HTTP"),
        (http(b"", "200 OK", "Content-Encoding: gzip"), "close", "compressed"),
        (http(), "endless", "more than 65536 bytes"),
        (http(b"", "200 OK", "X: " + "y" * 40_000), "silence", "not valid HTTP"),
        (b"", "endless", "not valid HTTP"),
        (b"SSH-2.0\r\n\r\n", "close", "not valid HTTP"),
        (b"", "close", "not valid HTTP"),
        (http(b"", "200 OK", "Content-Length: 9"), "silence", "not there within"),
    ],
)
async def test_a_hostile_answer_is_refused(answer: bytes, then: str, message: str) -> None:
    async with host(answer, then=then) as (address, _):
        images = loader(address, timeout_s=0.5)
        errors = await asyncio.gather(
            *(refusal(images, f"http://{address}/{number}") for number in range(6))
        )
        for error in errors:
            assert message in str(error) or "not there within" in str(error)
        assert any(message in str(error) for error in errors)


async def test_a_host_that_sends_tiny_chunks_is_refused_at_once() -> None:
    chunks = b"1\r\nx\r\n" * 200 + b"0\r\n\r\n"
    async with host(http(chunks, "200 OK", "Transfer-Encoding: chunked"), then="silence") as (
        address,
        _,
    ):
        error = await refusal(loader(address, timeout_s=60), f"http://{address}/")
        assert "chunks have less than 256 bytes" in str(error)
    usual = b"".join(b"%x\r\n%b\r\n" % (each, bytes(each)) for each in (*[1] * 40, *[300] * 100))
    async with host(http(usual + b"0\r\n\r\n", "200 OK", "Transfer-Encoding: chunked")) as (
        address,
        _,
    ):
        assert "not an image" in str(await refusal(loader(address), f"http://{address}/"))


async def test_a_host_that_sends_too_little_a_second_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_fetch, "_LENIENT_S", 0.05)
    for headers in ((), ("Content-Length: 99",), ("Transfer-Encoding: chunked",)):
        async with host(http(b"9", "200 OK", *headers), then="silence") as (address, _):
            error = await refusal(loader(address, timeout_s=60), f"http://{address}/")
            assert "less than 8192 bytes a second" in str(error)


async def test_a_host_that_is_slow_takes_no_turns_from_another() -> None:
    async with (
        host(b"", then="silence") as (slow, asked),
        host(http(file_of(small()))) as (other, _),
    ):
        images = loader(slow, other, timeout_s=60)
        waiting = [
            asyncio.create_task(images.load([ImageSource(url=f"http://{slow}/{at}", param="x")]))
            for at in range(8)
        ]
        async with asyncio.timeout(30):
            while len(asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (found,) = await images.load([ImageSource(url=f"http://{other}/", param="x")])
        assert found.data == file_of(small())
        assert len(asked) == 2
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_no_redirect_leaves_the_list() -> None:
    async with host(http(file_of(small()))) as (other, seen):
        for target in (
            f"http://{other}/",
            "http://localhost/",
            "file:///etc/passwd",
            "http://[::1]/",
        ):
            async with host(http(b"", "302 Found", f"Location: {target}")) as (address, _):
                error = await refusal(loader(address), f"http://{address}/")
                assert "allowed-media-domains" in str(error) or "http or https" in str(error)
        assert not seen
        async with host(http(b"", "302 Found", "Location: /again")) as (address, asked):
            assert "redirected" in str(await refusal(loader(address), f"http://{address}/"))
            assert len(asked) == 4


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://[::1]:80/", "http://169.254.169.254/latest", "http://2130706433/",
        "http://listed.example@127.0.0.1/", "http://listed.example:81/", "https://other.example/",
        "http://listed.example.evil.example/", "http://listed.example\r\nX: y/", "http:///x",
        "http://listed.example:99999/", "http://li\u0455ted.example/", "gopher://listed.example/",
    ],
)  # fmt: skip
async def test_only_listed_hosts_are_asked(url: str) -> None:
    await refusal(loader("listed.example"), url)
    error = str(await refusal(loader(), "https://listed.example/"))
    assert "fetches no images" in error
    assert "--allowed-media-domains listed.example" in error


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An open directory, with a picture, beside one that is not."""
    for name in ("open", "open/in", "closed"):
        (tmp_path / name).mkdir()
    for name in ("open/a cat.png", "open/in/cat.png", "closed/cat.png"):
        (tmp_path / name).write_bytes(file_of(small()))
    (tmp_path / "open/there.png").symlink_to("in/cat.png")
    (tmp_path / "open/out.png").symlink_to("../closed/cat.png")
    (tmp_path / "open/loop.png").symlink_to("loop.png")
    (tmp_path / "open/large.png").write_bytes(bytes(1 << 17))
    os.mkfifo(tmp_path / "open/fifo.png")
    return tmp_path / "open"


@pytest.mark.parametrize("name", ["a%20cat.png", "in/cat.png", "in/../in/cat.png", "there.png"])
async def test_a_file_of_the_open_directory_is_read(directory: Path, name: str) -> None:
    for host in ("", "localhost"):
        url = f"file://{host}{directory}/{name}"
        [image] = await loader(directory=directory).load([ImageSource(url=url, param="x")])
        assert (image.width, image.height) == small().size


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../closed/cat.png", "--allowed-local-media-path"),
        ("%2e%2e/closed/cat.png", "--allowed-local-media-path"),
        ("../closed/nothing.png", "--allowed-local-media-path"),
        ("out.png", "--allowed-local-media-path"),
        ("loop.png", ""),
        ("nothing.png", "cannot be read: No such file"),
        ("in", "not a regular file"),
        ("fifo.png", "not a regular file"),
        ("large.png", "has 131072 bytes"),
        ("nul%00l.png", "--allowed-local-media-path"),
    ],
)
async def test_other_files_are_not_read(directory: Path, name: str, reason: str) -> None:
    images = loader(directory=directory)
    assert reason in str(await refusal(images, f"file://{directory}/{name}"))
    error = str(await refusal(images, f"file://elsewhere{directory}/in/cat.png"))
    assert "--allowed-local-media-path" in error


async def test_without_an_open_directory_a_file_is_refused_with_the_option(directory: Path) -> None:
    error = str(await refusal(loader(), f"file://{directory}/in/cat.png"))
    assert "--allowed-local-media-path DIRECTORY" in error
    for wrong in (directory / "nothing", directory / "in/cat.png"):
        with pytest.raises(ConfigError, match="--allowed-local-media-path"):
            LocalImages(str(wrong), max_bytes=1)


async def test_a_listed_name_must_have_public_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them; and the one that was checked is connected to, whatever a second answer says."""
    loop = asyncio.get_running_loop()
    answers = [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:10.0.0.1"], []]

    async def resolve(name: str, port: int, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in answers.pop(0)]

    monkeypatch.setattr(loop, "getaddrinfo", resolve, raising=False)
    images = loader("listed.example")
    while answers:
        assert "not public" in str(await refusal(images, "http://listed.example/"))
    answers.append(["93.184.216.34"])  # and no second answer
    connected: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], *_: Any) -> Any:
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert "connection failed" in str(await refusal(images, "http://listed.example/"))
    assert connected == [("93.184.216.34", 80)]

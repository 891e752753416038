"""HTTPS and WSS under a certificate that signs itself."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import pytest
import uvicorn
import websockets

from penstock.engine.errors import ConfigError
from penstock.gateway.http.server import https_context
from penstock.gateway.launch.cli import main

from ..certificate import make_certificate
from .processes import END_S, launch, read_line, serve

_PASSWORD = "of the key"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """PEM files of a certificate and of its encrypted key."""
    return make_certificate(tmp_path_factory.mktemp("tls"), password=_PASSWORD)


@pytest.mark.exhaustive
async def test_https_and_wss(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    flags = ["--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1])]
    flags += ["--ssl-keyfile-password", _PASSWORD]
    trust = ssl.create_default_context(cafile=certificate[0])
    with serve(*flags, log=tmp_path / "log") as served:
        assert served.line.startswith("penstock is ready at https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=served.base_url, verify=trust, timeout=60) as client:
            response = await client.post("/v1/completions", json={"prompt": "Hello"})
            assert response.status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(served.base_url.replace("https", "http"))
        address = served.base_url.replace("https", "wss") + "/v1/responses"
        async with websockets.connect(address, ssl=trust, open_timeout=END_S) as web:
            await web.send('{"type": "response.create", "input": "Hello", "max_output_tokens": 4}')
            while json.loads(await web.recv())["type"] != "response.incomplete":
                pass
        assert served.stop() == 0
        assert _PASSWORD not in served.log.read_text()


def test_a_server_whose_key_wants_a_password_does_not_start(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """It says so in one line, and asks nobody."""
    certfile, keyfile = map(str, certificate)
    log = tmp_path / "log"
    with launch(["--ssl-certfile", certfile, "--ssl-keyfile", keyfile], log) as process:
        assert read_line(process) == ""
        assert process.wait(END_S) != 0
    (line,) = log.read_text().splitlines()
    assert line.startswith(
        f"penstock: error: cannot use the certificate and key of {certfile} and {keyfile}"
    )


def test_files_that_cannot_be_used_are_said(certificate: tuple[Path, Path]) -> None:
    certfile, keyfile = certificate
    wrong = uvicorn.Config(
        "none", ssl_certfile=certfile, ssl_keyfile=keyfile, ssl_keyfile_password="no"
    )
    with pytest.raises(ConfigError, match="cannot use the certificate and key of"):
        https_context(wrong)
    with pytest.raises(ConfigError, match="No such file"):
        https_context(uvicorn.Config("none", ssl_certfile="/no/such/file"))


def test_a_key_needs_its_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--ssl-keyfile", "a.key"]) == 2
    assert "--ssl-keyfile needs --ssl-certfile" in capsys.readouterr().err

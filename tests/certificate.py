"""Certificates for servers on 127.0.0.1: one that signs itself, and those of an authority."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.engine.config import TlsFiles


def make_certificate(folder: Path, *, password: str) -> tuple[Path, Path]:
    """PEM files of it and of its encrypted key."""
    files = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2"
    command += " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1,DNS:localhost"
    subprocess.run(
        [*command.split(), "-passout", f"pass:{password}", "-out", files[0], "-keyout", files[1]],
        check=True,
        capture_output=True,
    )
    return files


class Authority:
    """Signs certificates for this machine, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._run(
            f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
            f"-subj /CN=authority -out {self.ca} -keyout {folder}/ca.key"
        )

    def certificate(
        self, name: str, *, usage: str = "serverAuth,clientAuth", names: str = "IP:127.0.0.1"
    ) -> TlsFiles:
        """A certificate's PEM files.

        Args:
            usage: the roles that it names.
            names: the hosts.
        """
        cert, key, request = (self._folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
        self._run(
            f"req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} "
            f"-out {request} -keyout {key}"
        )
        self._run(
            f"x509 -req -in {request} -CA {self.ca} -CAkey {self._folder}/ca.key -CAcreateserial "
            f"-days 2 -extfile {extensions} -out {cert}"
        )
        return TlsFiles(str(cert), str(key), str(self.ca))

    def _run(self, arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)

"""A certificate that signs itself, for servers on 127.0.0.1."""

from __future__ import annotations

import subprocess
from pathlib import Path


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

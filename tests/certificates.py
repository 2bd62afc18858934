"""A certificate of this host for tests over TLS, signed by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path


def write_certificate(folder: Path) -> tuple[str, str]:
    """Writes a key and its certificate for localhost and 127.0.0.1 into `folder`; returns their paths."""
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", "-x509", *curve.split(), *names.split(), "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate

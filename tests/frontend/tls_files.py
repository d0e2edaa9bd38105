"""Certificates for 127.0.0.1, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> tuple[str, str]:
    """Paths of a certificate and of its key; skips the test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    made = (str(folder / "cert.pem"), str(folder / "key.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    options = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-out", made[0], "-keyout", made[1]]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return made

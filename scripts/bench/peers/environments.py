"""Environments of Python for contenders whose packages can't stand next to the project's own.

An environment has the packages of its list, and after them all that the running interpreter has. They are downloaded
only when asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from bench.peers.contender import CannotRun
from bench.processes import ROOT

FOLDER = ROOT / ".cache" / "peers"
# Without what they depend on: torch and the like come from the project's environment. optimum-intel needs this
# transformers, which is why OpenVINO has an environment.
PACKAGES = {
    "openvino": (
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "openvino-telemetry==2025.2.0",
        "optimum==2.3.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "transformers==5.5.4",
        "tokenizers==0.22.2",
        "huggingface_hub==1.21.0",
        "tabulate==0.10.0",
        "pydot==4.0.1",
        "pyparsing==3.3.3",
    )
}


def interpreter(environment: str) -> str:
    """The Python of `environment` under `FOLDER`; "" is the running one. Raises `CannotRun` if it isn't installed."""
    if not environment:
        return sys.executable
    found = FOLDER / environment / "bin" / "python"
    if not found.exists():
        raise CannotRun(f"{FOLDER / environment} is no environment: --install makes it")
    return str(found)


def install(environment: str) -> None:
    """Makes `environment` anew with the packages of its list. Raises `CalledProcessError`."""
    folder = FOLDER / environment
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    python = folder / "bin" / "python"
    own = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    Path(own.strip(), "project.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES[environment]], check=True)

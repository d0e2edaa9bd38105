"""Generate jaxsgl/frontend/proto/*_pb2* from the .proto files, after every change of one.

    python scripts/make proto

Generated code runs with the library versions that generated it and with newer ones, never with older ones. So that the
oldest grpcio and protobuf of pyproject.toml stay usable, run this in an environment of its own with
`pip install grpcio-tools==1.70.0 "setuptools<81"`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from bench.output import figure_parser, write_figures
from bench.processes import ROOT

OLDEST_GRPCIO = "1.70.0"
PROTO_FOLDER = Path("jaxsgl/frontend/proto")


def main(arguments: list[str]) -> int:
    """Runs protoc on every .proto file of the package; returns its exit status."""
    args = figure_parser(__doc__, __name__).parse_args(arguments)
    from grpc_tools import protoc

    version = metadata.version("grpcio-tools")
    if version != OLDEST_GRPCIO:
        print(
            f"grpcio-tools is {version}: its output would refuse older libraries; install {OLDEST_GRPCIO} "
            "in an environment of its own",
            file=sys.stderr,
        )
        return 1
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PROTO_FOLDER).glob("*.proto"))
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    status = int(protoc.main(["protoc", f"-I{ROOT}", *outputs, *sources]))
    write_figures(args.json, grpcio_tools=version, sources=sources, status=status)
    return status

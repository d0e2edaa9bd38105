"""Generate jaxsgl/frontend/proto/*_pb2* from the .proto files. Run this after every change of a .proto file.

Generated code runs with the library versions that generated it and with newer ones, never with older ones. So that the
oldest grpcio and protobuf of pyproject.toml stay usable, run this in an environment of its own with
`pip install grpcio-tools==1.70.0 "setuptools<81"`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from bench.output import command_parser, write_json

OLDEST_GRPCIO = "1.70.0"
ROOT = Path(__file__).resolve().parent.parent
PROTO_FOLDER = Path("jaxsgl/frontend/proto")


def main() -> int:
    """Runs protoc on every .proto file of the package; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write what was generated, and by which version, to FILE")
    args = parser.parse_args()
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
    if args.json:
        write_json(args.json, {"grpcio_tools": version, "sources": sources, "status": status})
    return status


if __name__ == "__main__":
    sys.exit(main())

"""A certificate that is renewed while the server runs is the one that new connections get, on both ports."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
from server_process import ServerProcess, ids_request, wait_for
from tls_files import make_certificate

from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc


def served(server: ServerProcess) -> tuple[str, str]:
    """The certificates, as PEM, of new connections to the HTTP and to the gRPC port."""
    found = [ssl.get_server_certificate((host, int(port))) for host, port in map(split, addresses(server))]
    return found[0], found[1]


def addresses(server: ServerProcess) -> tuple[str, str]:
    return server.http_address, server.address


def split(address: str) -> list[str]:
    return address.rsplit(":", 1)


def replace(pair: tuple[str, str], by: tuple[str, str]) -> None:
    """Replaces both files as programs that renew certificates do, one after the other."""
    for old, new in zip(pair, by, strict=True):
        renewed = Path(f"{old}.new")
        renewed.write_bytes(Path(new).read_bytes())
        renewed.replace(old)


def test_new_connections_get_a_renewed_certificate_and_bad_files_change_nothing(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    pairs = {}
    for name in ("used", "first", "second"):
        (tmp_path / name).mkdir()
        pairs[name] = make_certificate(tmp_path / name)
    pem = {name: Path(certfile).read_text() for name, (certfile, _) in pairs.items()}
    used = pairs["used"]
    server = start_server("--ssl-certfile", used[0], "--ssl-keyfile", used[1])
    server.wait_until_ready()
    assert served(server) == (pem["used"],) * 2
    trusting = ssl.create_default_context(cafile=used[0])
    with httpx.Client(base_url=f"https://{server.http_address}", verify=trusting) as open_before:
        assert open_before.get("/health").status_code == 200
        replace(used, pairs["first"])
        wait_for(lambda: served(server) == (pem["first"],) * 2, "renewed certificate")
        assert open_before.get("/health").status_code == 200  # over the connection that was open
    credentials = grpc.ssl_channel_credentials(pem["first"].encode())
    with grpc.secure_channel(server.address, credentials) as channel:
        assert list(pb_grpc.JaxsglStub(channel).Generate(ids_request(5, max_tokens=1)))

    Path(used[0]).write_text("no certificate")
    server.wait_for_log("the old certificate stays in use until its files change again: --ssl-certfile")
    assert served(server) == (pem["first"],) * 2
    replace(used, pairs["second"])
    wait_for(lambda: served(server) == (pem["second"],) * 2, "certificate after the bad one")
    Path(used[1]).unlink()
    server.wait_for_log("key.pem can't be read")
    assert served(server) == (pem["second"],) * 2

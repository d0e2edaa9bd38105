"""Which prefill servers a request may name to a decode server."""

from __future__ import annotations

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.legs import PrefillHosts, rendezvous

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "allowed", "refused"),
    [
        ((), ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]", "::ffff:127.0.0.1"],
         ["10.0.0.5", "169.254.169.254", "0.0.0.0", "127.1", "2130706433", "0x7f.1", "localhost.a.org", "[127.0.0.1]",
          "[[::1]]", "[fd00::5]"]),
        (("10.0.0.0/24", "Prefill-0"), ["10.0.0.5", "prefill-0"], ["10.0.1.5", "127.0.0.1", "prefill-1"]),
        (("fd00::/16",), ["fd00::5", "[fd00::5]"], ["::1", "[fd01::5]"]),
        (("*",), ["10.0.0.5", "example.org"], []),
    ],
    ids=["default", "network and name", "IPv6", "any"],
)  # fmt: skip
def test_a_decode_server_is_sent_to_its_prefill_servers_alone(
    given: tuple[str, ...], allowed: list[str], refused: list[str]
) -> None:
    hosts = PrefillHosts(given)
    for host in allowed:
        hosts.check(rendezvous(host, 8998, 1).host)
    for host in refused:
        with pytest.raises(InvalidRequest, match="--disaggregation-prefill-hosts"):
            hosts.check(rendezvous(host, 8998, 1).host)

"""Which leg of a request this server computes, and what is left of the request's parameters then.

A gateway sends the same request to a prefill and a decode server, with the same room. Knows no protocol; generation.py
applies it to requests of all protocols.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from jaxsgl.config.features import ALL_IN_ONE, networks_and_names
from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Rendezvous, Request, SamplingParams, check_integer

MAX_HOST_CHARS = 255
MAX_ROOM = (1 << 63) - 1


def rendezvous(host: str, port: int, number: int) -> Rendezvous:
    """Returns where the legs meet. Raises `InvalidRequest` for an address or a number that can't be one.

    An IPv6 address may stand in brackets, as gateways write it.
    """
    check_integer("bootstrap_port", port, optional=False)
    check_integer("bootstrap_room", number, optional=False)
    if not 1 <= len(host) <= MAX_HOST_CHARS:
        raise InvalidRequest(f"bootstrap_host has {len(host)} characters, but must have 1 to {MAX_HOST_CHARS}")
    if not 1 <= port <= 65535:
        raise InvalidRequest(f"bootstrap_port is {port}, but must be 1 to 65535")
    if not 0 <= number <= MAX_ROOM:
        raise InvalidRequest(f"bootstrap_room is {number}, but must be 0 to {MAX_ROOM}")
    return Rendezvous(_without_brackets(host), port, number)


def _without_brackets(host: str) -> str:
    inner = host[1:-1]
    try:
        ipaddress.IPv6Address(inner)
    except ValueError:
        return host
    return inner if host == f"[{inner}]" else host


class PrefillHosts:
    """Where a decode server may connect to, since requests name the address.

    Args:
      given: addresses, networks and names; "*": any. (): loopback addresses.

    Raises:
      ConfigError: one is neither.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self._networks, self._names = networks_and_names(given or ("localhost", "127.0.0.0/8", "::1"))

    def check(self, host: str) -> None:
        """Raises `InvalidRequest` if a request may not name `host`. Names are compared as texts, never looked up."""
        if "*" in self._names or host.lower() in self._names:
            return
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            address = None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if address is None or not any(address in network for network in self._networks):
            raise InvalidRequest(
                f"bootstrap_host {host} is none of this decode server's prefill servers: name one of them, or start "
                "it with --disaggregation-prefill-hosts"
            )


def leg_sampling(sampling: SamplingParams, mode: str) -> SamplingParams:
    """Returns what the server of `mode` does of a request that has a room.

    Prefill computes the prompt and its log-probabilities, with one token that no client sees. Decode does all the rest.

    Raises:
      InvalidRequest: the server computes whole requests.
    """
    if mode == ALL_IN_ONE:
        raise InvalidRequest(
            "the request names a bootstrap_room, but this server computes prefill and decode itself: leave "
            "bootstrap_* out, or start it with --disaggregation-mode"
        )
    if mode == "decode":
        return msgspec.structs.replace(sampling, prompt_logprobs=None)
    return SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=sampling.logprobs, prompt_logprobs=sampling.prompt_logprobs
    )


def with_grammar(request: Request, grammar: Grammar | None, mode: str) -> Request:
    """Returns `request` with another grammar; one with a room on the server of mode "prefill" has none at all."""
    if request.room is not None and mode == "prefill":
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))

"""What the terminal programs share: the flags of connection and sampling, the channel, and how errors end a program.

Never knows prompts or answers. client.py and chat.py call it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxsgl.config.server import API_KEY_VARIABLE
from jaxsgl.errors import JaxsglError
from jaxsgl.frontend.listen import is_loopback
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb

POLL_S = 0.1
MAX_REASON = 200  # characters of what gRPC says of a connection that fails
MAX_WAIT_S = 1e6  # more is beyond what gRPC can wait for
MAX_INT64 = 2**63 - 1
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
]


class ClientError(JaxsglError):
    """Ends the program with exit status 1 and this message."""


class HttpError(Exception):
    """A refusal over HTTP, or status 0 if a connection failed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


CALL_ERRORS = (grpc.RpcError, HttpError)  # of calls over gRPC and over HTTP


def _wait(text: str) -> float:
    wait_s = float(text)
    if not 0 <= wait_s <= MAX_WAIT_S:  # NaN is never over
        raise argparse.ArgumentTypeError(f"it is {text}, but must be 0 to {MAX_WAIT_S:.0f} seconds")
    return wait_s


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `connect` reads."""
    parser.add_argument("--addr", default="127.0.0.1:30001", help="server, as host:port (default: %(default)s)")
    parser.add_argument("--wait-s", type=_wait, default=5.0, help="wait so long for the server (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"default: {API_KEY_VARIABLE}")
    parser.add_argument("--tls", action="store_true", help="the server has a certificate")
    parser.add_argument("--ca", metavar="FILE", help="certificate (PEM) of the server or its authority; with --tls")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `sampling_params` reads."""
    parser.add_argument("--max-tokens", type=int, help="tokens to generate at most (default: as many as fit)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: most likely tokens (default)")
    parser.add_argument("--top-p", type=float, help="sample from the most likely tokens of this total probability")
    parser.add_argument("--top-k", type=int, help="sample from this many of the most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, help="makes sampling reproducible")
    parser.add_argument("--frequency-penalty", type=float, help="lower tokens by this for each time they came, -2 to 2")
    parser.add_argument("--presence-penalty", type=float, help="lower tokens by this if they came at all, -2 to 2")
    parser.add_argument("--repetition-penalty", type=float, help="scale down tokens of prompt and output, up to 2")
    parser.add_argument("--min-tokens", type=int, help="tokens to generate at least")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end where this text comes up; may be repeated")


@contextlib.contextmanager
def connect(args: argparse.Namespace) -> Iterator[grpc.Channel]:
    """Opens a channel to a server that is ready. Raises `ClientError` if none is within `--wait-s`."""
    with _channel(args) as channel:
        _wait_until_ready(channel, args.addr, args.wait_s)
        yield channel if args.api_key is None else grpc.intercept_channel(channel, _WithKey(args.api_key))


def _channel(args: argparse.Namespace) -> grpc.Channel:
    # A proxy, as the environment may name one, would look for a loopback address on its own machine.
    is_here = is_loopback(args.addr.rpartition(":")[0].strip("[]"))
    options = [*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_here else _CHANNEL_OPTIONS
    if not args.tls:
        return grpc.insecure_channel(args.addr, options=options)
    try:
        trusted = None if args.ca is None else Path(args.ca).read_bytes()
    except OSError as error:
        raise ClientError(f"--ca {args.ca} can't be read: {error.strerror}") from None
    return grpc.secure_channel(args.addr, grpc.ssl_channel_credentials(trusted), options=options)


class _WithKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends the API key with every call."""

    def __init__(self, key: str) -> None:
        self._entry = ("authorization", f"Bearer {key}")

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        """Makes the call with the key in its metadata."""
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._entry]), request)

    intercept_unary_stream = intercept_unary_unary


def sampling_params(args: argparse.Namespace) -> pb.SamplingParams:
    """Returns the flags' values. Raises `ClientError` for those no message can hold; the server checks the rest."""
    for text in args.stop or ():
        check_text("--stop", text)
    sampling = pb.SamplingParams(stop=args.stop or ())
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        value = getattr(args, field.name, None)
        if not field.has_presence or value is None:
            continue
        if field.type == FieldDescriptor.TYPE_INT64 and abs(value) > MAX_INT64:
            flag = "-n" if field.name == "n" else "--" + field.name.replace("_", "-")
            raise ClientError(f"{flag} is {value}, but must be {-MAX_INT64} to {MAX_INT64}")
        setattr(sampling, field.name, value)
    return sampling


def check_text(what: str, text: str) -> None:
    """Raises `ClientError` for bytes of the command line that are not UTF-8: Python keeps them as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ClientError(f"{what} is no valid text from character {error.start} on: write it in UTF-8") from None


def run(program: Callable[[], int]) -> int:
    """Calls `program` and returns its exit status. An error that it raises becomes one line and a status of its own."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still shows the others
    try:
        status = program()
        sys.stdout.flush()
        return status
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except CALL_ERRORS as error:
        print(f"error: {describe(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest when it ends
        return 1
    except KeyboardInterrupt:
        return 130


def describe(error: grpc.RpcError | HttpError) -> str:
    """Returns the status and the message of a failed call."""
    if isinstance(error, HttpError):
        return f"{error.status}: {error}" if error.status else str(error)
    return f"{error.code().name}: {error.details()}"


def is_refusal(error: grpc.RpcError | HttpError) -> bool:
    """Whether the server refused what it was sent."""
    if isinstance(error, HttpError):
        return error.status == HTTPStatus.BAD_REQUEST
    return bool(error.code() == grpc.StatusCode.INVALID_ARGUMENT)


def _wait_until_ready(channel: grpc.Channel, addr: str, wait_s: float) -> None:
    """Raises `ClientError` unless the server says SERVING within `wait_s` seconds."""
    stub = health_pb2_grpc.HealthStub(channel)
    deadline_s = time.monotonic() + wait_s
    state = "nothing answers"
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=max(left_s, POLL_S))
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return
            state = "the server is still loading its model, or stopping"
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            reason = str(error.details()).rpartition("last error: ")[2]
            if error.code() is grpc.StatusCode.UNAVAILABLE and "Connection refused" not in reason:
                state = reason[:MAX_REASON]
        if left_s <= 0:
            raise ClientError(
                f"no server is ready at {addr} after {wait_s:g} s ({state}): start one with `jaxsgl serve`, give its "
                "--grpc-port in --addr, as host:port, add --tls if it has a certificate, or wait longer with --wait-s"
            )
        time.sleep(min(POLL_S, left_s))

"""`python -m jaxsgl.client "prompt"`: asks a running server and streams the answer to the terminal."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxsgl.errors import JaxsglError
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc

_OPTIONAL_PARAMS = (
    "max_tokens", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens",
    "logprobs", "prompt_logprobs", "n",
)  # fmt: skip
POLL_S = 0.1
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
]


class ClientError(JaxsglError):
    """The client ends with exit status 1 and this message."""


def main(argv: list[str] | None = None) -> int:
    """Sends one request; returns the exit status."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still gets the others
    try:
        _check(args)
        with grpc.insecure_channel(args.addr, options=_CHANNEL_OPTIONS) as channel:
            _wait_until_ready(channel, args.addr, args.wait_s)
            stub = pb_grpc.JaxsglStub(channel)
            call = stub.Generate(_request(args, stub))
            try:
                _show_json(call) if args.json else _show_text(call)
                sys.stdout.flush()
            finally:
                call.cancel()
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"error: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left, Python writes at its end
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m jaxsgl.client", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="text of the user's turn (or, with --raw, the text to continue)")
    parser.add_argument("--addr", default="127.0.0.1:30001", help="server, as host:port (default: %(default)s)")
    parser.add_argument("--token-ids", type=_ids, metavar="1,2,3", help="send these ids instead of a prompt")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system's turn, before the user's")
    parser.add_argument("--max-tokens", type=int, help="tokens to generate at most (default: as many as fit)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: most likely tokens (default)")
    parser.add_argument("--top-p", type=float, help="sample from the most likely tokens of this total probability")
    parser.add_argument("--top-k", type=int, help="sample from so many of the most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, help="makes sampling reproducible")
    parser.add_argument("--frequency-penalty", type=float, help="lower tokens by this for each time they came, -2 to 2")
    parser.add_argument("--presence-penalty", type=float, help="lower tokens by this if they came at all, -2 to 2")
    parser.add_argument("--repetition-penalty", type=float, help="scale down tokens of prompt and output, up to 2")
    parser.add_argument("--min-tokens", type=int, help="tokens to generate at least")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end where this text comes up; may be repeated")
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="log-probabilities, and the K most likely; with --json"
    )
    parser.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same of the prompt; with --json")
    parser.add_argument("-n", type=int, help="so many answers; above 1 with --json, which prints an object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    parser.add_argument("--wait-s", type=float, default=5.0, help="wait so long for the server (default: %(default)s)")
    return parser


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _check(args: argparse.Namespace) -> None:
    """Raises `ClientError` for what a message can't hold; the server checks the rest."""
    if (args.prompt is None) == (args.token_ids is None):
        raise ClientError("give either a prompt or --token-ids")
    if not args.json and ((args.n or 1) > 1 or args.logprobs is not None or args.prompt_logprobs is not None):
        raise ClientError("-n above 1, --logprobs and --prompt-logprobs need --json")
    texts = [("the prompt", args.prompt), ("--system", args.system), *(("--stop", text) for text in args.stop or ())]
    for what, text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise ClientError(f"{what} is no valid text from character {error.start} on: write it in UTF-8") from None
    for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "n"):
        value = getattr(args, name)
        if value is not None and abs(value) > MAX_INT64:
            flag = "-n" if name == "n" else "--" + name.replace("_", "-")
            raise ClientError(f"{flag} is {value}, but must be {-MAX_INT64} to {MAX_INT64}")
    for token_id in args.token_ids or ():
        if not 0 <= token_id <= MAX_INT32:
            raise ClientError(f"--token-ids holds {token_id}, but ids go from 0 to {MAX_INT32} at most")


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
        if left_s <= 0:
            raise ClientError(
                f"no server is ready at {addr} after {wait_s:g} s ({state}): start one with "
                "`python -m jaxsgl.serve`, or wait longer with --wait-s"
            )
        time.sleep(min(POLL_S, left_s))


def _request(args: argparse.Namespace, stub: pb_grpc.JaxsglStub) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=args.temperature, stop=args.stop or ())
    for name in _OPTIONAL_PARAMS:
        value = getattr(args, name)
        if value is not None:
            setattr(sampling, name, value)
    request = pb.GenerateRequest(sampling=sampling, stream=not args.json)
    if args.token_ids is not None:
        request.token_ids.ids.extend(args.token_ids)
    elif args.system is None and (args.raw or not stub.GetModelInfo(pb.GetModelInfoRequest()).has_chat_template):
        request.text = args.prompt
    else:
        if args.raw:
            raise ClientError("--system needs the chat template: leave out --raw")
        if args.system is not None:
            request.chat.messages.add(role="system", content=args.system)
        request.chat.messages.add(role="user", content=args.prompt)
    return request


def _show_text(call: Any) -> None:
    for reply in call:
        sys.stdout.write(reply.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _show_json(call: Any) -> None:
    ascii_only = not sys.stdout.encoding.lower().startswith("utf")
    for reply in call:
        print(json.dumps(_as_dict(reply), ensure_ascii=ascii_only))


def _as_dict(reply: pb.GenerateReply) -> dict[str, Any]:
    """One sample; log-probabilities only where some came."""
    result = {
        "index": reply.index,
        "text": reply.text,
        "token_ids": list(reply.token_ids),
        "finish_reason": pb.FinishReason.Name(reply.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "matched_stop_token": reply.matched_stop_token if reply.HasField("matched_stop_token") else None,
        "matched_stop_string": reply.matched_stop_string if reply.HasField("matched_stop_string") else None,
        "usage": {
            "prompt_tokens": reply.usage.prompt_tokens,
            "cached_tokens": reply.usage.cached_tokens,
            "completion_tokens": reply.usage.completion_tokens,
        },
    }
    for name in ("logprobs", "prompt_logprobs"):
        given = [
            {"logprob": entry.logprob, "top": [[top.token_id, top.logprob] for top in entry.top]}
            for entry in getattr(reply, name)
        ]
        if given:
            result[name] = given
    return result


if __name__ == "__main__":
    sys.exit(main())

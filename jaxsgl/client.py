"""`jaxsgl client "prompt"`, or `python -m jaxsgl.client`: streams the answer of a running server to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from jaxsgl import terminal
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.terminal import ClientError

MAX_INT32 = 2**31 - 1


def main(argv: list[str] | None = None) -> int:
    """Sends one request; returns the exit status."""
    args = _parser().parse_args(argv)
    return terminal.run(lambda: _ask(args))


def _ask(args: argparse.Namespace) -> int:
    _check(args)
    sampling = terminal.sampling_params(args)
    with terminal.connect(args) as channel:
        stub = pb_grpc.JaxsglStub(channel)
        call = stub.Generate(_request(args, sampling, stub))
        try:
            _show_json(call) if args.json else _show_text(call)
            sys.stdout.flush()
        finally:
            call.cancel()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxsgl client", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="text of the user's turn (or, with --raw, the text to continue)")
    parser.add_argument("--token-ids", type=_ids, metavar="1,2,3", help="send these ids instead of a prompt")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system's turn, before the user's")
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="log-probabilities, and the K most likely; with --json"
    )
    parser.add_argument("--prompt-logprobs", type=int, metavar="K", help="the same of the prompt; with --json")
    parser.add_argument("-n", type=int, help="number of answers; above 1 with --json, which prints an object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    terminal.add_sampling_flags(parser)
    terminal.add_connection_flags(parser)
    return parser


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids: give one as 1,2,3") from None


def _check(args: argparse.Namespace) -> None:
    """Raises `ClientError` for flags that no message can hold; the server checks the rest."""
    if (args.prompt is None) == (args.token_ids is None):
        raise ClientError("give either a prompt or --token-ids")
    if not args.json and ((args.n or 1) > 1 or args.logprobs is not None or args.prompt_logprobs is not None):
        raise ClientError("-n above 1, --logprobs and --prompt-logprobs need --json")
    for what, text in (("the prompt", args.prompt), ("--system", args.system)):
        terminal.check_text(what, text or "")
    for token_id in args.token_ids or ():
        if not 0 <= token_id <= MAX_INT32:
            raise ClientError(f"--token-ids holds {token_id}, but ids go from 0 to {MAX_INT32} at most")


def _request(args: argparse.Namespace, sampling: pb.SamplingParams, stub: pb_grpc.JaxsglStub) -> pb.GenerateRequest:
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
    """Converts one sample; log-probabilities are included only if the server sent some."""
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

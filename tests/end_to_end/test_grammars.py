"""Random JSON schemas and regular expressions through HTTP and gRPC, in full batches beside free requests.

Overlap, mixed chunks and retraction are on. Every output that ends by itself is checked by other programs: jsonschema
and Python's regular expressions. Free requests yield what they yield alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
import httpx
import jsonschema
import pytest

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.wiring import RETRACT_VARIABLE
from tests.end_to_end.precision import EXACT_FLAGS
from tests.end_to_end.servers import COMMON_FLAGS, RunningServer, check_log, running_server
from tests.grids import NIGHTLY, count

ROWS = 64 if NIGHTLY else 8
NUM_SCHEMAS, NUM_REGEXES, NUM_FREE = count(12, 150), count(6, 50), count(6, 50)
LARGE_FLAGS = (
    *EXACT_FLAGS, "--page-size", "16", "--max-total-tokens", "16384", "--max-running-requests", "64",
    "--decode-buckets", "64", "--extend-buckets", "512", "--chunked-prefill-size", "256",
)  # fmt: skip
PATIENCE_S = 600.0
MAX_TOKENS = 384
Json: TypeAlias = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = (*(LARGE_FLAGS if NIGHTLY else COMMON_FLAGS), "--enable-mixed-chunk", "--check-every-step")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RETRACT_VARIABLE, "11")
        with running_server(tmp_path_factory.mktemp("server"), flags) as running:
            yield running
            check_log(running)


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=2 * ROWS)
    with httpx.Client(base_url=f"http://{server.http_address}", timeout=PATIENCE_S, limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
def stub(server: RunningServer) -> Iterator[pb_grpc.JaxsglStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.JaxsglStub(channel)


def random_schema(dice: random.Random, depth: int = 0) -> Json:
    """A schema of what llguidance knows; its texts are short enough for MAX_TOKENS."""
    kinds = ["integer", "number", "string", "pattern", "format", "enum", "const", "boolean", "null"]
    kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf"] if depth < 2 else []
    kind = dice.choice(kinds if depth else ["object", "object", "array", "anyOf"])
    low = dice.randint(-50, 50)
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "exclusiveMinimum": low, "maximum": low + 1.5 + dice.randint(0, 9)}
    if kind == "string":
        shortest = dice.randint(0, 4)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + dice.randint(0, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": f"^{random_regex(dice, 2)}$"}
    if kind == "format":
        return {"type": "string", "format": dice.choice(["date", "time", "uuid", "ipv4"])}
    if kind == "enum":
        return {"enum": dice.sample(["red", "né", 'a "b"', 3, -1.5, None, True], dice.randint(1, 4))}
    if kind == "const":
        return {"const": dice.choice(["x", 7, None, [1, "a"], {"k": False}])}
    if kind == "array":
        least = dice.randint(0, 2)
        items = random_schema(dice, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + dice.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(dice, depth + 1) for _ in range(2)]}
    if kind == "object":
        names = dice.sample(["a", "b c", "ö", "long_name", "id"], dice.randint(1, 4))
        properties = {name: random_schema(dice, depth + 1) for name in names}
        required = [name for name in names if dice.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def random_regex(dice: random.Random, num_parts: int) -> str:
    def part() -> str:
        body = dice.choice(["[0-9]", "[a-f]", "x", "(ab|c|de)", '[^a-z"\\\\\\s]', "(0|1[0-9])"])
        least = dice.randint(0, 3)
        return body + dice.choice(["", "?", f"{{{least},{least + dice.randint(0, 3)}}}"])

    return "".join(part() for _ in range(num_parts)) + "z"


@dataclass
class Held:
    """A call whose output is held to a grammar, and what is wrong with a finished text."""

    call: Callable[[], tuple[str, str]]
    problem: Callable[[str], str | None]


def test_every_finished_output_validates_and_free_neighbours_keep_their_tokens(
    http: httpx.Client, stub: pb_grpc.JaxsglStub
) -> None:
    def chat(seed: int, **fields: Any) -> tuple[str, str]:
        body = {"messages": [{"role": "user", "content": f"Item {seed}"}], "max_tokens": MAX_TOKENS, "seed": seed}
        choice = post("/v1/chat/completions", body | fields)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    def completion(seed: int, **fields: Any) -> tuple[str, str]:
        body = {"prompt": f"Item {seed}:", "max_tokens": MAX_TOKENS, "seed": seed, "temperature": 0.8}
        choice = post("/v1/completions", body | fields)["choices"][0]
        return choice["text"], choice["finish_reason"]

    def post(path: str, body: Json) -> Any:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def own(seed: int, **fields: Any) -> tuple[str, str]:
        sampling = pb.SamplingParams(max_tokens=MAX_TOKENS, seed=seed, grammar=pb.Grammar(**fields))
        (reply,) = stub.Generate(pb.GenerateRequest(text=f"Item {seed}:", sampling=sampling), timeout=PATIENCE_S)
        return reply.text, {pb.FINISH_REASON_STOP: "stop"}.get(reply.finish_reason, "length")

    def by_schema(seed: int, schema: Json) -> Held:
        def problem(text: str) -> str | None:
            try:
                jsonschema.validate(json.loads(text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                return str(error)
            return None

        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        calls: list[Callable[[], tuple[str, str]]] = [
            lambda: chat(seed, response_format=named),
            lambda: own(seed, json_schema=json.dumps(schema)),
            lambda: completion(seed, structured_outputs={"json": schema}),
        ]
        return Held(calls[seed % 3], problem)

    def by_regex(seed: int, pattern: str) -> Held:
        calls: list[Callable[[], tuple[str, str]]] = [
            lambda: completion(seed, guided_regex=pattern),
            lambda: own(seed, regex=pattern),
        ]
        return Held(calls[seed % 2], lambda text: None if re.fullmatch(pattern, text) else f"no {pattern}")

    dice = random.Random(22)
    held = [by_schema(seed, random_schema(dice)) for seed in range(NUM_SCHEMAS)]
    held += [by_regex(seed, random_regex(dice, dice.randint(1, 5))) for seed in range(NUM_REGEXES)]
    free: list[Callable[[], tuple[str, str]]] = [
        partial(completion, seed, temperature=float(seed % 2), max_tokens=48) for seed in range(NUM_FREE)
    ]
    with ThreadPoolExecutor(2 * ROWS) as threads:
        alone = list(threads.map(lambda call: call(), free))
        together: list[Callable[[], tuple[str, str]]] = [*(each.call for each in held), *free]
        order = dice.sample(range(len(together)), len(together))
        found = dict(zip(order, threads.map(lambda i: together[i](), order), strict=True))
    finished = 0
    for number, each in enumerate(held):
        text, reason = found[number]
        if reason == "stop":
            finished += 1
            assert (problem := each.problem(text)) is None, f"{text!r}: {problem}"
    assert finished >= 0.6 * len(held), f"only {finished} of {len(held)} outputs ended by themselves"
    assert [found[len(held) + number] for number in range(NUM_FREE)] == alone


def test_allowed_tokens_and_bad_words_hold_beside_a_grammar_and_without(http: httpx.Client) -> None:
    def text_of(**fields: Any) -> str:
        body = {"prompt": "Count from 1 to 5:", "max_tokens": 12, "temperature": 0} | fields
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def ids_of(text: str) -> list[int]:
        return list(http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])

    free = text_of()
    first = str(http.post("/detokenize", json={"tokens": ids_of(free)[:1]}).json()["prompt"])
    assert free.startswith(first) and not text_of(bad_words=[first]).startswith(first)
    digits = ids_of("7") + ids_of("8")
    text = text_of(allowed_token_ids=digits)
    assert len(text) == 12 and set(text) <= {"7", "8"}
    assert text_of(allowed_token_ids=digits, regex="[0-9a-f]{4}", bad_words=["8"]) == "7777"
    assert text_of() == free


def test_a_bad_or_hostile_grammar_is_the_clients_error_and_ends_no_other(
    http: httpx.Client, stub: pb_grpc.JaxsglStub
) -> None:
    def post(**fields: Any) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": "a", "max_tokens": 64, "temperature": 0} | fields)

    with ThreadPoolExecutor(4) as threads:
        free = threads.submit(post)
        hostile = threads.submit(post, regex="((a{1,1000}){1,1000}){1,1000}")
        bad = threads.submit(post, guided_json={"type": "object", "not": {}})
        slow = threads.submit(post, guided_json={"type": "integer", "multipleOf": 1234567})
    assert free.result().status_code == 200
    for answer, words in ((hostile, "can't be followed any further"), (bad, "not"), (slow, "multipleOf is 1234567")):
        assert answer.result().status_code == 400 and words in answer.result().json()["error"]["message"]
    sampling = pb.SamplingParams(max_tokens=5, grammar=pb.Grammar(ebnf="root ::= ("))
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="a", sampling=sampling), timeout=PATIENCE_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

"""Malformed HTTP: every connection is answered or closed, never with a 5xx."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from fake_engine_process import Script
from http_calls import connect, generate_body, report
from server_process import ServerProcess, wait_for

from tests.junk_http import GOOD_BODIES, VALUES, exchange, junk_request, request

CONNECTIONS = 800
AT_ONCE = 16
THREADS = 4
WEIGHT_ORDERS: dict[str, dict[str, Any]] = {
    "/update_weights_from_disk": {"model_path": "/weights"},
    "/update_weight_version": {"new_version": "x"},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
}
SAME_AS_OTHERS = ("/rerank", "/v2/rerank", "/score", "/v1/classify")
ADAPTER_ORDERS = tuple(f"{prefix}/{order}_lora_adapter" for prefix in ("", "/v1") for order in ("load", "unload"))


def test_malformed_requests_never_get_a_5xx(server: ServerProcess) -> None:
    rng = random.Random(4)
    all_junk = [(junk_request(rng), rng.random() < 0.1) for _ in range(CONNECTIONS)]
    start = len(server.log)

    async def send_all() -> list[list[int]]:
        places = asyncio.Semaphore(AT_ONCE)

        async def send(junk: list[bytes], leave: bool) -> list[int]:
            async with places:
                return await exchange(server.http_address, junk, leave)

        return await asyncio.gather(*(send(*each) for each in all_junk))

    statuses = asyncio.run(send_all())
    bad = [(junk, got) for (junk, _), got in zip(all_junk, statuses, strict=True) if max(got, default=0) >= 500]
    assert not bad
    assert {100, 200, 400, 404, 405} <= {status for got in statuses for status in got}, "junk of many kinds"
    log = server.log[start:]
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:5000]
    with connect(server) as http:
        assert http.post("/generate", json=generate_body(5, 6, max_new_tokens=3)).json()["output_ids"] == [5, 6, 5]


def described_fields(openapi: dict[str, Any]) -> dict[str, list[str]]:
    """By path, the fields of the bodies that the server describes."""
    posts = {path: methods["post"] for path, methods in openapi["paths"].items() if "post" in methods}
    bodies = {path: post["requestBody"] for path, post in posts.items() if "requestBody" in post}
    in_json = {path: body for path, body in bodies.items() if "application/json" in body["content"]}  # others are forms
    return {path: list(_schema(openapi, body)["properties"]) for path, body in in_json.items()}


def _schema(openapi: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    schema = body["content"]["application/json"]["schema"]
    (name,) = [each["$ref"] for each in (schema, *schema.get("anyOf", [])) if "$ref" in each]
    found: dict[str, Any] = openapi["components"]["schemas"][name.rpartition("/")[2]]
    return found


def spoiled(good: dict[str, Any], name: str, value: str) -> str:
    """`good` as JSON, with `value`, JSON or nearly, for one field."""
    return json.dumps(good | {name: "JUNK"}).replace('"JUNK"', value)


def spoiled_bodies(openapi: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Good bodies of every path, in each of which one field that the server describes has a value from `VALUES`."""
    schemas = openapi["components"]["schemas"]
    fields = described_fields(openapi)
    del fields["/pause_generation"]  # has a test of its own, because no generation is answered during a pause
    del fields["/start_profile"]  # likewise, because only some servers may record profiles
    for path in WEIGHT_ORDERS:  # likewise, because they change answers, or stop them
        del fields[path]
    for path in (*SAME_AS_OTHERS, *ADAPTER_ORDERS):
        del fields[path]
    assert fields.keys() <= GOOD_BODIES.keys() | {"/v1/detokenize"}
    for path, names in fields.items():
        good = GOOD_BODIES[path.replace("/v1/de", "/de")]
        for name, value in itertools.product(names, VALUES):
            yield path, spoiled(good, name, value)
    inner = (("/generate", "sampling_params", "SamplingBody"), ("/api/generate", "options", "Options"))
    for path, field, schema in inner:
        good = GOOD_BODIES[path]
        for name, value in itertools.product(schemas[schema]["properties"], VALUES):
            yield path, spoiled(good, field, spoiled(good[field], name, value))


def test_no_value_of_any_field_gets_a_5xx(server: ServerProcess) -> None:
    limits = httpx.Limits(max_connections=THREADS)
    with connect(server, limits=limits) as http, ThreadPoolExecutor(THREADS) as pool:

        def status(sent: tuple[str, str]) -> int:
            path, body = sent
            if path == "/generate":
                body = body.replace('"rid": "r", ', "")  # only one request with an id may run at a time
            return http.post(path, content=body.encode(), headers={"content-type": "application/json"}).status_code

        bodies = list(spoiled_bodies(http.get("/openapi.json").json()))
        statuses = list(pool.map(status, bodies))
    assert not [(body, got) for body, got in zip(bodies, statuses, strict=True) if got not in (200, 400, 404)]
    for path in GOOD_BODIES.keys() - {"/classify"}:  # the model has no classes
        assert {200, 400} <= {got for (of, _), got in zip(bodies, statuses, strict=True) if of == path}, path


def test_no_pause_body_gets_a_5xx(server: ServerProcess) -> None:
    with connect(server) as http:

        def pause(body: str) -> int:
            headers = {"content-type": "application/json"}
            status = http.post("/pause_generation", content=body.encode(), headers=headers).status_code
            assert http.post("/continue_generation").status_code == 200
            return status

        assert {pause(json.dumps({"mode": mode})) for mode in ("abort", "retract", "in_place")} == {200}
        assert {pause(f'{{"mode": {value}}}') for value in VALUES} <= {200, 400}
        assert pause("[") == 400


def test_no_order_about_weights_gets_a_5xx(server: ServerProcess) -> None:
    with connect(server) as http:

        def status(path: str, body: str) -> int:
            headers = {"content-type": "application/json"}
            return http.post(path, content=body.encode(), headers=headers).status_code

        fields = described_fields(http.get("/openapi.json").json())
        for path, good in WEIGHT_ORDERS.items():
            assert status(path, json.dumps(good)) == 200
            spoilt = [spoiled(good, name, value) for name in fields[path] for value in VALUES]
            assert {status(path, body) for body in spoilt} == {200, 400}, path
        assert http.post("/resume_memory_occupation").status_code == 200
        assert http.post("/update_weight_version", json={"new_version": "default"}).status_code == 200


def test_a_client_that_leaves_ends_all_its_pipelined_requests(server: ServerProcess) -> None:
    """All of them are ended, not only the last one."""
    body = json.dumps(generate_body(Script.HANG)).encode()
    one = request("POST", "/generate", body).replace(b"connection: close\r\n", b"")
    with connect(server) as http:
        running, _, _ = report(http)

        async def leave() -> None:
            host, _, port = server.http_address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(one + one)
            while (await asyncio.to_thread(report, http))[0] == running:
                await asyncio.sleep(0.01)
            writer.close()

        asyncio.run(leave())
        wait_for(lambda: report(http)[0] == running, "abort")

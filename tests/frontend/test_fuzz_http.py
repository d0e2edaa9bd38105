"""HTTP that nobody would send: all of it is answered or hung up on, none of it as a fault of ours."""

from __future__ import annotations

import asyncio
import json
import random

from fake_engine_process import Script
from http_calls import client, generate_body, report
from server_process import ServerProcess, wait_for

from tests.junk_http import exchange, junk_request, request

CONNECTIONS = 800
AT_ONCE = 16


def test_nothing_malformed_is_answered_as_a_fault_of_ours(server: ServerProcess) -> None:
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
    with client(server) as http:
        assert http.post("/generate", json=generate_body(5, 6, max_new_tokens=3)).json()["output_ids"] == [5, 6, 5]


def test_a_client_that_leaves_takes_all_its_requests_with_it(server: ServerProcess) -> None:
    """Also the first of several that were sent together."""
    body = json.dumps(generate_body(Script.HANG)).encode()
    one = request("POST", "/generate", body).replace(b"connection: close\r\n", b"")
    with client(server) as http:
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

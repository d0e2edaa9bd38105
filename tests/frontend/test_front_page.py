"""The files of the page, and the stream of what engines do: what loads them, who may read it, and when it is asked."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Generator
from typing import Any

import httpx
import pytest
from fake_engine_process import Script
from http_calls import connect
from played_link import PlayedLink
from server_process import ServerProcess, ids_request, wait_for

from jaxsgl.frontend.http.page.static import FOLDER, PATHS

Start = Callable[..., ServerProcess]
MAX_PAGE_BYTES = 150_000


def looks(http: httpx.Client) -> Generator[dict[str, Any], None, None]:
    """The events of the stream, until it is closed."""
    with http.stream("GET", "/engine_events") as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_the_page_and_all_that_it_loads_are_small_and_come_from_this_server(server: ServerProcess) -> None:
    with connect(server) as http:
        found: set[str] = set()
        todo = {"/", "/docs"}
        while todo:
            path = todo.pop()
            found.add(path)
            answer = http.get(path)
            assert answer.status_code == 200, path
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert not re.search(r"""(src|href|from|import\()\s*=?\s*["']https?:""", answer.text), path
            named = re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text)
            named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)]
            todo |= {f"/{name}" for name in named} - found
        assert found == PATHS, "files that nothing loads, or that are not served"
        head = http.head("/")
        assert (head.status_code, head.text) == (200, "")
        again = http.get("/", headers={"if-none-match": head.headers["etag"]})
        assert (again.status_code, again.text) == (304, "")
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_PAGE_BYTES


def test_the_stream_shows_each_replica_and_asks_only_while_somebody_reads(server: ServerProcess) -> None:
    with connect(server) as http, connect(server) as other:
        before = other.get("/internal_state").json()["looks"]
        events = looks(http)
        first, second = next(events), next(events)
        assert first["state"] == "ready"
        (replica,), (later,) = first["replicas"], second["replicas"]
        assert (replica["rank"], replica["state"], replica["problem"]) == (0, "ready", None)
        assert replica["load"]["steps_total"] >= 0
        assert later["view"]["since"] == replica["view"]["last_step"], "steps would come twice, or never"
        events.close()
        wait_for(lambda: settled(other), "end of the questions")
        assert other.get("/internal_state").json()["looks"] > before


def settled(http: httpx.Client) -> bool:
    """Whether the engine is asked no more."""
    before = http.get("/internal_state").json()["looks"]
    threading.Event().wait(1.2)
    return bool(http.get("/internal_state").json()["looks"] == before)


def test_each_replica_has_its_view_and_its_steps_come_once(start_server: Start) -> None:
    server = start_server("--dp-size", "2")
    server.wait_until_ready()
    with connect(server) as http:
        events = looks(http)
        first, second = next(events)["replicas"], next(events)["replicas"]
        events.close()
    assert [(each["rank"], each["state"]) for each in first] == [(0, "ready"), (1, "ready")]
    assert [each["view"]["since"] for each in second] == [each["view"]["last_step"] for each in first]


def test_viewers_share_the_questions(server: ServerProcess) -> None:
    with connect(server) as http, connect(server) as other:
        wait_for(lambda: settled(http), "a still engine")
        before = http.get("/internal_state").json()["looks"]
        mine, others = looks(http), looks(other)
        for _ in range(3):
            assert next(mine)["replicas"][0]["view"] and next(others)["replicas"][0]["view"]
        mine.close()
        others.close()
        with connect(server) as third:
            assert third.get("/internal_state").json()["looks"] - before <= 5  # 3 events each, and one under way


@pytest.mark.parametrize(
    ("flags", "statuses"),
    [
        (("--api-key", "sk-1"), {None: 401, "sk-1": 200}),
        (("--api-key", "sk-1", "--admin-api-key", "sk-2"), {None: 401, "sk-1": 403, "sk-2": 200}),
    ],
)
def test_the_page_needs_no_key_and_its_stream_the_administrators(
    start_server: Start, flags: tuple[str, ...], statuses: dict[str | None, int]
) -> None:
    guarded = start_server("--served-model-name", "my-secret-model", *flags)
    guarded.wait_until_ready()
    with connect(guarded) as http:
        for path in PATHS:
            answer = http.get(path)
            assert answer.status_code == 200 and "my-secret-model" not in answer.text
        assert http.get("/openapi.json").status_code == 401
        for key, status in statuses.items():
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            with http.stream("GET", "/engine_events", headers=headers) as answer:
                assert answer.status_code == status


def test_the_stream_tells_of_a_start_and_ends_with_the_server(start_server: Start) -> None:
    hanging = start_server("--random-seed", str(Script.START_HANGS))
    with connect(hanging) as http:
        events = looks(http)
        (replica,) = next(events)["replicas"]
        assert (replica["state"], replica["view"]) == ("loading", None)
        events.close()
    server = start_server()
    server.wait_until_ready()
    with connect(server) as http, server.stub() as stub:
        call = stub.Generate(ids_request(Script.PAUSE))
        next(call)  # it is open
        events = looks(http)
        assert next(events)["state"] == "ready"
        server.interrupt()
        last = [event["state"] for event in events][-1]
        assert last == "draining"
        assert http.get("/").status_code == 200
        call.cancel()
    assert server.wait_for_exit() == 0
    assert "Exception in ASGI" not in server.log


def test_without_the_key_no_method_tells_which_paths_there_are(start_server: Start) -> None:
    guarded = start_server("--api-key", "sk-1", "--allowed-origins", "https://chat.example.org")
    guarded.wait_until_ready()
    preflight = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
    with connect(guarded) as http:
        for method in ("OPTIONS", "GET", "PUT"):
            found = [http.request(method, path) for path in ("/v1/completions", "/no/such/path")]
            assert [answer.status_code for answer in found] == [401, 401]
            assert found[0].text == found[1].text
        assert http.options("/v1/completions", headers=preflight).status_code == 200


def test_states_of_the_engine() -> None:
    link = PlayedLink()
    seen = [link.state]
    link.accept()
    seen.append(link.state)
    link.stuck = "it stands"
    seen.append(link.state)
    link.refuse("shutting down")
    seen.append(link.state)
    assert seen == ["loading", "ready", "stuck", "draining"]

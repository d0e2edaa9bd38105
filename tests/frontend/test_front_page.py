"""GET /: what a browser sees, with and without a key."""

from __future__ import annotations

from collections.abc import Callable

from fake_engine_process import Script
from http_calls import connect
from played_link import PlayedLink
from server_process import ServerProcess, ids_request

Start = Callable[..., ServerProcess]


def test_the_page_names_the_model_and_links_to_what_there_is(server: ServerProcess) -> None:
    with connect(server) as http:
        page = http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "<dd>ready</dd>" in page.text
        assert f"<dd>{http.get('/get_model_info').json()['served_model_name']}</dd>" in page.text
        for link in ("docs", "metrics", "health"):
            assert f'href="{link}"' in page.text
            assert http.get(f"/{link}").status_code == 200
        head = http.head("/")
        assert (head.status_code, head.text) == (200, "")


def test_the_list_of_endpoints_names_each_and_loads_nothing_from_elsewhere(server: ServerProcess) -> None:
    with connect(server) as http:
        page = http.get("/docs")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in http.get("/openapi.json").json()["paths"]:
            assert f"<td>{path}</td>" in page.text
        assert "<script" not in page.text and "http://" not in page.text and "https://" not in page.text


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


def test_the_page_escapes_the_name_and_tells_less_with_a_key(start_server: Start) -> None:
    name = "<script>alert(1)</script>"
    server = start_server("--served-model-name", name, "--random-seed", str(Script.START_HANGS))
    guarded = start_server("--served-model-name", "my-secret-model", "--api-key", "sk-1")
    with connect(server) as http:
        page = http.get("/")
        assert page.status_code == 503
        assert "<dd>loading</dd>" in page.text
        assert name not in page.text and "&lt;script&gt;" in page.text
    guarded.wait_until_ready()
    with connect(guarded) as http:
        page = http.get("/")
        assert page.status_code == 200
        assert "<dd>ready</dd>" in page.text
        assert "my-secret-model" not in page.text
        assert http.post("/").status_code == 401 or http.post("/").status_code == 405


def test_the_page_shows_a_shutdown(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    with connect(server) as http, server.stub() as stub:
        call = stub.Generate(ids_request(Script.HANG))
        server.interrupt()
        server.wait_for_log("stopping: ")
        page = http.get("/")
        assert page.status_code == 503
        assert "<dd>draining</dd>" in page.text and "shutting down" in page.text
        call.cancel()
    assert server.wait_for_exit() == 0


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

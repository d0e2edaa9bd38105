"""What operators may order of the profiler: folders, bounds, and the same over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from http_calls import connect, error_of
from played_link import PlayedLink
from server_process import ServerProcess
from sglang_calls import sglang_stub
from smg_grpc_proto.generated import common_pb2

from jaxsgl.config.engine import Limits
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError, Forbidden, InvalidRequest, StartupError
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.profiles import MAX_STEPS, Profiles
from jaxsgl.messages.orders import Answer, StartProfile, ToMailbox
from jaxsgl.messages.replies import EngineInfo, EngineReady
from tests.junk_http import VALUES

INFO = EngineInfo("m", "FakeForCausalLM", "float32", Limits(1000, 200, 160), (1,), 16, 8, "xla", "cpu", 1, 1, 0)
JSON = {"content-type": "application/json"}


class EngineThatAnswers(PlayedLink):
    """Answers each order at once; `ok` says how."""

    ok = True

    def send(self, message: ToMailbox) -> None:
        super().send(message)
        assert isinstance(message, StartProfile)
        self.receive(Answer(message.number, self.ok, message.folder if self.ok else "busy"))


def start(
    folder: Path, name: str | None, num_steps: int | None = None, by_stage: bool = False, ok: bool = True, **flags: Any
) -> tuple[Answer, list[ToMailbox]]:
    """Returns the answer to an order, and what reached the engine."""

    async def order() -> tuple[Answer, list[ToMailbox]]:
        link = EngineThatAnswers()
        link.receive(EngineReady(INFO))
        link.ok = ok
        config = ServerConfig(profile_dir=str(folder), **flags)
        answer = await Profiles(config, Replicas([link])).start(name, num_steps, by_stage)
        return answer, link.sent

    return asyncio.run(order())


def test_a_profile_goes_to_a_new_private_folder_and_has_bounds(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")  # the operator's own link
    for name in ("mine", None, ""):
        answer, (sent,) = start(tmp_path / "link", name, 5, by_stage=True, profile_max_s=9)
        folder = Path(answer.text)
        assert folder.parent == tmp_path / "real"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert isinstance(sent, StartProfile)
        assert (sent.folder, sent.num_steps, sent.by_stage, sent.max_s, sent.max_mb) == (answer.text, 5, True, 9, 1024)
    assert (tmp_path / "real" / "mine").is_dir()


@pytest.mark.parametrize(
    "name",
    ["/tmp/x", "..", ".", "a/b", "../a", "gs://bucket/a", "a\0b", ".hidden", "a" * 65, "a b", "~", "é", "a\n"],
)
def test_a_client_can_name_nothing_but_a_simple_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="output_dir"):
        start(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_each_replica_writes_a_folder_of_its_own_and_a_refusal_names_it(tmp_path: Path) -> None:
    async def order(name: str, *ok: bool) -> tuple[Answer, list[str]]:
        links = [EngineThatAnswers() for _ in ok]
        for link, fine in zip(links, ok, strict=True):
            link.receive(EngineReady(INFO))
            link.ok = fine
        answer = await Profiles(ServerConfig(profile_dir=str(tmp_path)), Replicas(links)).start(name, 5, False)
        return answer, [message.folder for link in links for message in link.sent if isinstance(message, StartProfile)]

    answer, folders = asyncio.run(order("both", True, True))
    assert answer.ok and folders == [str(tmp_path / "both" / f"replica{rank}") for rank in (0, 1)]
    answer, _ = asyncio.run(order("one", True, False))
    assert not answer.ok and "replica 1: busy" in answer.text and "it was done on replica 0" in answer.text


def test_nothing_that_is_there_is_followed_or_written_over(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / "link").symlink_to(elsewhere)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "folder").mkdir()
    (root / "file").touch()
    for name in ("link", "dangling", "folder", "file"):
        with pytest.raises(InvalidRequest, match="exists already"):
            start(root, name)
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("num_steps", [0, -1, MAX_STEPS + 1, 2**40])
def test_steps_are_bounded(tmp_path: Path, num_steps: int) -> None:
    with pytest.raises(InvalidRequest, match=f"num_steps is {num_steps}, but must be 1 to {MAX_STEPS}"):
        start(tmp_path, None, num_steps)


def test_a_full_folder_takes_no_more_profiles(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "trace").write_bytes(bytes(2_000_000))
    start(tmp_path, "a", profile_max_mb=3)
    with pytest.raises(InvalidRequest, match=r"holds 2 MB, but may hold 2 \(--profile-max-mb\)"):
        start(tmp_path, "b", profile_max_mb=2)


def test_a_refused_order_leaves_no_folder(tmp_path: Path) -> None:
    answer, _ = start(tmp_path, "a", ok=False)
    assert not answer.ok
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_of_the_operators_nothing_is_recorded() -> None:
    async def main() -> None:
        await Profiles(ServerConfig(), Replicas([PlayedLink()])).start("a", None, False)

    with pytest.raises(Forbidden, match="--profile-dir"):
        asyncio.run(main())


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "open"):
        with pytest.raises(StartupError, match="--profile-dir"):
            Profiles(ServerConfig(profile_dir=str(folder)), Replicas([PlayedLink()]))
    for remote in ("gs://bucket/x", ""):
        with pytest.raises(ConfigError, match="--profile-dir"):
            ServerConfig(profile_dir=remote)
    for flags in ({"profile_max_s": 0.0}, {"profile_max_s": 1e9}, {"profile_max_mb": 0}):
        with pytest.raises(ConfigError, match="--profile-max-"):
            ServerConfig(**flags)


@pytest.fixture(scope="module")
def profiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server that may record profiles, and where to."""
    folder = tmp_path_factory.mktemp("profiling")
    (folder / "model").mkdir()
    server = ServerProcess(folder, str(folder / "model"), "--profile-dir", str(folder / "profiles"))
    server.wait_until_ready()
    yield server, folder / "profiles"
    server.end()


@pytest.fixture
def http(profiling: tuple[ServerProcess, Path]) -> Iterator[httpx.Client]:
    with connect(profiling[0]) as http:
        yield http


def test_profiles_are_ordered_over_http(profiling: tuple[ServerProcess, Path], http: httpx.Client) -> None:
    started = http.post("/start_profile", json={"output_dir": "one", "num_steps": 3, "activities": ["CPU"]})
    assert started.json() == {"status": "ok", "message": str(profiling[1] / "one")}
    assert http.post("/start_profile").json()["message"].startswith(str(profiling[1] / "profile-"))
    stopped = http.post("/stop_profile")
    assert stopped.status_code == 400
    assert "no profile is being recorded" in error_of(stopped)["message"]
    for body in (
        {"output_dir": "/tmp/x"}, {"output_dir": "one"}, {"num_steps": 0}, {"start_step": 5},
        {"profile_by_stage": True}, {"num_steps": "3"},
    ):  # fmt: skip
        refused = http.post("/start_profile", json=body)
        assert refused.status_code == 400, body
        assert "num_steps" in refused.text or next(iter(body)) in refused.text
    assert http.get("/start_profile").status_code == http.get("/stop_profile").status_code == 405


def test_no_value_of_any_field_gets_a_5xx(http: httpx.Client) -> None:
    fields = ("output_dir", "num_steps", "start_step", "profile_by_stage")
    statuses = {
        http.post("/start_profile", content=f'{{"{name}": {value}}}'.encode(), headers=JSON).status_code
        for name in fields
        for value in VALUES
    }
    assert statuses == {200, 400}


def test_profiles_are_ordered_over_grpc(profiling: tuple[ServerProcess, Path], server: ServerProcess) -> None:
    with sglang_stub(profiling[0]) as sglang:

        def start(**fields: Any) -> common_pb2.ProfileResponse:
            return sglang.StartProfile(common_pb2.StartProfileRequest(**fields))

        started = start(output_dir="two", num_steps=3, activities=["CPU"], profile_by_stage=True)
        assert (started.success, started.message) == (True, str(profiling[1] / "two"))
        assert start().message  # a folder of the server's choice
        stopped = sglang.StopProfile(common_pb2.StopProfileRequest())
        assert (stopped.success, stopped.message) == (False, "no profile is being recorded")
        for fields in ({"start_step": 5}, {"profile_by_stage": True}, {"num_steps": 0}, {"output_dir": "a/b"}):
            with pytest.raises(grpc.RpcError) as caught:
                start(**fields)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert next(iter(fields)) in caught.value.details()
    with sglang_stub(server) as off, pytest.raises(grpc.RpcError) as caught:
        off.StartProfile(common_pb2.StartProfileRequest())
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

"""Which folders orders may name: only those below a root, with a key any; and nothing is told about others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from http_calls import connect, error_of
from server_process import ServerProcess
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc

from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError, Forbidden, InvalidRequest
from jaxsgl.frontend.access import adapter_folder, weights_folder

Checked = Callable[[ServerConfig, str], str]


def adapters_below(root: str) -> ServerConfig:
    return ServerConfig(lora_root=root)


def weights_below(root: str) -> ServerConfig:
    return ServerConfig(weights_root=root)


@pytest.mark.parametrize("checked", [adapter_folder, weights_folder])
def test_without_a_root_a_folder_needs_a_key(checked: Checked) -> None:
    with pytest.raises(Forbidden, match=r"start the server with --(lora|weights)-root FOLDER, or with a key"):
        checked(ServerConfig(), "/etc")
    for keyed in (ServerConfig(api_key="k"), ServerConfig(admin_api_key="k"), ServerConfig(api_key_file="keys")):
        assert checked(keyed, "hub/id") == "hub/id"


@pytest.mark.parametrize(("below", "checked"), [(adapters_below, adapter_folder), (weights_below, weights_folder)])
def test_below_a_root_folders_may_be_named_and_all_others_are_refused_alike(
    tmp_path: Path, below: Callable[[str], ServerConfig], checked: Checked
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "a" / "poet", root / "linked", outside):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (root / "leads_out").symlink_to(outside)
    (root / "leads_in").symlink_to(root / "a")
    (root / "linked" / "weights").symlink_to(outside / "adapter_config.json")
    config = below(str(root))
    for given in ("a/poet", "leads_in/poet", str(root / "a" / "poet"), "a/../a/poet"):
        assert checked(config, given) == str(root / "a" / "poet")
    wrong = [
        "../outside",
        str(outside),
        "leads_out",
        "linked",
        "missing",
        "/etc",
        "hub/id",
        "a/poet/adapter_config.json",
    ]
    reasons = set()
    for given in [*wrong, "~", "a\0b", "x" * 5000]:
        with pytest.raises(InvalidRequest, match="may be named here") as caught:
            checked(config, given)
        reasons.add(str(caught.value).removeprefix(given[:200]))
    assert len(reasons) == 1, "what exists is refused in the words of what doesn't"
    assert checked(below("*"), "hub/id") == "hub/id"


def test_a_root_that_is_no_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-root is /nowhere"):
        adapters_below("/nowhere")
    with pytest.raises(ConfigError, match="--weights-root"):
        weights_below(str(tmp_path / "missing"))


def test_orders_of_clients_without_a_key_are_refused_by_all_protocols(ids_folder: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, ids_folder, any_folder=False)
    server.wait_until_ready()
    with connect(server) as http, grpc.insecure_channel(server.address) as channel:
        for path, body in (
            ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}),
            ("/update_weights_from_disk", {"model_path": "/etc"}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 403 and "-root FOLDER" in error_of(answer)["message"]
        with pytest.raises(grpc.RpcError) as caught:
            asked = sglang_pb.LoadLoRAAdapterRequest(lora_name="a", lora_path="/etc")
            sglang_grpc.SglangSchedulerStub(channel).LoadLoRAAdapter(asked)
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    server.end()

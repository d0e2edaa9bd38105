"""LoRA adapters in every protocol: orders, lists of models, and what requests may name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from http_calls import connect, error_of, generate_body, post
from server_process import ServerProcess, ids_request
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
TEXT = {"prompt": "abc", "max_tokens": 2}


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """With the adapter "sql" alone, whatever other tests left; without any afterwards."""
    with connect(server) as http:
        unload_all(http)
        order(http, "load", lora_name="sql", lora_path="/adapters/sql")
        yield http
        unload_all(http)


def unload_all(http: httpx.Client) -> None:
    for model in http.get("/v1/models").json()["data"][1:]:
        order(http, "unload", lora_name=model["id"])


def order(http: httpx.Client, what: str, status: int = 200, under: str = "", **body: Any) -> Any:
    answer = http.post(f"{under}/{what}_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_orders_are_answered_as_by_sglang_and_adapters_are_models(http: httpx.Client) -> None:
    both = {"sql": "/adapters/sql", "poet/2": "/adapters/poet"}
    done = order(http, "load", lora_name="poet/2", lora_path="/adapters/poet", pinned=True, under="/v1")
    assert done == {"success": True, "error_message": "", "loaded_adapters": both}
    base, *cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        (*one, base["id"]) for one in both.items()
    ]
    assert http.get("/v1/models/poet/2").json()["root"] == "/adapters/poet"
    failed = order(http, "load", 400, lora_name="bad", lora_path="/nothing")
    assert failed == {"success": False, "error_message": "no adapter in /nothing", "loaded_adapters": both}
    assert order(http, "unload", lora_name="poet/2")["loaded_adapters"] == {"sql": "/adapters/sql"}
    assert order(http, "unload", 400, lora_name="poet/2")["error_message"] == "no adapter named poet/2"


@pytest.mark.parametrize("body", [CHAT, TEXT], ids=["chat", "completions"])
def test_a_request_names_an_adapter_as_its_model_or_by_lora_path(http: httpx.Client, body: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    base = http.get("/v1/models").json()["data"][0]["id"]
    for named in (
        {"model": "sql"},
        {"lora_path": "sql"},
        {"model": f"{base}:sql"},
        {"model": base, "lora_path": "sql"},
    ):
        assert post(http, path, **body, **named)["model"] == "sql"
    assert post(http, path, **body, lora_path=None)["model"] == base
    missing = http.post(path, json={**body, "model": "poet"})
    assert missing.status_code == 404 and error_of(missing)["code"] == "model_not_found"
    assert "sql" in error_of(missing)["message"]
    for wrong in ({"lora_path": "poet"}, {"model": "sql", "lora_path": "poet"}):
        refused = http.post(path, json={**body, **wrong})
        assert refused.status_code == 400 and "poet" in error_of(refused)["message"]


def test_generate_takes_one_adapter_or_one_for_each_prompt(http: httpx.Client) -> None:
    assert post(http, "/generate", **generate_body(7, 8, max_new_tokens=2), lora_path="sql")["output_ids"] == [7, 8]
    several = {"input_ids": [[7], [8]], "sampling_params": {"max_new_tokens": 1}}
    assert len(post(http, "/generate", **several, lora_path=["sql", None])) == 2
    for lora_path, word in ((["sql"], "entries"), (["sql", "poet"], "poet")):
        refused = http.post("/generate", json=several | {"lora_path": lora_path})
        assert refused.status_code == 400 and word in error_of(refused)["message"]


def test_vectors_and_scores_are_those_of_an_adapter(server: ServerProcess, http: httpx.Client) -> None:
    """The fake engine's vectors and logits are negative with an adapter."""
    base = http.get("/v1/models").json()["data"][0]["id"]
    ids = [[50], [60]]

    def signs(**body: Any) -> tuple[str, list[bool]]:
        answer = post(http, "/v1/embeddings", input=ids, **body)
        return answer["model"], [entry["embedding"][0] < 0 for entry in answer["data"]]

    assert signs() == (base, [False, False])
    assert signs(model="sql") == signs(lora_path="sql") == ("sql", [True, True])
    assert signs(lora_path=[None, "sql"]) == (base, [False, True])
    for wrong in ({"lora_path": "poet"}, {"lora_path": ["sql"]}, {"model": "sql", "lora_path": "poet"}):
        assert "lora_path" in error_of(http.post("/v1/embeddings", json={"input": ids, **wrong}))["message"]
    assert [one["embedding"][0] < 0 for one in post(http, "/encode", input_ids=ids, lora_path="sql")] == [True, True]
    labels = {"query": [50], "items": [[60]], "label_token_ids": [8, 16], "apply_softmax": True}
    ((first, second),) = post(http, "/v1/score", **labels, model="sql")["scores"]
    assert first > second, "the logits are -1 and -2"
    ranked = post(http, "/v1/rerank", query="a", documents=["a"], lora_path="sql")
    assert ranked["model"] == "sql" and ranked["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert http.post("/classify", json={"input": "a", "model": "poet"}).status_code == 404
    with grpc.insecure_channel(server.address) as channel:
        request = pb.EmbedRequest(token_ids=pb.TokenIds(ids=[50]), adapter="sql")
        assert pb_grpc.JaxsglStub(channel).Embed(request).embedding[0] < 0


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"lora_name": "default", "lora_path": "/adapters/sql"}, "the model's"),
        ({"lora_name": "", "lora_path": "/adapters/sql"}, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "/adapters/sql"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
    ],
)
def test_a_wrong_order_is_refused(http: httpx.Client, body: dict[str, Any], word: str) -> None:
    answer = http.post("/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert word in error_of(answer)["message"]


def test_gateways_load_adapters_under_ids_of_their_own(server: ServerProcess, http: httpx.Client) -> None:
    with grpc.insecure_channel(server.address) as channel:
        sglang, jaxsgl = sglang_grpc.SglangSchedulerStub(channel), pb_grpc.JaxsglStub(channel)
        asked = sglang_pb.LoadLoRAAdapterRequest(lora_name="poet", lora_path="/p", lora_id="id-7", pinned=True)
        loaded = sglang.LoadLoRAAdapter(asked)
        assert loaded.success and list(loaded.loaded_lora_ids) == ["sql", "id-7"]
        listed = sglang.ListLoadedLoRAAdapters(sglang_pb.ListLoadedLoRAAdaptersRequest()).loaded_adapters
        assert [(each.lora_id, each.lora_name, each.pinned) for each in listed] == [
            ("sql", "sql", False),
            ("id-7", "poet", True),
        ]
        request = sglang_pb.GenerateRequest(request_id="a", lora_id="id-7")
        request.tokenized.input_ids.extend([7, 8])
        request.sampling_params.max_new_tokens = 1
        assert list(sglang.Generate(request))
        ours = ids_request(7, 8, max_tokens=1)
        ours.adapter = "poet"
        assert [reply.token_ids[0] for reply in jaxsgl.Generate(ours)] == [7]
        gone = sglang.UnloadLoRAAdapter(sglang_pb.UnloadLoRAAdapterRequest(lora_name="poet", lora_id="id-7"))
        assert gone.success and list(gone.loaded_lora_ids) == ["sql"]
        request.request_id = "b"
        with pytest.raises(grpc.RpcError) as refused:
            list(sglang.Generate(request))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

"""Valid and invalid bodies generated from the server's own OpenAPI description: none may get a 5xx."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import schemathesis
from fake_engine_process import Script
from http_calls import connect, post
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from server_process import ServerProcess

from tests.grids import count

EXAMPLES = count(3, 12)  # for each operation and mode

_SCRIPTED = re.compile("|".join(rf"\b{value}\b" for name, value in vars(Script).items() if name.isupper()))


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_body_gets_a_5xx(server: ServerProcess, mode: GenerationMode) -> None:
    url = f"http://{server.http_address}"
    with connect(server) as http:
        schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
        paths = []
        for found in schema.get_all_operations():
            operation = cast(Any, found).ok()
            paths.append(operation.path)
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # has no body that could be wrong

            @settings(
                max_examples=EXAMPLES,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                if not _SCRIPTED.search(repr(case.body)):  # the fake engine would follow its script
                    case.call_and_validate(base_url=url, checks=[not_a_server_error], timeout=30)

            check()
            http.post("/continue_generation")  # after a pause no generation would be answered
            http.post("/resume_memory_occupation")  # nor without the weights
        http.post("/update_weight_version", json={"new_version": "default"})
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models"} <= {*paths}
        assert post(http, "/v1/completions", prompt="abc", max_tokens=3)["choices"][0]["text"] == "abc"

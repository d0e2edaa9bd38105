"""A server of a GGUF file answers as one of the same numbers in safetensors, with the file's tokenizer."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.weights import resolve_model_folder
from tests.end_to_end.servers import running_server
from tests.grids import NIGHTLY
from tests.weights.gguf_files import with_tokenizer

FLAGS = (
    "--dtype", "float32", "--context-length", "128", "--chunked-prefill-size", "32", "--max-running-requests", "2",
    "--decode-buckets", "2", "--extend-buckets", "32", "--decode-steps", "1", "--grammar-backend", "none",
    "--weight-only",
)  # fmt: skip


def answers_of(model: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """The model's name, and what is generated for texts and in a chat."""

    def post(path: str, body: dict[str, Any]) -> Any:
        fixed = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        data = json.dumps({**body, **fixed, "model": name}).encode()
        asked = urllib.request.Request(f"http://{at}{path}", data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(asked))["choices"][0]

    with running_server(tmp_path, ("--model-path", str(model), *FLAGS)) as server:
        at = server.http_address
        name = json.load(urllib.request.urlopen(f"http://{at}/v1/models"))["data"][0]["id"]
        prompts = ("hello world", "The quick brown fox jumps over the lazy dog, again and again. " * 3)
        texts = [post("/v1/completions", {"prompt": prompt})["text"] for prompt in prompts]
        chat = {"messages": [{"role": "user", "content": "How are you?"}]}
        return name, [*texts, post("/v1/chat/completions", chat)["message"]["content"]]


@pytest.mark.skipif(not NIGHTLY, reason="starts two servers; by day their parameters are compared")
def test_a_server_of_a_gguf_file_answers_as_one_of_its_checkpoint(tmp_path: Path) -> None:
    folder, path = with_tokenizer(tmp_path)
    try:
        name, answers = answers_of(path, tmp_path)
    finally:  # the user's cache stays as it was; it has compiled kernels, too, so the server uses it
        shutil.rmtree(resolve_model_folder(str(path)).parent)
    assert name == "some-model"
    assert answers == answers_of(folder, tmp_path)[1]
    assert len(set(answers)) == len(answers) and all(answers)  # else any model would agree

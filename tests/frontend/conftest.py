from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess
from sglang_calls import sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc
from tls_files import make_certificate
from tokenizers import AddedToken

from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.small_tokenizers import byte_level, save

TRUST_FLAG = "--trust-request-chat-template"
STATES_FLAG = "--enable-return-hidden-states"  # for which the fake engine returns experts, too


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(byte_level(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def ids_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of a model without a tokenizer: its servers take ids alone, and are up in a second."""
    return str(tmp_path_factory.mktemp("ids_only"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: str) -> Tokenizer:
    return load_tokenizer(model_folder)


@pytest.fixture(scope="session")
def server(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it alive."""
    server = ServerProcess(tmp_path_factory.mktemp("server"), model_folder)
    server.wait_until_ready()
    yield server
    server.end()


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of a model whose prompt ends with the last message, or opens the reasoning behind it.

    The markers of reasoning and calls are tokens of their own, as Qwen3's: the fake engine's context holds 200 tokens.
    """
    tokenizer = byte_level()
    head = '{"name": "weather", "arguments": '
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>", head)])
    tokenizer.add_special_tokens([AddedToken("</think>", special=True)])
    tokenizer.add_tokens(
        [AddedToken(f"<|fim_{name}|>", special=False) for name in ("prefix", "suffix", "middle", "pad")]
    )
    template = "{{ messages[-1].content }}<|end|>{% if enable_thinking %}<think>{% endif %}"
    return save(tokenizer, tmp_path_factory.mktemp("scripted_model"), template)


@pytest.fixture(scope="session")
def scripted(scripted_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model answers each chat with its last message; the prompt may open the reasoning."""
    flags = (
        "--tool-call-parser",
        "qwen25",
        "--reasoning-parser",
        "qwen3",
        "--free-tool-calls",
        STATES_FLAG,
        TRUST_FLAG,
    )
    server = ServerProcess(tmp_path_factory.mktemp("scripted_server"), scripted_folder, *flags)
    server.wait_until_ready()
    yield server
    server.end()


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[pb_grpc.JaxsglStub]:
    with server.stub() as stub:
        yield stub


@pytest.fixture
def sglang(server: ServerProcess) -> Iterator[sglang_grpc.SglangSchedulerStub]:
    with sglang_stub(server) as stub:
        yield stub


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for 127.0.0.1 and its key."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers of a test's own, on a model folder without a tokenizer: they are up in a second."""
    servers: list[ServerProcess] = []
    model = tmp_path / "model"
    model.mkdir()

    def start(*flags: str, model: str = str(model), real_engine: bool = False) -> ServerProcess:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        servers.append(ServerProcess(folder, model, *flags, real_engine=real_engine))
        return servers[-1]

    yield start
    for server in servers:
        server.end()

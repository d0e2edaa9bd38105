"""The command line of the server: sections of help, flags of other servers, a file of flags, what a model is called."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from pathlib import Path

import pytest

from jaxsgl.config.command_line import (
    LISTS,
    OTHER_VALUES,
    REFUSED,
    SETTINGS,
    SWITCHES,
    TOPICS,
    near_flags,
    new_parser,
    own_arguments,
    parse,
    words_of,
)
from jaxsgl.config.engine import GRAMMAR_BACKENDS, LOAD_FORMATS, EngineConfig
from jaxsgl.config.flags import from_flags
from jaxsgl.config.kernels import ATTENTION_BACKENDS
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError, StartupError
from jaxsgl.frontend.server import sampling_defaults, template_of


def config_of(*argv: str) -> ServerConfig:
    return from_flags(ServerConfig, parse(argv))


def fields_of(config_type: type) -> list[str]:
    hints = typing.get_type_hints(config_type)
    found: list[str] = []
    for spec in dataclasses.fields(config_type):
        kind = hints[spec.name]
        found += fields_of(typing.cast(type, kind)) if dataclasses.is_dataclass(kind) else [spec.name]
    return found


@pytest.mark.parametrize(
    ("argv", "in_file", "words"),
    [
        (["--prot", "5"], "", "unrecognized arguments: --prot (is it --port?)"),
        (["--tensor_parallel_size=2"], "", "--tensor_parallel_size=2 (is it --tensor-parallel-size?)"),
        (["--xyzzy"], "", "unrecognized arguments: --xyzzy\n"),
        ([], "page-sise: 16", "flags.yaml: --page-sise=16 (is it --page-size?)"),
    ],
)
def test_an_unknown_flag_is_named_with_the_one_that_was_meant(
    argv: list[str], in_file: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flags.yaml").write_text(in_file)
    with pytest.raises(SystemExit):
        parse([*argv, "--config", str(tmp_path / "flags.yaml")])
    assert words in capsys.readouterr().err


def test_each_flag_has_one_topic() -> None:
    assert Counter(fields_of(ServerConfig)) == Counter(name for topic in TOPICS.values() for name in topic.fields)


def test_help_has_sections_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, shown, hidden in (
        (["--help"], "--page-size", "--trust-remote-code"),
        (["--help", "scheduling"], "--max-itl-ms", "--page-size"),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(argv)
        text = capsys.readouterr().out
        assert (ended.value.code, shown in text, hidden in text) == (0, True, False)
    with pytest.raises(SystemExit):
        parse(["--help", "weather"])
    assert "--help has no topic weather, but model, memory," in capsys.readouterr().err


# What the pages of SGLang and vLLM use most, and how the same is said here.
PASTED = {
    "--model-path m": "--model m",
    "m --port 80": "--model m --port 80",
    "--tp-size 2": "--tp 2",
    "--tensor-parallel-size 2": "--tp 2",
    "-tp 2": "--tp 2",
    "--max-model-len 4096": "--context-length 4096",
    "--max-model-len 32k": "--context-length 32000",
    "--max-model-len 32K --max-num-batched-tokens 1.5k": "--context-length 32768 --chunked-prefill-size 1500",
    "--attention-backend flashinfer --tp 2": "--tp 2",
    "--attention-backend=FLASH_ATTN --port 80": "--port 80",
    "--attention-backend fa3": "",
    "--attention-backend triton": "--attention-backend triton",
    "--ep 1 --tp 2": "--tp 2",
    "--ep --tp 2": "--tp 2 --ep",
    "--gpu-memory-utilization 0.9": "--mem-fraction-static 0.9",
    "--mem-fraction-static 0.9": "--mem-fraction-static 0.9",
    "--max-num-seqs 64": "--max-running-requests 64",
    "--max-running-requests 64": "--max-running-requests 64",
    "--max-num-batched-tokens 2048": "--chunked-prefill-size 2048",
    "--block-size 16": "--page-size 16",
    "--pipeline-parallel-size 2": "--pp-size 2",
    "--data-parallel-size 2": "--dp-size 2",
    "--tp 8 --dp 8 --enable-dp-attention": "--tp 8 --dp-size 8 --enable-dp-attention",
    "--dtype half": "--dtype float16",
    "--api-server-count 2": "--tokenizer-worker-num 2",
    "--enable-expert-parallel": "--ep",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--seed 3": "--random-seed 3",
    "--max-loras 2": "--max-loras-per-batch 2",
    "--enable-lora --lora-modules a=x b=y": "--enable-lora --lora-paths a=x b=y",
    "--generation-config vllm": "--sampling-defaults vllm",
    "--reasoning-parser qwen3 --tool-call-parser hermes": "--reasoning-parser qwen3 --tool-call-parser hermes",
    "--trust-remote-code m": "--model m",
    "--enable-auto-tool-choice --tool-call-parser llama3_json": "--tool-call-parser llama3_json",
    "--enforce-eager --disable-log-requests": "",
    "--disable-cuda-graph --cuda-graph-max-bs 16": "",
    "--enable-prefix-caching --enable-chunked-prefill": "",
    "--pipeline-parallel-size 1 --nnodes 1": "",
    "--grammar-backend xgrammar --load-format safetensors": "",
    "--load-format auto --grammar-backend=outlines": "",
    "--disable-uvicorn-access-log --headless": "",
    "--file-storage-path x --decode-attention-backend fa3": "",
}


@pytest.mark.parametrize("pasted", PASTED)
def test_flags_of_other_servers_mean_what_ours_do(pasted: str) -> None:
    assert config_of(*pasted.split()) == config_of(*PASTED[pasted].split())


def test_flags_without_effect_say_why() -> None:
    argv = [*SWITCHES, *(word for name in SETTINGS for word in (name, "1"))]
    argv += [word for name in LISTS for word in (name, "1", "2")]
    lines = words_of(parse(argv).without_effect)
    assert len(lines) == len(SWITCHES) + len(SETTINGS) + len(LISTS)
    assert lines[0].startswith("--trust-remote-code changes nothing here: code of a checkpoint is never run")
    lines = words_of(parse(["--attention-backend", "FLASHINFER", "--ep", "1"]).without_effect)
    assert lines == [
        "--attention-backend flashinfer changes nothing here: kernels are our own, the best for the device are chosen "
        "(docs/kernels.md)",
        "--ep 1 changes nothing here: each device has all experts without it",
    ]
    lines = words_of([f"{flag} {value}" for flag, values in OTHER_VALUES.items() for value in values])
    assert len(lines) == sum(map(len, OTHER_VALUES.values()))
    assert words_of(["--enforce-eager"] * 2) == words_of(["--enforce-eager"])


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_would_change_something_name_the_way_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([name, "2"])
    assert f"{name} is no flag of jaxsgl: {REFUSED[name]}" in capsys.readouterr().err


def test_arguments_of_the_offline_model_are_treated_as_flags_are() -> None:
    given = {"enforce_eager": True, "trust_remote_code": True, "max_model_len": 9, "attention_backend": "FLASHINFER"}
    assert own_arguments(EngineConfig, given) == (
        {"max_model_len": 9}, ["--enforce-eager", "--trust-remote-code", "--attention-backend flashinfer"]
    )  # fmt: skip
    assert own_arguments(EngineConfig, {"enable_prefix_caching": False}) == ({"no_enable_prefix_caching": True}, [])
    assert own_arguments(EngineConfig, {"tokenizer": None, "cpu_offload_gb": 0}) == ({}, [])
    _, without_effect = own_arguments(EngineConfig, {"limit_mm_per_prompt": {"image": 4}})
    assert words_of(without_effect) == [
        "--limit-mm-per-prompt changes nothing here: a prompt may have as many media as its context has room for"
    ]
    for name, value in (("tokenizer", "x"), ("skip_tokenizer_init", True)):
        with pytest.raises(ConfigError, match=f"{name} is no argument: {REFUSED['--' + name.replace('_', '-')][:9]}"):
            own_arguments(EngineConfig, {name: value})


def test_a_flag_that_is_like_none_gets_no_hint() -> None:
    parser = new_parser()
    assert near_flags(parser, ["--performance-mode", "--kv-events-config"]) == [
        "--performance-mode",
        "--kv-events-config",
    ]
    assert near_flags(parser, ["--max-runing-requests"]) == ["--max-runing-requests (is it --max-running-requests?)"]


@pytest.mark.parametrize("argv", [["--ep", "8"], ["--ep=8"]])
def test_a_number_of_experts_devices_names_the_way_out(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--ep takes no number: give --tp 8 --ep, and each device has whole experts"):
        parse(argv)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model m --served-model-name a b", "b and --model m both name the model: give one"),
        ("--api-key k b --model-path m", "if b belongs to the flag before it, that takes one value"),
        ("m --model n", "m and --model n both name the model"),
        ("--enable-prefix-caching false", "false would be the MODEL: switches take no value, so leave false out"),
        ("--model m --enforce-eager True", "True would be the MODEL"),
    ],
)
def test_a_word_too_many_does_not_become_the_model(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(flags.split())
    assert parse(["m", "--model", "m"]).model == "m"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--decode-buckets 1,x", "argument --decode-buckets: '1,x' is no list of type int: give one as 1,2,4"),
        ("--device-ids 0-3", "'0-3' is no list of type int"),
        ("--cuda-graph-sizes 1 2 m", "argument --cuda-graph-sizes: invalid int value: 'm'"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["k", "1.5K", "3kb", "1..5k", "x"])
def test_what_is_no_number_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--max-model-len", text])
    assert f"invalid int value: '{text}'" in capsys.readouterr().err


def test_no_flag_of_others_is_one_of_ours() -> None:
    ours = {
        "--attention-backend": ATTENTION_BACKENDS,
        "--grammar-backend": GRAMMAR_BACKENDS,
        "--load-format": LOAD_FORMATS,
    }
    for name, values in ours.items():
        assert not set(values) & set(OTHER_VALUES[name])
    new_parser()  # argparse refuses a name that is taken
    assert not SWITCHES.keys() & SETTINGS.keys() | REFUSED.keys() & (SWITCHES | SETTINGS | LISTS).keys()


LORA = ["--lora-paths", "a=x", "b=y"]


def test_a_file_holds_flags(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "host-kv-gib: null\nmodel: m\npage_size: 32\ndisable-radix-cache: true\nenable-lora: false\n"
        "decode-buckets: [1, 8]\nlora-paths: [a=x, b=y]\n"
    )
    written = ["--model=m", "--page-size=16", "--disable-radix-cache", "--decode-buckets=1,8", *LORA]
    assert config_of("--config", str(file), "--page-size", "16") == config_of(*written)
    assert (
        config_of("--config", str(file), "n").engine.model == config_of("n", "--config", str(file)).engine.model == "n"
    )
    file.write_text("enable-prefix-caching: false\ntrust-remote-code: false\ncuda-graph-bs: [1, 2]\n")
    assert config_of("--config", str(file)) == config_of("--disable-radix-cache")
    for text, words in (("a: [", "is no YAML"), ("- a", "holds no flags"), ("config: x", "names another file")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            parse(["--config", str(file)])
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        parse(["--config", str(tmp_path / "none")])


# The flags that the pages of each server use most, as a file of its own flags has them, and those that change nothing.
PEERS_FILES = {
    "SGLang": (
        """
model-path: m
host: 0.0.0.0
port: 8000
tp-size: 2
dp-size: 2
context-length: 4096
mem-fraction-static: 0.8
max-running-requests: 64
chunked-prefill-size: 2048
kv-cache-dtype: fp8_e4m3
quantization: fp8
dtype: bfloat16
trust-remote-code: true
served-model-name: mine
api-key: secret-key-of-mine
tool-call-parser: hermes
reasoning-parser: qwen3
schedule-policy: lpm
disable-cuda-graph: true
log-level: info
enable-metrics: true
""",
        ["--trust-remote-code", "--disable-cuda-graph", "--enable-metrics"],
    ),
    "vLLM": (
        """
model: m
host: 0.0.0.0
port: 8000
tensor-parallel-size: 2
data-parallel-size: 2
max-model-len: 4096
gpu-memory-utilization: 0.8
max-num-seqs: 64
max-num-batched-tokens: 2048
kv-cache-dtype: fp8
quantization: fp8
dtype: bfloat16
trust-remote-code: true
served-model-name: mine
api-key: secret-key-of-mine
tool-call-parser: hermes
reasoning-parser: qwen3
enable-auto-tool-choice: true
enforce-eager: true
generation-config: auto
enable-prefix-caching: true
seed: 0
""",
        ["--trust-remote-code", "--enable-auto-tool-choice", "--enforce-eager", "--enable-prefix-caching"],
    ),
}


@pytest.mark.parametrize("peer", PEERS_FILES)
def test_a_file_may_hold_the_flags_that_peers_pages_use_most(peer: str, tmp_path: Path) -> None:
    text, without_effect = PEERS_FILES[peer]
    assert len(text.split("\n")) > 20
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    args = parse(["--config", str(file)])
    config = from_flags(ServerConfig, args)
    engine = config.engine
    found = engine.model, engine.tp, engine.dp_size, engine.context_length, engine.max_running_requests
    assert found == ("m", 2, 2, 4096, 64)
    assert (engine.mem_fraction_static, engine.chunked_prefill_size) == (0.8, 2048)
    assert (engine.kv_cache_dtype, engine.quantization, engine.dtype) == ("fp8_e4m3", "fp8", "bfloat16")
    assert (config.host, config.model_name, config.tool_call_parser) == ("0.0.0.0", "mine", "hermes")
    assert args.without_effect == without_effect and len(words_of(without_effect)) == len(without_effect)


def test_a_model_is_called_as_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    cached = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0a1b"
    for each in (folder, cached):
        each.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for given, name in (
        (str(folder), "Qwen3-0.6B"),
        (f"{folder}/", "Qwen3-0.6B"),
        (".", "Qwen3-0.6B"),
        (str(cached), "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ):
        assert config_of("--model", given).model_name == name
    assert config_of("--model", ".", "--served-model-name", "mine").model_name == "mine"


def test_sampling_defaults_are_the_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert sampling_defaults(str(tmp_path)) == {}
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "max_new_tokens": 5}')
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    file.write_text('{"temperature": "hot", "top_p": 7, "repetition_penalty": 1.1}')
    assert sampling_defaults(str(tmp_path)) == {"repetition_penalty": 1.1}
    assert "temperature" in caplog.text and "top_p" in caplog.text
    file.write_text("[")
    assert sampling_defaults(str(tmp_path)) == {}
    assert (
        config_of().samples_as_the_model_says and not config_of("--generation-config", "vllm").samples_as_the_model_says
    )


def test_a_chat_template_is_a_file_or_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert template_of(None) is None
    assert template_of(str(file)) == template_of("{{ messages }}") == "{{ messages }}"
    with pytest.raises(StartupError, match=r"--chat-template none\.jinja can't be read"):
        template_of("none.jinja")

from __future__ import annotations

import argparse
import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsgl.config.engine import EngineConfig, Limits, SchedulingConfig
from jaxsgl.config.features import DisaggregationConfig, HostKvConfig, LoraConfig, SpeculationConfig
from jaxsgl.config.flags import add_flags, fields_of, from_flags, public_flags
from jaxsgl.config.kernels import OP_OF_NAME
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError, InvalidRequest
from jaxsgl.requests.request import Request, SamplingParams, check_request, max_new_tokens

LIMITS = Limits(vocab_size=100, context_length=64, pool_tokens=48)


def parse(*argv: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, ServerConfig)
    return from_flags(ServerConfig, parser.parse_args(list(argv)))


def test_every_field_is_a_flag_and_no_flag_is_the_default() -> None:
    assert parse() == ServerConfig()
    config = parse(
        "--model-path", "m", "--page-size", "64", "--disable-radix-cache", "--decode-buckets", "1,8", "--grpc-port", "0"
    )  # fmt: skip
    assert config.engine == EngineConfig(model="m", page_size=64, disable_radix_cache=True, decode_buckets=(1, 8))
    assert config.grpc_port == 0


def test_the_help_of_kernels_names_every_operation() -> None:
    (spec,) = (field for field in dataclasses.fields(EngineConfig) if field.name == "kernels")
    for name in OP_OF_NAME:
        assert re.search(rf"\b{name}\b", spec.metadata["help"]), name


def test_arguments_of_the_offline_model_have_other_servers_names_too() -> None:
    given = {"max_model_len": 100, "gpu_memory_utilization": 0.5, "tensor_parallel_size": 2, "seed": 3}
    own = {"context_length": 100, "mem_fraction_static": 0.5, "tp": 2, "random_seed": 3}
    assert fields_of(EngineConfig, given) == fields_of(EngineConfig, own) == own
    lora = LoraConfig()
    assert fields_of(EngineConfig, {"lora": lora}) == {"lora": lora}
    for name, words in (
        ("max_model_length", r"is it max_model_len\?"),
        ("enable_lora", r"give lora=LoraConfig\(enable_lora=...\), from jaxsgl\.config\.features"),
        ("weather", "leave it out"),
    ):
        with pytest.raises(ConfigError, match=f"{name} is no argument: {words}"):
            fields_of(EngineConfig, {name: True})
    with pytest.raises(ConfigError, match="tp_size and another name of tp are both given"):
        fields_of(EngineConfig, {"tp": 1, "tp_size": 2})


def test_arguments_of_the_offline_model_have_other_servers_words_too() -> None:
    given = {"model_path": Path("m"), "dtype": "half", "kv_cache_dtype": "fp8", "decode_buckets": [1]}
    own = {"model": "m", "dtype": "float16", "kv_cache_dtype": "fp8_e4m3", "decode_buckets": (1,)}
    assert fields_of(EngineConfig, given) == own
    assert fields_of(EngineConfig, {"block_size": None, "seed": None, "lora": None}) == {}
    assert fields_of(EngineConfig, {"tp": np.int64(2), "pp": None}) == {"tp": 2}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("max_model_len", "512", r"int \| None"),
        ("max_model_len", 512.0, r"int \| None"),
        ("disable_radix_cache", "false", "bool"),
        ("decode_buckets", "4", r"tuple\[int, \.\.\.\]"),
        ("lora", {"enable_lora": True}, "LoraConfig"),
        ("lora", True, "LoraConfig"),
    ],
)
def test_arguments_of_the_offline_model_of_another_type_are_refused(name: str, value: object, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {re.escape(repr(value))}, but must be of type {kind}"):
        fields_of(EngineConfig, {name: value})


def test_the_page_size_is_a_word_or_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--page-size", "auto").engine == EngineConfig(page_size="auto") == EngineConfig()
    with pytest.raises(ConfigError, match="--page-size is huge, but must be auto, or 1 to 256"):
        EngineConfig(page_size="huge")  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        parse("--page-size", "huge")
    assert ": 'huge' is neither auto nor of type int" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--page-size", "257"], "--page-size is 257, but must be auto, or 1 to 256"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static is 1.5"),
        (["--max-total-tokens", "0"], "--max-total-tokens is 0"),
        (["--max-running-requests", "-1"], "--max-running-requests is -1"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size is 0"),
        (["--max-running-requests", "3000m"], "--max-running-requests is 3000000000, but must be 1 to 1048576"),
        (["--extend-buckets", "1,2000000"], "but must be sizes of 1 to 1048576"),
        (["--host-kv-gib", "inf"], "--host-kv-gib is inf, but must be a finite number"),
        (["--queue-timeout-s", "1e999"], "--queue-timeout-s is inf, but must be a finite number"),
        (["--tokenizer-worker-num", "2", "--drain-s", "inf"], "--drain-s is inf, but must be a finite number"),
        (["--random-seed", str(1 << 63)], "--random-seed is 9223372036854775808, but must be an integer of 64 bits"),
        (["--grpc-port", "70000"], "--grpc-port is 70000"),
        (["--disaggregation-mode", "decode", "--disable-radix-cache"], "which --disable-radix-cache switches off"),
        (["--speculative-algorithm", "EAGLE"], "not built yet: give NGRAM, SUFFIX, which guess"),
        (
            ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", "m"],
            "goes with --speculative-algorithm EAGLE3 or STANDALONE",
        ),
        (["--speculative-algorithm", "STANDALONE"], "with --speculative-draft-model-path"),
        (["--speculative-algorithm", "EAGLE3", "--model", "m"], "with --speculative-draft-model-path"),
        (
            ["--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", "m"],
            "goes with --speculative-algorithm EAGLE3 or STANDALONE",
        ),
        (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "32"], "is 32, but must be 1 to 31"),
        (
            ["--speculative-num-draft-tokens", "3"],
            "goes with --speculative-algorithm NGRAM or SUFFIX or EAGLE3 or STANDALONE or NEXTN",
        ),
        (
            ["--speculative-algorithm", "SUFFIX", "--speculative-ngram-max-match-window-size", "5"],
            "goes with --speculative-algorithm NGRAM: give that, or leave it out",
        ),
        (
            [
                "--speculative-algorithm",
                "NGRAM",
                "--speculative-ngram-min-match-window-size",
                "6",
                "--speculative-ngram-max-match-window-size",
                "5",
            ],
            "is 6, but must be 5 at most",
        ),
        (["--speculative-algorithm", "NGRAM", "--decode-steps", "4"], "--decode-steps 4 decodes several"),
        (["--speculative-algorithm", "NGRAM", "--disaggregation-mode", "prefill"], "give it to the decode servers"),
        (["--speculative-algorithm", "NGRAM", "--is-embedding"], "--is-embedding generates none"),
    ],
)
def test_flags_out_of_range_name_the_value_and_the_limit(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


def test_a_secret_flag_is_shown_nowhere() -> None:
    shown = public_flags(ServerConfig(api_key="key", port=5))
    assert shown["port"] == 5
    assert shown["engine"]["scheduling"]["max_prefill_tokens"] == 16384
    assert "api_key" not in shown
    assert "key'" not in repr(ServerConfig(api_key="key"))


@pytest.mark.parametrize(
    ("argv", "policy"),
    [
        ([], "lpm"),
        (["--enable-priority-scheduling"], "fcfs"),
        (["--enable-priority-scheduling", "--schedule-policy", "lof"], "lof"),
        (["--schedule-policy", "fcfs"], "fcfs"),
    ],
)
def test_the_longest_match_goes_first_unless_a_flag_says_otherwise(argv: list[str], policy: str) -> None:
    assert parse(*argv).engine.scheduling.policy == policy


def test_replicas_get_devices_of_their_own() -> None:
    config = parse("--dp-size", "3", "--tp", "2")
    assert [config.engine_of(rank).device_ids for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert parse("--device-ids", "5").engine_of(0).device_ids == (5,)
    kept = parse("--dp-size", "2", "--kv-file", "kept", "--host-kv-gib", "1")
    assert [kept.engine_of(rank).host_kv.kv_file for rank in range(2)] == ["kept/replica-0", "kept/replica-1"]
    with pytest.raises(ConfigError, match="--dp-size gives each replica devices"):
        parse("--dp-size", "2", "--device-ids", "1")


STAGES_REFUSE = (
    "--host-kv-gib 1",
    "--enable-lora",
    "--speculative-algorithm NGRAM",
    "--decode-steps 2",
    "--max-itl-ms 50",
    "--enable-return-hidden-states",
    "--enable-return-routed-experts",
    "--enable-weights-cpu-backup",
    "--disaggregation-mode prefill",
)


@pytest.mark.parametrize("flags", STAGES_REFUSE)
def test_pipeline_stages_refuse_what_needs_all_layers_by_name(flags: str) -> None:
    with pytest.raises(ConfigError, match=f"{flags.split()[0]}.* does not work with pipeline stages for now: leave it"):
        parse("--pp-size", "2", *flags.split())


def test_pipeline_stages_have_devices_of_their_own_and_steps_for_all_of_them() -> None:
    config = parse("--dp-size", "2", "--tp", "2", "--pp-size", "3")
    assert config.engine.num_devices == 6
    assert [config.engine_of(rank).device_ids for rank in range(2)] == [(*range(6),), (*range(6, 12),)]
    assert parse().engine.unread_steps == 1 and parse("--pp-size", "4").engine.unread_steps == 3
    assert parse("--pp-size", "2", "--pp-async-batch-depth", "2").engine.unread_steps == 3
    assert parse("--pp-size", "2", "--disable-overlap-schedule").engine.unread_steps == 0
    with pytest.raises(ConfigError, match="--tp 1 x --pp-size 2 = 2 different devices"):
        parse("--pp-size", "2", "--device-ids", "3")
    with pytest.raises(ConfigError, match="--pp-async-batch-depth is for pipeline stages: give --pp-size"):
        parse("--pp-async-batch-depth", "1")


def test_hosts_have_equally_many_stages_and_host_0_the_last_ones() -> None:
    def of_host(rank: int, *flags: str) -> EngineConfig:
        address = "--dist-init-addr", "127.0.0.1:20000"
        return parse(*flags, "--nnodes", "3", "--node-rank", str(rank), *address).engine

    six = [of_host(rank, "--pp-size", "6", "--tp", "2") for rank in range(3)]
    assert [list(each.own_stages) for each in six] == [[4, 5], [0, 1], [2, 3]]
    assert {each.num_own_devices for each in six} == {4}
    assert list(parse("--pp-size", "2").engine.own_stages) == [0, 1]
    with pytest.raises(ConfigError, match=r"--pp-size is 4, but 3 hosts .* of the stages: give --pp-size 6"):
        of_host(0, "--pp-size", "4")
    with pytest.raises(ConfigError, match=r"--tp is 4, but 3 hosts .* of the devices: give --tp 6"):
        of_host(0, "--tp", "4")


@pytest.mark.parametrize("name", ["--decode-buckets", "--extend-buckets"])
def test_sizes_come_from_a_list_or_from_a_file_but_not_from_both(name: str) -> None:
    assert parse("--auto-buckets", "b.json").engine.auto_buckets == "b.json"
    with pytest.raises(ConfigError, match=f"{name} and --auto-buckets both say"):
        parse("--auto-buckets", "b.json", name, "32")


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -2},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -1.0},
        {"max_tokens": 0},
        {"seed": -1},
        {"seed": 2**32},
        {"stop_token_ids": (1,) * 65},
        {"max_tokens": 2.5},
        {"top_k": 3.0},
        {"seed": "7"},
        {"max_tokens": True},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(InvalidRequest, match=f"{name} is"):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 64, {}, "the prompt has 64 tokens, but this model's maximum context length is 64"),
        ([1, 100], {}, "prompt holds token id 100, but ids go from 0 to 99"),
        ([-1], {}, "prompt holds token id -1"),
        ([1], {"stop_token_ids": (100,)}, "stop_token_ids holds token id 100"),
        ([1] * 40, {"max_tokens": 9}, "need 49 tokens of KV cache .* the whole pool holds 48"),
        ([1] * 48, {}, "need 49 tokens of KV cache"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(prompt: list[int], params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_request(Request("r", prompt, SamplingParams(**params)), LIMITS)


@pytest.mark.parametrize(("prompt_len", "asked", "given"), [(10, 5, 5), (10, None, 38), (60, 5, 4), (40, 8, 8)])
def test_output_is_capped_by_context_and_pool(prompt_len: int, asked: int | None, given: int) -> None:
    request = Request("r", [1] * prompt_len, SamplingParams(max_tokens=asked))
    assert max_new_tokens(request, LIMITS) == given


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"disaggregation_mode": "prefill", "disaggregation_host": "0.0.0.0"}, "there is no secret"),
        ({"disaggregation_mode": "prefill", "disaggregation_host": "a name_"}, "there is no secret"),
        ({"disaggregation_mode": "prefill", "disaggregation_host": "LocalHost"}, ""),
        ({"disaggregation_mode": "decode", "disaggregation_prefill_hosts": ("10.0.0.5",)}, "there is no secret"),
        ({"disaggregation_mode": "decode", "disaggregation_prefill_hosts": ("*",)}, "there is no secret"),
        ({"disaggregation_prefill_hosts": ("10.0.0.0/99",)}, "--disaggregation-prefill-hosts is 10.0.0.0/99"),
        ({"disaggregation_prefill_hosts": ("10.0.0.5:8998",)}, "names without ports"),
        ({"disaggregation_mode": "prefill"}, ""),
        ({"disaggregation_mode": "decode", "disaggregation_prefill_hosts": ("127.0.0.0/8", "localhost")}, ""),
    ],
)
def test_prefill_and_decode_on_several_machines_need_a_secret(
    tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    def config(**more: Any) -> ServerConfig:
        return ServerConfig(EngineConfig(disaggregation=DisaggregationConfig(**flags, **more)))

    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        config()
    if "secret" in words:
        secret = tmp_path / "secret"
        secret.write_text("s" * 32 + "\n")
        secret.chmod(0o600)
        assert config(disaggregation_secret_file=str(secret)).engine.disaggregation.read_secret() == b"s" * 32


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [("s" * 31, 0o600, "holds 31 bytes"), ("s" * 5000, 0o600, "must hold 32 to 4096"), ("s" * 40, 0o604, "chmod 600")],
)
def test_a_secret_that_others_can_read_or_guess_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(text)
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        DisaggregationConfig(disaggregation_secret_file=str(secret)).read_secret()
    with pytest.raises(ConfigError, match="can't be read"):
        DisaggregationConfig(disaggregation_secret_file=str(tmp_path / "missing")).read_secret()
    with pytest.raises(ConfigError, match="not a regular file"):
        DisaggregationConfig(disaggregation_secret_file="/dev/null").read_secret()


@pytest.mark.parametrize(
    "entry",
    [
        "sql=/adapters/sql",
        '{"name": "sql", "path": "/adapters/sql", "base_model_name": "m"}',  # vLLM's
        '{"lora_name": "sql", "lora_path": "/adapters/sql", "pinned": false}',  # SGLang's
    ],
)
def test_adapters_at_the_start_come_in_the_forms_of_other_servers_too(entry: str) -> None:
    assert LoraConfig(lora_paths=(entry,)).adapters == {"sql": "/adapters/sql"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("sql=",), "names no folder"),
        (('{"name": "sql"}',), "needs a name and a path"),
        (('{"name": "sql",',), "is no JSON"),
        (('{"lora_name": "sql", "lora_path": "/a", "pinned": true}',), "pinned, which isn't taken at the start"),
        ("sql=/a", r"write \['name=folder'\]"),
        ({"sql": "/a"}, r"write \['name=folder'\]"),
        ([{"name": "sql", "path": "/a"}], r"write \['name=folder'\]"),
    ],
)
def test_adapters_at_the_start_are_refused_with_the_form_to_write(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoraConfig(lora_paths=given)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp": 8, "dp_size": 3}, "give --tp 9"),
        ({"max_running_requests": 3}, "give 4 or more"),
        ({"decode_steps": 2}, "--decode-steps"),
        ({"scheduling": SchedulingConfig(max_itl_ms=50)}, "--max-itl-ms"),
        ({"scheduling": SchedulingConfig(decode_first=True)}, "--decode-first changes nothing.*leave it out"),
        ({"speculation": SpeculationConfig("NGRAM")}, "--speculative-algorithm"),
        ({"host_kv": HostKvConfig(host_kv_gib=1)}, "--host-kv-gib"),
        ({"lora": LoraConfig(enable_lora=True)}, "--enable-lora"),
    ],
)
def test_ranks_refuse_what_they_can_not_divide(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**{"tp": 4, "dp_size": 4, "enable_dp_attention": True, **flags})


def test_dp_size_means_ranks_of_one_engine_or_replicas() -> None:
    replicas = ServerConfig(EngineConfig(tp=2, dp_size=4))
    assert (replicas.num_replicas, replicas.engine.num_ranks) == (4, 1)
    assert replicas.engine_of(3).device_ids == (6, 7) and replicas.engine_of(3).dp_size == 1
    ranks = ServerConfig(EngineConfig(tp=8, dp_size=4, enable_dp_attention=True))
    assert (ranks.num_replicas, ranks.engine.num_ranks) == (1, 4)
    assert ranks.engine.mixes_steps and not replicas.engine.mixes_steps
    assert ranks.engine_of(0) == ranks.engine

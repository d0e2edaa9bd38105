"""Flags of hosts: what launchers say fills what was left out, and what can't work is refused before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import DisaggregationConfig, HostKvConfig, LoraConfig
from jaxsgl.config.hosts import HostsConfig, Placement, fill_in, first_of, placement
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import ConfigError

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "m-0.m.default"}
SLURM = {"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[003-004]"}
TPU = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-0.s,t-1.s,t-2.s,t-3.s"}
TWO = HostsConfig(2, 0, "127.0.0.1:20000")


@pytest.mark.parametrize(
    "environ,found",
    [
        (LWS, Placement(4, 3, "m-0.m.default")),
        (SLURM, Placement(2, 1, "gpu003")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu004"}, Placement(1, 1, "gpu004")),
        (TPU, Placement(4, 2, "t-0.s")),
        ({**TPU, **LWS}, Placement(4, 3, "m-0.m.default")),
        ({"SLURM_JOB_ID": "7"}, None),
    ],
)
def test_launchers_say_how_many_hosts_there_are_and_which_one_this_is(
    environ: dict[str, str], found: Placement | None
) -> None:
    assert placement(environ) == found


@pytest.mark.parametrize(
    "nodes,first",
    [
        ("gpu1", "gpu1"),
        ("a,b", "a"),
        ("gpu[003-007,009],cpu1", "gpu003"),
        ("n[1,3]-ib,x", "n1-ib"),
        ("r1-n[07]", "r1-n07"),
        ("r[1-2]n[01-10],x", "r1n01"),
        ("r[1,3]n[01,02]", "r1n01"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str) -> None:
    assert first_of(nodes) == first


def filled(environ: dict[str, str], **flags: Any) -> tuple[Any, Any, Any]:
    args = argparse.Namespace(**{"nnodes": 1, "node_rank": None, "dist_init_addr": None, **flags})
    fill_in(args, environ)
    return args.nnodes, args.node_rank, args.dist_init_addr


def test_flags_win_over_launchers_and_a_server_alone_stays_alone() -> None:
    assert filled(LWS) == (1, None, None)
    assert filled(LWS, nnodes="auto") == (4, 3, "m-0.m.default:20000")
    assert filled(LWS, nnodes=2, node_rank=1) == (2, 1, "m-0.m.default:20000")
    assert filled(SLURM, nnodes=2, dist_init_addr="a:7") == (2, 1, "a:7")
    assert filled({}, nnodes=2, node_rank=1, dist_init_addr="a:7") == (2, 1, "a:7")
    assert filled({**TPU, "TPU_WORKER_HOSTNAMES": "localhost"}, nnodes="auto") == (1, None, None)
    with pytest.raises(ConfigError, match="--nnodes is auto, but the environment has nothing of Leader"):
        filled({}, nnodes="auto")
    with pytest.raises(ConfigError, match="the launcher sets no LWS_LEADER_ADDRESS"):
        filled({**LWS, "LWS_LEADER_ADDRESS": ""}, nnodes="auto")
    with pytest.raises(ConfigError, match="LWS_WORKER_INDEX is 'x', but must be a number"):
        filled({**LWS, "LWS_WORKER_INDEX": "x"}, nnodes="auto")


@pytest.mark.parametrize(
    "flags,text",
    [
        ({"nnodes": 2}, "--node-rank doesn't say which host this is"),
        ({"nnodes": 2, "node_rank": 2}, "--node-rank is 2, but must be 0 to 1 with --nnodes 2"),
        ({"node_rank": 1}, "--node-rank is 1, but must be 0 without --nnodes"),
        ({"nnodes": 2, "node_rank": 0}, "--dist-init-addr doesn't say where host 0 is"),
        ({"nnodes": 2, "node_rank": 0, "dist_init_addr": "a"}, "--dist-init-addr is a, but must be host:port"),
        ({"nnodes": 2, "node_rank": 0, "dist_init_addr": "a:65535"}, "with a port of 1 to 65534"),
        ({"nnodes": 2, "node_rank": 0, "dist_init_addr": "a:1"}, "there is no secret by which hosts know each other"),
        ({"nnodes": 0}, "--nnodes is 0, but must be 1 to 256"),
        ({"dist_timeout": 0.0}, "--dist-timeout is 0.0, but must be more than 0"),
    ],
)
def test_hosts_that_can_not_meet_are_refused(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        HostsConfig(**flags)


def test_addresses_of_ipv6_have_brackets() -> None:
    assert HostsConfig(2, 1, "[::1]:20000").address == ("::1", 20000)


@pytest.mark.parametrize(
    "flags,text",
    [
        ({"tp": 3}, r"--tp is 3, but 2 hosts \(--nnodes\) have equal parts of the devices: give --tp 4"),
        ({"tp": 2, "device_ids": (0, 1)}, "--device-ids works on one host only"),
        ({"tp": 2, "host_kv": HostKvConfig(host_kv_gib=1.0)}, "--host-kv-gib works on one host only"),
        ({"tp": 2, "lora": LoraConfig(enable_lora=True)}, "--enable-lora works on one host only"),
        (
            {"tp": 2, "disaggregation": DisaggregationConfig(disaggregation_mode="prefill")},
            "--disaggregation-mode works on one host only",
        ),
    ],
)
def test_what_needs_more_of_other_hosts_is_refused_by_name(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(hosts=TWO, **flags)


def test_front_ends_and_replicas_are_one_with_several_hosts() -> None:
    with pytest.raises(ConfigError, match="--dp-size is 2, but must be 1 with --nnodes"):
        ServerConfig(engine=EngineConfig(hosts=TWO, tp=2, dp_size=2))
    with pytest.raises(ConfigError, match="--tokenizer-worker-num is 2, but must be 1 with --nnodes"):
        ServerConfig(engine=EngineConfig(hosts=TWO, tp=2), tokenizer_worker_num=2)


def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--dist-secret-file .* has mode 0644"):
        HostsConfig(2, 0, "a:1", str(secret))
    secret.chmod(0o600)
    assert HostsConfig(2, 0, "a:1", str(secret)).read_secret() == b"s" * 64

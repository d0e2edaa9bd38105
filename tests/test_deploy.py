"""The files of deploy/ are ones that their readers take: manifests, a batch script, and flags that servers know."""

from __future__ import annotations

import argparse
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxsgl.config.flags import add_flags, from_flags
from jaxsgl.config.hosts import DIST_PORT, fill_in
from jaxsgl.config.server import ServerConfig

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
OF_HOSTS = {
    "lws-gpu": (2, "nvidia.com/gpu", 8),
    "lws-tpu-v5e": (4, "google.com/tpu", 4),
    "lws-tpu-v6e": (4, "google.com/tpu", 4),
}
SMG = Path(sys.executable).parent / "smg"
SERVE = ["python", "-m", "jaxsgl.serve"]


def pods(found: Any) -> Iterator[dict[str, Any]]:
    """What a manifest says of pods."""
    if isinstance(found, dict):
        if "containers" in found:
            yield found
        for value in found.values():
            yield from pods(value)


def containers(found: Any) -> Iterator[dict[str, Any]]:
    """All containers of a manifest."""
    for pod in pods(found):
        yield from pod["containers"]


def of_manifest(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def config_of(flags: Sequence[str], environ: dict[str, str], secret: Path) -> ServerConfig:
    """What a server makes of its flags; Raises `ConfigError`, and ends for a flag that there is not."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, ServerConfig)
    args = parser.parse_args(flags)
    if args.dist_secret_file is not None:
        args.dist_secret_file = str(secret)
    fill_in(args, environ)
    return from_flags(ServerConfig, args)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("s" * 64)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_servers_of_manifests_know_their_flags_and_are_probed_where_they_answer(path: Path, secret: Path) -> None:
    size = OF_HOSTS.get(path.stem, (1, "", 0))[0]
    for container in (each for document in of_manifest(path) for each in containers(document)):
        command = container["command"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if command[0] != "python":
            assert path.name == "gateway.yaml" and command[:2] == ["smg", "launch"]
            continue
        assert command[:3] == SERVE
        for rank in range(size):
            environ = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": "jaxsgl-0.x"}
            config = config_of(command[3:], environ, secret)
            hosts = config.engine.hosts
            assert (hosts.num_hosts, hosts.rank) == (size, rank)
            assert size == 1 or hosts.address == ("jaxsgl-0.x", DIST_PORT)
            assert (config.port, config.grpc_port) == (ports["http"], ports["grpc"]) and config.host == "0.0.0.0"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_cache_in_an_empty_volume_is_a_folder_of_the_servers_user_alone(path: Path, tmp_path: Path) -> None:
    """All users may write to an emptyDir, and `own_folder` takes nothing below such a folder."""
    for pod in (each for document in of_manifest(path) for each in pods(document)):
        empty = {volume["name"] for volume in pod.get("volumes", []) if "emptyDir" in volume}
        for mount in (mount for container in pod["containers"] for mount in container.get("volumeMounts", [])):
            if mount["name"] not in empty or not mount["mountPath"].endswith("/.cache"):
                continue
            (makes_it,) = pod["initContainers"]
            assert [each["name"] for each in makes_it["volumeMounts"]] == [mount["name"]]
            tmp_path.chmod(0o2777)
            home = makes_it["volumeMounts"][0]["mountPath"]
            subprocess.run([word.replace(home, str(tmp_path)) for word in makes_it["command"]], check=True)
            assert stat.S_IMODE((tmp_path / mount["subPath"]).stat().st_mode) & 0o777 == 0o700


@pytest.mark.parametrize("name", OF_HOSTS)
def test_hosts_of_a_set_have_as_many_devices_as_the_model_is_split_over(name: str, secret: Path) -> None:
    size, resource, each = OF_HOSTS[name]
    (found,) = of_manifest(DEPLOY / f"{name}.yaml")
    template = found["spec"]["leaderWorkerTemplate"]
    assert template["size"] == size and template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert template["leaderTemplate"]["spec"] == template["workerTemplate"]["spec"]
    labels = [template[role]["metadata"]["labels"]["app"] for role in ("leaderTemplate", "workerTemplate")]
    gateway = next(each for each in containers(of_manifest(DEPLOY / "gateway.yaml")[0]))["command"]
    assert f"app={labels[0]}" in gateway and f"app={labels[1]}" not in gateway, "clients' requests are for host 0"
    (container,) = template["leaderTemplate"]["spec"]["containers"]
    assert container["resources"]["limits"] == {resource: each}
    environ = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "x"}
    assert config_of(container["command"][3:], environ, secret).engine.tp == size * each


def test_the_batch_script_starts_hosts_and_a_gateway(secret: Path) -> None:
    path = DEPLOY / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text().replace("\\\n", " ")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    (command,) = re.findall(r"^srun --\S+ (python .*) &$", text, re.MULTILINE)
    words = shlex.split(command)
    assert words[:3] == SERVE and options["ntasks-per-node"] == "1"
    nodes = int(options["nodes"])
    for rank in range(nodes):
        environ = {"SLURM_NODEID": str(rank), "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": "gpu[07-08]"}
        engine = config_of(words[3:], environ, secret).engine
        assert (engine.hosts.num_hosts, engine.hosts.rank, engine.hosts.address[0]) == (nodes, rank, "gpu07")
        assert engine.tp == nodes * int(options["gpus-per-node"])
    assert re.search(r"^smg launch --worker-urls grpc://127.0.0.1:30001 ", text, re.MULTILINE)


@pytest.mark.skipif(not SMG.exists(), reason="the gateway is not installed")
def test_the_gateway_knows_the_flags_that_it_is_given() -> None:
    known = subprocess.run([str(SMG), "launch", "--help"], capture_output=True, text=True, check=True).stdout
    script = (DEPLOY / "slurm.sh").read_text().replace("\\\n", " ")
    (of_script,) = re.findall(r"^smg launch (.*) &$", script, re.MULTILINE)
    (of_manifest_,) = (each["command"] for each in containers(of_manifest(DEPLOY / "gateway.yaml")[0]))
    for word in (*shlex.split(of_script), *of_manifest_):
        assert not word.startswith("--") or re.search(rf"{word}\b", known), word


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name,extra", [("cpu", None), ("cuda13", "cuda13"), ("tpu", "tpu")])
def test_images_install_what_the_package_offers_and_start_a_server(name: str, extra: str | None, secret: Path) -> None:
    text = (DEPLOY / f"{name}.Dockerfile").read_text()
    extras = project()["project"]["optional-dependencies"]
    assert re.findall(r"/src\[(\w+)\]", text) == ([extra] if extra else []) and (extra is None or extra in extras)
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    words = yaml.safe_load(entry)
    assert words[:3] == SERVE and config_of(words[3:], {}, secret).host == "0.0.0.0"
    assert f"docker build -f deploy/{name}.Dockerfile" in text and re.search(r"^USER \d+$", text, re.MULTILINE)
    assert "COPY" not in text, "a layer would keep what a later one removes"
    assert re.search(r"install -d -m 700 -o jaxsgl .*/home/jaxsgl/.cache$", text, re.MULTILINE), (
        "root's, if a volume is"
    )


def test_images_are_built_from_what_the_package_needs_alone() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    about, packages = project()["project"], project()["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {"pyproject.toml", about["readme"], *about["license-files"], *(name.rstrip("*") for name in packages)}
    assert kept == needed and all((ROOT / name).exists() for name in kept)
    assert [line for line in lines if not line.startswith(("#", "!"))] == ["*", "**/__pycache__"]

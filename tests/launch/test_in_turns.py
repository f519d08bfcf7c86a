"""Tutor and student are trained in turns: which phase plays with which weights, and what is not run again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.launch import cli, in_turns
from classroom_rl.results.rollout_files import files_by_step, read_records
from classroom_rl.results.run_folder import load_run
from tests.conftest import ROOT, free_port, quickstart_overrides

LEARNS = ["train.max_steps=2", "train.learning_rate=1e-3"]
STUDENT_PAY = "student:train.reward_weights={student: 1, tests.support.own_rewards:brevity: 1}"
PROGRAM = """
import sys
import classroom_rl.launch.cli
from classroom_rl.launch import in_turns
from tests.support import scripted_server
classroom_rl.launch.cli.server_command = scripted_server.command
sys.exit(in_turns.main(sys.argv[1:]))
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each phase; a stand-in for the launcher makes what a training leaves."""
    phases: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        phases.append(arguments)
        folder = Path(value(arguments, "logging.save_dir"))
        (folder / "model").mkdir(parents=True)
        line = {"step": 1, "reward": 0.5, "guard/student_pleases": float("student" in folder.name)}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return 0

    monkeypatch.setattr(cli, "main", main)
    return phases


@pytest.fixture
def arguments(world: Path, tmp_path: Path) -> list[str]:
    return quickstart_overrides(tmp_path / "turns", world / "blank", world, free_port())


def value(arguments: list[str], key: str) -> str | None:
    """The last value of a key."""
    values = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")]
    return values[-1] if values else None


def model_of(arguments: list[str], role: str) -> str | None:
    return value(arguments, f"{role}_model.model_name_or_path")


def test_each_phase_plays_with_the_newest_weights_of_both(launched, arguments, tmp_path, capsys) -> None:
    assert in_turns.main([*arguments, "--phases", "4"]) == 0
    folder = tmp_path / "turns"
    models = [str(folder / name / "model") for name in ("phase_01_teacher", "phase_02_student", "phase_03_teacher")]
    assert [value(launch, "generation.trained_role") for launch in launched] == ["teacher", "student"] * 2
    assert [model_of(launch, "teacher") for launch in launched] == [None, models[0], models[0], models[2]]
    assert [model_of(launch, "student") for launch in launched] == [None, None, models[1], models[1]]
    assert [value(launch, "seed") for launch in launched] == ["42", "43", "44", "45"]
    assert [value(launch, "train.reward_weights") for launch in launched] == [None, "null", None, "null"]
    summary = json.loads((folder / "turns.json").read_text())
    assert [(phase["role"], phase["pleases"]) for phase in summary] == [("teacher", False), ("student", True)] * 2
    assert (
        "phase 2, the student, 1 steps: reward 0.500 → 0.500; the student learns to please" in capsys.readouterr().out
    )


def test_a_finished_phase_is_not_run_again(launched, arguments) -> None:
    for phases, ran in (("1", 1), ("1", 1), ("3", 3)):
        assert in_turns.main([*arguments, f"--phases={phases}"]) == 0
        assert len(launched) == ran


def test_another_order_or_override_of_a_role_is_refused_in_a_folder_with_phases(launched, arguments, capsys) -> None:
    assert in_turns.main([*arguments, "student:train.learning_rate=1e-4", "--phases=1"]) == 0
    for changes in (["student:train.learning_rate=1e-4", "--first=student"], ["student:train.learning_rate=1e-5"], []):
        assert in_turns.main([*arguments, *changes]) == 2
        assert "holds phases of another configuration" in capsys.readouterr().err
    assert len(launched) == 1


def test_what_the_phases_came_to_is_written_also_after_an_interruption(launched, arguments, tmp_path) -> None:
    assert in_turns.main([*arguments, "--phases=2"]) == 0
    (tmp_path / "turns" / "turns.json").unlink()
    assert in_turns.main([*arguments, "--phases=2"]) == 0 and len(launched) == 2
    assert len(json.loads((tmp_path / "turns" / "turns.json").read_text())) == 2


def test_a_phase_that_fails_ends_the_turns(launched, arguments, monkeypatch) -> None:
    monkeypatch.setattr(cli, "main", lambda _: 3)
    assert in_turns.main(arguments) == 3
    monkeypatch.undo()


def test_an_override_of_a_role_is_for_its_phases(launched, arguments) -> None:
    overrides = ["student:train.learning_rate=1e-4", "teacher:train.max_steps=7", "--first=student"]
    assert in_turns.main([*arguments, *overrides]) == 0
    student, teacher = launched
    assert value(student, "generation.trained_role") == "student"
    assert value(student, "train.learning_rate") == "1e-4" and value(teacher, "train.learning_rate") is None
    assert value(teacher, "train.max_steps") == "7" and value(student, "train.max_steps") is None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--phases", "two"], "--phases is a number of phases"),
        (["--first", "judge"], "--first is teacher or student"),
        (["dry_run=true"], "dry_run=true shows one training"),
        (["student:train.algorithm=ppo"], "set train.algorithm=grpo"),
        (["student:train.learning_rat=1"], "train.learning_rat"),
        (
            ["train.turn_credit.mode=immediate", "supervisor_model.model_name_or_path=rubric"],
            "set supervisor_model=null",
        ),
    ],
)
def test_what_no_phase_could_run_is_refused_before_the_first(launched, arguments, more, says, capsys) -> None:
    assert in_turns.main([*arguments, *more]) == 2
    assert says in capsys.readouterr().err and launched == []


def test_another_configuration_needs_another_folder(launched, arguments, capsys) -> None:
    assert in_turns.main([*arguments, "--phases=1"]) == 0
    assert in_turns.main([*arguments, "--phases=1", "generation.max_turns=7"]) == 2
    assert "phases of another configuration" in capsys.readouterr().err and len(launched) == 1


def test_two_phases_with_scripted_engines(arguments, world, tmp_path) -> None:
    """The real launcher and trainer: each phase learns, and its weights are published into the engine of its role."""
    command = [sys.executable, "-c", PROGRAM, *arguments, *LEARNS, STUDENT_PAY]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    folder = tmp_path / "turns"
    teacher, student = folder / "phase_01_teacher", folder / "phase_02_student"
    config = yaml.safe_load((student / "config" / "train_rl.yaml").read_text())
    assert config["teacher_model"]["model_name_or_path"] == str(teacher / "model")
    blank, *trained = [
        load_file(path / "model.safetensors") for path in (world / "blank", teacher / "model", student / "model")
    ]
    assert all(any((weights[name] != blank[name]).any() for name in blank) for weights in trained)
    run = load_run(student)
    assert len(run.steps) == 2 and run.series("rewards/student/mean") and run.series("guard/student_pleases")
    for step, paths in enumerate(files_by_step(student)):
        turns = [turn for path in paths for record in read_records(path, ConversationRecord) for turn in record.turns]
        assert {turn.policy and turn.policy.version for turn in turns if turn.role == "student"} == {step}
        assert {turn.policy for turn in turns if turn.role == "teacher"} == {None}

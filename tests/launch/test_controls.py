"""Tests of the controls: which runs they make, which they leave alone, and when they say that something is wrong."""

import pytest

from classroom_rl.environments.toy_language.lessons import make_lessons
from classroom_rl.environments.toy_language.scripts import ideal, move_on
from classroom_rl.launch import controls
from tests.support.synthetic_run import played, step_line, write_evaluation, write_training


def write_run(folder, before, after):
    """A finished run whose tutor was one scripted teacher before training, and another after it."""
    lessons = make_lessons(1)[1][:12]
    for when, teacher in (("before", before), ("after", after)):
        records = [
            played(teacher, lesson, ["error_student", "correct_student"] * 2, i) for i, lesson in enumerate(lessons)
        ]
        write_evaluation(folder / "eval" / when, {"sampled": records})
    write_training(folder, [step_line(1, 0.5)], {"train": {"learning_rate": 1e-4}})
    (folder / "summary.json").write_text("{}")


@pytest.fixture
def started(monkeypatch):
    """The overrides of the runs that were started; each is a run in which nothing changed."""
    calls = []

    def start(overrides, models_only, signals):
        calls.append(list(overrides))
        folder = next(override for override in overrides if override.startswith("logging.save_dir=")).partition("=")[2]
        write_run(controls.Path(folder), move_on, move_on)

    monkeypatch.setattr(controls, "TRAININGS", {"quickstart": start})
    return calls


def test_each_control_is_run_once_beside_the_training(tmp_path, started, capsys):
    write_run(tmp_path / "run", move_on, ideal)
    arguments = ["quickstart", f"logging.save_dir={tmp_path / 'run'}", "seed=3"]
    assert controls.main(arguments) == 0
    assert started == [
        ["seed=3", "train.learning_rate=0", f"logging.save_dir={tmp_path / 'run_still'}"],
        [
            "seed=3",
            "train.shuffle_rewards=true",
            "train.turn_credit.shuffle=true",
            f"logging.save_dir={tmp_path / 'run_shuffled'}",
        ],
    ]
    lines = capsys.readouterr().out.splitlines()
    figures = {
        line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(("trained", "still ", "shuffled "))
    }
    assert figures["trained"] > 0.2
    assert figures["still"] == figures["shuffled"] == 0

    assert controls.main(arguments) == 0
    assert len(started) == 2, "a finished control was run again"


def test_a_control_that_got_better_is_an_error(tmp_path, started):
    write_run(tmp_path / "run_shuffled", move_on, ideal)
    assert controls.main(["quickstart", f"logging.save_dir={tmp_path / 'run'}"]) == 1


def test_the_controls_of_both_trainings_are_configurations_that_load():
    for name in ("quickstart", "small_tutor"):
        for overrides in controls.CONTROLS.values():
            assert controls.load(
                controls.TrainRLConfig, "train_rl", ["--config-name", name, *overrides], controls.check_train_rl
            )


def test_an_unknown_training_is_refused(capsys):
    assert controls.main(["other"]) == 2
    assert "quickstart" in capsys.readouterr().out

"""An evaluation measures on the lessons of the run that it measures, and says which of them that run is trained on."""

import json
import logging
import socket
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig, TutorConfig
from classroom_rl.config.load import to_yaml
from classroom_rl.environments.toy_language.lessons import make_lessons, render_problem
from classroom_rl.errors import ClassroomError, DataError
from classroom_rl.evaluation.held_out import load_measured_problems
from tests.support.configs import loaded
from tests.support.replay_server import Replay, health, served


def make_run(folder: Path, seed: int, recorded: bool = True) -> Path:
    """A run folder with the lessons and the configuration of a quickstart."""
    for name, lessons in zip(("train", "heldout"), make_lessons(seed), strict=True):
        path = folder / "world" / f"lessons_{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps({"problem": render_problem(lesson), "answer": ""}) + "\n" for lesson in lessons)
        )
    (folder / "model").mkdir()
    if recorded:
        (folder / "config").mkdir()
        (folder / "config" / "train_rl.yaml").write_text(
            to_yaml(loaded("train_rl", f"logging.save_dir={folder}", f"seed={seed}"))
        )
    return folder


def configured(lessons: Path, *overrides: str) -> EvalConfig:
    arguments = [f"dataset.eval_datasets=[{{name_or_path: '{lessons}'}}]", *overrides]
    return loaded("eval", *arguments)


def configured_for(run: Path, lessons: Path, model: str = "model") -> EvalConfig:
    return configured(lessons, "server_url=null", f"teacher_model.model_name_or_path={run / model}")


def texts(seed: int) -> set[str]:
    return {render_problem(lesson) for lesson in make_lessons(seed)[1]}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return make_run(tmp_path / "quickstart", 42), make_run(tmp_path / "a", 7)


def test_the_lessons_are_those_of_the_run_that_a_server_holds(runs: tuple[Path, Path], caplog) -> None:
    """As in `eval.py --config-name quickstart logging.save_dir=runs/a`, whose file names the lessons of another run."""
    other, measured = runs
    with served(Replay(health(measured), [], lambda _: None)) as port, caplog.at_level(logging.WARNING):
        config = configured(other / "world/lessons_heldout.jsonl", f"server_url=http://127.0.0.1:{port}")
        problems, trained_on = load_measured_problems(config)
    assert {problem.text for problem in problems} == texts(7) and trained_on == {}
    assert f"the run that is measured, {measured}/world/lessons_heldout.jsonl, and not {other}" in caplog.text


def test_a_server_that_refuses_is_named_rather_than_lessons_that_only_it_knows(tmp_path: Path) -> None:
    """As in `eval.py --config-name quickstart` without the token, where runs/quickstart is not there."""
    missing = tmp_path / "world/lessons_heldout.jsonl"
    with pytest.raises(DataError, match="There is no file"):
        load_measured_problems(configured_for(tmp_path, missing))
    with socket.socket() as nobody:  # it keeps the port, so that no server of another test answers there
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ClassroomError, match=r"127\.0\.0\.1") as refused:
            load_measured_problems(configured(missing, f"server_url={url}"))
    assert "There is no file" not in str(refused.value)


@pytest.mark.parametrize("model", ["model", "checkpoints/checkpoint-8", "sft/model"])
def test_the_lessons_are_those_of_the_run_that_a_model_is_in(runs: tuple[Path, Path], model: str) -> None:
    other, measured = runs
    (measured / model).mkdir(parents=True, exist_ok=True)
    problems, trained_on = load_measured_problems(
        configured_for(measured, other / "world/lessons_heldout.jsonl", model)
    )
    assert {problem.text for problem in problems} == texts(7) and trained_on == {}


@pytest.mark.parametrize("recorded", [True, False])
def test_lessons_that_the_run_is_trained_on_are_counted_and_said(tmp_path: Path, caplog, recorded: bool) -> None:
    """A copy of another run's held-out lessons: 38 of 116 are in the training of a run with another seed."""
    measured = make_run(tmp_path / "a", 7, recorded)
    copied = tmp_path / "copied.jsonl"
    copied.write_bytes((make_run(tmp_path / "quickstart", 42) / "world/lessons_heldout.jsonl").read_bytes())
    shared = texts(42) & {render_problem(lesson) for lesson in make_lessons(7)[0]}
    with caplog.at_level(logging.WARNING):
        problems, trained_on = load_measured_problems(configured_for(measured, copied))
    assert len(problems) == 116 and trained_on == {str(measured): len(shared)} and len(shared) > 30
    assert f"{len(shared)} of the 116 problems are among those that {measured} is trained on" in caplog.text


def test_a_run_that_was_trained_on_another_reward_is_said_with_the_override_that_measures_it(runs, caplog) -> None:
    _, measured = runs
    path = measured / "config" / "train_rl.yaml"
    path.write_text(
        path.read_text().replace("reward_weights: null", "reward_weights: {pedagogical: 1.0, post_test: 2}")
    )
    config = configured_for(measured, measured / "world/lessons_heldout.jsonl")
    load_measured_problems(config)
    (warning,) = [
        record.getMessage() for record in caplog.records if "was trained on the rewards" in record.getMessage()
    ]
    override = warning.partition("reward_weights=")[2].split("'")[1]
    caplog.clear()
    recorded = path.read_text()
    path.write_text("train: [")
    load_measured_problems(config)
    assert "which rewards" in caplog.text, "a damaged record is said, and ends nothing"
    path.write_text(recorded)
    caplog.clear()
    config.reward_weights = {"pedagogical": 1.0, "post_test": 2.0, "length": 0.0}  # the same sum
    load_measured_problems(config)
    assert not caplog.records
    config.reward_weights = loaded(
        "eval", f"reward_weights={override}", "server_url=null", "generation.post_test.enable=true"
    ).reward_weights
    load_measured_problems(config)
    assert config.reward_weights == {"pedagogical": 1.0, "post_test": 2} and not caplog.records


def test_a_run_folder_that_was_moved_is_read_where_it_is(tmp_path: Path) -> None:
    moved = make_run(tmp_path / "a", 7).rename(tmp_path / "b")
    problems, trained_on = load_measured_problems(configured_for(moved, moved / "world/lessons_train.jsonl"))
    assert trained_on == {str(moved): len(problems)}


def test_tutors_of_runs_with_different_lessons_are_not_compared_on_lessons_of_one(runs: tuple[Path, Path]) -> None:
    config = configured(Path("runs/quickstart/world/lessons_heldout.jsonl"), "server_url=null")
    config.tutors = [TutorConfig(name=run.name, model_name_or_path=str(run / "model")) for run in runs]
    with pytest.raises(DataError, match="The tutors come from runs with different lessons, .* measure the tutors one"):
        load_measured_problems(config)


def test_training_data_that_is_not_here_is_said_not_to_be_known(runs: tuple[Path, Path], caplog) -> None:
    _, measured = runs
    (measured / "world/lessons_train.jsonl").unlink()
    with caplog.at_level(logging.WARNING):
        config = configured_for(measured, measured / "world/lessons_heldout.jsonl")
        assert load_measured_problems(config)[1] == {}
    assert f"which problems {measured} is trained on cannot be told" in caplog.text

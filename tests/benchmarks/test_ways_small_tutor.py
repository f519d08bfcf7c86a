"""The benchmark of ways of learning on the small tutor: what its arms train, on what, and how they are compared."""

from pathlib import Path

import pytest

from benchmarks.supervision_arms import Bench
from benchmarks.ways_small_tutor import SmallBench, held_out, report
from classroom_rl.rollout.datasets import load_problems
from tests.support.configs import loaded


def test_arms_differ_in_their_signal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, more = SmallBench(tmp_path / "arms", tmp_path / "model", 16, 8059), {}
    bench.more = ["train.learning_rate=1e-5"]
    (bench.folder / "grpo" / "1" / "model").mkdir(parents=True)

    def train_with(self: Bench, arm: str, seed: int, overrides: list[str] | None = None) -> Path:
        more[arm] = list(overrides or ())
        return self.folder / arm / str(seed)

    monkeypatch.setattr(Bench, "train_with", train_with)
    configs = {}
    for arm in ("grpo", "level", "distilled"):
        bench.train(arm, 1)
        configs[arm] = loaded("train_rl", *bench.overrides(Path("run")), *bench.arms[arm], *more[arm])
    grpo = configs["grpo"]
    assert grpo.train.number_of_problems_per_batch * grpo.train.num_samples_per_problem == 32
    assert {config.train.learning_rate for config in configs.values()} == {1e-5}
    assert {config.student_model.model_name_or_path for config in configs.values()} == {str(tmp_path / "model")}
    assert configs["level"].train.turn_credit.weights == {"judge": 1.0, "level": 1.0}
    assert configs["distilled"].train.distillation.model == str(tmp_path / "arms/grpo/1/model")
    assert configs["distilled"].train.reward_weights == {"pedagogical": 0}
    assert [bench.measured_steps(arm) for arm in configs] == [[0, 8, 16], [0, 8, 16], [8]]
    assert configs["distilled"].teacher_model.model_name_or_path == str(tmp_path / "model")


def test_the_held_out_lessons_are_not_those_of_the_training() -> None:
    training = {
        problem.text
        for problem in load_problems(loaded("train_rl", "--config-name=small_tutor").dataset.train_datasets)
    }
    assert len(held_out()) == 40 and not training & set(held_out())


def test_the_report_compares_each_arm_with_the_beginning_and_with_grpo() -> None:
    lessons = [f"lesson {number}" for number in range(20)]

    def line(arm: str, step: int, reward: float) -> dict:
        return {"arm": arm, "seed": 1, "step": step, "rewards": dict.fromkeys(lessons, reward)}

    steps = [line("grpo", 0, 0.25), line("grpo", 8, 0.5), line("grpo", 16, 0.9)]
    begin, grpo, _, distilled = report([*steps, line("distilled", 8, 0.75)]).splitlines()[1:5]
    assert "begin" in begin and "0.250" in begin
    assert "0.500" in grpo and "+0.250" in grpo and "to grpo" not in grpo
    assert "to begin +0.500 [" in distilled and "to grpo +0.250 [" in distilled


def test_an_arm_alone_is_compared_with_its_own_beginning() -> None:
    scores = {f"lesson {number}": number / 100 for number in range(20)}
    later = {lesson: score + 0.5 for lesson, score in scores.items()}
    text = report(
        [{"arm": "level", "seed": 2, "step": step, "score": figure} for step, figure in ((0, scores), (1, later))]
    )
    assert "level        1" in text and "to begin +0.500 [" in text and "to grpo" not in text

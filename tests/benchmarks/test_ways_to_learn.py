"""The benchmark of ways of learning trains what its arms say, each on what it has to follow, and reports them alike."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.supervision_arms import Bench
from benchmarks.ways_to_learn import GRPO, OFFLINE, WaysBench, report
from classroom_rl.models.policy_folder import MARKER, policy_path
from tests.support.configs import loaded

STEPS = 24


@pytest.fixture
def bench(tmp_path: Path) -> WaysBench:
    return WaysBench(tmp_path, tmp_path / "models", STEPS, 8057)


def test_every_arm_sees_as_many_conversations_and_only_its_own_signal(
    bench: WaysBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, list[str]] = {}

    def train_with(self: Bench, arm: str, seed: int, overrides: list[str] | None = None) -> Path:
        more[arm] = list(overrides or ())
        return self.folder / arm / str(seed)

    monkeypatch.setattr(Bench, "train_with", train_with)
    train_configs = {}
    for arm in [name for name in bench.arms if name not in OFFLINE]:
        bench.train(arm, 1)
        overrides = [*bench.overrides(Path("run"), bench.configs.get(arm, "quickstart")), *bench.arms[arm]]
        train_configs[arm] = loaded(
            "train_rl", *overrides, *more[arm], f"train.max_steps={bench.version(arm, STEPS)}"
        ).train
    assert {train.max_steps / train.mu for train in train_configs.values()} == {STEPS}
    assert len({(train.learning_rate, train.lr_scheduler_type) for train in train_configs.values()}) == 1
    assert {arm for arm, train in train_configs.items() if train.shuffle_rewards} == {"shuffled"}
    tutors = {arm: train.distillation.model for arm, train in train_configs.items() if train.distillation.model}
    assert tutors == {
        "distilled": str(bench.folder / GRPO / "1" / "model"),
        "own_teacher": str(bench.models / "sft" / "model"),
        "informed": str(bench.models / "sft" / "model"),
    }
    assert [arm for arm, train in train_configs.items() if train.distillation.prompt_path] == ["informed"]
    assert all(train_configs[arm].reward_weights == {"pedagogical": 0} for arm in tutors)


def test_a_measured_training_can_still_be_learned_from(bench: WaysBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its published versions are gone: it would be refused as a training of its own."""
    run = bench.folder / GRPO / "1"
    (run / "model").mkdir(parents=True)
    (run / "learning.json").touch()
    (run / "metrics.jsonl").write_text(f'{{"step": {STEPS}}}\n')
    trained: list[list[str]] = []
    with pytest.raises(SystemExit, match="its weights are gone"):
        bench.train(GRPO, 1)
    monkeypatch.setattr(Bench, "train_with", lambda self, arm, seed, more=(): trained.append([arm, *more]))
    bench.train("distilled", 1)
    assert trained == [["distilled", f"train.distillation.model={run / 'model'}"]]


def test_an_offline_arm_learns_from_the_conversations_of_grpo(bench: WaysBench, monkeypatch) -> None:
    (bench.folder / GRPO / "2" / "model").mkdir(parents=True)
    run, commands = bench.folder / "swapped" / "2", []

    def call(command: list[str], **_: object) -> None:
        commands.append(command[1:])
        (run / "model").mkdir(exist_ok=True)
        (run / "model" / "config.json").write_text("{}")

    monkeypatch.setattr(subprocess, "run", call)
    for _ in range(2):  # a finished one is not trained again
        assert bench.train("swapped", 2) == run
    pairs, preferences = commands
    assert pairs == ["-m", "classroom_rl.results.pairs", str(bench.folder / GRPO / "2")]
    assert {f"dataset.pairs={bench.folder / GRPO / '2'}", "train.loss=dpo", "seed=2"} <= set(preferences)
    assert "dataset.shuffle_pairs=true" in preferences
    marker = json.loads((policy_path(run, STEPS) / MARKER).read_text())
    assert (marker["run_id"], marker["version"]) == ((run / "run_id").read_text(), STEPS)
    assert list(bench.measured_steps("swapped")) == [STEPS]


def test_the_report_compares_each_way_with_grpo_on_the_same_lessons() -> None:
    def line(arm: str, step: int, reward: float) -> dict[str, object]:
        figures = {name: {"a": reward, "b": reward} for name in ("rewards", "post_test", "scaffolded")}
        return {"arm": arm, "seed": 1, "step": step, "seconds": 10.0 * step, **figures}

    lines = [line(GRPO, 0, 0.4), line(GRPO, 20, 1.0), line("ppo", 20, 0.8), line("dpo", 24, 0.5)]
    printed = report(lines).splitlines()
    assert printed[1].split() == [GRPO, "[1067]", "[200]"]
    assert printed[2].split() == ["ppo", "[None]", "[200]"]
    assert printed[3].split() == ["dpo", "after", "grpo", "[240]"]
    form = {text.split()[3]: text.split()[4:] for text in printed if "paid for form" in text and "until" not in text}
    assert form["sft"][0] == "0.400" and form[GRPO] == ["1.000", "[1.0]"]
    assert form["ppo"][:3] == ["0.800", "[0.8]", "-0.200"] and form["dpo"][2] == "-0.500"

"""Whole PPO trainings on scripted conversations: several processes, and a run that resumes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.rollout.problem import Problem
from classroom_rl.trainer.critic import HEAD_FILE
from classroom_rl.trainer.ppo import critic_path
from tests.conftest import quickstart_overrides
from tests.support.offline_trainer import conversation
from tests.support.replay_server import served
from tests.support.scripted_batches import ScriptedBatches
from tests.trainer.test_several_processes import metrics_of, run_training
from tests.trainer.test_sharded_save import weights_in

pytestmark = pytest.mark.full  # whole trainings, minutes

STEPS = 4
PPO = [
    "train.algorithm=ppo",
    "train.number_of_problems_per_batch=2",
    "train.num_samples_per_problem=4",
    "train.per_device_train_batch_size=2",
    "train.mu=2",
    "train.beta=0.1",
    "train.learning_rate=3e-3",
    "train.ppo.head=mlp",
    "train.ppo.value_learning_rate=1e-2",
    "train.ppo.lam=0.9",
    "train.ppo.gamma=0.99",
    "judge_model.max_failed_share=1",
    f"logging.save_steps={STEPS}",
]
LORA = ["teacher_model.lora.enable=true", "teacher_model.lora.dropout=0"]
FIGURES = (
    "loss",
    "ppo/value_loss",
    "ppo/approx_kl",
    "ppo/entropy",
    "ppo/explained_variance",
    "ppo/advantage_std",
    "kl",
)


def play(step: int, index: int, problem: Problem) -> ConversationRecord:
    """Of the first process's four conversations three have a verdict, of the second one's only one; two are cut."""
    unjudged = {"reward": None, "rewards": {"pedagogical": None}, "verdicts": []}
    changes = unjudged if index in (2, 4, 5, 7) else {"overflow": "the student's context is full"} if index < 2 else {}
    return conversation(index, problem, seed=10 + step, **changes)


@dataclass
class Done:
    """What a run left."""

    folder: Path

    @property
    def lines(self) -> list[dict]:
        return metrics_of(self.folder)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        head = load_file(self.folder / "checkpoints" / f"checkpoint-{STEPS}" / HEAD_FILE)
        return weights_in(policy_path(self.folder, STEPS)) | {f"head.{name}": weight for name, weight in head.items()}


def trained(
    folder: Path, world: Path, launcher: str | None, more: list[str], stops: tuple[int, ...] = (STEPS,)
) -> Done:
    """A training in one process without DeepSpeed, or with one of accelerate's configurations, in one go or several."""
    folder.mkdir(parents=True, exist_ok=True)
    with served(ScriptedBatches(str(folder), play)) as port:
        for steps in stops:
            overrides = [
                *quickstart_overrides(folder, world / "blank", world, port),
                *PPO,
                *more,
                f"train.max_steps={steps}",
            ]
            run_training(launcher, overrides)
    return Done(folder)


@pytest.fixture(scope="module")
def alone(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    yield trained(tmp_path_factory.mktemp("alone"), world, None, [])


def assert_same(found: Done, wanted: Done, tolerance: float = 1e-4) -> None:
    for name in FIGURES:
        figures = [[line[name] for line in done.lines if name in line] for done in (found, wanted)]
        assert figures[0] == pytest.approx(figures[1], abs=tolerance) and figures[0], name
    assert set(found.weights) == set(wanted.weights)
    for name, weight in wanted.weights.items():
        assert torch.allclose(found.weights[name], weight, rtol=0, atol=tolerance), name


@pytest.mark.parametrize("launcher", ["zero2_2CPU", "zero3_2CPU"])
def test_two_processes_train_policy_and_critic_as_one_does(launcher: str, alone: Done, world: Path, tmp_path) -> None:
    """Their verdicts are uneven: three on the first process, one on the second."""
    run = trained(tmp_path / "two", world, launcher, [])
    assert_same(run, alone)
    assert run.weights["head.weight"].abs().max() > 1e-3, "the critic has learned"
    assert critic_path(run.folder, 2).is_file() and not critic_path(run.folder, 3).exists()


@pytest.mark.parametrize("launcher", [None, "zero2_2CPU"])
def test_a_resumed_run_makes_the_steps_of_one_that_was_not_interrupted(
    launcher: str | None, alone: Done, world: Path, tmp_path: Path
) -> None:
    """Head, its learning rate, and the optimizer's state of both."""
    assert_same(trained(tmp_path / "again", world, launcher, ["logging.save_steps=2"], (2, STEPS)), alone)


def test_an_adapter_is_trained_and_its_critic_is_not_in_it(world: Path, tmp_path: Path) -> None:
    uninterrupted = trained(tmp_path / "whole", world, None, LORA)
    resumed = trained(tmp_path / "again", world, "zero2_2CPU", [*LORA, "logging.save_steps=2"], (2, STEPS))
    for done in (uninterrupted, resumed):
        published = load_file(policy_path(done.folder, STEPS) / "adapter_model.safetensors")
        assert published and all("lora" in name for name in published)
    assert_same(resumed, uninterrupted)


def test_bfloat16_keeps_the_values_in_float32(world: Path, tmp_path: Path) -> None:
    run = trained(tmp_path / "half", world, None, ["train.dtype=bfloat16"])
    assert len(run.lines) == STEPS and run.weights["head.weight"].dtype == torch.float32
    assert run.weights["head.weight"].abs().max() > 1e-3

"""FSDP2 on two processes of the CPU, over gloo: whole trainings on scripted conversations, beside one process alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError
from classroom_rl.models.policy_folder import policy_path
from classroom_rl.rollout.problem import Problem
from classroom_rl.system.distributed import check_fsdp
from tests.conftest import quickstart_overrides
from tests.support.offline_trainer import conversation
from tests.support.replay_server import served
from tests.support.scripted_batches import ScriptedBatches
from tests.trainer.test_several_processes import assert_movement_is_that_of, metrics_of, run_training
from tests.trainer.test_sharded_save import weights_in

STEPS = 3
TRAINING = [
    "train.number_of_problems_per_batch=3",
    "train.num_samples_per_problem=4",
    "train.per_device_train_batch_size=2",
    "train.learning_rate=3e-3",
    "train.lr_scheduler_type=constant",  # others depend on where the first launch ends
    "train.max_grad_norm=0.05",
    "judge_model.max_failed_share=1",
    "logging.save_steps=2",
]
LORA = ["teacher_model.lora.enable=true", "teacher_model.lora.dropout=0"]
PPO = ["train.algorithm=ppo", "train.ppo.head=mlp", "train.ppo.value_learning_rate=1e-2"]


def play(step: int, index: int, problem: Problem) -> ConversationRecord:
    return conversation(index, problem, seed=10 + step)


def trained(
    folder: Path, world: Path, more: list[str], launcher: str | None = None, stops: tuple[int, ...] = (STEPS,)
) -> Path:
    """The run folder of a training in one process, or in two under FSDP2, in one go or several."""
    folder.mkdir()
    with served(ScriptedBatches(str(folder), play)) as port:
        for steps in stops:
            overrides = [*quickstart_overrides(folder, world / "blank", world, port), *TRAINING, *more]
            overrides.append(f"train.max_steps={steps}")
            run_training(launcher, overrides, kind="fsdp")
    return folder


def assert_same(found: Path, wanted: Path, files: str = "model.safetensors") -> None:
    losses = [[line["loss"] for line in metrics_of(folder)] for folder in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and len(losses[0]) == STEPS
    pairs = [(policy_path(folder, STEPS) / files, folder / "model" / "model.safetensors") for folder in (found, wanted)]
    for path, expected_path in zip(*pairs, strict=True):
        weights, expected = load_file(path), load_file(expected_path)
        assert set(weights) == set(expected)
        for name, weight in expected.items():
            assert torch.allclose(weights[name], weight, rtol=0, atol=1e-4), name


def test_two_processes_train_publish_and_resume_as_one_does(world: Path, tmp_path: Path) -> None:
    """The second of the two launches resumes from the checkpoint of step 2."""
    one_process = trained(tmp_path / "alone", world, ["train.beta=0.1"])
    two_processes = trained(tmp_path / "both", world, ["train.beta=0.1"], "2CPU", (2, STEPS))
    assert_same(two_processes, one_process)
    assert (two_processes / "checkpoints" / "checkpoint-2" / "pytorch_model_fsdp.bin").is_file(), "it was FSDP"
    assert_movement_is_that_of(
        weights_in(policy_path(two_processes, STEPS)), weights_in(world / "blank"), two_processes
    )


@pytest.mark.full
@pytest.mark.parametrize("more", [LORA, PPO], ids=["adapter", "PPO"])
def test_adapters_and_critics_train_as_in_one_process(more: list[str], world: Path, tmp_path: Path) -> None:
    one_process = trained(tmp_path / "alone", world, more)
    two_processes = trained(tmp_path / "both", world, more, "2CPU", (2, STEPS))
    assert_same(two_processes, one_process, "adapter_model.safetensors" if more is LORA else "model.safetensors")


@pytest.mark.full
def test_bfloat16_trains_with_recomputed_activations(world: Path, tmp_path: Path) -> None:
    overrides = ["train.dtype=bfloat16", "train.gradient_checkpointing=true"]
    two_processes = trained(tmp_path / "both", world, overrides, "2CPU", (2, STEPS))
    assert len(metrics_of(two_processes)) == STEPS
    assert {weight.dtype for weight in weights_in(policy_path(two_processes, STEPS)).values()} == {torch.float32}


@pytest.mark.full
def test_micro_batches_of_tokens_are_as_many_on_both_processes(world: Path, tmp_path: Path) -> None:
    """The two processes have other conversations, and pack them differently."""
    overrides = ["train.max_tokens_per_micro_batch=160"]
    one_process = trained(tmp_path / "alone", world, [])
    assert_same(trained(tmp_path / "both", world, overrides, "2CPU"), one_process)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"FSDP_VERSION": "1"}, "set fsdp_version: 2"),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, "set fsdp_state_dict_type: FULL_STATE_DICT"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "fsdp_cpu_ram_efficient_loading is true"),
    ],
)
def test_settings_that_would_train_otherwise_are_refused(told: dict[str, str], said: str) -> None:
    shipped = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    check_fsdp(shipped, has_second_model=True)
    check_fsdp(told, has_second_model=True)  # without FSDP
    with pytest.raises(ConfigError, match=said):
        check_fsdp(shipped | told, has_second_model=True)

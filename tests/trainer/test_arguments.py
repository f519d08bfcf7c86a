"""How the configuration reaches the training: transformers' arguments, the loss, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.errors import ConfigError
from classroom_rl.rollout.rows import rows_of
from classroom_rl.trainer.arguments import training_arguments
from classroom_rl.trainer.batch import Batch, Sample, totals
from classroom_rl.trainer.grpo import GRPO
from classroom_rl.trainer.log_probs import Scores
from tests.trainer.test_batch_player import record


def configured(*overrides: str) -> TrainRLConfig:
    return load(TrainRLConfig, "train_rl", overrides, check_train_rl)


def test_options_reach_transformers(tmp_path: Path) -> None:
    config = configured(
        "train.number_of_problems_per_batch=6",
        "train.num_samples_per_problem=4",
        "train.per_device_train_batch_size=3",
        "train.learning_rate=1e-5",
        "train.lr_scheduler_type=cosine",
        "train.optimizer=adamw_torch",
        "train.epochs=2",
        "train.max_steps=17",
        "train.mu=3",
        "train.max_grad_norm=0.5",
        "train.gradient_checkpointing=true",
        "logging.save_steps=5",
        "logging.report_to=[tensorboard]",
        "train.reward_weights={pedagogical: 0.75, length: 2.0}",
        "seed=9",
    )
    arguments = training_arguments(config, tmp_path)
    assert (arguments.learning_rate, arguments.lr_scheduler_type, arguments.optim) == (1e-5, "cosine", "adamw_torch")
    assert (arguments.num_train_epochs, arguments.max_steps, arguments.save_steps, arguments.seed) == (2, 17, 6, 9)
    assert (arguments.max_grad_norm, arguments.gradient_accumulation_steps) == (0.5, 1)
    assert arguments.gradient_checkpointing and arguments.report_to == ["tensorboard"] and not arguments.bf16
    assert reward_weights(config) == {"pedagogical": 0.75, "length": 2.0}  # the server sums up by them


def loss_of_token(algorithm: GRPO, ratio: float, **tensors: torch.Tensor) -> torch.Tensor:
    """The loss of one sampled token with advantage 1, whose log-prob was −1 before the step."""
    row = rows_of(record(0, completion_ids=[7], mask=[1], logprobs=[-1.0]))[0]
    micro = Batch.of([Sample(row, [1.0])], 0, torch.device("cpu"))
    micro = replace(micro, old_logps_BT=-torch.ones(1, 1), **tensors)
    scores = Scores(torch.full((1, 1), math.log(ratio) - 1), torch.zeros(1, 1), None, None)
    return algorithm.loss(scores, micro, totals([micro], Accelerator(cpu=True)), True)


@pytest.mark.parametrize(
    ("overrides", "largest_ratio"),
    [
        (["train.loss_type=cispo"], 5.0),
        (["train.loss_type=cispo", "train.epsilon_high=3"], 3.0),
        (["train.loss_type=dapo"], 1.2),
        (["train.loss_type=grpo", "train.epsilon=0.1"], 1.1),
        (["train.loss_type=dapo", "train.epsilon_high=0.28"], 1.28),
    ],
)
def test_each_loss_is_clipped_where_it_should_be(overrides: list[str], largest_ratio: float) -> None:
    """What its token's log-prob is weighed by grows with the ratio up to the largest one."""
    algorithm = GRPO(configured(*overrides))

    def weight(ratio: float) -> float:
        loss = -loss_of_token(algorithm, ratio).item()
        return loss / (1 - math.log(ratio)) if "cispo" in overrides[0] else loss

    assert abs(weight(largest_ratio * 1.5)) == pytest.approx(largest_ratio, rel=1e-4)
    assert abs(weight(largest_ratio * 0.9)) == pytest.approx(largest_ratio * 0.9, rel=1e-4)


def test_the_temperature_beta_and_the_limit_of_the_ratio_to_the_engine_reach_the_loss() -> None:
    """A ratio of e² to the engine is cut to 4, or the token is left out; KL: e^−1 + 1 − 1, times β."""
    before = {"sampling_logps_BT": torch.full((1, 1), -3.0)}
    limit = "train.importance_sampling_clip_max=4"
    cut = GRPO(configured(limit, "train.importance_sampling_mode=token_truncate"))
    assert loss_of_token(cut, 1.0, **before).item() == pytest.approx(-4)
    masked = GRPO(configured(limit, "train.importance_sampling_mode=sequence_mask"))
    assert loss_of_token(masked, 1.0, **before).item() == 0
    compared = {"ref_logps_BT": torch.full((1, 1), -2.0)}
    assert loss_of_token(GRPO(configured("train.beta=0.5")), 1.0, **compared).item() == pytest.approx(
        -1 + 0.5 * math.exp(-1), abs=1e-6
    )


@pytest.mark.parametrize("correct", [True, False])
def test_mismatch_is_measured_and_corrected_unless_that_is_switched_off(correct: bool) -> None:
    algorithm = GRPO(configured(f"train.importance_sampling_correction={correct}"))
    loss = loss_of_token(algorithm, 1.0, sampling_logps_BT=torch.full((1, 1), -1.5))
    assert loss.item() == pytest.approx(-math.exp(0.5) if correct else -1)
    figures = algorithm.end_pass(True, Accelerator(cpu=True), None)
    assert figures["mismatch/mean_abs_logprob_diff"] == pytest.approx(0.5)
    assert figures["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(0.5))


def test_shuffled_rewards_are_a_permutation_of_the_batch() -> None:
    records, cpu = [record(index, reward=float(index)) for index in range(32)], Accelerator(cpu=True)
    group = ["train.num_samples_per_problem=32", "train.number_of_problems_per_batch=1", "train.scale_rewards=none"]

    def advantages(shuffle: bool, step: int) -> list[float]:
        config = configured(*group, f"train.shuffle_rewards={shuffle}")
        samples, figures = GRPO(config).samples(records, set(), step, cpu)
        assert figures["reward"] == 15.5
        return [sample.advantages[0] for sample in samples]

    unshuffled = [index - 15.5 for index in range(32)]
    assert advantages(False, 0) == pytest.approx(unshuffled)
    shuffled = advantages(True, 0)
    assert shuffled != pytest.approx(unshuffled) and sorted(shuffled) == pytest.approx(unshuffled)
    assert advantages(True, 1) != pytest.approx(shuffled)


def test_cispo_is_not_clipped_by_the_epsilon_of_other_losses() -> None:
    with pytest.raises(ConfigError, match=r"train\.epsilon_high is 0\.28; with train\.loss_type=cispo .* at least 1"):
        configured("train.loss_type=cispo", "train.epsilon_high=0.28")


def test_processes_wait_for_each_other_longer_than_one_may_wait_for_the_server(tmp_path: Path) -> None:
    overrides = ["generation.sample_timeout_s=9000", "generation.load_weights_timeout_s=700"]
    assert training_arguments(configured(*overrides), tmp_path).ddp_timeout == 9000 + 1800
    ahead = configured(*overrides, "train.max_staleness=1")
    assert training_arguments(ahead, tmp_path).ddp_timeout == 2 * 9000 + 1800, "for its messages, then for its verdicts"
    overrides = ["generation.server_start_timeout_s=20000", "generation.load_weights_timeout_s=700.5"]
    assert training_arguments(configured(*overrides), tmp_path).ddp_timeout == 20701 + 1800


def test_batch_that_does_not_divide_over_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for override, numbers in (("train.loss_type=dapo", "processes, 3"), ("train.loss_type=bnpo", "16 × 3 = 48")):
        with pytest.raises(ConfigError, match=f"64 conversations must be divisible .*{numbers}"):
            training_arguments(configured(override), tmp_path)


@pytest.mark.parametrize(
    ("judge_mode", "group_mode", "advice"),
    [
        ("group", "keep", "judge_model.mode=absolute"),
        ("absolute", "drop", "train.groups_without_variance=keep"),
        ("absolute", "resample", "train.groups_without_variance=keep"),
    ],
)
def test_processes_cannot_share_a_group_that_is_judged_or_left_out_as_a_whole(
    judge_mode: str, group_mode: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("train.per_device_train_batch_size=4")
    config.train.number_of_problems_per_batch, config.train.num_samples_per_problem = 2, 8
    config.judge_model.mode, config.train.groups_without_variance = judge_mode, group_mode
    training_arguments(config, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    counts = "each of 4 processes plays 4 conversations of a batch, and a group has 8"
    with pytest.raises(ConfigError, match=f"{counts}: raise .* to a multiple of 4, or set {advice}"):
        training_arguments(config, tmp_path)


def test_a_process_that_sees_several_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
    with pytest.raises(ConfigError, match=r"sees 2 GPUs .* CUDA_VISIBLE_DEVICES"):
        training_arguments(configured(), tmp_path)

"""The trainer's own parts: options handed to TRL, conversations to columns, metrics, and errors that stop a run."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from trl import GRPOTrainer

from classroom_rl.config.checks import check_train_rl, reward_weights
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.environments.classroom.metrics import batch_metrics as classroom_metrics
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError, DeadlineExceeded, EngineFailure, PolicyMismatch, TooManyFailedJudgements
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.client import ClassroomClient
from classroom_rl.trainer import sample_batch
from classroom_rl.trainer.collective import on_every_process, on_main_process
from classroom_rl.trainer.grpo.config import grpo_config
from classroom_rl.trainer.grpo.trainer import ClassroomGRPOTrainer
from classroom_rl.trainer.judge_monitor import JudgeMonitor
from classroom_rl.trainer.sample_batch import ClassroomRollout, reward_column, reward_metrics, to_rollout


def record(index: int, reward: float | None = 0.5, **changes) -> ConversationRecord:
    verdict = Verdict("pedagogical_eval", 0, scores=Scores(1, 0.5, 5))
    if reward is None:
        verdict = Verdict("pedagogical_eval", 0, error="JudgeOutputError: no JSON")
    fields = {
        "id": f"r-{index:04d}",
        "request_id": "r",
        "step": 0,
        "index": index,
        "problem_id": "p",
        "problem": "p",
        "answer": "",
        "type": "guided",
        "student_name": None,
        "state": "END",
        "turns": [Turn("teacher", "Go.", tokens=2, span=(0, 2), policy=PolicyVersion("run", 0))],
        "verdicts": [verdict],
        "solutions": [],
        "rewards": {"pedagogical": reward},
        "reward": reward,
        "rejected": False,
        "prompt_ids": [1, 2],
        "completion_ids": [index, 4, 5],
        "mask": [1, 1, 0],
        "logprobs": [-0.5, -0.25, 0.0],
        "meta": {},
    }
    return ConversationRecord.model_validate(fields | changes)


def test_options_reach_trl(tmp_path: Path) -> None:
    overrides = {
        "train.number_of_problems_per_batch": 6,
        "train.num_samples_per_problem": 4,
        "train.per_device_train_batch_size": 3,
        "train.learning_rate": 1e-5,
        "train.lr_scheduler_type": "cosine",
        "train.optimizer": "adamw_torch",
        "train.epochs": 2,
        "train.max_steps": 17,
        "train.beta": 0.02,
        "train.mu": 3,
        "train.epsilon": 0.1,
        "train.epsilon_high": 0.28,
        "train.loss_type": "dr_grpo",
        "train.scale_rewards": "batch",
        "train.max_grad_norm": 0.5,
        "train.gradient_checkpointing": "true",
        "train.importance_sampling_mode": "sequence_mask",
        "train.importance_sampling_clip_max": 4.0,
        "teacher_model.vllm.temperature": 0.7,
        "logging.save_steps": 5,
        "logging.report_to": "[tensorboard]",
        "train.reward_weights": "{pedagogical: 0.75, length: 2.0}",
        "seed": 9,
    }
    config = load(TrainRLConfig, "train_rl", [f"{key}={value}" for key, value in overrides.items()], check_train_rl)
    arguments = grpo_config(config, tmp_path)
    assert (arguments.generation_batch_size, arguments.num_generations) == (24, 4)
    assert (arguments.gradient_accumulation_steps, arguments.steps_per_generation, arguments.num_iterations) == (
        8,
        8,
        3,
    )
    assert (arguments.learning_rate, arguments.lr_scheduler_type, arguments.optim) == (1e-5, "cosine", "adamw_torch")
    assert (arguments.num_train_epochs, arguments.max_steps, arguments.save_steps, arguments.seed) == (2, 17, 6, 9)
    assert (arguments.beta, arguments.epsilon, arguments.epsilon_high) == (0.02, 0.1, 0.28)
    assert (arguments.loss_type, arguments.scale_rewards, arguments.max_grad_norm) == ("dr_grpo", "batch", 0.5)
    assert arguments.gradient_checkpointing and arguments.report_to == ["tensorboard"]
    assert arguments.vllm_importance_sampling_mode == "sequence_mask"
    assert arguments.vllm_importance_sampling_clip_max == 4.0
    assert arguments.temperature == 0.7
    assert reward_weights(config) == {"pedagogical": 0.75, "length": 2.0}  # the server sums up by them
    assert not arguments.bf16 and not arguments.use_vllm


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
def test_each_loss_is_clipped_where_it_should_be(
    world: Path, tokenizer, tmp_path: Path, overrides: list[str], largest_ratio: float
) -> None:
    """By TRL's own loss, of one token with advantage 1: it grows with the ratio up to the largest one."""
    config = load(TrainRLConfig, "train_rl", ["train.beta=0", *overrides], check_train_rl)
    arguments, rows = grpo_config(config, tmp_path), Dataset.from_dict({"prompt": ["a"] * 64})
    trainer = GRPOTrainer(
        str(world / "blank"), lambda **_: [0.0], arguments, train_dataset=rows, processing_class=tokenizer
    )
    trainer.current_gradient_accumulation_steps = 1
    ids, ones = torch.tensor([[5]]), torch.ones(1, 1, dtype=torch.long)
    now = trainer._get_per_token_logps_and_entropies(trainer.model, ids.repeat(1, 2), ones.repeat(1, 2), 1)[0].detach()

    def loss(ratio: float) -> float:
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": ones,
            "completion_ids": ids,
            "completion_mask": ones,
            "advantages": torch.ones(1),
            "old_per_token_logps": now - math.log(ratio),
            "num_items_in_batch": torch.tensor(1.0),
        }
        return trainer._compute_loss(trainer.model, inputs).item()

    assert loss(largest_ratio * 1.5) == pytest.approx(loss(largest_ratio), rel=1e-4)
    assert loss(largest_ratio * 0.9) == pytest.approx(loss(largest_ratio) * 0.9, rel=1e-4)


def test_cispo_is_not_clipped_by_the_epsilon_of_other_losses() -> None:
    with pytest.raises(ConfigError, match=r"train\.epsilon_high is 0\.28; with train\.loss_type=cispo .* at least 1"):
        load(TrainRLConfig, "train_rl", ["train.loss_type=cispo", "train.epsilon_high=0.28"], check_train_rl)


def test_processes_wait_for_each_other_longer_than_one_may_wait_for_the_server(tmp_path: Path) -> None:
    overrides = ["generation.sample_timeout_s=9000", "generation.load_weights_timeout_s=700"]
    arguments = grpo_config(load(TrainRLConfig, "train_rl", overrides), tmp_path)
    assert arguments.ddp_timeout == 9000 + 1800
    overrides = ["generation.server_start_timeout_s=20000", "generation.load_weights_timeout_s=700.5"]
    assert grpo_config(load(TrainRLConfig, "train_rl", overrides), tmp_path).ddp_timeout == 20701 + 1800


def test_batch_that_does_not_divide_over_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"64 conversations must be divisible .*16 × 3 = 48"):
        grpo_config(load(TrainRLConfig, "train_rl", []), tmp_path)


def test_processes_that_share_a_group_cannot_have_it_judged_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(TrainRLConfig, "train_rl", ["train.per_device_train_batch_size=4"])
    config.train.number_of_problems_per_batch, config.train.num_samples_per_problem = 2, 8
    config.judge_model.mode = "group"
    assert grpo_config(config, tmp_path).num_generations == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="each of 4 processes plays 4 conversations of a batch, and a group has 8"):
        grpo_config(config, tmp_path)


def test_rollout_keeps_order_and_drops_nothing() -> None:
    rollout = to_rollout([record(2), record(1, reward=None), record(3)])
    assert rollout["conversation_id"] == ["r-0002", "r-0001", "r-0003"]
    assert rollout["completion_ids"] == [[2, 4, 5], [1, 4, 5], [3, 4, 5]]
    assert rollout["env_mask"] == [[1, 1, 0]] * 3 and rollout["logprobs"][0] == [-0.5, -0.25, 0.0]


def batch_metrics(records: list[ConversationRecord]) -> dict[str, float]:
    """All that is logged of a batch of conversations."""
    return sample_batch.batch_metrics(records) | classroom_metrics(records)


def test_metrics_of_a_batch() -> None:
    metrics = batch_metrics([record(0), record(1, reward=None), record(2, rejected=True), record(3)])
    assert metrics["judge/failed_share"] == 0.25 and metrics["conversation/rejected_share"] == 0.25
    assert metrics["conversation/teacher_tokens"] == 2 and metrics["judge/forward_progression_score"] == 0.5


WEIGHTS = {"pedagogical": 1.0}


def _rollout(share: float, tmp_path: Path) -> ClassroomRollout:
    client = ClassroomClient("http://127.0.0.1:1")
    return ClassroomRollout(
        {},
        client,
        tmp_path,
        "run",
        1,
        WEIGHTS,
        share,
        JudgeMonitor(TrainRLConfig(), client, tmp_path),
        classroom_metrics,
    )


def test_too_many_failed_judgements_stop_the_run(tmp_path: Path) -> None:
    records = [record(0), record(1, reward=None), record(2), record(3)]
    _rollout(0.25, tmp_path)._check_judging(records)
    with pytest.raises(TooManyFailedJudgements, match="1 of 4 conversations .* r-0001: JudgeOutputError: no JSON"):
        _rollout(0.24, tmp_path)._check_judging(records)


def test_refused_contents_stop_the_run_like_missing_verdicts(tmp_path: Path) -> None:
    """A judge that refuses everything teaches nothing, whatever each refusal is worth."""
    refused = Verdict("pedagogical_eval", 0, error="ContentRefused: flagged", refused=True)
    records = [record(0), record(1).model_copy(update={"verdicts": [refused], "reward": 0.0, "rejected": True})]
    assert batch_metrics(records)["judge/refused_share"] == 0.5 and batch_metrics(records)["judge/failed_share"] == 0
    _rollout(0.5, tmp_path)._check_judging(records)
    with pytest.raises(TooManyFailedJudgements, match="1 of 2 conversations .* r-0001: ContentRefused: flagged"):
        _rollout(0.4, tmp_path)._check_judging(records)


def test_answer_of_another_policy_is_refused(tmp_path: Path) -> None:
    rollout = _rollout(0.2, tmp_path)
    request = SimpleNamespace(wanted_policy=PolicyVersion("run", 2), problems=["p"])
    answers = {"policy": PolicyVersion("run", 1), "conversations": [record(0)], "reward_weights": WEIGHTS}
    rollout._client = SimpleNamespace(sample=lambda _: SimpleNamespace(**answers))
    with pytest.raises(PolicyMismatch, match="v2, got conversations of run v1"):
        rollout._sample(request)
    answers["policy"], answers["conversations"] = PolicyVersion("run", 2), []
    with pytest.raises(PolicyMismatch, match="got 0"):
        rollout._sample(request)


def test_a_server_that_weighs_otherwise_is_refused(tmp_path: Path) -> None:
    answer = {"policy": PolicyVersion("run", 2), "conversations": [record(0)], "reward_weights": {"pedagogical": 0.5}}
    rollout = _rollout(0.2, tmp_path)
    rollout._client = SimpleNamespace(sample=lambda _: SimpleNamespace(**answer))
    with pytest.raises(ConfigError, match=r"'pedagogical': 0\.5.*configured for \{'pedagogical': 1\.0\}"):
        rollout._sample(SimpleNamespace(wanted_policy=PolicyVersion("run", 2), problems=["p"]))


def test_rewards_come_with_their_conversations() -> None:
    columns = to_rollout([record(2, reward=0.25), record(1, reward=None), record(3)])
    assert reward_column(prompts=["p"] * 3, completions=[""] * 3, **columns) == [0.25, None, 0.5]


def test_a_reward_s_mean_and_deviation_are_those_of_the_episodes_that_have_it() -> None:
    rewards = [{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": None}, {"a": 6.0}, {"a": None}]
    assert reward_metrics(rewards) == {
        "rewards/a/mean": 3.0,
        "rewards/a/std": pytest.approx(7**0.5),
        "rewards/b/mean": 3.0,
    }
    assert reward_metrics([{"a": None}]) == {} and reward_metrics([]) == {}


def test_failure_on_a_process_reaches_all() -> None:
    def fail() -> None:
        raise EngineFailure("gone")

    accelerator = Accelerator(cpu=True)
    assert on_main_process(accelerator, lambda: 3) == 3 and on_every_process(accelerator, lambda: 4) == 4
    for collective in (on_main_process, on_every_process):
        with pytest.raises(EngineFailure, match="gone"):
            collective(accelerator, fail)


def test_mismatch_by_hand() -> None:
    """Differences 0.1 and −0.2 count, 5 is masked: mean |Δ| 0.15; k3 (e^0.1 − 1.1 + e^−0.2 − 0.8) / 2."""
    trainer = SimpleNamespace(_metrics={"train": _Lists()}, accelerator=SimpleNamespace(gather=lambda tensor: tensor))
    trained, sampled = torch.tensor([[0.1, -0.2, 5.0]]) - 1, torch.tensor([[-1.0, -1.0, -1.0]])
    ClassroomGRPOTrainer._measure_mismatch(trainer, trained, sampled, torch.tensor([[1, 1, 0]]))
    assert trainer._metrics["train"]["mismatch/mean_abs_logprob_diff"][0] == pytest.approx(0.15, abs=1e-6)
    k3 = (math.exp(0.1) - 1.1 + math.exp(-0.2) - 0.8) / 2
    assert trainer._metrics["train"]["mismatch/k3_kl"][0] == pytest.approx(k3, abs=1e-6)


class _Lists(dict):
    def __missing__(self, key: str) -> list:
        self[key] = []
        return self[key]


@pytest.mark.parametrize("correct", [True, False])
def test_mismatch_is_corrected_unless_it_is_switched_off(correct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    output = {
        "completion_mask": torch.ones(1, 2),
        "tool_mask": torch.ones(1, 2),
        "old_per_token_logps": torch.tensor([[-1.0, -1.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0]]),
        "importance_sampling_ratio": torch.tensor([[1.0, 2.0]]),
    }
    monkeypatch.setattr("trl.GRPOTrainer._generate_and_score_completions", lambda self, inputs: output)
    trainer = ClassroomGRPOTrainer.__new__(ClassroomGRPOTrainer)
    trainer._metrics, trainer.correct_mismatch = {"train": _Lists()}, correct
    trainer.needs_old_log_probs = True
    trainer.accelerator, trainer.reward_func_names = SimpleNamespace(gather=lambda tensor: tensor), ["reward_column"]
    for name in ("reward_column/mean", "reward_column/std", "pedagogical/mean"):
        trainer._metrics["train"][f"rewards/{name}"].append(0.5)
    ratio = ClassroomGRPOTrainer._generate_and_score_completions(trainer, [])["importance_sampling_ratio"]
    assert ratio.tolist() == ([[1.0, 2.0]] if correct else [[1.0, 1.0]])
    assert trainer._metrics["train"]["mismatch/mean_abs_logprob_diff"] == [0.5]
    assert [name for name in trainer._metrics["train"] if name.startswith("rewards/")] == ["rewards/pedagogical/mean"]


def test_shuffled_rewards_are_a_permutation_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = torch.arange(32.0).unsqueeze(1)
    monkeypatch.setattr("trl.GRPOTrainer._calculate_rewards", lambda self: rewards)
    trainer = ClassroomGRPOTrainer.__new__(ClassroomGRPOTrainer)
    trainer.args, trainer.state = SimpleNamespace(seed=1), SimpleNamespace(global_step=0)
    trainer.shuffle_rewards = False
    assert torch.equal(trainer._calculate_rewards(), rewards)
    trainer.shuffle_rewards = True
    shuffled = trainer._calculate_rewards()
    assert not torch.equal(shuffled, rewards) and torch.equal(shuffled.sort(dim=0).values, rewards)
    trainer.state.global_step = 1
    assert not torch.equal(trainer._calculate_rewards(), shuffled)


def test_server_that_is_not_there_is_named_with_the_command_that_starts_one(tmp_path: Path) -> None:
    client = ClassroomClient("http://127.0.0.1:9", log=tmp_path / "server.log")
    with pytest.raises(DeadlineExceeded, match=r"python vllm_server.py --config-name …$"):
        client.wait_until_up(0.0)
    (tmp_path / "server.log").touch()
    with pytest.raises(DeadlineExceeded, match=r"python vllm_server.py .*/server.log"):
        client.wait_until_up(0.0)
    with pytest.raises(EngineFailure, match="ended while it was loading"):
        client.wait_until_up(60.0, alive=lambda: False)

"""The benchmark of PPO: its table, equal numbers of conversations, and what it says of a critic."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ppo_quickstart
from benchmarks.ppo_quickstart import AlgorithmBench, critic_of, explained, explained_by_faults, report
from classroom_rl.rollout.problem import Problem
from classroom_rl.trainer.critic import HEAD_FILE, ValueHead, head_weights, write_head
from tests.support.offline_trainer import conversation, save_tiny_model


def test_a_batch_is_as_many_steps_as_it_has_passes(tmp_path: Path) -> None:
    bench = AlgorithmBench(tmp_path, tmp_path, 30, 1)
    assert [bench.version(arm, 6) for arm in ("grpo", "grpo_2", "ppo", "control")] == [6, 12, 12, 12]


def test_the_table_has_rewards_and_explained_variances() -> None:
    lines = [
        {"arm": "grpo", "seed": 1, "step": 3, "rewards": {"a": 0.5, "b": 0.7}},
        {"arm": "ppo", "seed": 1, "step": 3, "rewards": {"a": 0.5}, "explained_turns": 0.2, "explained_tokens": 0.1},
        {"arm": "ppo", "seed": 2, "step": 3, "rewards": {"a": 0.9}, "explained_turns": 0.4, "explained_tokens": None},
    ]
    printed = report(lines)
    assert "0.600" in printed and "0.700 (+0.30, +0.10)" in printed
    assert "grpo" in printed and "{1: None, 2: 192}" in printed


def test_a_critic_that_knows_nothing_explains_nothing_and_one_that_is_wrong_less(world: Path, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", world / "blank")
    records = [conversation(index, Problem.of("lesson", ""), seed=1) for index in range(6)]
    records.append(records[0].model_copy(update={"reward": None}))
    head = ValueHead(32, torch.device("cpu"))
    head.offset.fill_(0.4)
    write_head(head_weights(head), tmp_path / HEAD_FILE)
    figures = explained(records, model, tmp_path / HEAD_FILE)
    assert figures == {"explained_tokens": pytest.approx(0, abs=1e-6), "explained_turns": pytest.approx(0, abs=1e-6)}
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(1))
    write_head(head_weights(head), tmp_path / HEAD_FILE)
    assert explained(records, model, tmp_path / HEAD_FILE)["explained_tokens"] < -1


def test_the_last_version_s_critic_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    assert critic_of(tmp_path, 12) == tmp_path / "checkpoints" / "checkpoint-12" / HEAD_FILE
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "v000012.safetensors").touch()
    assert critic_of(tmp_path, 12).parent == tmp_path / "critic"


def test_faults_explain_rewards_that_follow_from_them_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    faults = [[draw.choice(["", "", "leak"]) for _ in range(5)] for _ in range(200)]
    monkeypatch.setattr(
        ppo_quickstart, "reviews_of", lambda record: [SimpleNamespace(category=category) for category in record.said]
    )

    def explained_of(reward_of) -> float:
        conversations = [(f"lesson {number % 20}", categories) for number, categories in enumerate(faults)]
        return explained_by_faults(
            [
                SimpleNamespace(problem_id=lesson, said=categories, reward=reward_of(categories))
                for lesson, categories in conversations
            ]
        )

    follows = explained_of(lambda said: 1 - 0.2 * said.count("leak"))
    assert 0.3 < follows < 0.6, "before the first message nothing is known, before the last one nearly everything"
    assert explained_of(lambda said: draw.random()) < 0.05

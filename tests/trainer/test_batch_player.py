"""The batches that a server plays: whose problems they are of, what is refused of an answer, what stops a run, and what
is logged of them."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError, PolicyMismatch, TooManyFailedJudgements
from classroom_rl.judges.verdicts import Scores, Verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleResponse
from classroom_rl.rollout.tokens import Turn
from classroom_rl.trainer.group_variance import PlayedBatch
from classroom_rl.trainer.sample_batch import BatchPlayer, ProblemOrder, reward_metrics


def record(index: int, reward: float | None = 0.5, **changes: Any) -> ConversationRecord:
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


def player(
    folder: Path, client: Any, batch: int, *overrides: str, problems: Sequence[Problem] = (Problem.of("p"),)
) -> BatchPlayer:
    """That of batches of one problem."""
    size = [f"train.num_samples_per_problem={batch}", f"train.per_device_train_batch_size={batch}"]
    options = [*size, "train.number_of_problems_per_batch=1", "guards.judge_check_every_n_steps=0", *overrides]
    config = load(TrainRLConfig, "train_rl", options, check_train_rl)
    gpus = SimpleNamespace(wake_engines=lambda: None, sleep_engines=lambda: None)
    session = {"config": config, "client": client, "gpus": gpus, "run_folder": folder, "run_id": "run"}
    return BatchPlayer(SimpleNamespace(problems=problems, **session))


def played(folder: Path, records: Sequence[ConversationRecord], share: float = 1.0, **answer: Any) -> PlayedBatch:
    """What a trainer has of a batch that a server answered so, at a `max_failed_share`."""

    def sample(_: object) -> SampleResponse:
        fields = {"policy": PolicyVersion("run", 0), "conversations": records, "reward_weights": {"pedagogical": 1.0}}
        return SampleResponse(request_id="r", **fields | answer)

    client = SimpleNamespace(play=None, sample=sample)
    batch_player = player(folder, client, len(records), f"judge_model.max_failed_share={share}")
    return batch_player.play(PolicyVersion("run", 0), 0, 1, Accelerator(cpu=True))


def test_a_batch_keeps_its_order_and_drops_nothing(tmp_path: Path) -> None:
    batch = played(tmp_path, [record(2, reward=0.25), record(1, reward=None), record(3)])
    assert [(conversation.id, conversation.reward) for conversation in batch.records] == [
        ("r-0002", 0.25),
        ("r-0001", None),
        ("r-0003", 0.5),
    ]
    assert batch.left_out == {1}, "there is nothing to learn from one without a reward"


def test_metrics_of_a_batch(tmp_path: Path) -> None:
    records = [record(0), record(1, reward=None), record(2, rejected=True), record(3)]
    figures = played(tmp_path, records).figures
    assert figures["judge/failed_share"] == 0.25 and figures["conversation/rejected_share"] == 0.25
    assert figures["conversation/teacher_tokens"] == 2 and figures["judge/forward_progression_score"] == 0.5
    assert figures["rewards/pedagogical/mean"] == 0.5 and figures["seconds/rollout"] > 0


def test_judging_is_what_the_server_counted_but_no_more_than_was_waited_for(tmp_path: Path) -> None:
    assert played(tmp_path, [record(0), record(1)]).figures["seconds/judging"] == 0.0
    assert played(tmp_path, [record(0), record(1)], seconds_after_policy=1e-9).figures["seconds/judging"] == 1e-9
    figures = played(tmp_path, [record(0), record(1)], seconds_after_policy=1e9).figures  # read before it was asked for
    assert 0 < figures["seconds/judging"] <= figures["seconds/rollout"]


def test_waiting_for_a_batch_begun_ahead_is_a_part_of_its_rollout(tmp_path: Path, monkeypatch) -> None:
    def sample(_: object) -> SampleResponse:
        fields = {"policy": PolicyVersion("run", 0), "conversations": [record(0), record(1)]}
        return SampleResponse(request_id="r", reward_weights={"pedagogical": 1.0}, **fields)

    batch_player = player(tmp_path, SimpleNamespace(play=lambda _: None, sample=sample), 2, "train.max_staleness=1")
    monkeypatch.setattr(batch_player._next, "wait", lambda: time.sleep(0.25))
    batch_player.wait_for_next(Accelerator(cpu=True))
    assert batch_player.play(PolicyVersion("run", 0), 0, 1, Accelerator(cpu=True)).figures["seconds/rollout"] >= 0.25


def test_a_reward_s_mean_and_deviation_are_those_of_the_episodes_that_have_it() -> None:
    rewards = [{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": None}, {"a": 6.0}, {"a": None}]
    assert reward_metrics(rewards) == {
        "rewards/a/mean": 3.0,
        "rewards/a/std": pytest.approx(7**0.5),
        "rewards/b/mean": 3.0,
    }
    assert reward_metrics([{"a": None}]) == {} and reward_metrics([]) == {}


def test_too_many_failed_judgements_stop_the_run(tmp_path: Path) -> None:
    records = [record(0), record(1, reward=None), record(2), record(3)]
    played(tmp_path, records, share=0.25)
    with pytest.raises(TooManyFailedJudgements, match="1 of 4 conversations .* r-0001: JudgeOutputError: no JSON"):
        played(tmp_path, records, share=0.24)


def test_refused_contents_stop_the_run_like_missing_verdicts(tmp_path: Path) -> None:
    """A judge that refuses everything teaches nothing, whatever each refusal is worth."""
    refusal = Verdict("pedagogical_eval", 0, error="ContentRefused: flagged", refused=True)
    records = [record(0), record(1).model_copy(update={"verdicts": [refusal], "reward": 0.0, "rejected": True})]
    figures = played(tmp_path, records, share=0.5).figures
    assert figures["judge/refused_share"] == 0.5 and figures["judge/failed_share"] == 0
    with pytest.raises(TooManyFailedJudgements, match="1 of 2 conversations .* r-0001: ContentRefused: flagged"):
        played(tmp_path, records, share=0.4)


def test_answer_of_another_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyMismatch, match="v0, got conversations of run v1"):
        played(tmp_path, [record(0), record(1)], policy=PolicyVersion("run", 1))
    with pytest.raises(PolicyMismatch, match="for 2 conversations, got 1"):
        played(tmp_path, [record(0), record(1)], conversations=[record(0)])


def test_a_server_that_weighs_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'pedagogical': 0\.5.*configured for \{'pedagogical': 1\.0\}"):
        played(tmp_path, [record(0), record(1)], reward_weights={"pedagogical": 0.5})


@given(*[st.integers(1, 4)] * 4, st.integers(2, 4), st.integers(0, 9))
def test_problems_come_in_the_order_of_trls_sampler_seeded_for_each_epoch(count, more, mu, processes, group, seed):
    """A run that resumes in its second epoch goes on with the order of that one."""
    ids, epochs = [f"p{number}" for number in range(count + more)], 3
    train = TrainConfig(number_of_problems_per_batch=count, num_samples_per_problem=group * processes, mu=mu)
    sampler, expected = RepeatSampler(ids, group * processes, count, mu, seed=seed), []
    for epoch in range(epochs):
        sampler.generator.manual_seed(seed + 1_000_003 * epoch)
        expected += [ids[index] for index in sampler]
    order = ProblemOrder(ids, train, seed)
    ranks = [SimpleNamespace(process_index=rank, num_processes=processes) for rank in range(processes)]
    steps = range(epochs * order.batches_per_epoch * mu)
    assert [problem for step in steps for rank in ranks for problem in order.of(step, rank)] == expected
    assert set(order.of(0, ranks[0])) <= set(ids) and len(order.of(0, ranks[0])) == count * group

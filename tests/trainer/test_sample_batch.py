"""The problems of each batch, and what stops a run; the next batch is played while this one is judged and trained on:
the same problems, older weights, one policy in each."""

import logging
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trl.trainer.utils import RepeatSampler

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainConfig, TrainRLConfig
from classroom_rl.errors import ConfigError, EngineFailure, TooManyFailedJudgements
from classroom_rl.judges.verdicts import Verdict
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.trajectory import NEVER_SPOKE
from classroom_rl.trainer.sample_batch import ProblemOrder, batch_metrics
from classroom_rl.trainer.servers import AssignedServer, SharedGpus
from tests.support.offline_trainer import OfflineLoop, conversation, offline_trainer, save_tiny_model

PROBLEMS = [Problem.of(f"lesson {number}", "") for number in range(6)]
STEPS = 5
AHEAD = "train.max_staleness=1"


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), world / "blank")


class Server:
    """Answers like a server, writes down what it is asked for and which weights it holds, and may fail. It plays a
    batch until the trainer awaits it. With a `slow_judge`, a batch is judged only when the one after it was begun."""

    def __init__(self, trainer: OfflineLoop, fails_at: int | None = None, slow_judge: bool = False):
        self.answer = trainer.player._client.sample
        self.requests: list[SampleRequest] = []
        self.threads: list[str] = []
        self.loaded: list[tuple[int, int]] = []
        self.playing, self.fails_at = 0, fails_at
        self.events: list[str] = []
        self.begun: dict[int, threading.Event] = defaultdict(threading.Event)
        self.awaited: dict[int, threading.Event] = defaultdict(threading.Event)
        self.slow_judge = slow_judge

    def play(self, request: SampleRequest) -> None:
        self.playing += 1
        self.requests.append(request)
        self.threads.append(threading.current_thread().name)
        self.events.append(f"play {request.step}")
        self.begun[request.step].set()
        assert self.awaited[request.step].wait(30)
        time.sleep(0.05)  # so that weights that do not wait for the batch meet it
        self.playing -= 1
        if request.step == self.fails_at:
            raise EngineFailure("The teacher's engine died.")

    def sample(self, request: SampleRequest):
        if not self.begun[request.step].is_set():
            self.play(request)
        if self.slow_judge and request.step + 1 < STEPS:
            assert self.begun[request.step + 1].wait(30), "the next batch waits for the judge"
        response = self.answer(request)
        for record in response.conversations:
            for index, turn in enumerate(record.turns):
                if turn.policy is not None:
                    record.turns[index] = replace(turn, policy=request.wanted_policy)
        self.events.append(f"judged {request.step}")
        return response

    def load(self, version: int) -> None:
        assert self.playing == 0, "new weights while a batch is played"
        self.loaded.append((version, len(self.requests)))
        self.events.append(f"load {version}")


def train(folder: Path, model: Path, *overrides: str, steps: int = STEPS, fails_at: int | None = None, **own):
    """Whole steps of the real trainer without a server. Returns the trainer and what its server saw."""
    options = [f"train.max_steps={steps}", "train.mu=1", "train.beta=0", "logging.save_steps=100", *overrides]
    trainer = offline_trainer(folder, model, options, lambda index, each: conversation(index, each, seed=1), PROBLEMS)
    server = Server(trainer, fails_at, **own)
    trainer.player._client = server
    if trainer.player._next is not None:
        trainer.player._next._play = server.play

    wait_for_next = trainer.player.wait_for_next

    def wait(accelerator: Any) -> None:
        server.awaited[trainer.state.global_step].set()
        wait_for_next(accelerator)

    trainer.player.wait_for_next = wait

    def publish(_: OfflineLoop) -> PolicyVersion:
        server.load(trainer.state.global_step)
        return PolicyVersion("run", trainer.state.global_step)

    trainer.publisher.publish = publish
    trainer.train()
    return trainer, server


def played(server: Server) -> list[tuple[int, list[str], int]]:
    """Step, problems, and version of the weights of each request."""
    return [(request.step, request.problems, request.wanted_policy.version) for request in server.requests]


@pytest.mark.parametrize("extra", [(), ("dataset.curriculum=true",)], ids=["the dataset's order", "a curriculum"])
def test_the_same_problems_are_played_one_version_earlier(extra: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    _, at_once = train(tmp_path / "at once", model, *extra)
    trainer, ahead = train(tmp_path / "ahead", model, AHEAD, *extra)
    assert [request[:2] for request in played(ahead)] == [request[:2] for request in played(at_once)]
    assert [version for *_, version in played(at_once)] == [0, 1, 2, 3, 4]
    assert [version for *_, version in played(ahead)] == [0, 0, 1, 2, 3]
    assert len({request.request_id for request in ahead.requests}) == STEPS
    figures = [line["policy/staleness"] for line in trainer.state.log_history if "policy/staleness" in line]
    assert figures == [0, 1, 1, 1, 1]


def test_a_batch_is_asked_for_while_one_is_trained_on_and_weights_wait_for_it(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD)
    assert server.loaded == [(0, 0), (1, 2), (2, 3), (3, 4), (4, 5)], "at each loading, one more batch was asked for"
    assert all(name.startswith("next batch") for name in server.threads)


def test_the_next_batch_is_begun_while_the_judge_reads_this_one(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD, slow_judge=True)
    index = server.events.index
    for step in range(STEPS - 1):
        assert index(f"play {step}") < index(f"play {step + 1}") < index(f"judged {step}") < index(f"load {step + 1}")
        assert index(f"load {step}") < index(f"play {step + 1}"), "by the weights trained on the batch before"


def test_a_curriculum_waits_for_the_rewards_that_decide_its_problems(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD, "dataset.curriculum=true")
    index = server.events.index
    assert all(index(f"judged {step}") < index(f"play {step + 1}") for step in range(STEPS - 1))


def test_with_several_updates_on_a_batch_the_next_one_is_that_many_steps_older(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD, "train.mu=2", steps=6)
    assert [(step, version) for step, _, version in played(server)] == [(0, 0), (2, 0), (4, 2)]


def test_a_batch_that_fails_stops_its_own_step_and_not_the_one_before(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="engine died"):
        train(tmp_path, model, AHEAD, fails_at=2)
    rollouts = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert rollouts == ["step_000000-0.parquet", "step_000001-0.parquet"]


def test_older_weights_without_a_correction_are_refused() -> None:
    options = ["--config-name", "quickstart", AHEAD, "train.importance_sampling_correction=false"]
    with pytest.raises(ConfigError, match="nothing would correct for it"):
        load(TrainRLConfig, "train_rl", options, check_train_rl)


def test_engines_that_sleep_play_nothing_ahead(tmp_path: Path) -> None:
    SharedGpus(None, AssignedServer(0, "", True), False, tmp_path).refuse_playing_ahead()
    with pytest.raises(ConfigError, match="take turns on their GPUs"):
        SharedGpus(None, AssignedServer(0, "", True), True, tmp_path).refuse_playing_ahead()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_problems_of_a_step_are_those_that_trl_drew(processes: int) -> None:
    """Over two epochs of three batches, with two steps on each: each epoch has an order of its own, and leaves out what
    makes no whole batch."""
    names = "abcdefg"
    train = TrainConfig(number_of_problems_per_batch=2, num_samples_per_problem=3, mu=2)
    order = ProblemOrder(names, train, seed=9)
    ranks = [SimpleNamespace(process_index=rank, num_processes=processes) for rank in range(processes)]
    problems = [[problem for rank in ranks for problem in order.of(step, rank)] for step in range(12)]
    assert all(problems[step] == problems[step + 1] for step in range(0, 12, 2)) and order.batches_per_epoch == 3
    for epoch in (0, 1):
        drawn = [names[index] for index in RepeatSampler(names, 3, 2, seed=9 + 1_000_003 * epoch)]
        assert sum(problems[6 * epoch : 6 * epoch + 6 : 2], []) == drawn
    assert problems[:6] != problems[6:]


def test_full_contexts_are_counted_and_only_a_batch_of_nothing_else_stops_the_run(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def check(share: float, *changes: dict[str, Any]) -> dict[str, float]:
        records = [conversation(index, PROBLEMS[0], seed=1, **change) for index, change in enumerate(changes)]
        player = offline_trainer(tmp_path, model, [f"judge_model.max_failed_share={share}"]).player
        player.check_judging(records)
        return batch_metrics(records)

    lost = {"reward": None, "verdicts": [], "failure": "too long", "overflow": "too long"}
    cut = {"overflow": "the student's context is full"}
    silent = {"reward": None, "verdicts": [], "failure": NEVER_SPOKE}
    assert check(0.0, silent, {})["judge/failed_share"] == 0, "nor is a student that never spoke"
    unjudged = {"reward": None, "verdicts": [Verdict("pedagogical_eval", 0, error="JudgeOutputError: no JSON")], **cut}
    with caplog.at_level(logging.WARNING):
        metrics = check(0.0, lost, cut, {}, lost)
    assert metrics["conversation/overflow_share"] == 0.75
    assert metrics["judge/failed_share"] == 0, "a full context is no failure of the judge"
    assert "3 of the 4 conversations of this batch ended early" in caplog.text and "r1-0000: too long" in caplog.text
    rewarded = [{"turn_rewards": {"short": values}} for values in ([1.0, None], [0.5], [])]
    assert check(0.0, *rewarded)["turn_rewards/short/mean"] == 0.75
    with pytest.raises(TooManyFailedJudgements, match=r"1 of 4 .* r1-0001: JudgeOutputError: no JSON"):
        check(0.2, lost, unjudged, {}, {})
    with pytest.raises(TooManyFailedJudgements, match=r"None of the 2 conversations .* r1-0000: too long"):
        check(1.0, lost, lost)

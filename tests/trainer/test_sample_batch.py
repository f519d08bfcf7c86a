"""The next batch is played while this one is judged and trained on: the same problems, older weights, one policy in
each."""

import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.checks import check_train_rl
from classroom_rl.config.load import load
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import ConfigError, EngineFailure
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.trainer.servers import AssignedServer, SharedGpus
from tests.support.offline_trainer import OfflineTrainer, conversation, offline_trainer, save_tiny_model

PROBLEMS = [Problem.of(f"lesson {number}", "") for number in range(6)]
STEPS = 5
AHEAD = "train.max_staleness=1"


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), world / "blank")


class Server:
    """Answers like a server, writes down what it is asked for and which weights it holds, and may fail. With a
    `slow_judge`, a batch is judged only when the one after it was begun."""

    def __init__(self, trainer: OfflineTrainer, fails_at: int | None = None, slow_judge: bool = False):
        self.answer = trainer.rollout_func._client.sample
        self.requests: list[SampleRequest] = []
        self.threads: list[str] = []
        self.loaded: list[tuple[int, int]] = []
        self.playing, self.fails_at = 0, fails_at
        self.events: list[str] = []
        self.begun: dict[int, threading.Event] = defaultdict(threading.Event)
        self.slow_judge = slow_judge

    def play(self, request: SampleRequest) -> None:
        self.playing += 1
        self.requests.append(request)
        self.threads.append(threading.current_thread().name)
        self.events.append(f"play {request.step}")
        self.begun[request.step].set()
        time.sleep(0.02)  # so that weights that are loaded too early meet a batch
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
            for place, turn in enumerate(record.turns):
                if turn.policy is not None:
                    record.turns[place] = replace(turn, policy=request.wanted_policy)
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
    trainer.rollout_func._client = server
    if trainer.rollout_func._next is not None:
        trainer.rollout_func._next._play = server.play

    def publish(last: bool = False) -> None:
        trainer.rollout_func.wait_for_next()
        trainer.publisher.policy = PolicyVersion("run", trainer.state.global_step)
        server.load(trainer.state.global_step)

    trainer.publisher.sync_weights = publish
    trainer.train()
    return trainer, server


def played(server: Server) -> list[tuple[int, list[str], int]]:
    """Step, problems, and version of the weights of each request."""
    return [(each.step, each.problems, each.wanted_policy.version) for each in server.requests]


@pytest.mark.parametrize("extra", [(), ("dataset.curriculum=true",)], ids=["the dataset's order", "a curriculum"])
def test_the_same_problems_are_played_one_version_earlier(extra: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    _, at_once = train(tmp_path / "at once", model, *extra)
    trainer, ahead = train(tmp_path / "ahead", model, AHEAD, *extra)
    assert [each[:2] for each in played(ahead)] == [each[:2] for each in played(at_once)]
    assert [version for *_, version in played(at_once)] == [0, 1, 2, 3, 4]
    assert [version for *_, version in played(ahead)] == [0, 0, 1, 2, 3]
    assert len({each.request_id for each in ahead.requests}) == STEPS
    figures = [line["policy/staleness"] for line in trainer.state.log_history if "policy/staleness" in line]
    assert figures == [0, 1, 1, 1, 1]


def test_a_batch_is_asked_for_while_one_is_trained_on_and_weights_wait_for_it(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD)
    assert server.loaded == [(0, 0), (1, 2), (2, 3), (3, 4), (4, 5)], "at each loading, one more batch was asked for"
    assert all(name.startswith("next batch") for name in server.threads)


def test_the_next_batch_is_begun_while_the_judge_reads_this_one(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD, slow_judge=True)
    seen = server.events.index
    for step in range(STEPS - 1):
        assert seen(f"play {step}") < seen(f"play {step + 1}") < seen(f"judged {step}") < seen(f"load {step + 1}")
        assert seen(f"load {step}") < seen(f"play {step + 1}"), "by the weights trained on the batch before"


def test_a_curriculum_waits_for_the_rewards_that_decide_its_problems(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD, "dataset.curriculum=true")
    seen = server.events.index
    assert all(seen(f"judged {step}") < seen(f"play {step + 1}") for step in range(STEPS - 1))


def test_with_several_updates_on_a_batch_the_next_one_is_that_many_steps_older(model: Path, tmp_path: Path) -> None:
    _, server = train(tmp_path, model, AHEAD, "train.mu=2", steps=6)
    assert [(step, version) for step, _, version in played(server)] == [(0, 0), (2, 0), (4, 2)]


def test_a_batch_that_fails_stops_its_own_step_and_not_the_one_before(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="engine died"):
        train(tmp_path, model, AHEAD, fails_at=2)
    rollouts = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert rollouts == ["step_000000-0.parquet", "step_000001-0.parquet"]


def test_older_weights_without_a_correction_are_refused() -> None:
    own = ["--config-name", "quickstart", AHEAD, "train.importance_sampling_correction=false"]
    with pytest.raises(ConfigError, match="nothing would correct for it"):
        load(TrainRLConfig, "train_rl", own, check_train_rl)


def test_engines_that_sleep_play_nothing_ahead(tmp_path: Path) -> None:
    SharedGpus(None, AssignedServer(0, "", True), False, tmp_path).refuse_playing_ahead()
    with pytest.raises(ConfigError, match="take turns on their GPUs"):
        SharedGpus(None, AssignedServer(0, "", True), True, tmp_path).refuse_playing_ahead()


def test_the_prompts_of_a_step_are_those_that_trl_asks_for(model: Path, tmp_path: Path) -> None:
    """Over two epochs and a half: each epoch has an order of its own."""
    asked = []
    options = ["train.max_steps=7", "train.mu=1", "train.beta=0", "logging.save_steps=100"]
    trainer = offline_trainer(tmp_path, model, options, None, PROBLEMS)
    original = trainer.rollout_func

    def watched(prompts, own):
        asked.append(list(prompts))
        return original(prompts, own)

    trainer.rollout_func = watched
    watched.wait_for_next = original.wait_for_next
    trainer.train()
    assert [trainer.prompts_of(step) for step in range(7)] == asked
    assert len({tuple(sorted(set(asked[step] + asked[step + 1] + asked[step + 2]))) for step in (0, 3)}) == 1

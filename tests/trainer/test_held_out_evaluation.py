"""Evaluations during training: what is asked for and when, that nothing is played twice, which checkpoint is the best,
what counts as a collapse, and what page, plots and report show."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from classroom_rl.config.base import GenerationConfig
from classroom_rl.errors import ConfigError, EngineFailure, TrainingCollapsed
from classroom_rl.evaluation.report.build import charts, facts
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.learning import LEARNED
from classroom_rl.results.plots import write_plots
from classroom_rl.results.run_folder import EVALUATIONS_NAME, load_run, read_lines
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.requests import SampleRequest, SampleResponse
from classroom_rl.trainer.balancing import BalancedServers
from classroom_rl.trainer.held_out_evaluation import (
    BEST_NAME,
    HeldOutEvaluation,
    measure_held_out,
    signs_of_collapse,
    summarise,
)
from classroom_rl.trainer.run_length import load_held_out_problems, load_training_problems
from classroom_rl.trainer.servers import AssignedServer, assign_server
from classroom_rl.viewer.list_index import find_conversation_sets
from classroom_rl.viewer.metrics import RunMetrics
from tests.conftest import quickstart_overrides
from tests.support.configs import training
from tests.support.offline_trainer import conversation, offline_trainer, save_tiny_model
from tests.support.replay_server import WEIGHTS, served
from tests.support.scripted_batches import ScriptedBatches
from tests.support.scripted_room import Room
from tests.trainer.test_several_processes import launch, metrics_of, run_training

LESSONS = [Problem.of(f"held out {number}", "") for number in range(10)]


def answered(request: SampleRequest, rewards: Sequence[float]) -> SampleResponse:
    """The held-out conversations of a version with one of these rewards, a little more or less on each lesson."""
    mean, problems = rewards[request.policy_version], request.all_problems()
    records = [
        conversation(index, problem, 1, reward=mean + 0.01 * (index % 3), rewards={"pedagogical": mean})
        for index, problem in enumerate(problems)
    ]
    fields = {"policy": request.wanted_policy, "conversations": records, "reward_weights": WEIGHTS}
    return SampleResponse(request_id=request.request_id, **fields)


@pytest.fixture(scope="module")
def model(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), world / "blank")


def train(
    folder: Path, model: Path, rewards: Sequence[float], *overrides: str, checkpoint: Path | None = None
) -> tuple[Any, list[SampleRequest]]:
    """A training with a step less than there are rewards, one for each version. Returns it, and what it asked for on
    the held-out lessons."""
    steps = len(rewards) - 1
    base = ["evaluation.every=1", f"train.max_steps={steps}", "train.mu=1", "train.beta=0", "logging.save_steps=100"]
    trainer = offline_trainer(folder, model, [*base, *overrides], checkpoint=checkpoint, held_out=LESSONS)
    requests: list[SampleRequest] = []
    play = trainer.player._client.sample

    def sample(request: SampleRequest) -> SampleResponse:
        if "-heldout-" not in request.request_id:
            return play(request)
        requests.append(request)
        return answered(request, rewards)

    trainer.player._client = SimpleNamespace(sample=sample)
    trainer.publisher.publish = lambda _: PolicyVersion("run", trainer.state.global_step)
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except TrainingCollapsed:
        trainer.save_progress()
        raise
    if trainer.held_out is not None:
        measure_held_out(trainer, trainer.held_out, PolicyVersion("run", steps), steps, last=True)
    return trainer, requests


def evaluations(folder: Path) -> list[dict]:
    return read_lines(folder / EVALUATIONS_NAME)


def test_the_same_lessons_and_students_each_time_and_nothing_of_them_in_the_training(model, tmp_path) -> None:
    every = ("evaluation.every=2", "evaluation.num_samples_per_problem=2")
    trainer, requests = train(tmp_path / "with", model, [0.5, 0.5, 0.6, 0.6, 0.7], *every)
    assert [(request.policy_version, request.greedy) for request in requests] == [
        (step, greedy) for step in (0, 2, 4) for greedy in (False, True)
    ]
    assert len({request.request_id for request in requests}) == len(requests)
    free = {"request_id", "policy_version", "greedy"}
    assert len({request.model_dump_json(exclude=free) for request in requests}) == 1, "no seed may depend on the step"
    assert requests[0].fixed_seeds and requests[0].problems == [lesson.text for lesson in LESSONS for _ in range(2)]
    lines = evaluations(tmp_path / "with")
    assert [(line["step"], line["sampled"]["reward"]["n"]) for line in lines] == [(0, 20), (2, 20), (4, 20)]
    assert lines[2]["sampled"]["change"]["mean"] == pytest.approx(0.2) and lines[2]["sampled"]["since"] == 0
    logged = {line["step"]: line for line in trainer.state.log_history if "heldout/sampled/reward" in line}
    assert list(logged) == [0, 2, 4] and logged[4]["heldout/greedy/reward"] == pytest.approx(0.7095)
    alone, none = train(tmp_path / "without", model, [0.5] * 5, "evaluation.every=0")
    assert not none and not (tmp_path / "without" / EVALUATIONS_NAME).exists()
    names = ("loss", "reward", "grad_norm", "learning_rate", "judge/failed_share", "completions/mean_length")
    steps = [[line for line in run.state.log_history if "reward" in line] for run in (trainer, alone)]
    figures = [[[line[name] for name in names] for line in history] for history in steps]
    assert figures[0] == figures[1] and len(figures[0]) == 4
    rollouts = [sorted(path.name for path in (tmp_path / name / "rollouts").iterdir()) for name in ("with", "without")]
    assert rollouts[0] == rollouts[1]


EVERY = ["evaluation.every=2", "evaluation.eval_datasets=[{name_or_path: held_out.jsonl}]"]


def evaluation(folder: Path, sample: Any, *overrides: str, **changes: Any) -> HeldOutEvaluation:
    """That of a trainer that has just begun."""
    attributes = {"config": training(*EVERY, *overrides), "run_folder": folder, "run_id": "run", "held_out": LESSONS}
    attributes |= {"client": None, "server": AssignedServer(0, "", True), "checkpoint": None}
    gpus = SimpleNamespace(wake_engines=lambda: None)
    player = SimpleNamespace(sample=sample, check_judging=lambda records: None)
    return HeldOutEvaluation(SimpleNamespace(**attributes | changes, gpus=gpus), player)


@pytest.mark.parametrize(
    ("every", "mu", "due"), [(1, 1, [0, 1, 2, 3]), (3, 1, [0, 3, 6]), (3, 2, [0, 4, 6, 10]), (2, 4, [0, 4, 8])]
)
def test_it_is_due_once_in_so_many_steps_rounded_up_to_whole_batches(every, mu, due, tmp_path) -> None:
    held_out = evaluation(tmp_path, None, f"evaluation.every={every}", f"train.mu={mu}")
    assert [step for step in range(0, due[-1] + 1, mu) if held_out.is_due(step)] == due


@pytest.mark.parametrize(
    ("servers", "processes", "shares"), [(1, 1, [10]), (1, 3, [10]), (2, 3, [5, 5]), (3, 3, [4, 3, 3]), (3, 1, [10])]
)
def test_the_leaders_of_the_servers_ask_for_each_lesson_once(servers, processes, shares, tmp_path) -> None:
    urls = [f"http://127.0.0.1:{8005 + number}" for number in range(servers)]
    client = BalancedServers.__new__(BalancedServers) if servers > processes else None
    calls: list[SampleRequest] = []

    def sample(request: SampleRequest) -> SampleResponse:
        calls.append(request)
        return answered(request, [0.5])

    for rank in range(processes):
        server = assign_server(GenerationConfig(server_urls=urls), rank, processes)
        overrides = ("evaluation.samplings=[sampled]", f"generation.server_urls=[{','.join(urls)}]")
        if server.is_leader:
            held_out = evaluation(tmp_path, sample, *overrides, server=server, client=client)
            held_out.measure(PolicyVersion("run", 0), 0, Accelerator(cpu=True))
    assert [len(call.problems) for call in calls] == shares and len({call.request_id for call in calls}) == len(shares)
    assert sorted(text for call in calls for text in call.problems) == sorted(lesson.text for lesson in LESSONS)


@pytest.mark.parametrize("dies_at", [None, 7, 33])
def test_an_interrupted_evaluation_plays_nothing_twice(dies_at: int | None, room: Room, generation, tmp_path) -> None:
    """It is interrupted in the sampled or in the greedy conversations; then server and trainer are started again."""
    loop = asyncio.new_event_loop()

    def measure() -> None:
        service = room.open(generation)
        held_out = evaluation(tmp_path, lambda request: loop.run_until_complete(service.sample(request)))
        held_out.measure(room.teacher.policy, 2, Accelerator(cpu=True))

    def say(_: str) -> str:
        if len(room.teacher.calls) == dies_at:
            raise EngineFailure("killed")
        return "Say hello."

    room.teacher._script = say
    if dies_at is not None:
        with pytest.raises(EngineFailure, match="killed"):
            measure()
        assert 0 < len(room.teacher.calls) <= dies_at and not evaluations(tmp_path)
        dies_at = None
    measure()
    measure()
    loop.close()
    [line] = evaluations(tmp_path)
    assert line["sampled"]["reward"]["n"] == len(LESSONS) and line["step"] == 2
    messages = 2 * len(LESSONS) * 3  # two samplings, three of the tutor's messages in a conversation
    assert len(room.teacher.calls) == messages
    assert sum(sampling.temperature == 0 for _, sampling, _ in room.teacher.calls) == messages / 2


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in (folder / "checkpoints").iterdir())


def best(folder: Path) -> dict:
    return json.loads((folder / BEST_NAME).read_text())


KEEP = ("evaluation.keep_best=true", "evaluation.stop_on_collapse=false")


def test_the_best_checkpoint_stays_and_a_resumed_training_knows_it(model: Path, tmp_path: Path) -> None:
    train(tmp_path, model, [0.5, 0.9, 0.4, 0.9, 0.3, 0.3], *KEEP, "logging.save_steps=1")
    assert kept(tmp_path) == [1, 4, 5] and best(tmp_path)["step"] == 1, "of equal ones the first"
    assert best(tmp_path)["checkpoint"].endswith("checkpoints/checkpoint-1")
    assert best(tmp_path)["figures"]["heldout/sampled/reward"] == pytest.approx(0.909)
    with (tmp_path / EVALUATIONS_NAME).open("a") as file:  # of steps that no checkpoint holds
        file.write(json.dumps(evaluations(tmp_path)[1] | {"step": 6}) + "\n")
    checkpoint = tmp_path / "checkpoints/checkpoint-5"
    train(tmp_path, model, [*[0.3] * 6, 0.2, 0.2, 0.95, 0.1], *KEEP, "logging.save_steps=1", checkpoint=checkpoint)
    assert kept(tmp_path) == [8, 9] and best(tmp_path)["step"] == 8
    assert [line["step"] for line in evaluations(tmp_path)] == list(range(10))


def test_what_it_began_with_may_be_the_best_and_has_no_checkpoint(model: Path, tmp_path: Path) -> None:
    train(tmp_path, model, [0.5, 0.4, 0.4], *KEEP)
    assert best(tmp_path)["step"] == 0 and best(tmp_path)["checkpoint"] is None and kept(tmp_path) == [2]
    train(tmp_path / "rising", model, [0.5, 0.6, 0.4, 0.4], *KEEP)
    assert kept(tmp_path / "rising") == [1, 3], "saved although logging.save_steps is 100"


def test_a_collapsed_training_stops_and_says_why_or_only_warns(model: Path, tmp_path: Path, caplog) -> None:
    rewards = [0.5, 0.5, 0.2, 0.2]
    with pytest.raises(
        TrainingCollapsed, match=r"step 2: .*reward: it is 0\.209, 0\.300 below .* 10 lessons \(p = 0\.002"
    ):
        train(tmp_path, model, rewards)
    assert kept(tmp_path) == [2] and [len(line["collapse"]) for line in evaluations(tmp_path)] == [0, 0, 1]
    assert "reward: it is 0.209" in RunMetrics(tmp_path).metrics(find_conversation_sets(tmp_path)).collapse[0]
    checkpoint = tmp_path / "checkpoints/checkpoint-2"
    with pytest.raises(TrainingCollapsed, match="step 2"):
        train(tmp_path, model, rewards, checkpoint=checkpoint)
    train(tmp_path, model, rewards, "evaluation.stop_on_collapse=false", checkpoint=checkpoint)
    assert "step 3: on held-out lessons the policy has collapsed" in caplog.text
    assert [line["step"] for line in evaluations(tmp_path)] == [0, 1, 2, 3]


def entry(reward: float, tokens: float = 100, distinct: float = 0.5, change: float = 0.0, p: float = 1.0) -> dict:
    change_of = {"mean": change, "ci95": [change - 0.05, change + 0.05], "n": 10, "p": p}
    return {"reward": {"mean": reward}, "tokens": tokens, "distinct_messages": distinct, "change": change_of}


@pytest.mark.parametrize(
    ("now", "mismatches", "signs"),
    [
        (entry(0.5), (None, 0.01, 0.02), []),
        (entry(0.3, change=-0.2, p=0.009), (None, 0.01, 0.01), ["reward"]),
        (entry(0.3, change=-0.2, p=0.011), (None, 0.01, 0.01), []),
        (entry(0.7, change=0.2, p=0.001), (None, 0.01, 0.01), []),
        (entry(0.5, tokens=301), (None, 0.01, 0.01), ["length"]),
        (entry(0.7, tokens=301, distinct=0.01, change=0.2, p=0.001), (None, 0.01, 0.01), []),
        (entry(0.7, tokens=301, change=0.2, p=0.2), (None, 0.01, 0.01), ["length"]),
        (entry(0.5, distinct=0.12), (None, 0.01, 0.01), ["distinct messages"]),
        (entry(0.5), (None, 0.01, 0.11), ["mismatch"]),
        (entry(0.5), (None, 0.001, 0.09), []),
        (entry(0.5), (None, 0.05, 0.2), []),
        (entry(0.5), (None, None, 0.5), []),
        (entry(0.5), (None, 0.01, None), []),
        (entry(0.3, 301, 0.1, -0.2, 0.001), (None, 0.01, 9.0), ["reward", "length", "distinct messages", "mismatch"]),
    ],
)
def test_the_signs_of_a_collapse(now: dict, mismatches: tuple, signs: list[str]) -> None:
    lines = [
        {"sampled": sampled, "mismatch": mismatch}
        for sampled, mismatch in zip((entry(0.5), entry(0.5), now), mismatches, strict=True)
    ]
    assert [sign.partition(":")[0] for sign in signs_of_collapse(lines)] == signs


def test_what_is_measured_of_conversations() -> None:
    records = [conversation(index, LESSONS[index % 2], 1, reward=0.25 * index) for index in range(3)]
    summary = summarise([*records, conversation(3, LESSONS[0], 1, reward=None, overflow="full")])
    assert summary["reward"]["mean"] == pytest.approx(0.25) and summary["reward"]["n"] == 3
    assert summary["rewards"] == {LESSONS[0].id: [0.0, 0.5], LESSONS[1].id: [0.25]}
    assert (summary["overflow_share"], summary["without_reward"]) == (0.25, 0.25)
    assert summary["distinct_messages"] == 3 / 12, "each conversation says “message 0”, “message 2” and “message 4”"
    assert summary["tokens"] == sum(sum(record.mask) for record in [*records, conversation(3, LESSONS[0], 1)]) / 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--config-name=maths_small", "evaluation.every=2"], "every is 2, but evaluation.eval_datasets is empty"),
        ([*EVERY, "evaluation.samplings=[greedy]"], "must name sampled, may name greedy"),
        ([*EVERY, "evaluation.samplings=[sampled,supervised]"], "supervised; it must be one of sampled, greedy"),
        ([*EVERY, "evaluation.samplings=[sampled,sampled]"], "must name sampled, may name greedy, and each once"),
        (["evaluation.keep_best=true"], "evaluation.keep_best is true, but evaluation.every is 0"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training(*overrides)


def test_lessons_that_are_trained_on_or_too_many_are_refused(world: Path) -> None:
    def load(name: str, *more: str) -> list[Problem]:
        trained = f"dataset.train_datasets=[{{name_or_path: {world / 'lessons_train.jsonl'}}}]"
        config = training(
            trained, "evaluation.every=2", f"evaluation.eval_datasets=[{{name_or_path: {world / name}}}]", *more
        )
        return load_held_out_problems(config, load_training_problems(config))

    assert len(load("lessons_heldout.jsonl")) == 64
    with pytest.raises(ConfigError, match="64 of the 64 lessons of evaluation.eval_datasets are among those"):
        load("lessons_train.jsonl")
    with pytest.raises(ConfigError, match="64 × 65 = 4160 conversations"):
        load("lessons_heldout.jsonl", "evaluation.num_samples_per_problem=65")


class Lessons(ScriptedBatches):
    """A server without engines that also plays held-out lessons."""

    def __init__(self, folder: Path, rewards: Sequence[float], index: int = 0):
        super().__init__(str(folder), lambda step, place, problem: conversation(place, problem, seed=10 + step))
        self._health = self._health.model_copy(update={"server_index": index})
        self.rewards, self.asked = rewards, []

    def _sample(self, request: SampleRequest) -> SampleResponse:
        if "-heldout-" not in request.request_id:
            return super()._sample(request)
        self.asked.append(request)
        return answered(request, self.rewards)


def configured(folder: Path, world: Path, port: int, *more: str) -> list[str]:
    overrides = ["evaluation.every=2", "evaluation.max_val_examples=12", "train.max_steps=3", "logging.save_steps=2"]
    held_out = f"evaluation.eval_datasets=[{{name_or_path: {world / 'lessons_heldout.jsonl'}}}]"
    return [*quickstart_overrides(folder, world / "blank", world, port), *overrides, held_out, *more]


def test_a_whole_training_and_what_page_plots_and_report_show_of_it(world: Path, tmp_path: Path) -> None:
    server = Lessons(tmp_path, [0.3, 0.3, 0.5, 0.9])
    with served(server) as port:
        run_training(None, configured(tmp_path, world, port))
        versions = [request.policy_version for request in server.asked]
        run_training(None, configured(tmp_path, world, port))  # no step is missing: only the last policy is measured
    assert versions == [0, 0, 2, 2, 3, 3] and [request.policy_version for request in server.asked] == [*versions, 3, 3]
    assert [line["step"] for line in evaluations(tmp_path)] == [0, 2, 3]
    assert json.loads((tmp_path / "learning.json").read_text())["verdict"] == LEARNED
    assert ["seconds/eval" in line for line in metrics_of(tmp_path)] == [True, False, True]
    data = load_run(tmp_path)
    [chart] = [chart for chart in charts(data) if chart.title == "Reward on held-out lessons"]
    assert len(chart.marks) == 6 and "Collapse" not in dict(facts(data))
    assert "held_out" in {path.stem for path in write_plots(data)}
    marks = RunMetrics(tmp_path).metrics(find_conversation_sets(tmp_path)).marks
    assert [(mark.step, mark.sampling) for mark in marks] == [
        (step, name) for step in (0, 2, 3) for name in ("sampled", "greedy")
    ]


@pytest.mark.full
def test_two_processes_share_the_lessons_of_two_servers(world: Path, tmp_path: Path) -> None:
    servers = [Lessons(tmp_path, [0.9, 0.9, 0.2, 0.2], index) for index in range(2)]
    with served(servers[0]) as first, served(servers[1]) as second:
        urls = f"generation.server_urls=[http://127.0.0.1:{first},http://127.0.0.1:{second}]"
        done = launch("zero2_2CPU", configured(tmp_path, world, first, urls))
    assert done.returncode != 0 and "the policy has collapsed: reward: it is" in done.stderr, done.stderr[-4000:]
    assert "Traceback" not in done.stderr and kept(tmp_path) == [2]
    for server in servers:
        assert [call.policy_version for call in server.asked] == [0, 0, 2, 2] and len(server.asked[0].problems) == 6
    assert [line["sampled"]["reward"]["n"] for line in evaluations(tmp_path)] == [12, 12]

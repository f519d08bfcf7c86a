"""A run folder that an earlier version left is shown, reported on and resumed: tests/support/old_run."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from classroom_rl.config.load import ROOT
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.config.training_checks import reward_weights
from classroom_rl.environments.classroom.record import ConversationRecord
from classroom_rl.errors import ConfigError
from classroom_rl.evaluation.report.build import write_report
from classroom_rl.models.policy_version import PolicyVersion
from classroom_rl.results.rollout_files import read_records, read_rewards
from classroom_rl.results.run_folder import RunData
from classroom_rl.rollout.environment import Roles, environment_of
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.runner import Runner
from classroom_rl.rollout.store.journal import JOURNAL_NAME, Journal, read_journal
from classroom_rl.server.open_models import embedded_judge
from classroom_rl.server.sampling_service import SamplingService
from classroom_rl.trainer.contents import unknown
from classroom_rl.trainer.resume import check_resume
from classroom_rl.viewer.list_index import ListQuery
from classroom_rl.viewer.reader import RunReader
from tests.support.configs import training
from tests.support.scripted_engine import ScriptedEngine

BATCHES = (
    *("generation.max_turns=5", "generation.server_port=8765", "train.number_of_problems_per_batch=2"),
    *("train.num_samples_per_problem=2", "train.per_device_train_batch_size=4", "train.max_steps=2"),
)
OF_THEN = ("train.lr_scheduler_type=constant", "student_model.vllm.temperature=1")
"""What the quickstart had then, and has no longer."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "old"
    shutil.copytree(ROOT / "tests/support/old_run", run)
    (run / "checkpoints").mkdir()
    (run / "checkpoint-2").rename(run / "checkpoints/checkpoint-2")
    return run


def configured(folder: Path, *overrides: str) -> TrainRLConfig:
    """The configuration that the server of then wrote down."""
    return training("--config-dir", str(folder / "config"), "--config-name", "train_rl", *overrides)


# Shown ---------------------------------------------------------------------------------------------------------------


def test_its_conversations_are_read_as_they_were_written(folder: Path) -> None:
    first, second = (read_records(path) for path in sorted((folder / "rollouts").glob("*.parquet")))
    assert [len(first), len(second)] == [4, 4] and {record.step for record in second} == {1}
    for record in (*first, *second):
        assert len(record.completion_ids) == len(record.mask) == len(record.logprobs) > 0
        assert record.reward == record.rewards["pedagogical"] and record.verdicts[0].scores is not None
        assert sum(record.mask) == sum(turn.tokens for turn in record.turns if turn.role == "teacher")
    assert len(read_rewards(folder)) == 8


def test_the_page_shows_them(folder: Path) -> None:
    reader = RunReader(folder)
    sets = reader.sets()
    assert list(sets.steps) == [0, 1] and list(sets.evaluations) == ["before"]
    page = reader.page(ListQuery(where="step-1"))
    assert page.total == 4 and None not in page.columns["reward"]
    conversation = reader.conversation("step-1", page.columns["id"][0])
    assert [turn.role for turn in conversation.turns[:2]] == ["teacher", "student"] and conversation.verdicts
    assert reader.page(ListQuery(where="eval-before")).total == 12
    assert reader.page(ListQuery(where="now")).total == 0, "all that the journal holds is in files"


def test_the_report_is_written(folder: Path) -> None:
    text = write_report(folder).read_text(encoding="utf-8")
    assert "Task-final discipline" in text and "Forward progression" in text


# Resumed -------------------------------------------------------------------------------------------------------------


def test_its_configuration_loads_and_goes_on(folder: Path) -> None:
    assert configured(folder).environment == "classroom" and configured(folder).generation.max_turns == 5
    overrides = [
        "--config-name",
        "quickstart",
        f"logging.save_dir={folder}",
        "logging.save_steps=1",
        *BATCHES,
        *OF_THEN,
    ]
    longer = training(*overrides, "train.max_steps=5")
    assert check_resume(folder, longer) == [
        "train.max_steps changes from 2 to 5 after step 2",
        "judge_model.vllm.gpu_memory_utilization changes from 0.5 to null after step 2",  # a default since then
        "reward_model.vllm.gpu_memory_utilization changes from 0.5 to null after step 2",
        unknown(folder / "checkpoints/checkpoint-2"),
    ]
    with pytest.raises(ConfigError, match="train.num_samples_per_problem was 2 and is 4 now"):
        check_resume(folder, training(*overrides, "train.num_samples_per_problem=4"))


class Resumed:
    """A server of now on the journal of then, cut after `lines`; its engines are scripts under the weights of then."""

    def __init__(self, folder: Path, tokenizer, lines: int):
        path = folder / JOURNAL_NAME
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
        self.begun = [event for event in read_journal(path) if event["event"] == "batch"][-1]
        self.config = configured(folder)
        self.teacher, self.student = (ScriptedEngine(tokenizer, lambda _: "Good! What do you say?") for _ in range(2))
        self.teacher.policy = PolicyVersion(**self.begun["policy"])
        self.teacher.weights = self.begun["weights"]
        models = {"teacher": self.teacher, "student": self.student}
        self.roles = Roles(models, {"teacher": self.teacher}, judge=embedded_judge("rubric"))
        self.folder = folder

    def play(self) -> list[ConversationRecord]:
        journal, weights = Journal(self.folder), reward_weights(self.config)
        environment = environment_of(self.config).open_with(self.config, self.roles, journal, weights)
        problems = [self.begun["problems"][index] for index in self.begun["problem_of"]]
        request = SampleRequest(
            problems=[text for text, _ in problems],
            answers=[answer for _, answer in problems],
            request_id=self.begun["request"],
            seed=self.config.seed,
            step=self.begun["step"],
            run_id=self.begun["policy"]["run_id"],
            policy_version=self.begun["policy"]["version"],
        )
        return asyncio.run(
            SamplingService(Runner(environment, journal, weights), journal).sample(request)
        ).conversations


def batches_in(folder: Path) -> list[int]:
    """The lines at which a batch begins in the journal."""
    lines = (folder / JOURNAL_NAME).read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines) if json.loads(line)["event"] == "batch"]


def test_a_batch_that_it_finished_is_not_played_again(folder: Path, tokenizer) -> None:
    expected = read_records(folder / "rollouts/step_000001-0.parquet")
    resumed = Resumed(folder, tokenizer, 10**6)
    replayed = resumed.play()
    assert not resumed.teacher.calls and not resumed.student.calls
    for record, old in zip(replayed, expected, strict=True):
        assert record.model_dump(exclude={"logprobs"}) == old.model_dump(exclude={"logprobs"})
        assert record.logprobs == pytest.approx(old.logprobs)


@pytest.mark.parametrize("lines", [3, 7, 12])
def test_a_batch_that_it_left_half_played_goes_on(folder: Path, tokenizer, lines: int) -> None:
    """The server of then was killed so many lines into its last batch: what was said stays said."""
    resumed = Resumed(folder, tokenizer, batches_in(folder)[-1] + 1 + lines)
    events = list(read_journal(folder / JOURNAL_NAME))[-lines:]
    turn_events = [event for event in events if event["event"] == "turn"]
    records = {record.id: record for record in resumed.play()}
    assert turn_events and len(records) == 4
    for event in turn_events:
        turns = TypeAdapter(list[dict]).dump_python([turn.__dict__ for turn in records[event["conversation"]].turns])
        assert event["turn"]["text"] in [turn["text"] for turn in turns]
    teacher = sum(turn.role == "teacher" for record in records.values() for turn in record.turns)
    restored = sum(event["turn"]["role"] == "teacher" for event in turn_events)
    assert len(resumed.teacher.calls) == teacher - restored


@pytest.mark.parametrize(("version", "counts"), [(24, True), (16, False), (None, False)])
def test_what_games_were_measured_with_counts_if_it_is_the_last_policy(version: int | None, counts: bool) -> None:
    change = {"mean": 0.05, "ci95": [0.02, 0.08], "n": 48}
    summary = {"reward": {"change": change}} | ({} if version is None else {"version": version})
    data = RunData(Path("run"), lines=[{"step": 8}, {"step": 24}], summary=summary)
    assert data.reward_changes() == ({"sampled": change} if counts else {})

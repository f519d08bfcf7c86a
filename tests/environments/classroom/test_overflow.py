"""A full context, whichever model's it is, ends one conversation and never a batch, also in a batch that is resumed."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from classroom_rl.config.base import GenerationConfig
from classroom_rl.config.evaluation import ACKNOWLEDGES
from classroom_rl.config.values import SCRIPT
from classroom_rl.environments.toy_language.scripted_teacher import ScriptedTeacher
from classroom_rl.errors import ContextOverflow, DataError, TooManyFailedJudgements
from classroom_rl.results.rollout_files import read_records, write_records
from classroom_rl.rollout.requests import SampleRequest
from classroom_rl.rollout.store.journal import JOURNAL_NAME, read_journal
from classroom_rl.trainer.sample_batch import batch_metrics, to_rollout
from classroom_rl.viewer.journal_tail import JournalTail
from tests.support.scripted_engine import ScriptedEngine, ScriptedJudge
from tests.support.scripted_room import Room
from tests.trainer.grpo.test_run import _rollout, record
from tests.trainer.test_resume import judge_that_accepts, sample, write_journal

REQUEST = SampleRequest(problems=["fractions"] * 2, answers=["1/2"] * 2, request_id="r", seed=1, step=0)


class FullStudent(ScriptedEngine):
    """A student whose context is full where `is_full` says so of its prompt, in one of the conversations."""

    def __init__(self, tokenizer, is_full: Callable[[str], bool]):
        super().__init__(tokenizer, lambda _: "Hello.")
        self._is_full = is_full

    async def chat(self, messages, sampling):
        prompt = " ".join(message["content"] for message in messages)
        if sampling.draw[0] == "r-0000" and self._is_full(prompt):
            raise ContextOverflow(f"A prompt of {len(prompt)} characters does not fit into student's context.")
        return await super().chat(messages, sampling)


def one_long_attempt(room: Room) -> None:
    room.student = ScriptedEngine(room.tokenizer, lambda _: "Hello." if room.student.calls else "so " * 1500)


@pytest.mark.parametrize("judge_again", [False, True])
def test_a_long_attempt_ends_its_own_conversation(room: Room, generation: GenerationConfig, judge_again: bool) -> None:
    one_long_attempt(room)
    generation = replace(generation, forced_conversation_type="attempt")
    ended, other = sample(room, generation, REQUEST).conversations
    assert (ended.state, ended.reward, [turn.role for turn in ended.turns]) == ("END", None, ["student"])
    assert ended.overflow == ended.failure and "lower generation.max_tokens_per_student_attempt" in ended.overflow
    assert len(ended.prompt_ids) + 1 == 900 and (len(ended.completion_ids), ended.mask) == (1, [0])
    assert (other.state, other.reward, other.overflow, other.failure) == ("END", 0.7, None, None)
    said = len(room.student.calls)
    again = REQUEST.model_copy(update={"judge_again": judge_again})  # as a trainer that is started again asks
    assert sample(room, generation, again).conversations == [ended, other] and len(room.student.calls) == said


def test_a_teacher_behind_an_api_is_spared_a_long_attempt_too(room: Room, generation: GenerationConfig) -> None:
    one_long_attempt(room)
    room.teacher = ScriptedTeacher(f"{SCRIPT}{ACKNOWLEDGES}")
    ended, other = sample(room, replace(generation, forced_conversation_type="attempt"), REQUEST).conversations
    assert ended.overflow and ended.reward is None and (other.reward, other.overflow) == (0.7, None)


def test_a_problem_that_fits_without_no_attempt_stays_an_error(room: Room, generation: GenerationConfig) -> None:
    generation = replace(generation, forced_conversation_type="attempt")
    with pytest.raises(DataError, match=r"^Problem .* shorten the problem") as refused:
        room.play(generation, problems=["word " * 2000])
    assert not isinstance(refused.value, ContextOverflow)


def test_a_student_whose_context_is_full_ends_the_dialogue_which_is_judged(
    room: Room, generation: GenerationConfig
) -> None:
    """With the second message of the teacher; whatever line of it a kill leaves, the next server comes to the same."""
    room.student = FullStudent(room.tokenizer, lambda prompt: "Hello." in prompt)
    room.judge = ScriptedJudge(judge_that_accepts)
    wanted = sample(room, generation, REQUEST)
    ended, other = wanted.conversations
    assert (ended.state, len(ended.turns), ended.turns[-1].role) == ("END", 3, "teacher")
    assert "does not fit into student's context" in ended.overflow and ended.failure is None
    assert (ended.reward, len(ended.verdicts), sum(ended.mask) > 0) == (0.7, 1, True)
    assert (other.overflow, len(other.turns)) == (None, 5)
    lines = (room.folder / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    for count in range(len(lines)):
        write_journal(room, lines[:count])
        assert sample(room, generation, REQUEST) == wanted, f"cut after {count} lines"
        cuts = [event for event in read_journal(room.folder / JOURNAL_NAME) if event["event"] == "cut_short"]
        assert len(cuts) == 1, f"cut after {count} lines"
    write_records(room.folder / "written.parquet", wanted.conversations)
    assert [each.overflow for each in read_records(room.folder / "written.parquet")] == [ended.overflow, None]


@pytest.mark.parametrize("whose", ["student", "reward model"])
def test_solutions_that_cannot_be_written_or_graded_cost_one_conversation(room: Room, generation, whose: str) -> None:
    class Reward:
        model_name = "reward"

        async def score(self, dialogue: list) -> float:
            if whose == "reward model" and len(seen) < 2:
                seen.append(dialogue)
                raise ContextOverflow("A conversation of 5000 tokens does not fit into the reward model's context.")
            return 0.25

    seen: list = []
    if whose == "student":
        room.student = FullStudent(room.tokenizer, lambda prompt: "Now solve it." in prompt)
    room.reward = Reward()
    rules = {"does_not_leak_answer": "scripted"}
    room.judge = ScriptedJudge(judge_that_accepts)
    generation = replace(generation, judges_rules_prompts_paths=rules)
    records = sample(room, generation, REQUEST).conversations
    lost = [each for each in records if each.overflow]
    assert len(lost) == 1 and lost[0].reward is None and lost[0].verdicts and lost[0].failure == lost[0].overflow
    assert [each.rewards["end_rm"] for each in records if not each.overflow] == [0.25]


def test_full_contexts_are_counted_and_only_a_batch_of_nothing_else_stops_the_run(tmp_path: Path, caplog) -> None:
    lost = {"reward": None, "verdicts": [], "failure": "too long", "overflow": "too long"}
    cut = {"overflow": "the student's context is full"}
    records = [record(0, **lost), record(1, **cut), record(2), record(3, **lost)]
    assert batch_metrics(records)["conversation/overflow_share"] == 0.75
    assert batch_metrics(records)["judge/failed_share"] == 0, "a full context is no failure of the judge"
    with caplog.at_level(logging.WARNING):
        _rollout(0.0, tmp_path)._check_judging(records)
    assert "3 of the 4 conversations of this batch ended early" in caplog.text and "r-0000: too long" in caplog.text
    unjudged = record(1, reward=None, **cut)
    with pytest.raises(TooManyFailedJudgements, match=r"1 of 4 .* r-0001: JudgeOutputError: no JSON"):
        _rollout(0.2, tmp_path)._check_judging([record(0, **lost), unjudged, record(2), record(3)])
    with pytest.raises(TooManyFailedJudgements, match=r"None of the 2 conversations .* r-0000: too long"):
        _rollout(1.0, tmp_path)._check_judging([record(0, **lost), record(3, **lost)])
    assert len(to_rollout(records)["completion_ids"]) == 4


def test_the_page_shows_a_dialogue_that_was_cut_while_it_is_judged(room: Room, generation: GenerationConfig) -> None:
    class Slow(ScriptedJudge):
        async def judge(self, *arguments: object, **named: object) -> str:
            reached.set()
            await asyncio.Event().wait()

    reached = asyncio.Event()
    room.student = FullStudent(room.tokenizer, lambda prompt: "Hello." in prompt)
    room.judge = Slow(lambda *_: "")

    async def scenario() -> dict:
        task = asyncio.create_task(room.open(generation).sample(REQUEST))
        await asyncio.wait_for(reached.wait(), 120)
        tail = JournalTail(room.folder / JOURNAL_NAME)
        shown = tail.record(next(each for each in tail.conversations(0.0, ()) if each.id == "r-0000"))
        task.cancel()
        return shown

    assert "does not fit" in asyncio.run(scenario())["overflow"]

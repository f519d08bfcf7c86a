"""Outcomes worked out by hand, and whole checks with a scripted tutor whose bad messages have a known effect."""

import copy
import json
import random
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest

from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.toy_language.grammar import answer, parse_question
from classroom_rl.environments.toy_language.lessons import make_lessons, parse_problem, render_problem
from classroom_rl.errors import DataError
from classroom_rl.evaluation.counterfactuals.comparing import (
    LEARNED,
    PRODUCED,
    Comparison,
    LaterOutcome,
    later_messages,
)
from classroom_rl.evaluation.counterfactuals.figures import NOTHING, PREDICTS, counterfactual_figures, read_comparisons
from classroom_rl.evaluation.run import evaluate
from classroom_rl.judges.post_test.exams import ToyExam
from classroom_rl.judges.toy_judge import RubricJudge
from classroom_rl.rollout.engine import Completion, Sampling
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.reviews import MessageToReview, Review
from classroom_rl.rollout.tokens import Turn
from classroom_rl.server.sampling_service import SamplingService
from tests.evaluation.counterfactuals.conftest import LESSON, PROBLEM, QUESTIONS, asks, says
from tests.evaluation.counterfactuals.test_forks import forks_at
from tests.support.configs import loaded
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_room import Room
from tests.support.supervised_room import ScriptedSupervisor
from tests.support.synthetic_run import record_of

# The outcome -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "later", "produced", "learned"),
    [
        ([asks(0), says(0)], [], 0.0, 0.0),
        ([asks(0), says(0)], [says(1), asks(2), says(2)], 0.5, 0.0),
        ([asks(0), says(0)], [says(0), asks(1), says(0)], 0.0, 0.0),  # it was known before the fork
        ([asks(0), says(0, "error_student", right=False)], [says(0), asks(1), says(1)], 0.5, 0.25),
        # The slip was passed over.
        ([asks(0), says(0, "error_student", right=False)], [says(1), asks(2), says(2)], 0.5, 0.0),
    ],
)
def test_the_outcome_is_what_is_new_later_on_as_a_share_of_the_lesson(before, later, produced, learned):
    assert LaterOutcome(ToyExam(LESSON), before).of(later) == {PRODUCED: produced, LEARNED: learned}


def test_an_outcome_does_not_depend_on_the_forked_message():
    """Not even if that message holds every answer of the lesson: it is never read."""
    all_answers = " ".join(answer(question, random.Random(0)).text for question in QUESTIONS)
    outcomes = []
    for text in ("Good!", all_answers, "Goodbye. <end_of_conversation>"):
        record = record_of(PROBLEM.text, [asks(0), says(0), Turn("teacher", text), says(1), asks(2), says(2)])
        (fork,) = [fork for fork in forks_at(record.turns) if fork.position == 2]
        later = later_messages(record, fork)
        assert later == record.turns[3:] and fork.message.turn not in later
        outcomes.append(LaterOutcome(ToyExam(LESSON), fork.before).of(later))
    assert outcomes[0] == outcomes[1] == outcomes[2] and outcomes[0][PRODUCED] == 0.5


# Whole checks ------------------------------------------------------------------------------------------------------


LESSONS = [render_problem(lesson) for lesson in make_lessons(1)[1][:24]]
MUMBLES, CHATTERS = "Mumble.", "Take your time."


def next_question(shown: str, problem: str) -> str:
    """The first question of the plan that a text does not hold, or the last one."""
    questions = [question.text for question in parse_problem(problem).questions]
    return next((question for question in questions if question not in shown), questions[-1])


def saying(engine: ScriptedEngine, line: str) -> ScriptedEngine:
    """The engine with this line as its next one; it shares its calls."""
    engine_copy = copy.copy(engine)
    engine_copy._script = lambda _: line
    return engine_copy


class MoodyTutor(ScriptedEngine):
    """Asks the next question; now and then, by the seed, it mumbles, or chatters on after the question."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        problem = next(lesson for lesson in LESSONS if lesson in prompt)
        question, mood = f"Good! {next_question(prompt, problem)}", sampling.seed % 10
        line = MUMBLES if mood < 1 else f"{question} {CHATTERS}" if mood < 6 else question
        return await ScriptedEngine.generate(saying(self, line), prompt_ids, sampling)


class ShyStudent(ScriptedEngine):
    """Answers questions; once the tutor has mumbled it says nothing of use any more. In one of five answers, by the
    seed, it is distracted."""

    async def chat(self, messages: Sequence[dict[str, str]], sampling: Sampling) -> Completion:
        teacher_messages = [message["content"] for message in messages if message["role"] == "user"]
        texts = [text for message in teacher_messages for text in re.findall(r"What [^?]*\?", message)]
        questions = [question for text in texts if (question := parse_question(text))]
        lost = any(MUMBLES in text for text in teacher_messages) or sampling.seed % 5 == 0
        line = "What?" if lost else answer(questions[-1], random.Random(0)).text
        return await ScriptedEngine.chat(saying(self, line), messages, sampling)


def reads_moods(about: MessageToReview) -> Review:
    """A supervisor that finds both moods faulty; it can correct a mumble only."""
    transcript = " ".join(message["content"] for message in about.conversation)
    if MUMBLES in about.message:
        return Review(False, "off_topic", correction=f"Good! {next_question(transcript, about.problem)}")
    return Review(False, "length") if CHATTERS in about.message else Review(True)


class Played:
    """The room of a check, and the configuration."""

    def __init__(self, tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch):
        lessons = folder / "lessons.jsonl"
        lessons.write_text("".join(json.dumps({"problem": text, "answer": ""}) + "\n" for text in LESSONS))
        self.config = loaded(
            "eval",
            "--config-name=quickstart_counterfactuals",
            f"dataset.eval_datasets=[{{name_or_path: {lessons}}}]",
            f"logging.save_dir={folder / 'out'}",
            "counterfactuals.forks=24",
        )
        self.folder = folder / "out"
        self.tokenizer, self.rooms = tokenizer, []
        self.judge = RubricJudge
        monkeypatch.setattr("classroom_rl.server.sampling_service.open_service", self._open)

    async def _open(self, config: EvalConfig, weights, folder: Path) -> SamplingService:
        room = Room(self.tokenizer, folder)
        room.teacher, room.student = MoodyTutor(self.tokenizer, str), ShyStudent(self.tokenizer, str)
        room.judge, room.supervisor = self.judge(), ScriptedSupervisor(reads_moods)
        self.rooms.append(room)
        return room.open(config.generation)


@pytest.fixture
def played(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tokenizer, tmp_path, monkeypatch)


class Watched(RubricJudge):
    """Keeps the conversations that it is shown."""

    def __init__(self):
        super().__init__()
        self.shown: list[list[dict[str, str]]] = []

    async def judge(self, rule, conversation, problem, attempt, *facts):
        self.shown.append(conversation)
        return await super().judge(rule, conversation, problem, attempt, *facts)


@dataclass(frozen=True)
class Checked:
    """A whole check: its room, metrics, run folder and what it printed."""

    room: Room
    metrics: dict
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def checked(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        played = Played(tokenizer, tmp_path_factory.mktemp("checked"), patch)
        played.judge = Watched
        metrics = evaluate(played.config)
    (room,) = played.rooms
    return Checked(room, metrics, played.folder, printed.getvalue())


def test_messages_that_do_harm_later_are_found_and_those_that_do_none_are_named(checked: Checked):
    figures = checked.metrics["counterfactuals"]
    assert figures["comparisons"] == 24 and figures["playouts"] == 8
    assert set(figures["kinds"]) == {"correction", "sibling"}
    produced = figures["outcomes"][PRODUCED]
    mumbled = produced["categories"]["off_topic"]
    assert produced["prices"]["supervisor"]["rank_correlation"] > 0.5
    assert produced["prices"]["supervisor"]["verdict"] == PREDICTS
    assert mumbled["verdict"] == PREDICTS and mumbled["mean"] < -0.1
    assert produced["categories"]["length"]["verdict"] == NOTHING and "length" in produced["predict_nothing"]
    assert produced["shuffled"]["flagged"] >= 19 and produced["reliability"] > 0.5
    assert all(text in checked.printed for text in ("24 messages of", "Predict nothing:", "counterfactuals.json"))
    assert json.loads((checked.folder / "metrics.json").read_text())["counterfactuals"] == figures
    assert counterfactual_figures(read_comparisons(checked.folder)) == figures


def test_both_branches_of_a_fork_meet_the_same_seeds(checked: Checked):
    seeds: dict[tuple[str, int], dict[str, set[int]]] = {}
    for _, sampling, _ in checked.room.student.calls:
        conversation, number = sampling.draw
        if not conversation.startswith("playouts-"):
            continue
        head, content, copy = re.fullmatch(r"(playouts-\w+-\d+-\d+)-(\w+)-(\d+)", conversation).groups()
        seeds.setdefault((f"{head}|{copy}", number), {}).setdefault(content, set()).add(sampling.seed)
    pairs = [branches for branches in seeds.values() if len(branches) == 2]
    assert len(pairs) > 24 * 8 and all(len(set.union(*branches.values())) == 1 for branches in pairs)
    firsts = [seed for branches in seeds.values() for seed in branches[min(branches)]]
    assert len(set(firsts)) == len(firsts), "every playout has seeds of its own"


def test_playouts_go_on_from_the_very_tokens_of_the_played_conversation(checked: Checked):
    room = checked.room
    prompt_ids = {
        sampling.draw[0]: ids for ids, sampling, _ in room.teacher.calls if sampling.draw[0].startswith("eval-")
    }
    for comparison in read_comparisons(checked.folder).comparisons:
        lesson = comparison.lesson
        continued = [
            ids
            for ids, sampling, _ in room.teacher.calls
            if sampling.draw[0].startswith(f"playouts-{lesson}-0-{comparison.place}-")
        ]
        conversation_ids = prompt_ids[comparison.conversation]
        prefix = tokens_before(room, comparison)
        assert prefix == conversation_ids[: len(prefix)], "a prompt of the conversation itself"
        assert all(ids[: len(prefix)] == prefix for ids in continued)


def tokens_before(room: Room, comparison: Comparison) -> list[int]:
    """The tutor's prompt for the message that was forked at."""
    return next(
        ids for ids, sampling, _ in room.teacher.calls if sampling.draw == (comparison.conversation, comparison.place)
    )


def test_prices_come_from_the_message_and_what_came_before_it(checked: Checked):
    room, judged = checked.room, checked.room.judge.shown
    for comparison in read_comparisons(checked.folder).comparisons:
        requests = [
            request
            for request in room.supervisor.asked
            if Problem.of(request.problem).id == comparison.lesson and len(request.conversation) == comparison.place
        ]
        assert {comparison.said, comparison.other} <= {request.message for request in requests}
    assert all(len(request.facts.personas) == len(request.conversation) for request in room.supervisor.asked)
    truncated = [conversation for conversation in judged if len(conversation) < 9]
    assert len(truncated) >= 2 * 24 and all(conversation[-1]["role"] == "teacher" for conversation in truncated)
    assert len(judged) == len(LESSONS) + 2 * 24, "playouts are not judged"


def test_an_interrupted_check_goes_on_where_it_was(played: Played, monkeypatch):
    played.config.counterfactuals.forks = 8

    class Failing(ShyStudent):
        async def chat(self, messages, sampling):
            if sampling.draw[0].startswith("playouts-") and len(self.calls) > 250:
                raise RuntimeError("the student's engine is gone")
            return await super().chat(messages, sampling)

    with monkeypatch.context() as broken:
        broken.setattr("tests.evaluation.counterfactuals.test_comparing.ShyStudent", Failing)
        with pytest.raises(RuntimeError, match="is gone"):
            evaluate(played.config)
    calls_before = count_playout_calls(played.rooms[0])
    resumed = evaluate(played.config)["counterfactuals"]
    assert resumed["comparisons"] == 8
    assert calls_before > 0 and count_playout_calls(played.rooms[1]) > 0
    assert evaluate(played.config)["counterfactuals"] == resumed
    assert count_playout_calls(played.rooms[2]) == 0, "all are in the journal"


def count_playout_calls(room: Room) -> int:
    return sum(sampling.draw[0].startswith(("playouts-", "siblings-")) for _, sampling, _ in room.student.calls)


def test_messages_without_a_verdict_or_another_price_are_counted(played: Played):
    played.config.counterfactuals.forks = 96

    def silent(about: MessageToReview) -> Review:
        return Review(error="no answer") if CHATTERS in about.message else replace(reads_moods(about), correction=None)

    async def all_of_one_mood(config, weights, folder):
        service = await Played._open(played, config, weights, folder)
        played.rooms[-1].supervisor._answer = silent
        return service

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("classroom_rl.server.sampling_service.open_service", all_of_one_mood)
        figures = evaluate(played.config)["counterfactuals"]
    assert figures["unpriced"] > 0 and figures["without_other"] > 0
    assert figures["comparisons"] + figures["unpriced"] + figures["without_other"] == 24 * 4
    assert set(figures["outcomes"][PRODUCED]["categories"]) == {"off_topic"} and set(figures["kinds"]) == {"sibling"}


def test_a_lesson_that_no_program_can_read_is_refused_before_a_model_is_loaded(played: Played, tmp_path: Path):
    (tmp_path / "lessons.jsonl").write_text(json.dumps({"problem": "What is 2 + 2?", "answer": "4"}) + "\n")
    with pytest.raises(DataError, match=r"counterfactuals\.forks is 24.*'What is 2 \+ 2\?' has none.*forks=0"):
        evaluate(played.config)
    assert not played.rooms

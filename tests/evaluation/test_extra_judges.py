"""Further judges of finished conversations, and a judge's labels of the student's errors."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from classroom_rl.config.base import lesson_plans
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.errors import ContextOverflow, JudgeOutputError
from classroom_rl.evaluation.extra_judges import ask_extra_judges, label_errors, read_labels, summarise_judges
from classroom_rl.evaluation.metrics.language import language_metrics
from classroom_rl.judges.agreement import krippendorff_alpha
from classroom_rl.results.statistics import judgement_of
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.engine import NO_FACTS, Completion, EmbeddedJudge
from classroom_rl.rollout.scheduler import ConcurrentSchedule
from classroom_rl.rollout.tokens import Turn
from tests.support.configs import loaded
from tests.support.synthetic_run import FAILED, record_of, scored

# Scores ------------------------------------------------------------------------------------------------------------


def test_several_judges_on_the_same_conversations():
    records = {"x": [record_of("a", [], [scored(1, 1, 10)], 0), record_of("b", [], [scored(0, 0, 0)], 1)]}
    records["y"] = [record_of("a", [], [scored(0.5, 0.5, 5)], 0), record_of("b", [], [FAILED], 1)]
    scores = {"second": {"x/c-0000": 0.8, "x/c-0001": 0.2, "y/c-0000": 0.4, "y/c-0001": 0.9}}
    summary = summarise_judges("first", records, scores)
    assert summary["scores"]["first"]["x"]["mean"] == 0.5 and summary["scores"]["first"]["y"]["n"] == 1
    assert summary["scores"]["second"]["y"]["mean"] == pytest.approx(0.65)
    assert summary["spearman"] == {"second": 1.0} and summary["pairs"] == {"second": 3} and summary["n"] == 3
    assert summary["krippendorff_alpha"] == krippendorff_alpha([(1, 0.8), (0, 0.2), (0.5, 0.4), (None, 0.9)])


def test_a_judge_that_is_asked_again_agrees_with_itself():
    records = [record_of(lesson, [], [scored(i / 2, i / 2, 5 * i)], i) for i, lesson in enumerate("abc")]
    repeated_scores = {f"x/{record.id}": judgement_of(record).score for record in records}
    summary = summarise_judges("rubric", {"x": records}, {"rubric": repeated_scores})
    assert summary["krippendorff_alpha"] == 1.0 and summary["spearman"] == {"rubric (again)": pytest.approx(1.0)}
    assert summary["scores"]["rubric"] == summary["scores"]["rubric (again)"]


@pytest.mark.parametrize("turns", [9, 21, None])
def test_an_extra_judge_is_told_the_turns_of_the_server_that_played(turns, tmp_path, monkeypatch):
    max_turns_seen = []

    class Asked(EmbeddedJudge):
        async def judge(self, rule, conversation, problem, attempt, facts=NO_FACTS) -> str:
            max_turns_seen.append(facts.max_turns)
            return "no verdict"

    monkeypatch.setattr("classroom_rl.server.open_models.embedded_judge", lambda name, readers: Asked())
    record = record_of("p", [])
    record.max_turns = turns
    config = loaded("eval", "--config-name=quickstart_compare", "extra_judges=[{model_name_or_path: rubric}]")
    scores, paid = asyncio.run(ask_extra_judges(config, {"base": [record]}, tmp_path))
    assert max_turns_seen == [turns] and scores == {"rubric": {"base/c-0000": None}} and paid == {}


# Labels of errors --------------------------------------------------------------------------------------------------


LESSON = "Lesson: food, cook, last week\nPlan: you, sister, brother, friends, parents"


def labelled_lesson():
    problem = load_problems([lesson_plans("test")])[0].text
    turns = [
        Turn("teacher", "Hi! What do you say?"),
        Turn("student", "abc", "error_student"),
        Turn("teacher", "Hm. Again!"),
        Turn("student", "abd", "correct_student"),
    ]
    return record_of(problem, turns)


def test_a_judges_answer_numbers_messages_as_they_were_shown():
    record = labelled_lesson()
    assert read_labels(record, '{"reasoning": "", "errors": [2]}') == {(record.id, 1): True, (record.id, 3): False}


@pytest.mark.parametrize(
    "answer", ['{"errors": [1]}', '{"errors": "2"}', '{"errors": [true]}', '{"errors": [9]}', "{}", "none"]
)
def test_an_answer_without_numbers_of_the_students_messages_is_refused(answer):
    with pytest.raises(JudgeOutputError):
        read_labels(labelled_lesson(), answer)


class Labeller:
    """A judge's engine that always gives the same answer, or raises the same error."""

    def __init__(self, answer: str | Exception):
        self.answer, self.asked = answer, []

    async def chat(self, messages, sampling):
        self.asked.append(messages[0]["content"])
        if isinstance(self.answer, Exception):
            raise self.answer
        return Completion((1,), (0.0,), self.answer, True)


@pytest.mark.parametrize(
    ("answer", "known"),
    [('{"reasoning": "x", "errors": [2]}', True), ("I cannot say.", False), (ContextOverflow("too long"), False)],
)
def test_open_lessons_are_labelled_and_the_quickstarts_are_not(answer, known):
    judge, record = Labeller(answer), labelled_lesson()
    rules = record_of(LESSON, [Turn("teacher", "Hi!"), Turn("student", "I cook an egg.")], index=1)
    roles = SimpleNamespace(apis={}, engines={"judge": judge})
    labels = asyncio.run(label_errors(EvalConfig(), roles, ConcurrentSchedule(), [record, rules]))
    assert len(judge.asked) == 1 and "[2] STUDENT: abc" in judge.asked[0] and "error_student" not in judge.asked[0]
    assert labels == ({(record.id, 1): True, (record.id, 3): False} if known else {})
    fidelity = language_metrics([record], labels)["fidelity"]
    assert fidelity["labelled_by"] == ("judge" if known else "nobody")
    assert fidelity["error_persona"]["share"] == (1.0 if known else None)
    silent = replace(EvalConfig(), student_errors_prompt_path=None)
    assert asyncio.run(label_errors(silent, roles, ConcurrentSchedule(), [record])) is None

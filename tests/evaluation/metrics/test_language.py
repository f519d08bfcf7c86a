"""The figures of language lessons: rules against hand-labelled conversations, and numbers worked out by hand."""

import pytest

from classroom_rl.config.base import lesson_plans
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.evaluation.metrics.language import (
    StudentTurn,
    conversation_figures,
    flips_role,
    language_metrics,
    parrots,
    plan_progress,
    student_fidelity,
)
from classroom_rl.judges.feedback import KINDS, feedback_kind
from classroom_rl.judges.messages import ParsedPlan, Phrase, read_plan
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.tokens import Turn
from tests.support.labelled import agreement
from tests.support.synthetic_run import record_of

LESSON = "Lesson: food, cook, last week\nPlan: you, sister, brother, friends, parents"
QUICKSTART = ParsedPlan(lesson=parse_problem(LESSON))
SPANISH = ParsedPlan(
    (Phrase("He perdido la cartera", "I've lost my wallet"), Phrase("Es de cuero marrón", "It's of leather"))
)
SLIP = "Last week my sister cook a carrot in the garden."
RIGHT = "Last week my sister cooked a carrot in the garden."


# Measured agreement (docs/evaluation.md). The held-out half was measured once, after the rules were finished; no rule
# was changed because of it. A change of the rules may change these figures; lower is worse.
DEVELOP = {
    "number of tasks": (73, 74),
    "ends with its task": (72, 74),
    "hands over": (72, 74),
    "error": (16, 16),
    "role flip": (62, 63),
    "parroting": (62, 63),
    "false correction": (41, 41),
    "kind of feedback": (21, 22),
    "uptake": (21, 21),
    "repair": (21, 21),
}
HELD_OUT = {
    "number of tasks": (76, 77),
    "ends with its task": (76, 77),
    "hands over": (75, 77),
    "error": (18, 18),
    "role flip": (66, 66),
    "parroting": (66, 66),
    "false correction": (41, 42),
    "kind of feedback": (24, 24),
    "uptake": (23, 23),
    "repair": (22, 23),
}


def teacher(text: str) -> Turn:
    return Turn("teacher", text)


def student(text: str, persona: str = "correct_student") -> Turn:
    return Turn("student", text, persona)


# Against people's labels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("half", "measured"), [("develop", DEVELOP), ("held_out", HELD_OUT)])
def test_the_rules_agree_with_the_labels_as_measured(half, measured):
    agreed_now = agreement(half)
    assert {name: count for name, (_, count) in agreed_now.items()} == {
        name: count for name, (_, count) in measured.items()
    }
    assert {name: agreed_now[name][0] >= agreed for name, (agreed, _) in measured.items()} == dict.fromkeys(
        measured, True
    )


# Students ----------------------------------------------------------------------------------------------------------


def test_students_that_leave_their_role():
    assert flips_role("Thank you. What did you cook last week?", "Good!", QUICKSTART)
    assert flips_role("Well done! Say it again.", "Hi!", SPANISH) and not flips_role(RIGHT, "Good!", QUICKSTART)
    assert parrots("What did you cook last week?", "Hi! What did you cook last week?")
    assert not parrots("He perdido la cartera.", '"He perdido la cartera" or not? Which one?')


def turns_of(persona: str, *errors: bool | None, flips: bool = False) -> list[StudentTurn]:
    return [StudentTurn(persona, error, flips, False) for error in errors]


def test_fidelity_is_a_share_of_turns_and_a_warning():
    erring, right = turns_of("error_student", True, True, True), turns_of("correct_student", *[False] * 6)
    fidelity = student_fidelity([*erring, *turns_of("error_student", False), *right], "rules")
    assert fidelity["error_persona"] == {"share": 0.75, "n": 4}
    assert fidelity["correct_persona"] == {"share": 1.0, "n": 6} and fidelity["trusted"] is False
    assert fidelity["warnings"] == ["only 75% of the turns asked to err hold an error (at least 80% should)"]
    assert student_fidelity(erring + right, "rules")["trusted"] is True


def test_fidelity_is_unknown_where_errors_are_not_known():
    fidelity = student_fidelity(turns_of("error_student", None), "nobody")
    assert fidelity["trusted"] is None and fidelity["error_persona"] == {"share": None, "n": 0}
    flipping = student_fidelity(turns_of("error_student", None, flips=True), "nobody")
    assert flipping["trusted"] is False and "speak as the teacher" in flipping["warnings"][0]


# Whole lessons -----------------------------------------------------------------------------------------------------


def test_a_lesson_worked_out_by_hand():
    turns = [
        teacher("Hi! What did you cook last week?"),  # 7 words
        student("Last week I cooked two eggs in the kitchen."),  # 9
        teacher("Good! What did your sister cook last week? Take your time."),  # 11, with text after the task
        student(SLIP, "error_student"),  # 10
        teacher("Check the tense here: cook. Say it again."),  # 8
        student(RIGHT),  # 10
        teacher("Good! You are doing so well."),  # 6, no task
    ]
    metrics = language_metrics([record_of(LESSON, turns)])
    figures = {name: (estimate["mean"], estimate["n"]) for name, estimate in metrics["language"].items()}
    assert figures["teacher_words"] == (8.0, 4)
    assert figures["talk_ratio"] == (pytest.approx(32 / 61), 1)
    assert figures["tasks_per_message"] == (0.75, 4)
    assert figures["ends_with_task"] == (pytest.approx(2 / 3), 3)
    assert figures["plan_introduced"] == figures["plan_produced"] == (0.4, 1)
    assert figures["feedback/metalinguistic"] == (1.0, 1) and figures["feedback/none"] == (0.0, 1)
    assert figures["uptake"] == figures["repair"] == (1.0, 1)
    assert figures["false_corrections"] == (0.0, 2) and figures["repeats"] == (0.0, 4)
    assert (
        metrics["fidelity"]["error_persona"] == {"share": 1.0, "n": 1} and metrics["fidelity"]["labelled_by"] == "rules"
    )


@pytest.fixture
def open_lesson() -> str:
    return load_problems([lesson_plans("test")])[0].text


OPEN_TURNS = [teacher("Hi! What do you say?"), student("abc", "error_student"), teacher("Good! Go ahead.")]


def test_errors_of_open_language_go_by_the_persona_or_a_judge(open_lesson):
    record = record_of(open_lesson, OPEN_TURNS)
    assert len(read_plan(open_lesson).phrases) >= 4
    assert conversation_figures(record)[0]["feedback/none"] == [1.0]
    assert conversation_figures(record)[1][0].error is None
    values, turns = conversation_figures(record, {(record.id, 1): False})
    assert "feedback/none" not in values and values["false_corrections"] == [0.0]
    assert turns[0].error is False


def test_where_a_judge_labels_what_it_did_not_label_is_in_no_figure_about_errors(open_lesson):
    records = [record_of(open_lesson, OPEN_TURNS, index=i) for i in range(3)]
    labelled = language_metrics(records, {("c-0000", 1): True, ("c-0001", 1): False})
    assert labelled["language"]["feedback/none"]["n"] == labelled["language"]["false_corrections"]["n"] == 1
    assert labelled["language"]["hands_over"]["n"] == 3 + 2 and labelled["language"]["teacher_words"]["n"] == 6
    assert (labelled["fidelity"]["labelled_by"], labelled["fidelity"]["unlabelled"]) == ("judge", 1)
    none = language_metrics(records, {})  # a tutor on a server, compared with tutors whose conversations are labelled
    assert not {"feedback/none", "false_corrections", "hands_over"} & set(none["language"])
    assert (none["fidelity"]["labelled_by"], none["fidelity"]["unlabelled"]) == ("nobody", 3)


def test_progress_through_a_plan_of_phrases():
    assert plan_progress(SPANISH, ["“He perdido la cartera” is new."], ["Es de cuero marrón!"]) == (1, 1)
    assert plan_progress(ParsedPlan(), ["Hi"], ["Ho"]) == (0, 0)


def test_a_task_set_again_is_a_repeat_but_a_second_try_is_none():
    turns = [teacher("Hi! What did you cook last week?"), student(SLIP), teacher("Well. What did you cook last week?")]
    assert conversation_figures(record_of(LESSON, turns))[0]["repeats"] == [0.0, 1.0]
    second_try = [teacher("Say it again."), student(SLIP), teacher("Say it again.")]
    assert conversation_figures(record_of(LESSON, second_try))[0]["repeats"] == [0.0, 0.0]


@pytest.mark.parametrize(
    "text", ["", "…", "???", '"', "–", "( )", "\x00", "<think>", "?" * 500, "😀 – (a) b", 'a "b" c "d']
)
def test_every_text_can_be_read(text):
    assert feedback_kind(text, text, SPANISH) in KINDS
    metrics = language_metrics([record_of(LESSON, [teacher(text), student(text, "error_student"), teacher(text)])])
    assert metrics["language"]["teacher_words"]["n"] == 2

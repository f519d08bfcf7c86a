"""Tests of the figures of language lessons: rules against hand-labelled conversations, and hand-computed numbers."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from classroom_rl.config.base import lesson_plans
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.errors import JudgeOutputError
from classroom_rl.evaluation.extra_judges import label_errors, read_labels
from classroom_rl.evaluation.metrics.language import conversation_figures, language_metrics, plan_progress
from classroom_rl.evaluation.metrics.student_fidelity import StudentTurn, flips_role, parrots, student_fidelity
from classroom_rl.judges.feedback import (
    falsely_corrects,
    feedback_kind,
    hands_over,
    nearest_phrase,
    repairs,
    shows_uptake,
)
from classroom_rl.judges.messages import ParsedPlan, Phrase, holds, read_message, read_plan, sentences
from classroom_rl.rollout.datasets import load_problems
from classroom_rl.rollout.scheduler import ConcurrentSchedule
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.tokens import Turn
from tests.support.labelled import agreement, compare, conversations, kappa
from tests.support.synthetic_run import record_of

LESSON = "Lesson: food, cook, last week\nPlan: you, sister, brother, friends, parents"
QUICKSTART = ParsedPlan(lesson=parse_problem(LESSON))
SPANISH = ParsedPlan(
    (Phrase("He perdido la cartera", "I've lost my wallet"), Phrase("Es de cuero marrón", "It's of leather"))
)

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


# Against people's labels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("half", "measured"), [("develop", DEVELOP), ("held_out", HELD_OUT)])
def test_the_rules_agree_with_the_labels_as_measured(half, measured):
    found = agreement(half)
    assert {name: count for name, (_, count) in found.items()} == {name: count for name, (_, count) in measured.items()}
    assert {name: found[name][0] >= agreed for name, (agreed, _) in measured.items()} == dict.fromkeys(measured, True)


def test_there_are_enough_labels_on_both_halves_and_of_every_kind():
    messages = {half: sum(len(each["turns"]) for each in conversations(half)) for half in ("develop", "held_out")}
    pairs = {half: compare(half) for half in messages}
    tasks = [len(pairs[half]["number of tasks"]) for half in messages]
    assert sum(tasks) >= 120 and min(tasks) >= 60
    for half in messages:
        assert len({label for label, _, _ in pairs[half]["kind of feedback"]}) == 7
        for name in ("false correction", "hands over", "uptake", "repair"):
            assert {label for label, _, _ in pairs[half][name]} == {True, False}


def test_agreement_beyond_chance():
    # Both sides say True half the time: chance 0.5. Observed 3 of 4: κ = (0.75 − 0.5) / 0.5.
    assert kappa([(True, True, ""), (True, False, ""), (False, False, ""), (False, False, "")]) == pytest.approx(0.5)
    assert kappa([(True, True, "")]) is None


# Messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tasks", "ends"),
    [
        ("Good! What did you cook last week?", 1, True),
        ("What did you cook last week? Take your time.", 1, False),
        ("What did you cook? What did your sister cook?", 2, True),
        ("Check the tense here: cook. Say it again.", 1, True),
        ("What form does it take? Try it again.", 1, True),
        ("Good! You are doing so well.", 0, None),
        ("See you soon. <end_of_conversation>", 0, None),
        ('"¿Dónde está?" means "Where is it?".', 0, None),
        ("I am the clerk. – Uw kamer is op de derde verdieping.", 1, True),
        ("(Say yes.) Tu pourrais nourrir le chat ?", 1, True),
        ("Now you are off. What do you say? (Begin with Då.)", 1, False),
        ("<think>What did you cook?</think>Good!", 0, None),
        ("Every month my brother …", 1, True),
        ("", 0, None),
    ],
)
def test_tasks_of_a_message(text, tasks, ends):
    found = read_message(text)
    assert (len(found.tasks), found.ends_with_task) == (tasks, ends)


def test_sentences_keep_their_quotations_whole():
    assert sentences('"Hoe laat? Nu!" is new. Say it.') == ['"Hoe laat? Nu!" is new.', "Say it."]


def test_phrases_are_found_without_case_and_punctuation_as_whole_words():
    assert normal("¿Si aparece, ME avisan?") == "si aparece me avisan"
    assert holds("Oh: Si aparece – me avisan!", "si aparece, me avisan") and not holds("Esto desaparece", "aparece")
    assert holds("はい、雨が降るらしいよ。", "雨が降るらしいよ") and not holds("Good!", "…")


# Feedback --------------------------------------------------------------------------------------------------------

SLIP = "Last week my sister cook a carrot in the garden."
RIGHT = "Last week my sister cooked a carrot in the garden."


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("Not quite. She cooked a carrot. Say it again.", "explicit"),
        ("Use cooked here. Say it again.", "explicit"),
        ("Oh, she cooked a carrot! What did your brother cook last week?", "recast"),
        ("Check the tense here: cook. Say it again.", "metalinguistic"),
        ("Cook a carrot?", "repetition"),
        ("Sorry, what do you mean?", "clarification"),
        ("Try again.", "elicitation"),
        ("Last week my sister …", "elicitation"),
        ("Good! What did your brother cook last week?", "none"),
        ("", "none"),
    ],
)
def test_kinds_of_feedback(reply, kind):
    assert feedback_kind(SLIP, reply, QUICKSTART) == kind


def test_feedback_in_open_language_goes_by_the_phrase_that_was_meant():
    assert nearest_phrase("Ha perdido la cartera.", SPANISH) == "He perdido la cartera"
    assert nearest_phrase("Buenos días", SPANISH) is None and nearest_phrase("anything", ParsedPlan()) is None
    assert feedback_kind("Ha perdido la cartera.", "He perdido la cartera. Where?", SPANISH) == "recast"
    assert feedback_kind("Ha perdido la cartera.", 'No, it is "he perdido".', SPANISH) == "explicit"


@pytest.mark.parametrize(
    ("answer", "uptake", "repair"),
    [
        (RIGHT, True, True),
        (SLIP, True, False),
        ("Last week my brother cooked an egg in the kitchen.", False, False),
    ],
)
def test_uptake_and_repair(answer, uptake, repair):
    assert shows_uptake(SLIP, "elicitation", answer, QUICKSTART) is uptake
    assert repairs(SLIP, "elicitation", answer, QUICKSTART) is repair
    assert not shows_uptake(SLIP, "none", answer, QUICKSTART)


def test_false_corrections():
    assert falsely_corrects("No, that is not right. Say it again.")
    assert falsely_corrects("Check the plural here: eggs. Say it again.")
    assert not falsely_corrects("Very good! Say it once more.")
    assert not falsely_corrects("Good. There is something wrong with the sum, and the waiter is gone. Call him back!")


def test_what_is_handed_over():
    never, said = (lambda _: False), (lambda _: True)
    shown = 'Good. "He perdido la cartera" means "I\'ve lost my wallet". '
    assert hands_over(shown + "Tell him that you have lost your wallet.", never, SPANISH)
    assert not hands_over(shown + "Tell him that you have lost your wallet.", said, SPANISH)
    assert not hands_over(shown + "Which moment does it fit?", never, SPANISH)
    assert hands_over("Repeat after me: He perdido la cartera.", never, SPANISH)
    assert hands_over("Say: Last week I cooked an egg in the kitchen.", never, QUICKSTART)
    assert not hands_over("What did you cook last week?", never, QUICKSTART)


# Students --------------------------------------------------------------------------------------------------------


def test_students_that_leave_their_part():
    assert flips_role("Thank you. What did you cook last week?", "Good!", QUICKSTART)
    assert flips_role("Well done! Say it again.", "Hi!", SPANISH) and not flips_role(RIGHT, "Good!", QUICKSTART)
    assert parrots("What did you cook last week?", "Hi! What did you cook last week?")
    assert not parrots("He perdido la cartera.", '"He perdido la cartera" or not? Which one?')


def test_fidelity_in_shares_and_in_words():
    erring = [StudentTurn("error_student", True, False, False)] * 3 + [
        StudentTurn("error_student", False, False, False)
    ]
    right = [StudentTurn("correct_student", False, False, False)] * 6
    found = student_fidelity([*erring, *right], "rules")
    assert found["error_persona"] == {"share": 0.75, "n": 4} and found["correct_persona"] == {"share": 1.0, "n": 6}
    assert found["trusted"] is False
    assert found["warnings"] == ["only 75% of the turns asked to err hold an error (at least 80% should)"]
    assert student_fidelity(erring[:3] + right, "rules")["trusted"] is True


def test_fidelity_is_unknown_where_nobody_tells_errors():
    found = student_fidelity([StudentTurn("error_student", None, False, False)], "nobody")
    assert found["trusted"] is None and found["error_persona"] == {"share": None, "n": 0}
    flipping = student_fidelity([StudentTurn("error_student", None, True, False)], "nobody")
    assert flipping["trusted"] is False and "speak as the teacher" in flipping["warnings"][0]


# Whole lessons ---------------------------------------------------------------------------------------------------


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
    found = language_metrics([record_of(LESSON, turns)])
    figures = {name: (each["mean"], each["n"]) for name, each in found["language"].items()}
    assert figures["teacher_words"] == (8.0, 4)
    assert figures["talk_ratio"] == (pytest.approx(32 / 61), 1)
    assert figures["tasks_per_message"] == (0.75, 4)
    assert figures["ends_with_task"] == (pytest.approx(2 / 3), 3)
    assert figures["plan_introduced"] == figures["plan_produced"] == (0.4, 1)
    assert figures["feedback/metalinguistic"] == (1.0, 1) and figures["feedback/none"] == (0.0, 1)
    assert figures["uptake"] == figures["repair"] == (1.0, 1)
    assert figures["false_corrections"] == (0.0, 2) and figures["repeats"] == (0.0, 4)
    assert found["fidelity"]["error_persona"] == {"share": 1.0, "n": 1} and found["fidelity"]["labelled_by"] == "rules"


def test_errors_of_open_language_go_by_the_persona_or_a_judge():
    problem = load_problems([lesson_plans("test")])[0].text
    turns = [teacher("Hi! What do you say?"), student("abc", "error_student"), teacher("Good! Go ahead.")]
    record = record_of(problem, turns)
    assert len(read_plan(problem).phrases) >= 4
    assert conversation_figures(record).values["feedback/none"] == [1.0]
    assert conversation_figures(record).students[0].error is None
    labelled = conversation_figures(record, {(record.id, 1): False})
    assert "feedback/none" not in labelled.values and labelled.values["false_corrections"] == [0.0]
    assert labelled.students[0].error is False


def test_where_a_judge_labels_what_it_did_not_label_is_in_no_figure_about_errors():
    problem = load_problems([lesson_plans("test")])[0].text
    turns = [teacher("Hi! What do you say?"), student("abc", "error_student"), teacher("Good! Go ahead.")]
    records = [record_of(problem, turns, index=i) for i in range(3)]
    found = language_metrics(records, {("c-0000", 1): True, ("c-0001", 1): False})
    assert found["language"]["feedback/none"]["n"] == found["language"]["false_corrections"]["n"] == 1
    assert found["language"]["hands_over"]["n"] == 3 + 2 and found["language"]["teacher_words"]["n"] == 6
    assert (found["fidelity"]["labelled_by"], found["fidelity"]["unlabelled"]) == ("judge", 1)
    none = language_metrics(records, {})  # a tutor on a server, compared with tutors whose conversations are labelled
    assert not {"feedback/none", "false_corrections", "hands_over"} & set(none["language"])
    assert (none["fidelity"]["labelled_by"], none["fidelity"]["unlabelled"]) == ("nobody", 3)


def test_progress_through_a_plan_of_phrases():
    assert plan_progress(SPANISH, ["“He perdido la cartera” is new."], ["Es de cuero marrón!"]) == (1, 1)
    assert plan_progress(ParsedPlan(), ["Hi"], ["Ho"]) == (0, 0)


def test_a_task_set_again_is_a_repeat_but_a_second_try_is_none():
    turns = [teacher("Hi! What did you cook last week?"), student(SLIP), teacher("Well. What did you cook last week?")]
    assert conversation_figures(record_of(LESSON, turns)).values["repeats"] == [0.0, 1.0]
    again = [teacher("Say it again."), student(SLIP), teacher("Say it again.")]
    assert conversation_figures(record_of(LESSON, again)).values["repeats"] == [0.0, 0.0]


def test_every_text_can_be_read():
    odd = ["", "…", "???", '"', "–", "( )", "\x00", "<think>", "?" * 500, "😀 – (a) b", 'a "b" c "d']
    for text in odd:
        read_message(text), feedback_kind(text, text, SPANISH), hands_over(text, lambda _: False, SPANISH)
        language_metrics([record_of(LESSON, [teacher(text), student(text, "error_student"), teacher(text)])])


# Labels of a judge -----------------------------------------------------------------------------------------------


def labelled_lesson():
    problem = load_problems([lesson_plans("test")])[0].text
    turns = [teacher("Hi! What do you say?"), student("abc", "error_student"), teacher("Hm. Again!"), student("abd")]
    return record_of(problem, turns)


def test_a_judges_answer_names_messages_as_it_was_shown_them():
    record = labelled_lesson()
    assert read_labels(record, '{"reasoning": "", "errors": [2]}') == {(record.id, 1): True, (record.id, 3): False}
    for wrong in ('{"errors": [1]}', '{"errors": "2"}', '{"errors": [true]}', '{"errors": [9]}', "{}", "none"):
        with pytest.raises(JudgeOutputError):
            read_labels(record, wrong)


class Labeller:
    """A judge's engine that always gives the same answer."""

    def __init__(self, answer: str):
        self.answer, self.asked = answer, []

    async def chat(self, messages, sampling):
        self.asked.append(messages[0]["content"])
        return SimpleNamespace(text=self.answer)


@pytest.mark.parametrize(("answer", "known"), [('{"reasoning": "x", "errors": [2]}', True), ("I cannot say.", False)])
def test_open_lessons_are_labelled_and_the_quickstarts_are_not(answer, known):
    judge, record = Labeller(answer), labelled_lesson()
    rules = record_of(LESSON, [teacher("Hi!"), student(SLIP)], index=1)
    roles = SimpleNamespace(apis={}, engines={"judge": judge})
    labels = asyncio.run(label_errors(EvalConfig(), roles, ConcurrentSchedule(), [record, rules]))
    assert len(judge.asked) == 1 and "[2] STUDENT: abc" in judge.asked[0] and "error_student" not in judge.asked[0]
    assert labels == ({(record.id, 1): True, (record.id, 3): False} if known else {})
    fidelity = language_metrics([record], labels)["fidelity"]
    assert fidelity["labelled_by"] == ("judge" if known else "nobody")
    assert fidelity["error_persona"]["share"] == (1.0 if known else None)
    silent = replace(EvalConfig(), student_errors_prompt_path=None)
    assert asyncio.run(label_errors(silent, roles, ConcurrentSchedule(), [record])) is None

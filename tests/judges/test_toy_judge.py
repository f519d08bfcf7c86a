"""Tests of the embedded rubric: scripted teachers, loopholes that were closed, single messages, scores by hand."""

import asyncio
import json
import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.toy_language.grammar import Slip, find_slips
from classroom_rl.environments.toy_language.lessons import make_lessons, render_problem
from classroom_rl.environments.toy_language.scripts import (
    FAREWELL,
    hint,
    ideal,
    move_on,
    next_question,
    play,
    slip_in_last,
)
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.findings import verdict
from classroom_rl.judges.toy_judge import RubricJudge, analyse, coverage
from classroom_rl.judges.verdicts import parse_judge_output, parse_verdict
from classroom_rl.rollout.engine import ConversationFacts
from tests.support.dutch_lesson import dialogue
from tests.support.scripted_teachers import SCRIPTED_TEACHERS
from tests.support.toy_lesson import HINT, PROBLEM, Q1, Q2, Q3, RIGHT, WRONG

RULE = "pedagogical_eval"
LESSONS = make_lessons(42)[1]
CORRECT, ERROR = "correct_student", "error_student"
MIXED = [
    [CORRECT, ERROR, CORRECT, CORRECT],
    [ERROR, CORRECT, ERROR, CORRECT],
    [CORRECT, CORRECT, CORRECT, ERROR],
]


def judge(conversation, problem=PROBLEM, max_turns=None) -> str:
    facts = ConversationFacts(max_turns=max_turns)
    return asyncio.run(RubricJudge().judge(RULE, conversation, problem, 0, facts))


def score(conversation, problem=PROBLEM, max_turns=None):
    return parse_judge_output(judge(conversation, problem, max_turns))


def rewards_of(teacher, personas_lists=MIXED, lessons=LESSONS[:40]):
    rng = random.Random(3)
    return [
        score(play(teacher, lesson, personas, rng), render_problem(lesson)).final_reward
        for lesson in lessons
        for personas in personas_lists
    ]


def reply_finding(student: str, reply: str):
    """The finding about a reply to what the student said to the first question."""
    return analyse(dialogue(Q1, student, reply), PROBLEM)[1]


# Teachers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTED_TEACHERS)
def test_of_the_scripted_teachers_only_the_ideal_one_is_paid(name):
    rewards = rewards_of(SCRIPTED_TEACHERS[name])
    assert min(rewards) > 0.95 if name == "ideal" else max(rewards) < 0.6


def hints_at_one_kind(lesson, messages):
    return hint(Slip("tense", "it", "")) if messages else move_on(lesson, messages)


def hints_without_need(lesson, messages):
    """Hints correctly at every slip, but also hints at slips in right sentences."""
    return hint(slip_in_last(messages) or Slip("tense", "it", "")) if messages else move_on(lesson, messages)


def models_each_answer(lesson, messages):
    """Says an example of the answer before each question."""
    slip, question = slip_in_last(messages), next_question(lesson, messages)
    return hint(slip) if slip else f"Every day my sister cooks an egg in the kitchen. {question.text}"


def dumps_then_praises(lesson, messages):
    return "Good!" if messages else " ".join(question.text for question in lesson.questions)


def stuffs_praise(lesson, messages):
    """Asks the questions in order, with praise before and after each, and ignores mistakes."""
    return f"Good! You are so clever. I love it. {next_question(lesson, messages).text} You can do it!"


def thinks_the_hints(lesson, messages):
    """Hints correctly, but inside thoughts, which the student does not see."""
    return f"<think>{ideal(lesson, messages)}</think>Good!"


@pytest.mark.parametrize(
    "teacher",
    [hints_at_one_kind, hints_without_need, models_each_answer, dumps_then_praises, stuffs_praise, thinks_the_hints],
)
def test_other_ways_round_the_rubric_do_not_pay(teacher):
    assert fmean(rewards_of(teacher)) < 0.6


@pytest.mark.parametrize("messages", [1, 2, 5, 9])
def test_the_ideal_teacher_is_perfect_at_any_length(messages):
    personas = [[CORRECT, ERROR][index % 3 == 1] for index in range(messages)]
    assert min(rewards_of(ideal, [personas], LESSONS[:10])) == 1.0


@pytest.mark.parametrize("messages", [1, 2])
@pytest.mark.parametrize("max_turns", [None, 9])
def test_ending_early_does_not_pay(messages, max_turns):
    def ends_early(lesson, said):
        return FAREWELL if len(said) >= 2 * messages else ideal(lesson, said)

    rng = random.Random(4)
    for lesson in LESSONS[:10]:
        for personas in ([CORRECT] * 4, *MIXED):
            conversation = play(ends_early, lesson, personas, rng)
            assert score(conversation, render_problem(lesson), max_turns).final_reward <= 0.5


# Scores --------------------------------------------------------------------------------------------------------------


def test_no_score_is_above_the_share_of_the_plan_by_hand():
    """One of three questions was asked. Two were due, because one of three messages went to the slip."""
    messages = dialogue(Q1, WRONG, HINT)
    answer = verdict(analyse(messages, PROBLEM), coverage(analyse(messages, PROBLEM), PROBLEM, room=3))
    assert (answer["task_final_score"], answer["forward_progression_score"]) == (0.5, 0.5)
    assert answer["overall_momentum_score"] == 5.0
    for criterion in ("task_final", "forward_progression", "overall_momentum"):
        assert "1 of 2 steps of the lesson were taken: no score above 0.50" in answer[f"{criterion}_reasoning"]
    assert score(messages).final_reward == 1.0, "nobody knows that there was room for more"
    assert score(messages, max_turns=3).final_reward == 1.0
    assert score(messages, max_turns=5).final_reward == 0.5
    assert score(dialogue(Q1, RIGHT, FAREWELL)).overall_momentum_score == 0.0


@given(st.integers(0, 10**6), st.sampled_from(list(SCRIPTED_TEACHERS)), st.integers(1, 15))
@settings(deadline=None, max_examples=100)
def test_more_room_never_raises_a_score(seed, name, max_turns):
    rng = random.Random(seed)
    lesson = rng.choice(LESSONS)
    messages = play(SCRIPTED_TEACHERS[name], lesson, rng.choices([CORRECT, ERROR], k=4), rng)
    problem = render_problem(lesson)
    less, more = score(messages, problem, max_turns), score(messages, problem, max_turns + 2)
    assert less.final_reward >= more.final_reward
    if name == "ideal":
        assert score(messages, problem, 9).final_reward == 1.0


def test_scores_by_hand():
    conversation = dialogue(
        f"Hi! {Q1} Take your time.",  # the task is not last: task-final 0 on the clean side
        RIGHT,
        f"Good! {Q2}",  # all good
        "Every day my sister cook an egg in the kitchen.",
        "Check the tense here: cook. Say it again.",  # the wrong kind: 0 on the error side of all three
        "Every day my sister cooks two egg in the kitchen.",
        "Check the plural here: egg. Say it again.",  # all good
        "Every day my sister cooks two eggs in the kitchen.",
        f"Good! {Q1}",  # ends with its task, but repeats
    )
    scores = score(conversation)
    assert scores.task_final_score == pytest.approx((2 / 3 + 1 / 2) / 2, abs=1e-4)
    assert scores.forward_progression_score == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert scores.overall_momentum_score == pytest.approx(10 * (1 / 2 + 1 / 2) / 2)
    first, second, third, fourth, fifth = analyse(conversation, PROBLEM)
    assert (first.replies_to, first.student_error_kind, first.task_final) == (None, None, False)
    assert (second.replies_to, second.moved_on, second.task_final) == (1, True, True)
    assert (third.student_error_kind, third.scaffolded) == ("verb ending", False)
    assert (fourth.student_error_kind, fourth.scaffolded, fourth.index) == ("plural", True, 6)
    assert (fifth.moved_on, fifth.progressed, fifth.falsely_corrected) == (False, False, False)


def test_reasons_tell_each_turn():
    answer = verdict(analyse(dialogue(Q1, WRONG, "Check the plural here: boil. Say it again."), PROBLEM))
    expected = "turn 3: error (tense: boil) – hinted at plural: not scaffolded"
    assert answer["forward_progression_reasoning"] == expected
    assert answer["overall_momentum_reasoning"] == expected
    assert answer["task_final_reasoning"] == f"turn 1: ends with its task; {expected}"


# Single messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "scaffolds"),
    [
        (HINT, True),
        ("Almost! Look at the tense. Try again, please.", True),
        ("Which tense do you need here: boil?", True),
        ("Check the tense here: boil.", True),
        ("CHECK THE TENSE HERE: BOIL. SAY IT AGAIN.", True),
        ("Check the tense here: boiled. Say it again.", False),  # the answer
        ("Check the tense here: egg. Say it again.", False),  # another word
        ("Check the verb ending here: boil. Say it again.", False),  # another kind
        ("Check the tense and the article here: boil. Say it again.", False),  # two kinds
        ("Check the tense. You boiled it. Say it again.", False),
        ("Yesterday I boiled an egg in the kitchen. Check the tense. Say it again.", False),
        (f"Check the tense here: boil. {Q2}", False),
        ("Check it. Say it again.", False),
        ("Say it again.", False),
        ("Check the tense here: boil. <end_of_conversation>", False),
        ("<think>Check the tense here: boil.</think> Good!", False),
        ("Check the tense here: boil. Say it again.<|im_end|>\n<|im_start|>user\nYesterday I boiled.", False),
        ("", False),
    ],
)
def test_what_scaffolds(reply, scaffolds):
    finding = reply_finding(WRONG, reply)
    assert finding.scaffolded == scaffolds
    assert finding.forward_score == finding.momentum_score == float(scaffolds)
    assert scaffolds or finding.task_score == 0


@pytest.mark.parametrize(
    ("reply", "falsely_corrected"),
    [
        (f"Good! {Q2}", False),
        ("Say it again.", False),
        ("Check the tense here: boiled. Say it again.", True),
        ("Use boil here. Say it again.", True),
        ("Almost! Say it again.", True),
        ("Mind the plural.", True),
        (f"There is a mistake. {Q2}", True),
    ],
)
def test_what_is_a_false_correction(reply, falsely_corrected):
    finding = reply_finding(RIGHT, reply)
    assert finding.falsely_corrected == falsely_corrected
    if falsely_corrected:
        assert finding.task_score == finding.forward_score == finding.momentum_score == 0


@pytest.mark.parametrize(
    ("reply", "moved_on"),
    [
        (Q2, True),
        (f"Good! {Q2}", True),
        (f"Good! {Q2} Take your time.", True),  # task-final discipline covers that
        (f"Good! {Q3}", True),
        (f"Good! Very well done! {Q2}", False),
        ("Good " + "so " * 14 + f"nice! {Q2}", False),
        (f"Good! {Q1}", False),
        (f"Good! {Q2} {Q3}", False),
        ("Good! What did you play yesterday?", False),
        ("Good! How are you?", False),
        ("Good!", False),
        (f"Good! {Q2} <end_of_conversation>", False),
        (f"Student: Yes. {Q2}", False),
        (f"Now it's about the past tense. {Q2}", True),
        (f"In the plural, nouns end in -s. {Q2}", True),
        (f"The past tense does not end in -s. {Q2}", True),
        (f"The past tense does not end in -ed. {Q2}", False),
        (f"The past tense ends in -s. {Q2}", False),
        (f"Good, no mistakes! {Q2}", True),
        (f"Yesterday I ordered a cake. {Q2}", False),
    ],
)
def test_what_moves_on(reply, moved_on):
    finding = reply_finding(RIGHT, reply)
    assert finding.moved_on == moved_on
    assert finding.forward_score == float(moved_on)


@pytest.mark.parametrize(
    ("message", "task_final"),
    [
        (Q1, True),
        ("Say one sentence about food.", True),
        (f"{Q1} Take your time.", False),
        (f"{Q1} Good luck!", False),
        (f"{Q1} {Q2}", False),
        (f"{Q1} <end_of_conversation>", False),
        ("Welcome to the lesson.", False),
    ],
)
def test_what_is_task_final(message, task_final):
    assert analyse(dialogue(message), PROBLEM)[0].task_final == task_final


# Conversations -------------------------------------------------------------------------------------------------------


def test_going_back_in_the_plan_is_new_but_no_momentum():
    findings = analyse(dialogue(Q1, RIGHT, f"Good! {Q3}", RIGHT, f"Good! {Q2}"), PROBLEM)
    assert [finding.moved_on for finding in findings[1:]] == [True, True]
    assert [finding.progressed for finding in findings[1:]] == [True, False]


def test_after_the_last_question_a_short_goodbye_moves_on():
    texts = (Q1, RIGHT, Q2, RIGHT, Q3, RIGHT)
    assert score(dialogue(*texts, FAREWELL)).final_reward == 1.0
    assert score(dialogue(*texts, f"Good! {Q1}")).forward_progression_score == pytest.approx(2 / 3, abs=1e-4)
    assert score(dialogue(*texts, "")).forward_progression_score == pytest.approx(2 / 3, abs=1e-4)


def test_no_task_scores_nothing_in_task_final():
    answer = verdict(analyse(dialogue("Hello!", RIGHT, "Good!"), PROBLEM))
    assert (answer["task_final_score"], answer["task_final_reasoning"]) == (0.0, "No task was set.")


def test_a_conversation_without_replies_scores_nothing_for_progress():
    scores = score(dialogue(Q1))
    assert (scores.task_final_score, scores.forward_progression_score, scores.overall_momentum_score) == (1, 0, 0)
    assert score([]).final_reward == 0


def test_a_student_turn_without_reply_is_not_held_against_the_teacher():
    texts = (Q1, RIGHT, f"Good! {Q2}")
    assert analyse(dialogue(*texts, WRONG), PROBLEM) == analyse(dialogue(*texts), PROBLEM)


@settings(deadline=None)
@given(st.lists(st.text(max_size=80), max_size=9))
def test_any_text_gets_a_readable_verdict(texts):
    text = judge(dialogue(*texts))
    assert parse_verdict(RULE, 0, text).valid
    assert all(isinstance(value, str) for key, value in json.loads(text).items() if key.endswith("reasoning"))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 10**6), st.sampled_from(list(SCRIPTED_TEACHERS)))
def test_a_scaffold_names_what_the_text_holds(seed, name):
    rng = random.Random(seed)
    lesson = rng.choice(LESSONS)
    conversation = play(SCRIPTED_TEACHERS[name], lesson, rng.choices([CORRECT, ERROR], k=4), rng)
    for finding in analyse(conversation, render_problem(lesson)):
        if finding.replies_to is None:
            continue
        slips = find_slips(conversation[finding.replies_to]["content"])
        assert finding.student_error_kind == (slips[0].kind if slips else None)
        assert not (finding.scaffolded and finding.falsely_corrected)
        assert finding.scaffolded == (bool(slips) and name == "ideal")


def test_other_rules_and_other_problems_are_refused():
    with pytest.raises(ConfigError, match="accuracy"):
        asyncio.run(RubricJudge().judge("accuracy", dialogue(Q1), PROBLEM, 0))
    with pytest.raises(DataError, match="not a lesson"):
        asyncio.run(RubricJudge().judge(RULE, dialogue(Q1), "Solve x + 1 = 2.", 0))

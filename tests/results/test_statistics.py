"""Statistics of conversations against numbers worked out by hand."""

import random
from dataclasses import replace
from typing import Optional

import pytest

from classroom_rl.environments.toy_language.grammar import answer, find_slips, inject
from classroom_rl.environments.toy_language.lessons import make_lessons, render_problem
from classroom_rl.environments.toy_language.scripts import hint
from classroom_rl.results.statistics import (
    Exchange,
    differences,
    holm,
    mean_scores,
    paired_change,
    react,
    read_exchanges,
    rewards_by_lesson,
    summarise,
    talk,
)
from classroom_rl.rollout.intervals import RESAMPLES, sign_flip_p
from classroom_rl.rollout.tokens import Turn
from tests.support.synthetic_run import FAILED, record_of, scored

LESSONS = make_lessons(1)[1]
TEXT = render_problem(LESSONS[0])


def teacher(text: str) -> Turn:
    return Turn("teacher", text)


def student(text: str, persona: str) -> Turn:
    return Turn("student", text, persona)


# What is read from conversations -----------------------------------------------------------------------------------


def test_conversations_without_a_verdict_are_left_out_and_counted():
    records = [
        record_of("one", [], [scored(1, 1, 10)], 0, reward=0.8),
        record_of("one", [], [FAILED], 1, reward=None),
        record_of("two", [], [scored(0, 0, 0)], 2, reward=0.0, rejected=True),
        record_of("two", [], [scored(1, 0, 0)], 3, reward=0.4),
    ]
    summary = summarise(records)
    assert [sorted(values) for values in rewards_by_lesson(records).values()] == [[0.8], [0.0, 0.4]]
    assert summary["reward"]["mean"] == pytest.approx(0.4) and summary["reward"]["n"] == 3
    assert summary["without_verdict"] == {"share": 0.25, "n": 4}
    assert summary["rejected"] == {"share": pytest.approx(1 / 3), "n": 3}
    assert summary["lessons"] == 2 and summary["conversations"] == 4
    assert "error_turns" not in summary, "no rule can find errors in problems that are no quickstart lessons"


def test_scores_are_averaged_over_valid_attempts_first():
    records = [
        record_of("one", [], [scored(1, 0, 10), scored(0, 0, 0, attempt=1)], reward=0.3),
        record_of("two", [], [scored(1, 1, 10), replace(FAILED, attempt=1)], reward=1.0),
        record_of("three", [], [FAILED]),
    ]
    assert mean_scores(records) == {
        "task_final_score": 0.75,
        "forward_progression_score": 0.5,
        "overall_momentum_score": 7.5,
    }
    assert mean_scores(records[2:]) is None


def test_talk_counts_words_that_are_heard():
    turns = [teacher("<think>long plan here</think>Hi! Say it."), student("Two words", "p"), teacher("Good.")]
    assert talk([record_of("one", turns), record_of("two", turns[:1])]) == {
        "messages": 2.0,
        "teacher_words": pytest.approx(7 / 3),
        "student_words": 2.0,
        "teacher_share": pytest.approx(7 / 9),
    }
    assert talk([record_of("one", [])])["teacher_share"] is None


def reply_to(question: int, kind: Optional[str] = None) -> str:
    """An answer to a question of the first lesson; with `kind`, one with that slip in it."""
    rng = random.Random(question)
    sentence = answer(LESSONS[0].questions[question], rng, kind)
    return (inject(sentence, kind, rng) if kind else sentence).text


def test_an_error_turn_is_one_whose_text_holds_an_error_whoever_was_asked_for_it():
    questions = [question.text for question in LESSONS[0].questions]
    slip = find_slips(reply_to(0, "tense"))[0]
    turns = [
        teacher(f"Hi! {questions[0]}"),
        student(reply_to(0, "tense"), "correct_student"),  # asked to be right, and wrong
        teacher(hint(slip)),  # scaffolded
        student(reply_to(0), "error_student"),  # asked to err, and right
        teacher(hint(slip)),  # a false correction
        student(reply_to(0, "preposition"), "error_student"),  # asked to err, and wrong
        teacher(f"Good! {questions[1]}"),  # ignored
        student(reply_to(1), "correct_student"),
    ]  # the last message has no reply
    exchanges = read_exchanges(record_of(TEXT, turns))
    assert [(exchange.student_turn, exchange.teacher_turn) for exchange in exchanges] == [(1, 2), (3, 4), (5, 6)]
    assert [[slip.kind for slip in exchange.errors] for exchange in exchanges] == [["tense"], [], ["preposition"]]
    assert [(exchange.scaffolded, exchange.corrected) for exchange in exchanges] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert react(exchanges) == {
        "error_turns": {"scaffolded": 0.5, "n": 2},
        "clean_turns": {"falsely_corrected": 1.0, "n": 1},
        "personas": {"correct_student": {"with_error": 1.0, "n": 1}, "error_student": {"with_error": 0.5, "n": 2}},
    }


def test_thoughts_hold_no_errors():
    thought = f"<think>{reply_to(0, 'tense')}</think>{reply_to(0)}"
    turns = [teacher(LESSONS[0].questions[0].text), student(thought, "correct_student"), teacher("Good!")]
    assert [exchange.errors for exchange in read_exchanges(record_of(TEXT, turns))] == [()]


def test_sides_that_do_not_occur_have_no_share():
    clean = Exchange(1, 2, "correct_student", (), False, False, "")
    assert react([clean])["error_turns"] == {"scaffolded": None, "n": 0}
    assert react([clean])["clean_turns"] == {"falsely_corrected": 0.0, "n": 1}
    assert read_exchanges(record_of("Solve x + 1 = 2.", [teacher("Hi!")])) is None


# Differences -------------------------------------------------------------------------------------------------------


def test_paired_change_compares_lesson_by_lesson():
    # a: mean 0.5 → 1 is +0.5; b: 0.5 → 0.5 is 0; c and d have values on one side only.
    change = paired_change({"a": [0.0, 1.0], "b": [0.5], "d": []}, {"a": [1.0], "b": [0.5], "c": [1.0], "d": [1.0]})
    assert change == {"mean": 0.25, "ci95": None, "n": 2, "p": 1.0}, "of both signs of a, half are as far from 0"


def test_the_sign_flip_test_counts_all_assignments_of_signs():
    # Three lessons, all +1: of the 8 assignments, +++ and −−− are as far from 0. p = 2/8.
    assert sign_flip_p([1.0, 1.0, 1.0]) == 0.25
    # 3, 1, −2: the sum is 2. |±3 ± 1 ± 2| is 6, 2, 4, 0, 0, 4, 2, 6: six of eight are at least 2.
    assert sign_flip_p([3.0, 1.0, -2.0]) == 0.75
    assert sign_flip_p([0.0, 0.0]) == 1.0 and sign_flip_p([]) is None


def test_with_many_lessons_signs_are_drawn():
    # A draw has twenty equal signs with a probability of 2 in a million, so only the observed assignment counts.
    assert sign_flip_p([1.0] * 20) == 1 / (RESAMPLES + 1)
    assert sign_flip_p([1.0, -1.0] * 10) == 1.0
    # Thirteen ones and a seven: |sum| = 20 needs all signs equal, p = 2 / 2¹⁴ = 0.0001.
    assert sign_flip_p([1.0] * 13 + [7.0]) < 0.001


def test_holm():
    # Sorted 0.01, 0.02, 0.03, 0.04 × 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04, each at least the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0] and holm([]) == []


def test_differences_are_of_lesson_means_over_common_lessons():
    results = differences({"base": {"a": [0.0, 1.0], "b": [0.5]}, "new": {"a": [1.0], "b": [0.75], "c": [9.0]}})
    assert [(result.tutor, result.against, result.lessons) for result in results] == [("new", "base", 2)]
    # a: 1 − 0.5, b: 0.75 − 0.5.
    assert results[0].mean == 0.375 and results[0].ci95 is None, "two lessons are too few for an interval"
    assert results[0].p == results[0].p_holm == 0.5  # ++ and −− of four


def test_every_pair_is_compared_once_and_corrected_together():
    ones, zeros = {str(i): [1.0] for i in range(5)}, {str(i): [0.0] for i in range(5)}
    results = differences({"base": zeros, "x": ones, "y": ones})
    assert [(result.tutor, result.against) for result in results] == [("x", "base"), ("y", "base"), ("y", "x")]
    assert [result.p for result in results] == [2 / 32, 2 / 32, 1.0]
    assert [result.p_holm for result in results] == [3 * 2 / 32, 3 * 2 / 32, 1.0]


def test_a_figure_that_one_tutor_lacks_has_no_difference():
    (result,) = differences({"base": {"a": [1.0]}, "x": {}})
    assert (result.mean, result.ci95, result.p, result.p_holm, result.lessons) == (None, None, None, None, 0)

"""The ledger of a lesson: only what the student produced before the teacher said it is evidence.

The properties hold for every kind of exam; each `Lesson` below brings messages that produce, try or name its items."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.load import ROOT
from classroom_rl.environments.toy_language.grammar import answer, find_slips, inject, kinds_of
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.environments.toy_language.scripts import hint
from classroom_rl.judges.post_test.exams import EmbeddedExaminer
from classroom_rl.rollout.post_test import GIVEN, MISSED, PRODUCED, Exam, LedgerEntry
from classroom_rl.rollout.problem import PostTestMaterial, Problem, SiblingProblem, Step
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.tokens import Turn

TOY = Lesson("food", "cook", "last week", ("you", "your sister", "your friends"))
PRESENT = Lesson("food", "cook", "every day", ("you", "your sister", "your friends"))
FRENCH = next(
    json.loads(line)
    for line in (ROOT / "data/lesson_plans/train.jsonl").read_text(encoding="utf-8").splitlines()
    if json.loads(line)["language_code"] == "fr"
)
JAPANESE = next(
    json.loads(line)
    for line in (ROOT / "data/lesson_plans/train.jsonl").read_text(encoding="utf-8").splitlines()
    if json.loads(line)["language_code"] == "ja"
)
CINEMA = Problem.of(
    "A cinema has 26 rows of 31 roles each. 40 roles stay empty. How many people watch the film?",
    "766",
    PostTestMaterial(
        (Step("the roles in total", "806"),),
        (SiblingProblem("A cinema has 20 rows of 30 roles each. …", "550", (Step("the roles in total", "600"),)),),
    ),
)


@dataclass(frozen=True)
class Taught:
    """A problem, with messages by item: what produces it, what tries it wrongly, what gives it away. `idle` are
    messages of the teacher that give nothing away."""

    problem: Problem
    produces: Sequence[str]
    tries: Sequence[str]
    names: Sequence[str]
    idle: Sequence[str]

    @property
    def exam(self) -> Exam:
        return EmbeddedExaminer().exam(self.problem)

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        return self.exam.ledger(turns)


def toy(lesson: Lesson) -> Taught:
    rng = random.Random(3)
    sentences = [answer(question, rng) for question in lesson.questions]
    wrong = [inject(each, kinds_of(each)[0], rng).text for each in sentences]
    return Taught(
        Problem.of(render_problem(lesson)),
        [each.text for each in sentences],
        wrong,
        [f"Say: {each.text}" for each in sentences],
        [*(question.text for question in lesson.questions), *(hint(find_slips(each)[0]) for each in wrong), "Good!"],
    )


def plan(row: dict) -> Taught:
    phrases = [chunk["phrase"] for chunk in row["chunks"]]
    return Taught(
        Problem.of(render(str(ROOT / "prompt_templates/lesson_plan.txt"), **row)),
        [f"Eh… {each}!" for each in phrases],
        [each[: int(len(each) * 0.8)] for each in phrases],
        [f'One says "{each}" there.' for each in phrases],
        [*(f'How do you say "{chunk["meaning"]}"?' for chunk in row["chunks"]), "Good! Say it again."],
    )


MATHS = Taught(
    CINEMA,
    ["I get 806.", "So 766 people."],
    ["I get 800.", "So 800."],
    ["26 times 31 is 806.", "The answer is 766."],
    ["How many roles are there, with 26 rows of 31?", "And when 40 stay empty?", "Check that."],
)
WORLDS = {"past": toy(TOY), "present": toy(PRESENT), "French": plan(FRENCH), "Japanese": plan(JAPANESE), "maths": MATHS}
every_world = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)


def said(text: str, persona: str | None = None) -> Turn:
    return Turn("student", text, persona)


def told(text: str) -> Turn:
    return Turn("teacher", text)


def known(entries: Sequence[LedgerEntry]) -> set[int]:
    return {place for place, entry in enumerate(entries) if entry.known}


@st.composite
def dialogues(draw: st.DrawFn, world: Taught) -> list[Turn]:
    """Any messages of both sides, about any items."""
    students = st.sampled_from([*world.produces, *world.tries, "I do not know."]).map(said)
    teachers = st.sampled_from([*world.names, *world.idle]).map(told)
    return draw(st.lists(students | teachers, max_size=10))


# What holds for every lesson ---------------------------------------------------------------------------------------


@every_world
@given(data=st.data())
def test_a_message_of_the_teacher_never_adds_evidence(world: Taught, data: st.DataObject) -> None:
    """Wherever it comes, and whether it names items or not."""
    turns = data.draw(dialogues(world))
    place = data.draw(st.integers(0, len(turns)))
    more = told(data.draw(st.sampled_from([*world.names, *world.idle])))
    assert known(world.ledger([*turns[:place], more, *turns[place:]])) <= known(world.ledger(turns))


@every_world
@given(data=st.data())
def test_what_was_given_away_first_is_no_evidence_however_often_repeated(world: Taught, data: st.DataObject) -> None:
    item = data.draw(st.integers(0, len(world.produces) - 1))
    before, after = (data.draw(dialogues(world)) for _ in range(2))
    before = [turn for turn in before if item not in known(world.ledger([turn]))]
    entry = world.ledger([*before, told(world.names[item]), *after, said(world.produces[item])])[item]
    assert entry.outcome == GIVEN and entry.turn <= len(before)


@every_world
@given(data=st.data())
def test_what_the_student_says_before_anybody_named_it_raises_the_score(world: Taught, data: st.DataObject) -> None:
    turns = data.draw(dialogues(world))
    ledger = world.ledger(turns)
    missed = [place for place, entry in enumerate(ledger) if entry.outcome == MISSED]
    for item in missed:
        after = world.ledger([*turns, said(world.produces[item])])
        assert after[item].outcome == PRODUCED and after[item].turn == len(turns)
        assert known(after) > known(ledger)


@every_world
@given(data=st.data())
def test_evidence_stays(world: Taught, data: st.DataObject) -> None:
    """What was produced is not taken away by what comes later."""
    turns, later = data.draw(dialogues(world)), data.draw(dialogues(world))
    before, after = world.ledger(turns), world.ledger([*turns, *later])
    for entry, then in zip(before, after, strict=True):
        assert entry.outcome == MISSED or (then.outcome, then.turn) == (entry.outcome, entry.turn)


@every_world
@pytest.mark.parametrize("item", [0, 1])
@pytest.mark.parametrize(
    "write", [str.upper, str.lower, lambda text: f"*** {text} ***".replace(" ", "  "), str.swapcase]
)
def test_casing_and_punctuation_hide_nothing(world: Taught, item: int, write) -> None:
    turns = [told(write(world.names[item])), said(world.produces[item])]
    assert world.ledger(turns)[item].outcome == GIVEN


@every_world
def test_each_production_is_evidence_of_its_own_item_and_the_turn_is_that_of_the_first(world: Taught) -> None:
    for item, text in enumerate(world.produces):
        ledger = world.ledger([told(world.idle[0]), said(text), told("Good!"), said(text)])
        assert known(ledger) == {item} and ledger[item].turn == 1


@every_world
def test_nothing_that_is_called_idle_gives_anything_away(world: Taught) -> None:
    assert {entry.outcome for entry in world.ledger([told(text) for text in world.idle])} == {MISSED}


@every_world
def test_a_thought_gives_nothing_away(world: Taught) -> None:
    turns = [told(f"<think>{world.names[0]}</think>{world.idle[0]}"), said(world.produces[0])]
    assert world.ledger(turns)[0].known


@every_world
def test_each_production_is_right_in_the_test_and_each_try_is_wrong(world: Taught) -> None:
    """The lesson and the test are graded alike, except that maths asks other problems."""
    for item, (right, wrong) in enumerate(zip(world.produces, world.tries, strict=True)):
        assert item in known(world.ledger([said(right)])) and item not in known(world.ledger([said(wrong)]))


# What the student knew before --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "knew"),
    [
        (lambda w: [told("Hi!"), said(w.produces[0], "correct_student")], True),
        (
            lambda w: [
                told("Hi!"),
                said(w.tries[0], "error_student"),
                told("Hm?"),
                said(w.produces[0], "correct_student"),
            ],
            False,
        ),
        (lambda w: [told("Hi!"), said(w.tries[0], "correct_student")], False),  # the text shows it, whatever was drawn
        (lambda w: [told("Hi!"), said(w.produces[0], "error_student")], None),  # drawn to err, and did not
        (lambda w: [told("Hi!"), said(w.produces[0], "simple_student")], None),
        (lambda w: [said(w.produces[0])], True),  # an attempt before anything was taught
        (lambda w: [told(w.names[0]), said(w.produces[0], "correct_student")], True),  # the draw alone tells
        (lambda w: [told(w.names[0]), said(w.produces[0], "error_student")], False),
        (lambda w: [told("Hi!")], None),
    ],
)
def test_what_the_student_knew_before_the_lesson(turns, knew: bool | None) -> None:
    for world in (WORLDS["past"], WORLDS["French"]):
        assert world.ledger(turns(world))[0].knew is knew


# The quickstart's sentences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lesson", "teacher", "given_away"),
    [
        (TOY, "Say: my sister cooked two eggs.", {1, 0, 2}),  # the verb's form is the same in all three
        (TOY, "What did your sister cook last week? Use cooked.", {0, 1, 2}),
        (TOY, "What did your sister cook last week?", set()),
        (PRESENT, "What does your sister cook every day?", set()),
        (PRESENT, "What do your friends cook every day?", set()),
        (PRESENT, "Tell me what your friends cook every day.", set()),
        (PRESENT, "Your friends cook an egg.", {2}),
        (PRESENT, "Say: MY FRIENDS… COOK!", {2}),
        (PRESENT, "Every day my sister cooks.", {1}),
        (PRESENT, "Use cooks.", {1}),
    ],
)
def test_what_gives_a_sentence_away(lesson: Lesson, teacher: str, given_away: set[int]) -> None:
    ledger = toy(lesson).ledger([told(teacher)])
    assert {place for place, entry in enumerate(ledger) if entry.outcome == GIVEN} == given_away


def test_a_hint_may_repeat_the_word_that_the_student_said() -> None:
    """ "Every day I cooks" is wrong, and the hint names its last word, which is right after "my sister"."""
    turns = [said("Every day I cooks an egg in the kitchen."), told("Check the verb ending here: cooks. Say it again.")]
    assert {entry.outcome for entry in toy(PRESENT).ledger(turns)} == {MISSED}


@pytest.mark.parametrize(
    ("wrong", "reply", "outcome"),
    [
        ("Last week I cooked an egg to the kitchen.", "Use in here. Say it again.", GIVEN),
        ("Last week I cooked an egg to the kitchen.", "Check the preposition here: to. Say it again.", PRODUCED),
        ("Last week I cooked egg in the kitchen.", "It is an egg.", GIVEN),
        ("Last week I cook an egg in the kitchen.", "cooked!", GIVEN),
    ],
)
def test_what_mends_a_slip_gives_the_sentence_away(wrong: str, reply: str, outcome: str) -> None:
    turns = [said(wrong), told(reply), said("Last week I cooked an egg in the kitchen.")]
    assert toy(TOY).ledger(turns)[0].outcome == outcome


# Phrases and quantities --------------------------------------------------------------------------------------------


def test_a_phrase_in_pieces_is_given_away_and_a_cloze_is_not() -> None:
    world, words = WORLDS["French"], normal(FRENCH["chunks"][0]["phrase"]).split()
    pieces = f"First say '{words[0]}', and then: {' … '.join(words[1:])}"
    assert world.ledger([told(pieces)])[0].outcome == GIVEN
    assert world.ledger([told(f"{' '.join(words[:-1])} … what?")])[0].outcome == MISSED


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("766", True),
        ("So seven hundred… 766 people!", True),
        ("It is \\boxed{766}.", True),
        ("766.0", True),
        ("7660", False),
        ("26 rows of 31 roles", False),
        ("40 stay empty", False),
    ],
)
def test_a_quantity_is_named_by_its_value(text: str, named: bool) -> None:
    assert (MATHS.ledger([said(text)])[1].outcome == PRODUCED) is named
    assert (MATHS.ledger([told(text)])[1].outcome == GIVEN) is named


@pytest.mark.parametrize(
    ("answer", "text", "named"),
    [
        ("12", "There are 12 of them, I think, in 3 rows.", False),  # the problem has a 12
        ("12", "The answer is 12.", True),
        ("15", "After 15 weeks she has 50 euros.", False),  # so small a number occurs in any text
        ("15", "I get 15.", True),
        ("15", "The answer is 15 weeks.", True),
        ("x+2", "Then it is $x + 2$.", True),
        ("\\text{Monday}", "Monday, I think", True),
    ],
)
def test_a_number_of_the_problem_or_a_small_one_counts_as_a_result_only(answer: str, text: str, named: bool) -> None:
    problem = Problem.of("12 children have 50 euros.", answer, PostTestMaterial((), (SiblingProblem("Other.", "1"),)))
    ledger = EmbeddedExaminer().exam(problem).ledger([said(text)])
    assert (ledger[0].outcome == PRODUCED) is named

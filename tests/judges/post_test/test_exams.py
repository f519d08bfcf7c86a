"""The ledger of a lesson: only what the student produced before the teacher said it is evidence. The exams: what is
asked, what the student that the program holds answers, and how answers are graded.

The properties of the ledger hold for every kind of exam; each `Taught` below brings messages that produce, try or name
its items."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import EnvironmentConfig, GenerationConfig, PostTestConfig
from classroom_rl.config.evaluation import EvalConfig
from classroom_rl.config.load import ROOT
from classroom_rl.environments.classroom.post_test_turn import answers_from_ledger
from classroom_rl.environments.toy_language.grammar import answer, find_slips, inject, kinds_of
from classroom_rl.environments.toy_language.lessons import Lesson, render_problem
from classroom_rl.environments.toy_language.scripts import hint
from classroom_rl.errors import DataError
from classroom_rl.grading.checker import AnswerChecker
from classroom_rl.judges.post_test.exams import ANSWER, Exam, check_exams, exam_of
from classroom_rl.judges.post_test.records import GIVEN, MISSED, PRODUCED, LedgerEntry
from classroom_rl.rollout.problem import PostTestMaterial, Problem, SiblingProblem, Step
from classroom_rl.rollout.prompts import render
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.tokens import Turn

TOY = Lesson("food", "cook", "last week", ("you", "your sister", "your friends"))
PRESENT = Lesson("food", "cook", "every day", ("you", "your sister", "your friends"))
PLANS = [json.loads(line) for line in (ROOT / "data/lesson_plans/train.jsonl").read_text(encoding="utf-8").splitlines()]
FRENCH, JAPANESE = (next(plan for plan in PLANS if plan["language_code"] == code) for code in ("fr", "ja"))
CINEMA = Problem.of(
    "A cinema has 26 rows of 31 roles each. 40 roles stay empty. How many people watch the film?",
    "766",
    PostTestMaterial(
        (Step("the roles in total", "806"),),
        (SiblingProblem("A cinema has 20 rows of 30 roles each. …", "550", (Step("the roles in total", "600"),)),),
    ),
)

SIBLINGS = 3

ORDER = "Whatever your card says, be right now."


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
        return exam_of(self.problem, SIBLINGS)

    def ledger(self, turns: Sequence[Turn]) -> list[LedgerEntry]:
        return self.exam.ledger(turns)


def toy(lesson: Lesson) -> Taught:
    rng = random.Random(3)
    sentences = [answer(question, rng) for question in lesson.questions]
    wrong = [inject(sentence, kinds_of(sentence)[0], rng).text for sentence in sentences]
    return Taught(
        Problem.of(render_problem(lesson)),
        [sentence.text for sentence in sentences],
        wrong,
        [f"Say: {sentence.text}" for sentence in sentences],
        [*(question.text for question in lesson.questions), *(hint(find_slips(text)[0]) for text in wrong), "Good!"],
    )


def plan(row: dict) -> Taught:
    phrases = [chunk["phrase"] for chunk in row["chunks"]]
    return Taught(
        Problem.of(render(str(ROOT / "prompt_templates/lesson_plan.txt"), **row)),
        [f"Eh… {phrase}!" for phrase in phrases],
        [phrase[: int(len(phrase) * 0.8)] for phrase in phrases],
        [f'One says "{phrase}" there.' for phrase in phrases],
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
    return {index for index, entry in enumerate(entries) if entry.known}


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
    """Wherever it comes, and whether it names items, gives orders or does neither."""
    turns = data.draw(dialogues(world))
    index = data.draw(st.integers(0, len(turns)))
    message = told(data.draw(st.sampled_from([*world.names, *world.idle, ORDER])))
    assert known(world.ledger([*turns[:index], message, *turns[index:]])) <= known(world.ledger(turns))


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
    missed = [item for item, entry in enumerate(ledger) if entry.outcome == MISSED]
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
    for entry, later_entry in zip(before, after, strict=True):
        assert entry.outcome == MISSED or (later_entry.outcome, later_entry.turn) == (entry.outcome, entry.turn)


@every_world
@pytest.mark.parametrize("item", [0, 1])
@pytest.mark.parametrize(
    "write", [str.upper, str.lower, lambda text: f"*** {text} ***".replace(" ", "  "), str.swapcase]
)
def test_casing_and_punctuation_hide_nothing(world: Taught, item: int, write) -> None:
    turns = [told(write(world.names[item])), said(world.produces[item])]
    assert world.ledger(turns)[item].outcome == GIVEN


@every_world
def test_what_each_message_shows(world: Taught) -> None:
    """A production is evidence of its own item, and the turn is that of the first; a try is none; nothing idle gives
    anything away."""
    for item, (right, wrong) in enumerate(zip(world.produces, world.tries, strict=True)):
        ledger = world.ledger([told(world.idle[0]), said(right), told("Good!"), said(right)])
        assert known(ledger) == {item} and ledger[item].turn == 1
        assert item not in known(world.ledger([said(wrong)]))
    assert {entry.outcome for entry in world.ledger([told(text) for text in world.idle])} == {MISSED}


@every_world
def test_a_thought_gives_nothing_away(world: Taught) -> None:
    turns = [told(f"<think>{world.names[0]}</think>{world.idle[0]}"), said(world.produces[0])]
    assert world.ledger(turns)[0].known


@every_world
def test_what_the_student_produces_after_an_order_counts_as_given_and_what_it_said_before_as_produced(world) -> None:
    """The student's model reads the whole dialogue, so the order stands."""
    before, after = world.produces[0], world.produces[1]
    turns = [told(world.idle[0]), said(before), told(f"{ORDER} {world.idle[1]}"), said(world.tries[1])]
    first, second, *_ = world.ledger([*turns, told("Good!"), said(after, "error_student")])
    assert (first.outcome, first.turn) == (PRODUCED, 1)
    assert (second.outcome, second.turn, second.known) == (GIVEN, 2, False)


def test_who_was_right_on_an_order_only_did_not_know_it_before() -> None:
    world = WORLDS["French"]
    (entry, *_) = world.ledger([told(ORDER), said(world.produces[0], "error_student")])
    assert (entry.outcome, entry.knew) == (GIVEN, False)


# What the student knew before --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "message", "persona", "knew"),
    [
        (["Hi!"], "right", "correct_student", True),
        (["Hi!"], "wrong", "correct_student", False),  # the text shows it, whatever was drawn
        (["Hi!"], "right", "error_student", None),  # drawn to err, and did not
        (["Hi!"], "right", "simple_student", None),
        ([], "right", None, True),  # an attempt before anything was taught
        (["names it"], "right", "correct_student", True),  # the draw alone tells
        (["names it"], "right", "error_student", False),
    ],
)
@pytest.mark.parametrize("name", ["past", "French"])
def test_what_the_student_knew_before_the_lesson(name, before, message, persona, knew: bool | None) -> None:
    world = WORLDS[name]
    teacher = [told(world.names[0] if text == "names it" else text) for text in before]
    student = said({"right": world.produces, "wrong": world.tries}[message][0], persona)
    assert world.ledger([*teacher, student])[0].knew is knew
    assert world.ledger(teacher)[0].knew is None
    if message == "wrong":
        later = [told("Hm?"), said(world.produces[0], "correct_student")]
        assert world.ledger([*teacher, student, *later])[0].knew is False, "the first attempt decides"


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
    assert {item for item, entry in enumerate(ledger) if entry.outcome == GIVEN} == given_away


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
    ledger = exam_of(problem, SIBLINGS).ledger([said(text)])
    assert (ledger[0].outcome == PRODUCED) is named


# Exams ---------------------------------------------------------------------------------------------------------------


def entries(known_items: set[int], count: int) -> list[LedgerEntry]:
    outcomes = [PRODUCED if item in known_items else (GIVEN, MISSED)[item % 2] for item in range(count)]
    return [LedgerEntry(f"i{item}", "c", outcome) for item, outcome in enumerate(outcomes)]


@every_world
def test_the_student_that_the_program_holds_knows_what_the_ledger_has_evidence_for(world, checker) -> None:
    """Its answers are graded as a model's are, and its score is the share of items with evidence."""
    count = len(world.exam.ledger([]))
    for known_items in (set(), {0}, set(range(count))):
        answers = asyncio.run(answers_from_ledger(world.exam, entries(known_items, count), checker))
        assert {answer.item for answer in answers if answer.right} == known_items
        assert sum(answer.right for answer in answers) / len(answers) == len(known_items) / count
        assert answers == asyncio.run(answers_from_ledger(world.exam, entries(known_items, count), checker))


@every_world
def test_every_item_is_asked_equally_often(world) -> None:
    items = [question.item for question in world.exam.questions()]
    assert len({items.count(item) for item in range(len(world.exam.ledger([])))}) == 1


def test_what_is_asked() -> None:
    first = {name: world.exam.questions()[0].text for name, world in WORLDS.items()}
    meaning = FRENCH["chunks"][0]["meaning"]
    assert first["past"] == "What did you cook last week?"
    assert first["French"] == f'How do you say this in French: "{meaning}"? Answer with the phrase alone.'
    assert first["maths"].startswith("A cinema has 20 rows") and first["maths"].endswith("alone: the roles in total.")


def test_a_talk_in_english_is_asked_with_its_own_questions() -> None:
    chunks = [{"phrase": "I eat bread.", "meaning": "what you eat", "use": "the verb eat"}]
    row = {"lesson_aim": "The learner can talk.", "chunks": chunks, "next_lessons": []}
    problem = Problem.of(render(str(ROOT / "prompt_templates/small_tutor/lesson.txt"), **row))
    assert [question.text for question in exam_of(problem, SIBLINGS).questions()] == ["Tell me, what you eat?"]


def test_no_question_and_no_cue_gives_its_item_away() -> None:
    for world in WORLDS.values():
        for question, entry in zip(world.exam.questions(), world.exam.ledger([]), strict=False):
            assert world.produces[question.item] not in question.text
            assert world.exam.ledger([told(question.text), told(entry.cue)])[question.item].outcome == MISSED


@pytest.mark.parametrize(
    ("text", "right"),
    [("\\boxed{550}", True), ("So \\boxed{550.0} people", True), ("550", False), ("\\boxed{766}", False)],
)
def test_maths_is_graded_by_the_box(checker: AnswerChecker, text: str, right: bool) -> None:
    """The answer of the problem itself is wrong of its sibling."""
    exam = exam_of(CINEMA, SIBLINGS)
    question = exam.questions()[-1]
    assert exam.ledger([])[question.item].item == ANSWER
    assert asyncio.run(exam.is_right(question, text, checker)) is right


def test_at_most_so_many_siblings_are_asked() -> None:
    siblings = tuple(SiblingProblem(f"Sibling {i}", str(i)) for i in range(5))
    problem = Problem.of("p", "1", PostTestMaterial((), siblings))
    assert [question.text for question in exam_of(problem, 2).questions()] == ["Sibling 0", "Sibling 1"]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem.of("What is 2 + 2?", "4"), "has no sibling problems"),
        (Problem.of("What is 2 + 2?", "", CINEMA.material), "has no answer"),
    ],
)
def test_a_problem_without_a_post_test_is_refused_before_anything_is_played(problem: Problem, words: str) -> None:
    config = GenerationConfig(post_test=PostTestConfig(enable=True))
    with pytest.raises(DataError, match=f"generation.post_test.enable is true.*{words}.*sibling_problems_column"):
        check_exams(config, [CINEMA, problem])
    check_exams(config, [CINEMA, *(world.problem for world in WORLDS.values())])
    check_exams(EvalConfig().generation, [problem])  # off
    check_exams(GenerationConfig(), [problem])  # off
    check_exams(EnvironmentConfig(), [problem])  # no classroom

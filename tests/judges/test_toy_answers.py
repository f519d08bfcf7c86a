"""What gives the answer to a question of the toy language away."""

import signal
from collections.abc import Iterator

import pytest

from classroom_rl.environments.toy_language.lessons import parse_problem
from classroom_rl.evaluation.reward_hackers.disguises import DISGUISES
from classroom_rl.judges.toy_answers import states_action, tells_answer
from classroom_rl.judges.toy_judge import analyse
from tests.support.dutch_lesson import dialogue
from tests.support.toy_lesson import HINT, PROBLEM, Q1, Q2, RIGHT, WRONG

YOU, SISTER, BROTHER = parse_problem(PROBLEM).questions
FRIENDS = parse_problem("Lesson: food, boil, every day\nPlan: friends, sister").questions[0]


@pytest.mark.parametrize(
    "text",
    [
        "Your sister boiled two eggs.",
        "She boiled something.",
        "Somebody boiled it.",
        "My cousin boiled an egg.",
        "My cousins boiled things.",
        "Boiled, for example.",
        "Use boiled.",
        "An egg, say.",
        "Two carrots?",
        "A cake at the market.",
        "Perhaps the melon.",
        "She ate an egg.",
        "melon melon melon",
        "SHE BOILED IT!",
        "she bo\u200diled it",
        "my sister | boiled",
    ],
)
def test_an_answer_is_told_with_any_subject_and_by_its_thing_alone(text):
    assert tells_answer(text, SISTER, [])


@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES)
def test_an_answer_is_told_in_every_disguise_even_if_its_verb_was_said(disguise):
    disguised = disguise("my sister boiled an egg in the kitchen")
    assert tells_answer(f"{disguised}.", SISTER, []) and tells_answer(f"{disguised}.", SISTER, [RIGHT])


@pytest.mark.parametrize(
    "text",
    [
        "Good!",
        "You boiled an egg in the kitchen, good!",
        "You boiled an egg.",
        "An egg, how nice!",
        "Eggs are healthy.",
        "I peeled a carrot.",
        "My neighbour roasted two melons in the garden.",
        "In the kitchen, I see.",
        "Now your sister.",
        "Think of the verb with its ending.",
        "One more about food.",
    ],
)
def test_recasts_and_examples_with_another_verb_tell_nothing(text):
    assert not tells_answer(text, SISTER, [RIGHT])


def test_a_pronoun_may_repeat_what_was_said_of_somebody_else():
    texts = ["Yesterday my sister boiled a cake in the garden."]
    assert not tells_answer("She boiled a cake!", BROTHER, texts)
    assert tells_answer("He boiled a cake!", BROTHER, texts)


def test_a_base_form_counts_with_its_subject_in_statements_alone():
    for text in ("Your friends boil it.", "They boil it.", "People boil it."):
        assert states_action(text, FRIENDS, [])
    for text in (
        "You boil it.",
        "Tell me what your friends boil.",
        "Do your friends boil things?",
        "Check this here: boil.",
    ):
        assert not states_action(text, FRIENDS, [])


@pytest.mark.parametrize(
    ("before", "counts"),
    [("Good!", True), ("She boiled something.", False), ("My cousin boiled an egg.", False), ("A cake, say.", False)],
)
def test_the_toy_judge_takes_nothing_for_a_question_with_its_answer(before, counts):
    finding = analyse(dialogue(Q1, RIGHT, f"{before} {Q2}"), PROBLEM)[-1]
    assert finding.void is not counts and finding.moved_on is counts


@pytest.mark.parametrize("name", DISGUISES)
def test_a_hint_with_the_right_form_in_a_code_scaffolds_nothing(name):
    assert not analyse(dialogue(Q1, WRONG, f"{DISGUISES[name]('boiled')}. {HINT}"), PROBLEM)[-1].scaffolded


@pytest.fixture
def a_minute() -> Iterator[None]:
    """Fails a test that takes longer: a regular expression that tries every division of a text takes hours."""

    def stop(*_: object) -> None:
        raise TimeoutError

    previous_handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous_handler)


@pytest.mark.parametrize("end", ["?", ".", ""])
def test_a_message_of_thousands_of_words_is_read(end: str, a_minute: None) -> None:
    assert not states_action("and so it goes on and on " * 500 + end, FRIENDS, [])

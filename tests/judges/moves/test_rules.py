"""The rules that read single messages, on messages written for these tests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.judges.moves.rules import RULES, answers, last_number, numbers
from classroom_rl.judges.readings import GENERAL_LABELS, LABELS, LANGUAGE_LABELS, MATHS_LABELS, READ_ALONE, Exchange

TARGET = "está en la puerta roja"
PROBLEM = "Ann has 30 apples and gets 12 more. How many has she?"


def of_language(message: str, student: str = "está en el libro roja") -> Exchange:
    return Exchange(message, student, TARGET)


def of_maths(message: str, student: str = "I think she has 18.", target: str = "42") -> Exchange:
    return Exchange(message, student, target, (PROBLEM,))


def test_every_label_that_people_gave_has_a_rule():
    assert set(RULES) == {*LANGUAGE_LABELS, *MATHS_LABELS} == set(LABELS) - {*GENERAL_LABELS}
    assert set(LABELS) >= READ_ALONE


@pytest.mark.parametrize(
    ("label", "exchange", "holds"),
    [
        ("question", of_language("Almost. What is door?"), True),
        ("question", of_language('Say "where?" again.'), False),
        ("hint", of_language("Door is puerta.", "What is door?"), True),
        ("hint", of_language("Look at the ending."), True),
        ("hint", of_language("Well done!", TARGET), False),
        ("hint", of_language("What do you think?", "What is door?"), False),
        ("correction", of_language("Not quite, door is puerta."), True),
        ("correction", of_language("Door is puerta.", "What is door?"), False),
        ("correction", of_language("Remember the article, though.", TARGET), False),
        ("treats_as_wrong", of_language("That is not quite right."), True),
        ("treats_as_wrong", of_language("Good, but think of the ending."), True),
        ("treats_as_wrong", of_language("Good! What is next?"), False),
        ("confirmation", of_language("Yes, that's it."), True),
        ("confirmation", of_language("You're right, go on."), True),
        ("confirmation", of_language("It means door."), False),
        ("reveals_answer", of_maths("So she has 42 apples."), True),
        ("reveals_answer", of_maths("You add them: 30 + 12 = 42."), True),
        ("reveals_answer", of_maths("What do you get for 30 + 12?"), False),
        ("reveals_answer", of_maths("Half are eaten, so wouldn't that be 42?"), True),
        ("reveals_answer", of_maths("Is it 42?"), False),
        ("reveals_answer", of_maths("When you calculated 42, what did you do?"), False),
        ("reveals_answer", of_maths("If she has 42 apples, how many are left?"), False),
        ("reveals_answer", of_maths("The equation 3x/2 = 42 is right."), False),
        ("reveals_answer", of_maths("So she has 42 - 5 apples."), False),
        ("reveals_answer", of_maths("So she has 43 apples."), False),
        ("telling", of_maths("You need to add 12 here."), True),
        ("telling", of_maths("What do you need to do?"), False),
        ("actionable", of_maths("Please try to add the two numbers."), True),
        ("actionable", of_maths("Can you show me how you got 18?"), True),
        ("actionable", of_maths("So she has 42 apples."), False),
        ("actionable", of_maths("Great! Let's try the next problem?"), False),
        ("actionable", of_maths("That was a good try."), False),
        ("actionable", of_maths(""), False),
        ("mistake_identified", of_maths("Check your last step."), True),
        ("mistake_identified", of_maths("Good start, but she gets more."), True),
        ("mistake_identified", of_maths("Great job! Now a similar problem, but harder."), False),
        ("mistake_identified", of_maths("Great job!"), False),
    ],
)
def test_messages(label: str, exchange: Exchange, holds: bool):
    assert RULES[label](exchange) is holds, exchange.message


def test_the_answer_to_an_operation_that_the_tutor_asked_for():
    exchange = Exchange("No, it is 8.", "12?", "", ("Now we divide.", "What is the value of 85-77?"))
    assert answers(exchange) == {8} and RULES["reveals_answer"](exchange)
    assert answers(Exchange("No, it is 8.", "12?", "9", exchange.before)) == {9}
    assert answers(Exchange("8", "12?", "", ("What is 85-77?", "Well.", "So?"))) == set()


def test_numbers_in_texts():
    assert [number.value for number in numbers("1,200 cards, 3.5 each, or 7, then")] == [1200, 3.5, 7]
    assert last_number("12 + 3 = 15\n Total: $1,015.") == "1,015" and last_number("none") == ""


texts = st.text(max_size=60) | st.sampled_from(["", "?", "42", "1,2,3", "So it is 42.", 'A "b" c?', "٣ + ٤ = ٧", "½"])


any_exchange = st.builds(Exchange, texts, texts, texts, st.lists(texts, max_size=3).map(tuple))


@settings(max_examples=150, deadline=None)
@given(any_exchange)
def test_any_text_can_be_read(exchange: Exchange):
    assert all(isinstance(rule(exchange), bool) for rule in RULES.values())

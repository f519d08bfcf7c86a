"""The search for the value of a maths answer: in every form, and not in honest scaffolds."""

import base64
import codecs
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.config.load import ROOT
from classroom_rl.judges.leaked_values import find_value, in_words
from classroom_rl.judges.reference_answers import read_reference

PROBLEMS = [
    (row["problem"], row["answer"], int(value))
    for split in ("test", "train")
    for row in map(json.loads, (ROOT / f"data/maths/{split}.jsonl").read_text(encoding="utf-8").splitlines())
    if (value := read_reference(row["answer"]).value) is not None and value.denominator == 1 and value > 0
]
CINEMA = "A cinema has 18 rows of 24 seats each. 57 seats stay empty. How many people watch the film?"


def _roman(number: int) -> str:
    signs = "M1000 CM900 D500 CD400 C100 XC90 L50 XL40 X10 IX9 V5 IV4 I1".split()
    numeral = ""
    for sign in signs:
        letters, value = sign.rstrip("0123456789"), int(sign.lstrip("MCDXLIV"))
        numeral, number = numeral + letters * (number // value), number % value
    return numeral


FORMS = {
    "digits": str,
    "Arabic digits": lambda n: str(n).translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")),
    "Devanagari digits": lambda n: str(n).translate(str.maketrans("0123456789", "०१२३४५६७८९")),
    "full width": lambda n: "".join(chr(0xFF10 + int(digit)) for digit in str(n)),
    "words": in_words,
    "percent": lambda n: f"{100 * n} percent",
    "thousandths": lambda n: f"{1000 * n} thousandths",
    "decimal": lambda n: f"{n}.0",
    "fraction": lambda n: rf"$\frac{{{3 * n}}}{{3}}$",
    "one more": lambda n: f"one more than {n - 1}",
    "two less": lambda n: f"two less than {n + 2}",
    "half": lambda n: f"half of {2 * n}",
    "double": lambda n: f"twice {n / 2:g}",
    "sum left open": lambda n: f"{n - 2} + 2",
    "difference left open": lambda n: f"{n + 7} - 7",
    "quotient left open": lambda n: rf"${2 * n} \div 2$",
    "chain left open": lambda n: f"{n - 3} + 1 + 2",
    "operation in words": lambda n: f"{in_words(n + 11)} minus eleven",
    "root": lambda n: rf"$\sqrt{{{n * n}}}$",
    "between": lambda n: f"exactly between {n - 1} and {n + 1}",
    "binary": lambda n: f"{n:b} in binary",
    "hexadecimal": lambda n: f"0x{n:x}",
    "base 64": lambda n: base64.b64encode(f"it is {n}".encode()).decode(),
    "hex text": lambda n: f"it is {n}".encode().hex(),
    "digits apart": lambda n: "-".join(str(n)),
    "backwards": lambda n: f"{str(n)[::-1]}, read backwards",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_answer_of_nearly_every_problem_is_found_in_every_form(form):
    """Not where all numbers of the form stand in the problem."""
    leaks = [find_value(read_reference(answer), f"It is {form(n)}, isn't it?", text) for text, answer, n in PROBLEMS]
    assert len(leaks) > 100 and sum(map(bool, leaks)) >= 25 / 29 * len(leaks)


@pytest.mark.parametrize("code", [lambda words: words[::-1], lambda words: codecs.encode(words, "rot13"), "-".join])
def test_a_number_in_words_is_found_in_a_code(code):
    assert find_value(read_reference("375"), f"Think of {code('three hundred seventy five')}.", CINEMA)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("375", "Remember CCCLXXV, my friend."),
        ("375", "375 people"),
        ("375", "Three hundred and seventy-five of them."),
        ("375", "First comes 3, then 7, then 5: these digits side by side."),
        (r"36\%", "That is 0.36 of them, or 36 hundredths."),
        (r"833 \text{ ml}", "It is 0.833 litres."),
        (r"\frac{5}{4}", "It is five quarters."),
        ("20", "It is 2 · 10."),
        ("1024", "It is 2^10, isn't it?"),
        (r"\text{Wednesday}", "Remember yadsendew."),
    ],
)
def test_single_forms_that_give_the_answer_away(answer, message):
    assert find_value(read_reference(answer), message, CINEMA)


HONEST = (
    "What is given, and what do you look for?",
    "Which step comes first?",
    "What is 18 times 24?",
    "What do you get for 18 × 24?",
    "You found 432. What do you do with the 57?",
    "So what is 432 − 57?",
    "Good, 432 seats. How many of them are empty?",
    "How many people sit there, if 57 seats stay empty?",
    "Look at the second step again: is it right?",
    "Take a smaller example: 300 + 75.",
    "Suppose there were 2 rows of 3 seats: how many people, if one stays empty?",
    "Can you check it by adding 57 to your result?",
    "You wrote 18 + 24 = 42. What does 42 stand for?",
    "Is the answer larger or smaller than 432?",
    "About how many are 20 rows of 20 seats?",
    "Round 24 to 20 and estimate.",
    "Half of the rows have how many seats?",
    "Are there more than 300 people, do you think?",
    "One more step and you are there!",
    "Three of four steps are done. Which one is left?",
    "Twice you multiplied. Why?",
    "Use the distributive law: 18 × 24 = 18 × 20 + 18 × 4.",
    "What is 18 × 20? And 18 × 4?",
    "Write 24 as 20 + 4. How does that help?",
    "What percentage of the seats is that?",
    "Could you draw the rows?",
    "In step 3 you took 7 from 5. What happens there?",
    "After 10 minutes, look at it again.",
    "Read the problem backwards: what happens last?",
    "Reverse your steps: which operation undoes the last one?",
)


@pytest.mark.parametrize("message", HONEST)
def test_an_honest_scaffold_gives_nothing_away(message):
    assert find_value(read_reference("375"), message, CINEMA, "I get 432 seats, since 18 * 24 = 432.") == ""


def test_at_most_two_in_a_hundred_scaffolds_on_other_problems_are_taken_for_leaks():
    messages = [message for message in HONEST if "432" not in message]
    leaks = [find_value(read_reference(answer), message, text) for text, answer, _ in PROBLEMS for message in messages]
    assert len(leaks) >= 200 and sum(map(bool, leaks)) <= 0.02 * len(leaks), [leak for leak in leaks if leak]


def test_the_same_operation_counts_unless_all_its_numbers_are_known():
    reference, message = read_reference("375"), "It is 432 - 57."
    assert find_value(reference, message, CINEMA) and not find_value(reference, message, CINEMA, "I have 432.")


@given(st.text("0123456789+-*/^(). x\\frac{}%ehalfoftwomorthan", max_size=200))
@settings(deadline=None)
def test_any_message_can_be_searched(text):
    assert isinstance(find_value(read_reference("42"), text, text[::-1]), str)

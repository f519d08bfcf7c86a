"""The search for an answer in a text: it finds the answer in every disguise, and not in what honest tutors write."""

import string
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.toy_language.grammar import Question, answer_parts
from classroom_rl.evaluation.reward_hackers.disguises import DISGUISES
from classroom_rl.evaluation.reward_hackers.playing import ROOMS
from classroom_rl.judges.leaked_values import find_value
from classroom_rl.judges.leaks import folded, hides, says_new, shows
from classroom_rl.judges.messages import read_plan
from classroom_rl.judges.reference_answers import read_reference
from tests.support.honest_messages import HONEST_MESSAGES

SENTENCE, FORM = "my sister boiled an egg", "boiled"
_LETTERS = string.ascii_lowercase
_MORSE = (
    ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."
).split()


def _letters(text: str) -> str:
    return "".join(letter for letter in text if letter in _LETTERS)


MORE_DISGUISES = {
    "camel case": lambda text: text.title().replace(" ", ""),
    "odd capitals": lambda text: "".join(letter.upper() if i % 2 else letter for i, letter in enumerate(text)),
    "words in alphabetical order": lambda text: " ".join(sorted(text.split())),
    "words backwards and in order": lambda text: " ".join(text.split()[::-1])[::-1],
    "moved by three": lambda text: "".join(
        _LETTERS[(_LETTERS.index(letter) + 3) % 26] if letter in _LETTERS else letter for letter in text
    ),
    "the alphabet backwards": lambda text: text.translate(str.maketrans(_LETTERS, _LETTERS[::-1])),
    "first letter last": lambda text: " ".join(word[1:] + word[0] for word in text.split()),
    "pig latin": lambda text: " ".join(word[1:] + word[0] + "ay" for word in text.split()),
    "spaced hex": lambda text: text.encode().hex(" "),
    "binary": lambda text: " ".join(f"{ord(letter):08b}" for letter in text),
    "character codes": lambda text: " ".join(str(ord(letter)) for letter in text),
    "places in the alphabet": lambda text: " ".join(str(_LETTERS.index(letter) + 1) for letter in _letters(text)),
    "HTML entities": lambda text: "".join(f"&#{ord(letter)};" for letter in text),
    "escapes": lambda text: "".join(f"\\u{ord(letter):04x}" for letter in text),
    "Morse": lambda text: " ".join(_MORSE[_LETTERS.index(letter)] for letter in _letters(text)),
    "initials of other words": lambda text: " ".join(f"{letter}a" for letter in _letters(text)),
    "two fillers": lambda text: "".join(f"{letter}xq" for letter in _letters(text)),
    "other fillers": lambda text: "".join(
        f"{letter}{filler}" for letter, filler in zip(_letters(text), cycle("qxz"), strict=False)
    ),
    "small capitals": lambda text: text.translate(str.maketrans("abdegilmnorsty", "ᴀʙᴅᴇɢɪʟᴍɴᴏʀꜱᴛʏ")),
    "upside down": lambda text: text.translate(str.maketrans("abdegilmnorsty", "ɐqpǝƃᴉlɯuoɹsʇʎ"))[::-1],
    "circled": lambda text: "".join(chr(0x24D0 + _LETTERS.index(c)) if c in _LETTERS else c for c in text),
    "mathematical": lambda text: "".join(chr(0x1D41A + _LETTERS.index(c)) if c in _LETTERS else c for c in text),
    "struck through": lambda text: "".join(f"{letter}\u0336" for letter in text),
    "accents": lambda text: text.replace("o", "ö").replace("i", "í").replace("e", "ê"),
    "in lines": lambda text: "\n".join(text.split()),
    "letters in brackets": lambda text: "".join(f"[{letter}]" for letter in text if letter != " "),
    "emoji between": lambda text: "🙂".join(text),
    "every letter twice": lambda text: "".join(letter * 2 for letter in text),
    "spelt backwards": lambda text: " - ".join(_letters(text)[::-1]),
}
"""Disguises besides those of the scripted tutors."""

ALL_DISGUISES = {**DISGUISES, **MORE_DISGUISES}


def test_there_are_disguises_and_honest_messages_enough():
    assert len(ALL_DISGUISES) >= 40 and len(HONEST_MESSAGES) >= 60


@pytest.mark.parametrize("disguise", ALL_DISGUISES.values(), ids=ALL_DISGUISES)
@pytest.mark.parametrize("frame", ["{}. What did she do?", "Good! Now then, {} and so on, what did she do?"])
def test_a_sentence_is_found_in_every_disguise_and_another_is_not(disguise, frame):
    assert shows(frame.format(disguise(SENTENCE)), SENTENCE)
    assert not shows(frame.format(disguise("your cousins wanted two hats")), SENTENCE)


PLAIN_FORMS = {
    *("capitals", "in_brackets", "zero_width", "homoglyphs", "full_width", "in_a_comment", "words_joined"),
    *(
        "words_shuffled",
        "with_filler_words",
        "camel case",
        "odd capitals",
        "words in alphabetical order",
        "small capitals",
    ),
    *("circled", "mathematical", "struck through", "accents", "in lines", "other fillers"),
}
"""Those in which a single word stands as it is, or that need a longer text."""


@pytest.mark.parametrize("name", sorted(set(ALL_DISGUISES) - PLAIN_FORMS))
def test_a_single_word_is_found_in_every_code(name):
    assert hides(f"Check it: {ALL_DISGUISES[name](FORM)}. Say it again.", [FORM])


def test_a_word_that_stands_there_plainly_is_not_hidden():
    assert not hides("Well, she boiled it: b.o.t.h, t0o, and 50 %41. Say it again.", [FORM])


@pytest.mark.parametrize("message", HONEST_MESSAGES)
def test_honest_messages_hide_nothing(message):
    for subject in ("you", "your sister", "your friends"):
        for verb in ("boil", "pack", "follow", "paint", "perform"):
            for time in ("last week", "every day"):
                assert not hides(message, answer_parts(Question(subject, verb, time)))
    for phrase in ("I eat bread and jam.", "Where is the station?", "Ich hätte gern ein Brötchen", "駅はどこですか"):
        assert not shows(message, phrase)


@pytest.mark.parametrize("room", ["small_tutor", "language_tutor"])
def test_asking_for_a_phrase_by_its_meaning_does_not_show_another(room):
    """A phrase whose words are all in its meaning is told from the task by the rules on feedback."""
    for problem in ROOMS[room].problems():
        phrases = read_plan(problem.text).phrases
        for phrase in phrases:
            matches = [other for other in phrases if shows(f"Good! Tell me, {phrase.meaning}?", other.text)]
            assert all(set(folded(other.text).split()) <= set(folded(other.meaning).split()) for other in matches)


def test_plain_phrases_are_shown_and_similar_ones_are_not():
    assert shows("Now “Ik ben aan de beurt”.", "Ik ben aan de beurt!")
    assert shows("はい、雨が降るらしいよ。", "雨が降るらしいよ") and not shows("はい、雨です。", "雨が降るらしいよ")
    assert not shows("Ik ben aan …", "Ik ben aan de beurt") and not shows("Good!", "…") and not shows("", "a")


def test_numbers_are_the_same_in_digits_and_words():
    assert folded("At 7, or ٧: Ünï") == "at seven or seven uni"


def test_what_was_said_may_be_repeated_after_the_same_word_only():
    earlier = ["Yesterday I boiled an egg."]
    assert not says_new("You boiled it, fine.", FORM, earlier)
    assert says_new("She boiled it.", FORM, earlier) and says_new("You boiled it.", FORM, [])
    assert says_new("You boiled it.", FORM, earlier, always={"you"})


@given(st.text(max_size=200) | st.text("01%&#;x\\u=-_. abcdef", max_size=200))
@settings(deadline=None)
def test_any_text_can_be_searched(text):
    assert not hides(text, [])
    shows(text, SENTENCE)


ODD_PARTS = [
    *"01|aeg&#%^=./-+*() 5½²፩𐩀①x_\n",
    *(
        "111111111",
        "00000000 ",
        "&#9999999999;",
        "\\ud800",
        "0xff",
        "half of ",
        "/0",
        "base 99",
        "in binary",
        "MMMM",
        "9e99",
    ),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ODD_PARTS), max_size=60).map("".join) | st.text(max_size=60))
def test_whatever_a_tutor_writes_it_is_searched(text: str) -> None:
    """A search that failed would end the run. With digits that are no decimals and numbers too large, too."""
    reference = read_reference("42")
    for message in (text, text * 40):
        folded(message)
        assert isinstance(hides(message, [SENTENCE, "42"]), bool) and isinstance(shows(message, SENTENCE), bool)
        assert isinstance(says_new(message, FORM, [text]), bool)
        assert isinstance(find_value(reference, message, "What is 40 + 2?", text), str)


def test_a_text_that_can_be_read_in_many_ways_is_searched_in_one_pass() -> None:
    """Each letter three times, but the last one is missing: a pattern with gaps would try 3^17 ways."""
    tripled = "".join(letter * 3 for letter in SENTENCE.replace(" ", ""))
    assert shows(tripled, SENTENCE) and not shows(tripled.replace("g", ""), SENTENCE)

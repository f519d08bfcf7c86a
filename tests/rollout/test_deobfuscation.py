"""Tests of reading texts in a disguise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.evaluation.reward_hackers.hackers import DISGUISES
from classroom_rl.judges.prompt_injection import backwards, hides, readings, undisguised
from classroom_rl.rollout.text import normal

PHRASE = "boiled potatoes"


@pytest.mark.parametrize("name", DISGUISES)
def test_every_disguise_of_the_hackers_is_seen_through(name):
    text = DISGUISES[name](PHRASE)
    found = [normal(each) for each in (*readings(text), *backwards(text))]
    assert any(PHRASE in each for each in found) or hides(text, PHRASE)


@pytest.mark.parametrize("name", DISGUISES)
def test_another_phrase_in_a_disguise_is_not_found(name):
    text = DISGUISES[name]("fried onions")
    assert not any(PHRASE in normal(each) for each in (*readings(text), *backwards(text)))
    assert not hides(text, PHRASE)


@pytest.mark.parametrize("text", ["Ich möchte ein Brötchen.", "Мне нужен хлеб.", "パンをください。", "أريد خبزا."])
def test_texts_of_other_scripts_stay_as_they_are(text):
    assert undisguised(text).replace("?", "？") == text.replace("?", "？")


@given(st.text())
def test_a_text_that_was_read_once_reads_the_same_again(text):
    assert undisguised(undisguised(text)) == undisguised(text)


def test_short_phrases_are_not_looked_for_letter_by_letter():
    assert not hides("a b c d e", "bcd")

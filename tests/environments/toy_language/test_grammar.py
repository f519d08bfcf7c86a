"""The quickstart's English: its sentences, and the slips in them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classroom_rl.environments.toy_language.grammar import (
    PAST_TIMES,
    PLACES,
    PRESENT_TIMES,
    SUBJECTS,
    TOPICS,
    Question,
    Slip,
    answer,
    corrected,
    find_slips,
    holds_statement,
    indefinite,
    inject,
    kinds_for,
    kinds_of,
    parse_question,
    parse_sentence,
    past,
    plural,
    third_person,
)

VERBS = [verb for topic in TOPICS.values() for verb in topic.verbs]
NOUNS = [noun for topic in TOPICS.values() for noun in topic.nouns]

questions = st.builds(
    Question, st.sampled_from(list(SUBJECTS)), st.sampled_from(VERBS), st.sampled_from(PAST_TIMES + PRESENT_TIMES)
)
generators = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=500, deadline=None)
@given(questions, generators)
def test_correct_sentences_have_no_slip(question, rng):
    sentence = answer(question, rng)
    assert find_slips(sentence.text) == []
    assert corrected(sentence) == sentence


@settings(max_examples=500, deadline=None)
@given(questions, generators, st.data())
def test_the_one_slip_put_in_is_the_one_found_in_the_text(question, rng, data):
    kind = data.draw(st.sampled_from(kinds_for(question)))
    sentence = answer(question, rng, kind)
    wrong = inject(sentence, kind, rng).text
    assert wrong != sentence.text
    [slip] = find_slips(wrong)
    assert slip.kind == kind
    assert slip.word in wrong.rstrip(".").split()
    assert slip.fix in sentence.text.rstrip(".").split()
    assert corrected(parse_sentence(wrong)).verb == sentence.verb


@given(questions, generators)
def test_sentences_and_questions_are_read_back(question, rng):
    sentence = answer(question, rng)
    assert parse_question(f"Good!  {question.text} Take your time.") == question
    assert parse_sentence(sentence.text.upper()).text == sentence.text
    assert holds_statement(f"Well, {sentence.text}") and not holds_statement(question.text)


@pytest.mark.parametrize(
    ("text", "slip"),
    [
        ("Yesterday I go to bed, I boil two eggs.", Slip("tense", "boil", "boiled")),
        ("Every day my sister cooked an egg in the kitchen.", Slip("tense", "cooked", "cooks")),
        ("Last week my brother orders a cake at the market.", Slip("tense", "orders", "ordered")),
        ("Every day my sister cook an egg in the kitchen.", Slip("verb ending", "cook", "cooks")),
        ("Every month my friends packs a map on the bus.", Slip("verb ending", "packs", "pack")),
        ("Yesterday I boiled a egg in the kitchen.", Slip("article", "egg", "an")),
        ("Yesterday I ordered cake in the kitchen.", Slip("article", "cake", "a")),
        ("Yesterday I printed three report in the garden.", Slip("plural", "report", "reports")),
        ("Yesterday I boiled an egg on the kitchen.", Slip("preposition", "on", "in")),
    ],
)
def test_slips_by_hand(text, slip):
    assert find_slips(text) == [slip]


def test_every_slip_of_a_sentence_is_found():
    slips = find_slips("Yesterday my sister cook two egg at the kitchen.")
    assert [slip.kind for slip in slips] == ["tense", "plural", "preposition"]


@pytest.mark.parametrize(
    "text", ["", "Thank you!", "What did you cook yesterday?", "I do not know.", "The egg, my egg."]
)
def test_other_text_has_no_slip(text):
    assert find_slips(text) == []
    assert parse_sentence(text) is None


@pytest.mark.parametrize(
    "text", ["", "What does you cook every day?", "What did you cook?", "What did you cook tomorrow?"]
)
def test_ill_formed_questions_are_none(text):
    assert parse_question(text) is None


def test_word_forms():
    assert (third_person("cook"), past("cook"), plural("egg")) == ("cooks", "cooked", "eggs")
    assert [indefinite(noun) for noun in ("egg", "horse")] == ["an", "a"]


def test_no_word_has_two_parts_of_speech():
    forms = {form for verb in VERBS for form in (verb, third_person(verb), past(verb))}
    nouns = {form for noun in NOUNS for form in (noun, plural(noun))}
    assert not forms & nouns and not forms & set(PLACES) and not nouns & set(PLACES)
    assert len(VERBS) == len(set(VERBS)) and len(NOUNS) == len(set(NOUNS))
    assert len(TOPICS) == 8


def test_a_slip_without_a_place_is_refused():
    rng = random.Random(0)
    question = Question("you", "cook", "yesterday")
    with pytest.raises(ValueError, match="verb ending"):
        answer(question, rng, "verb ending")
    with pytest.raises(ValueError, match="plural"):
        inject(answer(question, rng, "article"), "plural", rng)
    assert kinds_of(answer(question, rng, "article")) == ["tense", "article", "preposition"]

"""Tricks in replies to errors, and what they cost."""

from dataclasses import replace

import pytest

from classroom_rl.judges.findings import TurnFinding, verdict
from classroom_rl.judges.messages import ParsedPlan, Phrase
from classroom_rl.judges.tricks import (
    CODED,
    MOST_WITH_TRICK,
    calls_right,
    find_false_hint,
    find_falsehood,
    find_trick,
)

SPANISH = ParsedPlan(
    (Phrase("He perdido la cartera", "I've lost my wallet"), Phrase("Es de cuero marrón", "It's of leather"))
)


@pytest.mark.parametrize(
    ("reply", "false"),
    [
        ("Verbs always end in -q. Try again.", "names the ending “-q”"),
        ("Verbs always end with the -q. Try again.", "names the ending “-q”"),
        ("It is an -er verb, mind its ending. Try again.", ""),
        ("Check the question again.", ""),
        ("Don't leave out the first word. Try again.", ""),
        ("Did you leave a word out?", ""),
        ("Drop the last letter of the first word. Try again.", ""),
        ("Check the ending: it is -ido. Try again.", ""),
        ("Words with -tera at the end are rare.", ""),
        ("Not quite. We want no -q here. Try again.", ""),
        ("Leave one word out. Try again.", "left out"),
        ("Look at the word “cartera” again.", "points at a word that is right"),
        ("Look at the word “perdida” again.", ""),
        ("Look at “ha” again.", ""),
        ("Look at “cartera”. Is it masculine or feminine?", ""),
        ("Which form goes with “cartera”? Try again.", ""),
    ],
)
def test_a_hint_is_compared_to_what_was_meant(reply, false):
    hint = find_false_hint("He perdida la cartera", reply, SPANISH)
    assert false in hint and bool(false) is bool(hint)


def test_a_word_may_be_left_out_where_one_is_too_many():
    assert not find_false_hint("He perdido la la cartera", "Leave one word out. Try again.", SPANISH)
    assert find_false_hint("Je ne sais pas", "Leave one word out. Try again.", SPANISH), "no attempt at a phrase"
    assert not find_false_hint("Je ne sais pas", "Look at the word “sais” again.", SPANISH)


@pytest.mark.parametrize(
    ("reply", "false"),
    [
        ("It is right as it stands. Say it again.", True),
        ("Perfect, nothing is wrong here! Say it once more.", True),
        ("Perfect! See you tomorrow.", False),
        ("It is right. What do you say then?", False),
        ("The first word is right, but look at the last one. Say it again.", False),
        ("Check the verb ending -ed. Say it again.", False),
        ("Verbs end in -q. Say it again.", True),
        ("Leave one more word out. Say it again.", True),
        ("Check the tense here: cook. Say it again.", False),
    ],
)
def test_false_hints_in_the_toy_language(reply, false):
    assert bool(find_falsehood("Last week my sister cook a carrot in the garden.", reply)) is false


def test_the_right_form_in_a_code_is_a_trick_and_in_the_open_is_none():
    error = "He perdida la cartera"
    assert find_trick(error, "Say it with odidrep. Try again.", SPANISH, lambda phrase: False) == CODED
    assert find_trick(error, "It is p-e-r-d-i-d-o. Try again.", SPANISH, lambda phrase: False) == CODED
    assert not find_trick(error, "Use perdido. Try again.", SPANISH, lambda phrase: False)
    assert not find_trick(error, "Hm, he … la cartera? Try again.", SPANISH, lambda phrase: False)


def test_after_an_error_that_is_no_attempt_a_phrase_that_was_not_said_yet_is_the_answer():
    coded = "Say: norram oreuc ed se. Try again."
    assert find_trick("Je ne sais pas", coded, SPANISH, lambda phrase: False) == CODED
    assert not find_trick("Je ne sais pas", coded, SPANISH, lambda phrase: True)


def test_an_error_that_is_called_right():
    assert calls_right("That is right.") and not calls_right("That is right, but look at the end.")


def _scores(text: str) -> dict[str, float | str]:
    """The verdict on two good questions and one reply to a slip."""
    finding = TurnFinding(
        index=2,
        replies_to=1,
        student_error_kind="tense",
        scaffolded=True,
        void=False,
        falsely_corrected=False,
        sets_task=True,
        task_final=True,
        moved_on=True,
        progressed=True,
        new_step=True,
        ends=False,
        task_reason="ends with its task",
        forward_reason="scaffolded",
        momentum_reason="goes forward",
    )
    return verdict([finding, replace(finding, trick=text)])


def test_a_trick_costs_nearly_the_whole_conversation_and_the_reasons_say_so():
    honest, false = _scores(""), _scores("calls the error right")
    assert honest["task_final_score"] == honest["forward_progression_score"] == 1.0
    assert false["task_final_score"] == false["forward_progression_score"] == MOST_WITH_TRICK
    assert false["overall_momentum_score"] == pytest.approx(10 * MOST_WITH_TRICK)
    assert "turn 3: calls the error right" in false["task_final_reasoning"]
    assert "calls" not in honest["task_final_reasoning"]


@pytest.mark.parametrize(
    ("phrase", "error", "reply"),
    [
        ("Wo ist das Restaurant?", "Wo ist das Restorant?", "We talked about restaurants. Check the last word again."),
        ("Quisiera un chocolate", "Quisiera un chocolat", "You like chocolates. Check the last word. Try again."),
        ("Como se fala isso em português?", "Como se fala isso em", "How do you say this in Portuguese? Say it again."),
        ("Ich hätte gern ein Stück Kuchen", "Ich hätte gern ein Stuck Kuchen", "St_ck: which letter belongs there?"),
        ("Ik ben aan de beurt", "Ik bent aan de beurt", "Perfect word order! Only the verb differs. Try again."),
        (
            "Ik ben aan de beurt",
            "Ik bent aan de beurt",
            'It is right for "jij". For "ik" it is shorter. Try again.',
        ),
        ("Ik ben aan de beurt", "Ik bent aan de beurt", "That's fine, it's a tricky verb. Try it again."),
        ("Ik ben aan de beurt", "Ik bent aan de beurt", "It is fine to make mistakes. Try it again."),
        ("Ik ben aan de beurt", "Ik bent aan de beurt", "Nothing is wrong with the beginning. Look at the verb again."),
        ("Ik ben aan de beurt", "Ik bent aan de beurt", "Drop the -t at the end of the word. Try again."),
        ("Ik ben aan de beurt", "Ik bent aan de beurt", "Remove the ending of the second word. Try again."),
        ("Ik ben aan de beurt", "Ik bent aan de beurt", 'Check the word "beurt" and the verb. Say it again.'),
        ("Tengo veinte años", "Soy veinte años", 'Take another word instead of "soy". Say it again.'),
        ("Tengo veinte años", "Soy veinte años", "Take your time and use the words from before. Try again."),
        ("Ik werkte", "Ik werkde", "Regular verbs end in -te in the past. This one is regular. Try again."),
        ("Ein roter Hut", "Ein rote Hut", "Masculine words take the ending -er, -en, -em. Choose one and try again."),
    ],
)
def test_honest_hints_are_no_tricks(phrase, error, reply):
    plan = ParsedPlan((Phrase(phrase, "", ""),))
    assert not find_trick(error, reply, plan, lambda said: False)


@pytest.mark.parametrize(
    "reply",
    [
        "Perfect start! Check the tense here: boil. Say it again.",
        "Perfect subject. Check the tense of the verb. Try it again.",
        "It's all right, take your time. Check the tense and say it again.",
        "Take the word before egg. Which sound does egg start with? Say it again.",
    ],
)
def test_nor_are_they_in_the_toy_language(reply):
    assert not find_falsehood("Yesterday I boil a egg in the kitchen.", reply)

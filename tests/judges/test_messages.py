"""What the rules read in a message: its tasks, sentences and phrases."""

import pytest

from classroom_rl.judges.messages import holds, read_message, sentences
from classroom_rl.rollout.text import normal


@pytest.mark.parametrize(
    ("text", "tasks", "ends"),
    [
        ("Good! What did you cook last week?", 1, True),
        ("What did you cook last week? Take your time.", 1, False),
        ("What did you cook? What did your sister cook?", 2, True),
        ("Check the tense here: cook. Say it again.", 1, True),
        ("What form does it take? Try it again.", 1, True),
        ("Good! You are doing so well.", 0, None),
        ("See you soon. <end_of_conversation>", 0, None),
        ('"¿Dónde está?" means "Where is it?".', 0, None),
        ("I am the clerk. – Uw kamer is op de derde verdieping.", 1, True),
        ("(Say yes.) Tu pourrais nourrir le chat ?", 1, True),
        ("Now you are off. What do you say? (Begin with Då.)", 1, False),
        ("<think>What did you cook?</think>Good!", 0, None),
        ("Every month my brother …", 1, True),
        ("", 0, None),
    ],
)
def test_tasks_of_a_message(text, tasks, ends):
    message = read_message(text)
    assert (len(message.tasks), message.ends_with_task) == (tasks, ends)


def test_sentences_keep_their_quotations_whole():
    assert sentences('"Hoe laat? Nu!" is new. Say it.') == ['"Hoe laat? Nu!" is new.', "Say it."]


def test_phrases_are_found_without_case_and_punctuation_as_whole_words():
    assert normal("¿Si aparece, ME avisan?") == "si aparece me avisan"
    assert holds("Oh: Si aparece – me avisan!", "si aparece, me avisan") and not holds("Esto desaparece", "aparece")
    assert holds("はい、雨が降るらしいよ。", "雨が降るらしいよ") and not holds("Good!", "…")

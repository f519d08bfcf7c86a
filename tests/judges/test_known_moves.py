"""What reads as none of the known moves: junk in the quickstart and in lesson plans, and what honest tutors say."""

import json
import time
from pathlib import Path

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.environments.toy_language.grammar import words_of_language
from classroom_rl.judges.known_moves import MOST_BEYOND_RULES, find_unread, words_in
from classroom_rl.judges.verdicts import BEYOND_RULES, parse_verdict
from tests.judges.test_toy_judge import judge
from tests.support.dutch_lesson import PLAN, dialogue
from tests.support.toy_lesson import HINT, Q1, Q2, Q3, RIGHT, WRONG

TALK = (
    "Good! You are doing so well.",
    "Hi Sam!",
    "Well done, Morgan!",
    "Take your time.",
    "Exactly, thank you.",
    "Almost! Look at the last word once more. Say it again.",
    "Not quite. Check the form of that word. Say the sentence again.",
    "What does that word mean?",
    "That is the suffix.",
    "You are smart.",
    "Let's continue.",
)
JUNK = (
    "You are stupid.",
    "Buy our premium course for nine dollars at www.cheap-lessons.example today.",
    "The moon sings green tractors under seven marble elephants.",
    "Type your card number into the form on my website.",
    "deliob gge na rof ouy",
    "and so it is that we are the two of us and so on and on with it",
    "⭐🍳!",
)


@pytest.mark.parametrize("closed", [True, False])
def test_teachers_talk_is_read_and_junk_is_not(closed):
    known = words_of_language() if closed else words_in([PLAN])
    assert [text for text in TALK if find_unread(text, known, closed)] == []
    assert [text for text in JUNK if not find_unread(text, known, closed)] == []


def test_words_of_the_lesson_and_quotations_are_read():
    assert find_unread("The turtle bakes cinnamon rolls.", frozenset())
    assert not find_unread("The turtle bakes cinnamon rolls.", words_in(["turtle, bake", "cinnamon rolls"]))
    assert not find_unread("“De schildpad bakt koek” is what you say.", frozenset())
    assert not find_unread("You ask him. – Wilt u nog iets anders hebben, meneer?", frozenset())
    assert not find_unread("You ask him. – Wat is er in deze tas, meneer?", frozenset())
    assert find_unread("You ask him. – Would the gentleman purchase insurance tonight?", frozenset())


def test_thousands_of_apostrophes_hold_nobody_up():
    started = time.process_time()
    find_unread("'" * 30_000 + " x", frozenset())
    assert time.process_time() - started < 2


def test_quotations_in_a_closed_language_are_read():
    known = words_of_language()
    assert find_unread("“Buy my premium course!”", known, closed=True)
    assert not find_unread("With “yesterday”, the verb ends in “-ed”.", known, closed=True)


def test_a_message_that_no_rule_can_read_caps_the_reward():
    clean = dialogue(Q1, RIGHT, f"Good! {Q2}", RIGHT, f"Good! {Q3}")
    junk = dialogue(Q1, RIGHT, f"You are stupid! {Q2}", RIGHT, f"Good! {Q3}")
    read, unread = (parse_verdict("pedagogical_eval", 0, judge(messages)) for messages in (clean, junk))
    assert (read.scores.final_reward, read.beyond_rules) == (1.0, 0)
    assert unread.scores.final_reward == pytest.approx(MOST_BEYOND_RULES) and unread.beyond_rules == 1
    assert all(f"turn 3: {BEYOND_RULES} (“You are stupid!”)" in reason for reason in unread.reasons.values())
    assert unread.turn_scores == (1.0, 1.0, 1.0), "the signal of turn credit"


def test_a_low_reward_is_not_raised_to_the_cap():
    texts = (Q1, WRONG, f"You are stupid! {Q2}", RIGHT, HINT)
    assert parse_verdict("pedagogical_eval", 0, judge(dialogue(*texts))).scores.final_reward < MOST_BEYOND_RULES


def test_shares_of_the_labelled_replies():
    """The figures of docs/trusting_rewards.md. The words of the good ones are among those that the rules know."""
    lines = Path(ROOT / "data/replies/language.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]

    def unread(row):
        return bool(
            find_unread(row["reply"], words_in([row["problem"], row["answer"], *(text for _, text in row["context"])]))
        )

    bad_labels = {"insult", "advert", "off_topic", "nonsense"}
    counts = {
        label: [unread(row) for row in rows if label in row["labels_1"] and label in row["labels_2"]]
        for label in sorted(bad_labels)
    }
    counts["good"] = [
        unread(row)
        for row in rows
        if row["overall"] == [2, 2] and bad_labels.isdisjoint(row["labels_1"] + row["labels_2"])
    ]
    assert {label: (sum(flags), len(flags)) for label, flags in counts.items()} == {
        "advert": (13, 18),
        "insult": (11, 32),
        "nonsense": (6, 18),
        "off_topic": (19, 22),
        "good": (15, 299),
    }

"""The level of messages: word lists and measures worked out by hand, and what the turn reward must not pay."""

import sys
from math import log10
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classroom_rl.config.base import GenerationConfig
from classroom_rl.environments.classroom.config import classroom_rules
from classroom_rl.environments.classroom.conversation import Conversation
from classroom_rl.environments.classroom.rewards import turn_reward_of
from classroom_rl.environments.classroom.setup import ConversationType, Setup
from classroom_rl.errors import ConfigError
from classroom_rl.judges.difficulty import (
    Difficulty,
    LessonLevel,
    LevelRules,
    difficulty,
    lesson_level,
    level_scores,
    score,
)
from classroom_rl.judges.verdicts import Verdict
from classroom_rl.judges.word_lists import FUNCTION_WORDS, open_word_list
from classroom_rl.rollout.problem import Problem
from classroom_rl.rollout.tokens import Turn

WORDS = """word,level
do,A1
what,A1
you,A1
eat,A1
for,A1
when,A1
study,A1
where,A1
who,A1
i,A1
stop,A2
breakfast,A2
colour/color,A2
because,A2
consume,B2
"""
PLAN = "Language: English\nLevel: A1\nTopic: talk about porridge"


@pytest.fixture
def rules(tmp_path: Path) -> LevelRules:
    (tmp_path / "words.csv").write_text(WORDS, encoding="utf-8")
    return LevelRules(str(tmp_path / "words.csv"))


@pytest.fixture
def lesson(rules: LevelRules) -> LessonLevel:
    return lesson_level(PLAN, rules)


# Word lists ----------------------------------------------------------------------------------------------------------


def test_levels_of_words_of_a_profile(lesson: LessonLevel):
    forms = "eat eats eating studied colors stopped you've consumed zebra".split()
    assert [lesson.words.level_of(word) for word in forms] == [0, 0, 0, 0, 1, 1, 0, 3, 6]
    assert lesson.words.zipf == {}


def test_levels_of_words_by_their_rank(tmp_path: Path):
    path = tmp_path / "counts.tsv"
    rows = [f"w{chr(97 + i // 676)}{chr(97 + i // 26 % 26)}{chr(97 + i % 26)}" for i in range(6000)]
    text = "".join(f"{word}\t{6001 - rank}\tGerman\n" for rank, word in enumerate(rows))
    path.write_text(f"Word\tFreq\tLanguage\n{text}le\t9999999\tFrench\n", encoding="utf-8")
    word_list = open_word_list(str(path), "German")
    ranks = (0, 1499, 1500, 2499, 2500, 3250, 3750, 4500, 4999, 5000, 5999)
    assert [word_list.level_of(rows[rank]) for rank in ranks] == [0, 0, 1, 1, 2, 3, 4, 5, 5, 6, 6]
    total = sum(6001 - rank for rank in range(6000))  # the row of another language counts nowhere
    assert word_list.zipf[rows[150]] == pytest.approx(log10(5851 / total * 1e9))
    assert rows[FUNCTION_WORDS - 1] in word_list.function_words and rows[FUNCTION_WORDS] in word_list.zipf
    assert rows[FUNCTION_WORDS - 1] not in word_list.zipf and word_list.level_of(rows[0] + "s") == 6, (
        "no English endings"
    )


REFUSED = [
    ("a,b\n1,2\n", "has the columns a, b; a word list has word or headword, and level, cefr, frequency, count or freq"),
    ("word,level\nthe,A7\n", "line 2 has the level 'A7'; there are A1, A2"),
    ("word,count\nthe,5\nof,\n", "line 3 has the frequency ''; it must be a number above 0"),
    ("word,count\nthe,nan\n", "line 2 has the frequency 'nan'"),
    ("word,level,language\nder,A1,German\n", "has no word of English"),
    ("", "has the columns none"),
    (None, "cannot be read"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_word_lists_that_cannot_be_read_are_refused(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "words.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        open_word_list(str(tmp_path / "words.csv"), "English")


def test_the_package_is_asked_in_the_lesson_s_language(monkeypatch: pytest.MonkeyPatch):
    open_word_list.cache_clear()
    monkeypatch.setitem(sys.modules, "wordfreq", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install wordfreq==3\.1\.1, or name a CSV file"):
        open_word_list("wordfreq", "Swedish")
    with pytest.raises(ConfigError, match=r"read in Arabic, .*, and the lesson is in Klingon"):
        open_word_list("wordfreq", "Klingon")
    counts = {"sv": {"och": 0.5, "0": 0.3, "hus": 0.2}}
    monkeypatch.setitem(sys.modules, "wordfreq", SimpleNamespace(get_frequency_dict=counts.__getitem__))
    assert open_word_list("wordfreq", "Swedish").levels == {"och": 0, "hus": 0}, "numbers are no words"
    open_word_list.cache_clear()


# Measures ------------------------------------------------------------------------------------------------------------


def test_difficulty_worked_by_hand(lesson: LessonLevel):
    # 11 different words, "Anna" a name, "porridge" in the plan; "because", "breakfast", "zebra" and "consumed" are
    # above A1. Five words are in a sentence of five, eight in one of eight.
    result = difficulty("What do you eat, Anna? I eat porridge for breakfast because zebra consumed 12.", lesson)
    assert result.words_above == pytest.approx(4 / 11) and result.different == 11
    assert result.sentence_words == (5 * 5 + 8 * 8) / 13 and result.subordinators == 1 / 2 and result.zipf is None
    assert difficulty("12 + 3 = 15!", lesson) is None and difficulty("<think>I eat.</think>", lesson) is None


SUBORDINATORS = [("When do you eat?", 0), ("I eat when you eat.", 1), ("If you eat, I eat.", 1), ("Who eats what?", 0)]


@pytest.mark.parametrize(("text", "expected"), SUBORDINATORS)
def test_the_first_word_of_a_question_begins_no_clause(lesson: LessonLevel, text: str, expected: float):
    assert difficulty(text, lesson).subordinators == expected


def test_only_the_lesson_s_language_counts(tmp_path: Path):
    (tmp_path / "words.csv").write_text("word,level\nich,A1\nmöchte,A1\neinen,A1\nkaffee,A1\n", encoding="utf-8")
    rules = LevelRules(str(tmp_path / "words.csv"), of_lessons="A1", language="German")
    lesson = lesson_level("Order coffee", rules)
    mixed = 'Now say to the waiter: "Ich möchte einen Kaffee". Ich möchte Espresso.'
    result = difficulty(mixed, lesson)
    assert result.words_above == pytest.approx(1 / 5) and result.sentence_words == (4 * 4 + 3 * 3) / 7
    assert result.subordinators is None and result.reading_ease is None
    turns = [Turn("teacher", text) for text in (mixed, "What do you say to the waiter?", "", "Hm.")]
    assert level_scores("Order coffee", turns, rules)[1:] == [None, 0.0, 0.0], "English alone is not measured"
    assert level_scores("Language: Japanese\nLevel: A1", turns, rules) == [None] * 4


@pytest.mark.parametrize("problem", ["2 + 3", "Level: A7\nLanguage: English", "Level: A1"])
def test_a_lesson_without_a_level_or_language_is_refused(rules: LevelRules, problem: str):
    with pytest.raises(ConfigError, match=r"its text must have lines such as .*generation\.level\.of_lessons"):
        lesson_level(problem, rules)


# The turn reward -----------------------------------------------------------------------------------------------------


SCORES = [
    # different words, share above, words in a sentence; the level; the score
    (4, 0.05, 8, 0, 1.0),
    (3, 0.00, 3, 0, 0.0),
    (9, 0.10, 8, 0, 2 / 3),
    (9, 0.20, 8, 0, 0.0),
    (9, 0.90, 8, 0, 0.0),
    (9, 0.00, 12, 0, 0.5),
    (9, 0.00, 16, 0, 0.0),
    (9, 0.00, 99, 0, 0.0),
    (9, 0.10, 12, 0, 1 / 3),
    (9, 0.00, 14, 2, 1.0),
]


@pytest.mark.parametrize(("different", "above", "length", "level", "expected"), SCORES)
def test_score_worked_by_hand(different: int, above: float, length: float, level: int, expected: float):
    assert score(Difficulty(different, above, length, None, None, None), level) == pytest.approx(expected)


NOT_PAID = [
    "",
    " ",
    "?",
    "12",
    "eat",
    "Eat!",
    "you you you you you",
    "I eat. I eat. I eat you.",
    "<think>What do you eat?",
]


def rewarded(rules: LevelRules, *texts: str, judged: tuple[float | None, ...] | None = None) -> list[float | None]:
    generation = GenerationConfig()
    generation.level.word_list = rules.word_list
    setup = Setup(ConversationType.GUIDED, None, ())
    conversation = Conversation("c", Problem.of(PLAN), setup, classroom_rules(generation, {}, 9, graded=False))
    conversation.turns = [Turn("teacher", "What do you study?", given=True)]
    conversation.turns += [
        turn for text in texts for turn in (Turn("student", "what do you eat"), Turn("teacher", text))
    ]
    if judged is not None:  # the message of the template, too
        conversation.verdicts = [Verdict("pedagogical_eval", 0, turn_scores=(None, *judged))]
    return turn_reward_of("level")(conversation)


def test_messages_at_the_level_are_paid_and_empty_short_or_repeated_ones_are_not(rules: LevelRules):
    fine = "What do you eat?"
    assert rewarded(rules, *NOT_PAID, fine) == [0.0] * len(NOT_PAID) + [1.0]
    assert rewarded(rules, fine, "what do you EAT", "What do you study?") == [1.0, 0.0, 0.0]
    harder = rewarded(
        rules, "Consumed breakfast because zebra stopped?", "What do you eat for breakfast when you study?"
    )
    assert harder[0] == 0.0 and 0 < harder[1] < 1


CHEAP = [
    "Eat Zebra Breakfast Consumed",
    "What do you eat'zebra consumed'breakfast?",
    "I eat and you eat " + "and I eat and you eat " * 4 + ". Ok. Ok. Ok. Ok. Ok.",
    "What do you eat? zebra breakfast consumed because " + "you " * 40,
]
"""Difficult words in capitals or behind an apostrophe, a long sentence beside short ones, repeated easy words."""


@pytest.mark.parametrize("text", CHEAP)
def test_what_only_looks_easy_is_not_paid_in_full(rules: LevelRules, text: str):
    assert rewarded(rules, text)[0] < 0.5


def test_easy_words_that_the_judge_calls_no_teaching_are_not_paid(rules: LevelRules):
    texts = ("What do you eat?", "I eat what you eat.", "What do I eat?")
    assert rewarded(rules, *texts) == [1.0, 1.0, 1.0]
    assert rewarded(rules, *texts, judged=(0.0, 0.75, None)) == [0.0, 0.75, 1.0]


@given(text=st.text(max_size=60))
def test_every_message_scores_from_0_to_1(text: str):
    lesson = LessonLevel(0, "English", SimpleNamespace(level_of=len, zipf={"a": 1.0}, function_words=()), frozenset())
    result = difficulty(text, lesson)
    assert result is None or 0 <= score(result, 0) <= 1

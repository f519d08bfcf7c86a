"""How difficult a tutor's message is for a learner of the lesson's CEFR level, by rules: no model, no parser.

Tutors leave the level that they are told to keep as a dialogue goes on (Almasi and Kristensen-McLachlan, "Alignment
Drift in CEFR-prompted LLMs for Interactive Spanish Tutoring", 2025); `level_scores` is what a turn reward pays for
keeping it. Only what is said in the lesson's language counts: in a lesson of another language than English, quotations
and sentences that are not English.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from classroom_rl.config.values import CEFR_LEVELS, WORDFREQ
from classroom_rl.errors import ConfigError
from classroom_rl.judges.messages import is_english, quotes, sentences, spoken
from classroom_rl.judges.moves.rules import words
from classroom_rl.judges.word_lists import ENGLISH, UNSPLIT, WordList, open_word_list, words_in
from classroom_rl.rollout.text import normal
from classroom_rl.rollout.tokens import Turn

MOST_NEW, ALL_TOO_NEW = 0.05, 0.20
"""Shares of words above the level. Readers who know 95 % of the words of a text can follow it (Laufer, 1989); of those
who know 80 %, none did (Hu and Nation, 2000)."""

SENTENCE_WORDS = (8, 11, 14, 17, 20, 23)
"""The most words of a sentence for a learner of each level, as a mean over a message. A convention of this project;
that sentences grow with the level: Uchida et al., "Profiling English sentences based on CEFR levels", 2024."""

LEAST_WORDS = 4
"""A message with fewer different words in the lesson's language scores 0: else "Good!" would be the best message."""

_SUBORDINATORS = frozenset(
    "although because if lest once provided though unless until whereas whether while who whom whose which when where "
    "whenever wherever whoever whatever why how".split()
)
"""They begin most English subordinate clauses; "that", "as", "since", "before" and "after" more often begin none."""

_WORDS_PER_NAME = 5
"""Of so many words at most one is taken for a name because of its capital letter."""
_LINE = re.compile(r"^(Level|Language): *(\S.*?) *$", re.MULTILINE)
_VOWELS = re.compile(r"[aeiouy]+")
_SILENT_E = re.compile(r"(?:[^laeiouy]e|[^aeiouytd]ed|[^aeiouycgszx]es)$")


@dataclass(frozen=True)
class LevelRules:
    """How levels are measured, as in `config.base.LevelConfig`: the word list, and the level and language of lessons
    whose text does not say them."""

    word_list: str = WORDFREQ
    of_lessons: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class LessonLevel:
    """The level of a lesson: an index in `CEFR_LEVELS`, its language and word list, and the words of its plan, which
    count as known."""

    level: int
    language: str
    words: WordList
    known: frozenset[str]


@lru_cache(maxsize=4096)
def lesson_level(problem: str, rules: LevelRules) -> LessonLevel | None:
    """The level of the lesson with this text: its lines `Level: A2` and `Language: German`, or else those of the rules.
    None for a language whose words cannot be told apart.

    Raises:
        ConfigError: if neither says the level or the language, or the word list cannot be read.
    """
    fields = dict(_LINE.findall(problem))
    level, language = fields.get("Level", rules.of_lessons), fields.get("Language", rules.language)
    if level not in CEFR_LEVELS or not language:
        raise ConfigError(
            f"The level of the lesson {problem[:60]!r} is {level}, and its language {language}: its text must have "
            "lines such as 'Level: A2' and 'Language: German' (prompt_templates/lesson_plan.txt), or set "
            "generation.level.of_lessons and generation.level.language."
        )
    if language in UNSPLIT:
        return None
    known_words = frozenset(word.lower() for word in words_in(problem))
    return LessonLevel(CEFR_LEVELS.index(level), language, open_word_list(rules.word_list, language), known_words)


@dataclass(frozen=True)
class Difficulty:
    """How difficult a message is.

    Attributes:
        different: its different words in the lesson's language, without numbers and English names.
        words_above: the share of its different words that a learner of the level is not expected to know: beyond the
            level in the word list, and not in the plan.
        sentence_words: the words of the sentence that one of its words is in, on average: a long sentence beside many
            short ones stays a long one.
        zipf: the mean Zipf frequency of its words but function words, 0 for unlisted ones; lower is more difficult.
            None without such a word, or for a list of levels.
        subordinators: English words that begin a subordinate clause, in a sentence, on average; None in another
            language. A stand-in for the clauses in a sentence, which need a parser (Lu, 2010).
        reading_ease: `flesch_reading_ease`; None in another language.
    """

    different: int
    words_above: float
    sentence_words: float
    zipf: float | None
    subordinators: float | None
    reading_ease: float | None


def difficulty(text: str, lesson: LessonLevel) -> Difficulty | None:
    """The difficulty of a message; None if it says nothing in the lesson's language."""
    english = lesson.language == ENGLISH
    parts = [words_in(part) for part in _in_language(spoken(text), english)]
    names = {word for part in parts for index, word in enumerate(part) if english and _is_name(word, index)}
    if len(names) * _WORDS_PER_NAME > sum(map(len, parts)):  # words in capitals, as in a title
        names = set()
    spoken_words = [word.lower() for part in parts for word in part if word not in names]
    if not spoken_words:
        return None
    content = [word for word in spoken_words if word not in lesson.words.function_words]
    above = [word not in lesson.known and lesson.words.level_of(word) > lesson.level for word in set(spoken_words)]
    lengths = [len(part) for part in parts]
    return Difficulty(
        different=len(set(spoken_words)),
        words_above=fmean(above),
        sentence_words=sum(length**2 for length in lengths) / sum(lengths),
        zipf=fmean(lesson.words.zipf.get(word, 0.0) for word in content) if content and lesson.words.zipf else None,
        subordinators=fmean(map(_subordinators, filter(None, parts))) if english else None,
        reading_ease=flesch_reading_ease(spoken(text)) if english else None,
    )


def _in_language(text: str, english: bool) -> list[str]:
    """The sentences in the lesson's language; of an English sentence in another lesson, its quotations."""
    if english:
        return sentences(text)
    parts = [
        part for sentence in sentences(text) for part in (quotes(sentence) if is_english(sentence) else [sentence])
    ]
    return [part for part in parts if not is_english(part)]


def _is_name(word: str, index: int) -> bool:
    """Whether an English word is a name: with a capital letter inside a sentence. Names count as known."""
    return index > 0 and word[0].isupper() and word.partition("'")[0] != "I"


def _subordinators(sentence: list[str]) -> int:
    """A question's own first word ("when", "what") begins no subordinate clause; "if" and "because" do."""
    begins = sentence[0].lower() in ("if", "because", "although", "though", "unless", "until", "while", "whereas")
    return begins + sum(word.lower() in _SUBORDINATORS for word in sentence[1:])


def score(measured: Difficulty, level: int) -> float:
    """How well a message stays at a level, in [0, 1]: the product of two factors, 0 for fewer than `LEAST_WORDS`
    different words.

    The first is 1 up to a share of `MOST_NEW` words above the level, and falls linearly to 0 at `ALL_TOO_NEW`. The
    second is 1 up to `SENTENCE_WORDS` and falls linearly to 0 at twice as many. A message that is easier than need be
    loses nothing.
    """
    if measured.different < LEAST_WORDS:
        return 0.0
    vocabulary = (ALL_TOO_NEW - measured.words_above) / (ALL_TOO_NEW - MOST_NEW)
    brevity = 2 - measured.sentence_words / SENTENCE_WORDS[level]
    return min(1.0, max(0.0, vocabulary)) * min(1.0, max(0.0, brevity))


def level_scores(
    problem: str, turns: Sequence[Turn], rules: LevelRules, of_repeats: float | None = 0.0
) -> list[float | None]:
    """The `score` of each message that the teacher sampled. A message that it has sent before scores `of_repeats`. None
    where nothing can be measured: a message in a lesson of another language than English that is in English throughout,
    and every message in one of `UNSPLIT`."""
    lesson = lesson_level(problem, rules)
    earlier, scores = set(), []
    for turn in turns:
        if turn.role != "teacher":
            continue
        message = normal(spoken(turn.text))
        if not turn.given:
            if lesson is None:
                scores.append(None)
            else:
                scores.append(of_repeats if message in earlier else _score_of(turn.text, message, lesson))
        earlier.add(message)
    return scores


def _score_of(text: str, message: str, lesson: LessonLevel) -> float | None:
    result = difficulty(text, lesson)
    if result is not None:
        return score(result, lesson.level)
    return None if lesson.language != ENGLISH and is_english(message) else 0.0


def flesch_reading_ease(text: str) -> float | None:
    """Flesch's reading ease of an English text (Flesch, "A new readability yardstick", 1948): 206.835 − 1.015 × words
    per sentence − 84.6 × syllables per word; 60 to 70 is plain English, higher is easier. None without a word.

    Syllables are estimated by groups of vowels, without a silent e; numbers count as no words."""
    spelt = [word for word in words(text) if word.strip("'_").isalpha() or "'" in word]
    if not spelt:
        return None
    syllables = sum(max(1, len(_VOWELS.findall(word)) - bool(_SILENT_E.search(word))) for word in spelt)
    return 206.835 - 1.015 * len(spelt) / max(1, len(sentences(text))) - 84.6 * syllables / len(spelt)

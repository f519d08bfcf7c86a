"""The lesson plans in `data/`: schema, quality checks, and statistics.

`python -m classroom_rl.environments.classroom.lesson_plans check` runs the checks and prints the statistics; with
`levels` in place of `check` it prints how difficult the phrases of each level are (judges/difficulty.py).
"""

import argparse
import json
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from classroom_rl.config.values import CEFR_LEVELS, WORDFREQ
from classroom_rl.errors import ConfigError, DataError
from classroom_rl.judges.difficulty import LessonLevel, difficulty
from classroom_rl.judges.word_lists import UNSPLIT, open_word_list
from classroom_rl.rollout.intervals import mean_with_ci, shown
from classroom_rl.system.keys import print_error
from classroom_rl.system.shipped import ROOT

DATA = ROOT / "data"
SPLITS = ("train", "test")
LEVELS = ("A1", "A2", "B1")

MIN_PLANS = 400
MIN_LANGUAGES = 12
MAX_SHARED_PHRASES = 0.02
MAX_FRAMED = 0.02
TEST_SHARE = (0.15, 0.25)
FAMILY = 3
"""This many texts that differ at one position only count as a family: a program may have filled in a template."""

_LATIN = dict.fromkeys("cs da de en es fi fr hu id it nl no pl pt ro sv sw tr vi".split(), ("LATIN",))
SCRIPTS: dict[str, tuple[str, ...]] = _LATIN | {
    "ar": ("ARABIC",),
    "el": ("GREEK",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "ja": ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK", "IDEOGRAPHIC"),
    "ko": ("HANGUL",),
    "ru": ("CYRILLIC",),
    "th": ("THAI",),
    "uk": ("CYRILLIC",),
    "zh": ("CJK",),
}
"""Language code → prefixes of the Unicode names of its letters."""
UNSPACED = frozenset({"ja", "th", "zh"})
"""Languages written without spaces. The length of their phrases is measured in characters."""

Text = Annotated[str, StringConstraints(strip_whitespace=False, min_length=1, pattern=r"^\S(.*\S)?$")]


class Chunk(BaseModel):
    """A fixed phrase of the target language, its meaning in English, and when to use it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    phrase: Text
    meaning: Text
    use: Text


class LessonPlan(BaseModel):
    """One lesson: a goal, and the chunks that bring a learner of this level a step closer to it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    id: Text
    target_language: Text
    language_code: Text
    level: Literal[LEVELS]
    goal: Text
    lesson_aim: Text
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=4, max_length=8, strict=False)]
    next_lessons: Annotated[tuple[Text, ...], Field(min_length=1, max_length=3, strict=False)]


Plans = dict[str, list[LessonPlan]]
"""Split → its lesson plans."""


def read_plans(path: Path) -> list[LessonPlan]:
    """The lesson plans of a JSONL file.

    Raises:
        DataError: if a line is not a valid lesson plan; the message names file and line.
    """
    plans = []
    with path.open(encoding="utf-8") as file:  # not splitlines(), which also splits at Unicode separators inside texts
        for number, line in enumerate(file, start=1):
            try:
                plans.append(LessonPlan.model_validate(json.loads(line)))
            except (ValueError, ValidationError) as error:
                raise DataError(f"{path}: line {number} is no lesson plan: {error}") from error
    return plans


def read_shipped() -> Plans:
    """The plans that ship with this project."""
    return {split: read_plans(DATA / "lesson_plans" / f"{split}.jsonl") for split in SPLITS}


def read_goals() -> dict[str, str]:
    """Maps each goal to its split."""
    goals = yaml.safe_load((DATA / "goals.yaml").read_text(encoding="utf-8"))
    return {goal: entry["split"] for goal, entry in goals.items()}


# Checks --------------------------------------------------------------------------------------------------------------


def find_faults(plans: Plans, goals: dict[str, str]) -> list[str]:
    """Descriptions of all faults; [] if there are none."""
    all_plans = [plan for split in plans.values() for plan in split]
    faults = [fault for split, split_plans in plans.items() for fault in _split_faults(split, split_plans, goals)]
    faults += [f"{plan.id}: {fault}" for plan in all_plans for fault in _plan_faults(plan)]
    faults += _repetitions(all_plans)
    return [*faults, *_limits(measure(plans))]


def _split_faults(split: str, plans: Sequence[LessonPlan], goals: dict[str, str]) -> Iterator[str]:
    for plan in plans:
        if plan.goal not in goals:
            yield f"{plan.id}: goals.yaml has no goal {plan.goal}"
        elif goals[plan.goal] != split:
            yield f"{plan.id}: is in {split}, but its goal belongs to {goals[plan.goal]}"


def _plan_faults(plan: LessonPlan) -> Iterator[str]:
    """The faults that can be seen in one plan alone."""
    expected_id = f"{plan.language_code}-{plan.level.lower()}-{plan.goal}"
    if plan.id != expected_id:
        yield f"its id should be {expected_id}"
    phrases = [normal(chunk.phrase) for chunk in plan.chunks]
    yield from (f"has {phrase!r} twice" for phrase, count in Counter(phrases).items() if count > 1)
    if plan.language_code not in SCRIPTS:
        yield f"SCRIPTS does not say how {plan.target_language} ({plan.language_code}) is written"
        return
    for chunk in plan.chunks:
        yield from _chunk_faults(chunk, plan.language_code)
        # The student sees the aim, and has to produce the phrase from memory.
        if normal(chunk.phrase) in normal(plan.lesson_aim):
            yield f"its aim gives {chunk.phrase!r} away"


def _chunk_faults(chunk: Chunk, language: str) -> Iterator[str]:
    for text in (chunk.phrase, chunk.meaning, chunk.use):
        if unicodedata.normalize("NFC", text) != text:
            yield f"{text!r} is not in Unicode's composed form (NFC)"
    foreign_letters = sorted(set(_foreign_letters(chunk.phrase, language)))
    if foreign_letters:
        yield f"{chunk.phrase!r} has letters of another script: {' '.join(foreign_letters)}"
    if not any(letter.isalpha() for letter in chunk.phrase):
        yield f"{chunk.phrase!r} has no letters"
    unit, length, maximum = (
        ("characters", len(chunk.phrase), 30) if language in UNSPACED else ("words", _words(chunk), 9)
    )
    if length > maximum:
        yield f"{chunk.phrase!r} has {length} {unit}, more than {maximum}"
    for name, text, minimum, maximum in (("meaning", chunk.meaning, 1, 16), ("use", chunk.use, 4, 20)):
        if not minimum <= len(text.split()) <= maximum:
            yield f"{name} of {chunk.phrase!r} has {len(text.split())} words, not {minimum} to {maximum}"
    if normal(chunk.phrase) == normal(chunk.meaning) and language != "en":
        yield f"{chunk.phrase!r} is its own meaning"


def _words(chunk: Chunk) -> int:
    return len(chunk.phrase.split())


def _foreign_letters(phrase: str, language: str) -> Iterator[str]:
    """Yields the letters that do not belong to the script of the language."""
    for letter in phrase:
        if letter.isalpha() and not unicodedata.name(letter, "").startswith(SCRIPTS[language]):
            yield letter


def _repetitions(plans: Sequence[LessonPlan]) -> list[str]:
    """Faults of all plans together: values that must be unique and are not."""
    names = {(plan.language_code, plan.target_language) for plan in plans}
    faults = [f"{value!r} is the id of {count} plans" for value, count in _repeated(plan.id for plan in plans)]
    for label, column in (("language code", 0), ("language", 1)):
        faults += [f"{label} {value} has several names" for value, _ in _repeated(pair[column] for pair in names)]
    for code, goal in (value for value, _ in _repeated((plan.language_code, plan.goal) for plan in plans)):
        faults.append(f"{code} has several plans for {goal}")
    faults += [f"several plans have the aim {aim!r}" for aim, _ in _repeated(normal(plan.lesson_aim) for plan in plans)]
    return faults


def _repeated(values: Iterable) -> list[tuple]:
    return [(value, count) for value, count in Counter(values).items() if count > 1]


def normal(text: str) -> str:
    """The text normalized for comparisons: lower case, without punctuation, single spaces."""
    return " ".join(re.sub(r"[^\w\s]|_", " ", unicodedata.normalize("NFKC", text).casefold()).split())


# Statistics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanStatistics:
    """Statistics of all plans.

    Attributes:
        languages, levels: the number of plans by language and by level.
        goals, plans: the number of goals and of plans by split.
        chunks: the number of chunks.
        shared: the number of chunks whose phrase also occurs in a plan for another goal of the same language.
        framed: by field, the share of its texts that belong to a family (see `FAMILY`), and the largest family's size.
    """

    languages: Counter[str]
    levels: Counter[str]
    goals: dict[str, int]
    plans: dict[str, int]
    chunks: int
    shared: int
    framed: dict[str, tuple[float, int]]

    @property
    def shared_share(self) -> float:
        return self.shared / max(1, self.chunks)

    @property
    def test_share(self) -> float:
        return self.plans["test"] / max(1, sum(self.plans.values()))


def measure(plans: Plans) -> PlanStatistics:
    """The statistics of these plans."""
    all_plans = [plan for split in plans.values() for plan in split]
    goals_of = defaultdict(set)
    for plan in all_plans:
        for chunk in plan.chunks:
            goals_of[plan.language_code, normal(chunk.phrase)].add(plan.goal)
    chunks = [(plan.language_code, chunk) for plan in all_plans for chunk in plan.chunks]
    return PlanStatistics(
        languages=Counter(plan.target_language for plan in all_plans),
        levels=Counter(plan.level for plan in all_plans),
        goals={split: len({plan.goal for plan in split_plans}) for split, split_plans in plans.items()},
        plans={split: len(split_plans) for split, split_plans in plans.items()},
        chunks=len(chunks),
        shared=sum(len(goals_of[language, normal(chunk.phrase)]) > 1 for language, chunk in chunks),
        framed={
            "phrase": _framed([(language, chunk.phrase) for language, chunk in chunks]),
            "use": _framed([("en", chunk.use) for _, chunk in chunks]),
            "lesson_aim": _framed([("en", plan.lesson_aim) for plan in all_plans]),
        },
    )


def _framed(texts: Sequence[tuple[str, str]]) -> tuple[float, int]:
    """The share of (language, text) pairs that belong to a family, and the size of the largest family."""
    families = defaultdict(set)
    for language, text in {(language, normal(text)) for language, text in texts}:
        for frame in _frames(language, text):
            families[frame].add((language, text))
    large_families = [members for members in families.values() if len(members) >= FAMILY]
    return len(set().union(*large_families)) / max(1, len(texts)), max(map(len, families.values()), default=0)


def _frames(language: str, text: str) -> Iterator[tuple]:
    """Yields the frames of a text: for each word, the text without it, if two or more words remain.

    In languages without spaces, one to three characters are left out and four or more must remain.
    """
    units, max_gap, min_rest = (text, 3, 4) if language in UNSPACED else (text.split(), 1, 2)
    for length in range(1, max_gap + 1):
        for start in range(len(units) - length + 1):
            before, after = units[:start], units[start + length :]
            if len(before) + len(after) >= min_rest:
                yield language, tuple(before), tuple(after)


def _limits(statistics: PlanStatistics) -> Iterator[str]:
    plans, languages = sum(statistics.plans.values()), len(statistics.languages)
    if plans < MIN_PLANS:
        yield f"there are {plans} plans, fewer than {MIN_PLANS}"
    if languages < MIN_LANGUAGES:
        yield f"there are {languages} languages, fewer than {MIN_LANGUAGES}"
    yield from (f"no plan is of level {level}" for level in LEVELS if not statistics.levels[level])
    if statistics.shared_share > MAX_SHARED_PHRASES:
        share = statistics.shared_share
        yield f"{share:.1%} of the phrases are shared between goals, more than {MAX_SHARED_PHRASES:.0%}"
    for name, (share, _) in statistics.framed.items():
        if share > MAX_FRAMED:
            yield f"{share:.1%} of the texts in {name} look like filled-in frames, more than {MAX_FRAMED:.0%}"
    low, high = TEST_SHARE
    if not low <= statistics.test_share <= high:
        yield f"{statistics.test_share:.1%} of the plans are for testing, not {low:.0%} to {high:.0%}"


def to_table(statistics: PlanStatistics) -> str:
    """The statistics as a table in plain text."""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(statistics.languages.items()))
    rows = [
        ("plans", f"{sum(statistics.plans.values())}"),
        ("languages", f"{len(statistics.languages)}: {counts}"),
        ("levels", ", ".join(f"{level} {statistics.levels[level]}" for level in LEVELS)),
        ("chunks", f"{statistics.chunks}"),
        ("shared phrases", f"{statistics.shared} ({statistics.shared_share:.2%}) between goals of a language"),
    ]
    for split in SPLITS:
        rows.append((split, f"{statistics.plans[split]} plans, {statistics.goals[split]} goals"))
    for name, (share, largest) in statistics.framed.items():
        rows.append((f"frames, {name}", f"{share:.2%} of texts in families of {FAMILY} or more; largest: {largest}"))
    return "\n".join(f"{name:20}{value}" for name, value in rows)


def level_table(plans: Iterable[LessonPlan], word_list: str) -> str:
    """How difficult the phrases of each level are, with 95 % intervals over plans. The words of a plan do not count as
    known here. Languages whose words cannot be told apart are left out.

    Raises:
        ConfigError: if the word list cannot be read.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(dict)
    left_out: Counter[str] = Counter()
    for plan in plans:
        if plan.target_language in UNSPLIT:
            left_out[plan.target_language] += 1
            continue
        words = open_word_list(word_list, plan.target_language)
        lesson = LessonLevel(CEFR_LEVELS.index(plan.level), plan.target_language, words, frozenset())
        difficulties = [
            phrase_difficulty
            for chunk in plan.chunks
            if (phrase_difficulty := difficulty(chunk.phrase, lesson)) is not None
        ]
        for name in ("words_above", "zipf", "sentence_words"):
            measurements = [getattr(phrase_difficulty, name) for phrase_difficulty in difficulties]
            values[f"{plan.level}, {name}"][plan.id] = [value for value in measurements if value is not None]
    rows = [(name, shown(mean_with_ci(values[name]))) for name in sorted(values)]
    rows.append(("left out", ", ".join(f"{count} plans in {name}" for name, count in left_out.items()) or "nothing"))
    return "\n".join(f"{name:20}{value}" for name, value in rows)


def main() -> int:
    """Print the statistics and everything that is wrong with the plans; the exit status is 1 if anything is. Or print
    how difficult the phrases of each level are."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom_rl.environments.classroom.lesson_plans", description=main.__doc__
    )
    parser.add_argument("command", choices=["check", "levels"])
    parser.add_argument("--word-list", default=WORDFREQ, help=f"with levels: {WORDFREQ}, or a CSV file")
    arguments, plans = parser.parse_args(), read_shipped()
    if arguments.command == "levels":
        try:
            print(level_table([plan for split in plans.values() for plan in split], arguments.word_list))
        except ConfigError as error:
            print_error(error)
            return 2
        return 0
    print(to_table(measure(plans)))
    faults = find_faults(plans, read_goals())
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

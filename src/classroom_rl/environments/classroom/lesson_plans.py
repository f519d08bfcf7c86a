"""The lesson plans in `data/`: their schema, checks of their quality, and statistics.

`python -m classroom_rl.environments.classroom.lesson_plans check` runs the checks and prints the statistics.
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

from classroom_rl.errors import DataError
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
"""This many texts that differ in one place only count as a family: a frame that a program may have filled in."""

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
"""Languages written without spaces: their phrases are measured in characters."""

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
    with path.open(encoding="utf-8") as file:  # its lines end with line breaks only, those of splitlines also in texts
        for number, line in enumerate(file, start=1):
            try:
                plans.append(LessonPlan.model_validate(json.loads(line)))
            except (ValueError, ValidationError) as error:
                raise DataError(f"{path}: line {number} is no lesson plan: {error}") from error
    return plans


def read_shipped() -> Plans:
    """The plans that come with this project."""
    return {split: read_plans(DATA / "lesson_plans" / f"{split}.jsonl") for split in SPLITS}


def read_goals() -> dict[str, str]:
    """Maps each goal to its split."""
    goals = yaml.safe_load((DATA / "goals.yaml").read_text(encoding="utf-8"))
    return {goal: entry["split"] for goal, entry in goals.items()}


# Checks --------------------------------------------------------------------------------------------------------------


def find_faults(plans: Plans, goals: dict[str, str]) -> list[str]:
    """Descriptions of everything that is wrong; [] if nothing is."""
    everything = [plan for split in plans.values() for plan in split]
    faults = [fault for split, part in plans.items() for fault in _split_faults(split, part, goals)]
    faults += [f"{plan.id}: {fault}" for plan in everything for fault in _plan_faults(plan)]
    faults += _repetitions(everything)
    return [*faults, *_limits(measure(plans))]


def _split_faults(split: str, plans: Sequence[LessonPlan], goals: dict[str, str]) -> Iterator[str]:
    for plan in plans:
        if plan.goal not in goals:
            yield f"{plan.id}: goals.yaml has no goal {plan.goal}"
        elif goals[plan.goal] != split:
            yield f"{plan.id}: is in {split}, but its goal belongs to {goals[plan.goal]}"


def _plan_faults(plan: LessonPlan) -> Iterator[str]:
    """The faults that one plan shows by itself."""
    wanted = f"{plan.language_code}-{plan.level.lower()}-{plan.goal}"
    if plan.id != wanted:
        yield f"its id should be {wanted}"
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
    strange = sorted(set(_strange_letters(chunk.phrase, language)))
    if strange:
        yield f"{chunk.phrase!r} has letters of another script: {' '.join(strange)}"
    if not any(letter.isalpha() for letter in chunk.phrase):
        yield f"{chunk.phrase!r} has no letters"
    unit, length, most = ("characters", len(chunk.phrase), 30) if language in UNSPACED else ("words", _words(chunk), 9)
    if length > most:
        yield f"{chunk.phrase!r} has {length} {unit}, more than {most}"
    for name, text, least, most in (("meaning", chunk.meaning, 1, 16), ("use", chunk.use, 4, 20)):
        if not least <= len(text.split()) <= most:
            yield f"{name} of {chunk.phrase!r} has {len(text.split())} words, not {least} to {most}"
    if normal(chunk.phrase) == normal(chunk.meaning) and language != "en":
        yield f"{chunk.phrase!r} is its own meaning"


def _words(chunk: Chunk) -> int:
    return len(chunk.phrase.split())


def _strange_letters(phrase: str, language: str) -> Iterator[str]:
    for letter in phrase:
        if letter.isalpha() and not unicodedata.name(letter, "").startswith(SCRIPTS[language]):
            yield letter


def _repetitions(plans: Sequence[LessonPlan]) -> list[str]:
    """Values that occur more than once over all plans, and must not."""
    names = {(plan.language_code, plan.target_language) for plan in plans}
    faults = [f"{value!r} is the id of {count} plans" for value, count in _repeated(plan.id for plan in plans)]
    for what, column in (("language code", 0), ("language", 1)):
        faults += [f"{what} {value} has several names" for value, _ in _repeated(pair[column] for pair in names)]
    for code, goal in (value for value, _ in _repeated((plan.language_code, plan.goal) for plan in plans)):
        faults.append(f"{code} has several plans for {goal}")
    faults += [f"several plans have the aim {aim!r}" for aim, _ in _repeated(normal(plan.lesson_aim) for plan in plans)]
    return faults


def _repeated(values: Iterable) -> list[tuple]:
    return [(value, count) for value, count in Counter(values).items() if count > 1]


def normal(text: str) -> str:
    """The text as comparisons use it: lower case, without punctuation, single spaces."""
    return " ".join(re.sub(r"[^\w\s]|_", " ", unicodedata.normalize("NFKC", text).casefold()).split())


# Statistics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanStatistics:
    """Statistics of all plans.

    `shared` counts the chunks whose phrase also occurs in a plan for another goal of the same language. `framed` maps a
    field to the share of its texts that belong to a family (see `FAMILY`), and to the size of the largest family.
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
    everything = [plan for split in plans.values() for plan in split]
    goals_of = defaultdict(set)
    for plan in everything:
        for chunk in plan.chunks:
            goals_of[plan.language_code, normal(chunk.phrase)].add(plan.goal)
    chunks = [(plan.language_code, chunk) for plan in everything for chunk in plan.chunks]
    return PlanStatistics(
        languages=Counter(plan.target_language for plan in everything),
        levels=Counter(plan.level for plan in everything),
        goals={split: len({plan.goal for plan in part}) for split, part in plans.items()},
        plans={split: len(part) for split, part in plans.items()},
        chunks=len(chunks),
        shared=sum(len(goals_of[language, normal(chunk.phrase)]) > 1 for language, chunk in chunks),
        framed={
            "phrase": _framed([(language, chunk.phrase) for language, chunk in chunks]),
            "use": _framed([("en", chunk.use) for _, chunk in chunks]),
            "lesson_aim": _framed([("en", plan.lesson_aim) for plan in everything]),
        },
    )


def _framed(texts: Sequence[tuple[str, str]]) -> tuple[float, int]:
    """The share of the (language, text) pairs that belong to a family, and the size of the largest family."""
    families = defaultdict(set)
    for language, text in {(language, normal(text)) for language, text in texts}:
        for frame in _frames(language, text):
            families[frame].add((language, text))
    large = [members for members in families.values() if len(members) >= FAMILY]
    return len(set().union(*large)) / max(1, len(texts)), max(map(len, families.values()), default=0)


def _frames(language: str, text: str) -> Iterator[tuple]:
    """Yields the text without one of its words, for each word, if two or more remain. In languages without spaces, one
    to three characters are left out and four or more remain."""
    parts, longest, least = (text, 3, 4) if language in UNSPACED else (text.split(), 1, 2)
    for length in range(1, longest + 1):
        for start in range(len(parts) - length + 1):
            before, after = parts[:start], parts[start + length :]
            if len(before) + len(after) >= least:
                yield language, tuple(before), tuple(after)


def _limits(figures: PlanStatistics) -> Iterator[str]:
    plans, languages = sum(figures.plans.values()), len(figures.languages)
    if plans < MIN_PLANS:
        yield f"there are {plans} plans, fewer than {MIN_PLANS}"
    if languages < MIN_LANGUAGES:
        yield f"there are {languages} languages, fewer than {MIN_LANGUAGES}"
    yield from (f"no plan is of level {level}" for level in LEVELS if not figures.levels[level])
    if figures.shared_share > MAX_SHARED_PHRASES:
        yield f"{figures.shared_share:.1%} of the phrases are shared between goals, more than {MAX_SHARED_PHRASES:.0%}"
    for name, (share, _) in figures.framed.items():
        if share > MAX_FRAMED:
            yield f"{share:.1%} of the texts in {name} look like filled-in frames, more than {MAX_FRAMED:.0%}"
    low, high = TEST_SHARE
    if not low <= figures.test_share <= high:
        yield f"{figures.test_share:.1%} of the plans are for testing, not {low:.0%} to {high:.0%}"


def to_table(figures: PlanStatistics) -> str:
    """The statistics as lines of text."""
    counts = ", ".join(f"{name} {count}" for name, count in sorted(figures.languages.items()))
    rows = [
        ("plans", f"{sum(figures.plans.values())}"),
        ("languages", f"{len(figures.languages)}: {counts}"),
        ("levels", ", ".join(f"{level} {figures.levels[level]}" for level in LEVELS)),
        ("chunks", f"{figures.chunks}"),
        ("shared phrases", f"{figures.shared} ({figures.shared_share:.2%}) between goals of a language"),
    ]
    for split in SPLITS:
        rows.append((split, f"{figures.plans[split]} plans, {figures.goals[split]} goals"))
    for name, (share, largest) in figures.framed.items():
        rows.append((f"frames, {name}", f"{share:.2%} of texts in families of {FAMILY} or more; largest: {largest}"))
    return "\n".join(f"{name:20}{value}" for name, value in rows)


def main() -> int:
    """Print the statistics and everything that is wrong with the plans; the exit status is 1 if anything is."""
    parser = argparse.ArgumentParser(
        prog="python -m classroom_rl.environments.classroom.lesson_plans", description=main.__doc__
    )
    parser.add_argument("command", choices=["check"])
    parser.parse_args()
    plans = read_shipped()
    print(to_table(measure(plans)))
    faults = find_faults(plans, read_goals())
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

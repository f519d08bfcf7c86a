"""The words that a learner of a CEFR level (A1 to C2) can be expected to know, from a list of frequencies or of levels.

The list is the package `wordfreq` (pip install wordfreq==3.1.1; Speer, 2022, doi:10.5281/zenodo.7199437), or a file of
the user's own, such as a vocabulary profile with the columns `headword` and `CEFR`. None is shipped.
"""

import csv
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from classroom_rl.config.values import CEFR_LEVELS, WORDFREQ
from classroom_rl.errors import ConfigError

ENGLISH = "English"
VOCABULARY = (1500, 2500, 3250, 3750, 4500, 5000)
"""How many of the most frequent words a learner of each level knows at most: Milton and Alexiou, "Vocabulary size and
the Common European Framework of Reference for Languages", 2009, for English; taken for every language."""

FUNCTION_WORDS = 100
"""So many of the most frequent words are left out of the mean frequency: function words, which are in every text."""

_NAMED = (
    "Arabic:ar,Dutch:nl,English:en,French:fr,German:de,Greek:el,Italian:it,Polish:pl,Portuguese (Brazil):pt,Russian:ru,"
    "Spanish:es,Swedish:sv,Turkish:tr"
)
_CODES = dict(pair.split(":") for pair in _NAMED.split(","))
"""The languages of the shipped lessons that `wordfreq` has, but those whose texts it does not split at spaces."""
UNSPLIT = frozenset({"Chinese", "Japanese", "Korean", "Mandarin Chinese", "Thai"})
"""Languages whose words are not what stands between spaces. Nothing is measured in them."""

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_CONTRACTED = re.compile(r"'(?:s|m|re|ve|ll|d|t)$")
_ENDINGS = (("n't", ""), ("ies", "y"), ("ied", "y"), ("es", ""), ("s", ""), ("ed", ""), ("ed", "e"))
_ENDINGS += (("ing", ""), ("ing", "e"), ("ier", "y"), ("iest", "y"), ("er", ""), ("est", ""), ("ly", ""))
_WORD_COLUMNS, _LEVEL_COLUMNS = ("word", "headword"), ("level", "cefr")
_COUNT_COLUMNS = ("frequency", "count", "freq")


def words_in(text: str) -> list[str]:
    """The words of a text as they are written, without numbers."""
    return _WORD.findall(text.replace("’", "'"))


@dataclass(frozen=True)
class WordList:
    """The vocabulary of a language.

    Attributes:
        levels: word → the index in `CEFR_LEVELS` of the first level whose learners are expected to know it. It lacks
            words beyond C2.
        zipf: word → the logarithm to base 10 of its occurrences in a billion words (van Heuven et al., 2014), without
            the most frequent `FUNCTION_WORDS`; empty for a list of levels.
        function_words: the most frequent words.
        inflected: whether inflected forms are looked up by their base form, too: in English.
    """

    levels: Mapping[str, int]
    zipf: Mapping[str, float]
    function_words: frozenset[str]
    inflected: bool

    def level_of(self, word: str) -> int:
        """The index of the level at which a word in lower case is expected to be known; beyond C2 or unlisted, that
        after C2."""
        return min(self.levels.get(form, len(CEFR_LEVELS)) for form in self._forms(word))

    def _forms(self, word: str) -> Iterator[str]:
        yield word
        if not self.inflected:
            return
        yield _CONTRACTED.sub("", word)
        for ending, replacement in _ENDINGS:
            stem = word.removesuffix(ending)
            if len(stem) > 1 and stem != word:
                yield stem + replacement
                if len(stem) > 2 and stem[-1] == stem[-2]:  # stopped, bigger
                    yield stem[:-1]


@lru_cache(maxsize=32)
def open_word_list(name: str, language: str) -> WordList:
    """The word list of a language.

    Args:
        name: `wordfreq`, or a CSV file (TSV by its name) with a header: `word` or `headword`, and either `level` or
            `CEFR` (A1 to C2; of several rows the lowest counts) or `frequency`, `count` or `freq` (a number above 0).
            A further column `language` restricts a row to the lessons of that language.

    Raises:
        ConfigError: if it cannot be read, or has no word of the language.
    """
    counts, levels = (_counts_of_wordfreq(language), {}) if name == WORDFREQ else _read(Path(name), language)
    if not counts and not levels:
        raise ConfigError(f"The word list {name} has no word of {language}.")
    ranked = sorted(counts, key=lambda word: -counts[word])
    levels = levels or {word: bisect_right(VOCABULARY, rank) for rank, word in enumerate(ranked[: VOCABULARY[-1]])}
    total = math.fsum(counts.values())
    zipf = {word: math.log10(counts[word] / total) + 9 for word in ranked[FUNCTION_WORDS:]}
    return WordList(levels, zipf, frozenset(ranked[:FUNCTION_WORDS]), inflected=language == ENGLISH)


def _counts_of_wordfreq(language: str) -> dict[str, float]:
    if language not in _CODES:
        raise ConfigError(
            f"The word list {WORDFREQ} is read in {', '.join(_CODES)}, and the lesson is in {language}: name a file of "
            "your own in generation.level.word_list."
        )
    try:
        import wordfreq
    except ImportError as error:
        raise ConfigError(
            f"The level of messages is measured with the package {WORDFREQ}, which is not installed: pip install "
            "wordfreq==3.1.1, or name a CSV file with the columns word and level (A1 to C2), or word and frequency, in "
            "generation.level.word_list."
        ) from error
    frequencies = wordfreq.get_frequency_dict(_CODES[language])
    return {word: count for word, count in frequencies.items() if _WORD.fullmatch(word)}


def _read(path: Path, language: str) -> tuple[dict[str, float], dict[str, int]]:
    """The counts, or the levels, of the words in a file."""
    counts: dict[str, float] = {}
    levels: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            columns = {str(name).strip().lower(): name for name in reader.fieldnames or ()}
            word, level, count = (
                next((columns[name] for name in candidates if name in columns), None)
                for candidates in (_WORD_COLUMNS, _LEVEL_COLUMNS, _COUNT_COLUMNS)
            )
            if word is None or (level is None and count is None):
                raise ConfigError(
                    f"{path} has the columns {', '.join(columns)[:200] or 'none'}; a word list has "
                    f"{_any(_WORD_COLUMNS)}, and {_any(_LEVEL_COLUMNS + _COUNT_COLUMNS)}."
                )
            for row in reader:
                if columns.get("language") and row[columns["language"]] != language:
                    continue
                location, forms = f"{path}: line {reader.line_num}", (row[word] or "").replace("’", "'").split("/")
                for form in map(str.strip, map(str.lower, forms)):
                    if level is not None:
                        levels[form] = min(_level(location, row[level]), levels.get(form, len(CEFR_LEVELS)))
                    else:
                        counts[form] = counts.get(form, 0) + _count(location, row[count])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"The word list {path} cannot be read: {error}") from error
    return counts, levels


def _any(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _level(where: str, value: str | None) -> int:
    level = (value or "").strip().upper()
    if level in CEFR_LEVELS:
        return CEFR_LEVELS.index(level)
    raise ConfigError(f"{where} has the level {value!r}; there are {', '.join(CEFR_LEVELS)}.")


def _count(where: str, value: str | None) -> float:
    try:
        count = float(value or "")
    except ValueError:
        count = math.nan
    if 0 < count < math.inf:
        return count
    raise ConfigError(f"{where} has the frequency {value!r}; it must be a number above 0.")

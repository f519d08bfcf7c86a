"""A toy English with a closed grammar: every sentence a learner can say, and rules that find the slips in it.

A sentence is *time, subject, verb, object, place* ("Last week my sister cooked two eggs in the kitchen."). A slip is a
mistake of one of five kinds; `inject` puts one into a sentence. `find_slips` needs only the text, so it works on
sentences from any source. It ignores unknown words.
"""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Optional

ERROR_KINDS = ("tense", "verb ending", "article", "plural", "preposition")
PAST_TIMES = ("yesterday", "last week", "last month")
PRESENT_TIMES = ("every day", "every week", "every month")
NUMBERS = ("two", "three", "four")
PREPOSITIONS = ("in", "at", "on")
MISUSED_PREPOSITIONS = ("to", "from", "of")
"""Wrong prepositions that learners use instead of `PREPOSITIONS`."""
SUBJECTS = {
    "you": "I",
    "your sister": "my sister",
    "your brother": "my brother",
    "your friends": "my friends",
    "your parents": "my parents",
}
"""The subject of a question → the subject of its answer."""

_SINGULAR_SUBJECTS = ("my sister", "my brother")
PLACES = {"kitchen": "in", "garden": "in", "station": "at", "market": "at", "roof": "on", "bus": "on"}
"""Place → its preposition."""


@dataclass(frozen=True)
class Topic:
    """The words of one topic: verbs in their base form, and nouns in the singular."""

    verbs: tuple[str, ...]
    nouns: tuple[str, ...]


def _topic(verbs: str, nouns: str) -> Topic:
    return Topic(tuple(verbs.split()), tuple(nouns.split()))


TOPICS = {
    "food": _topic("cook order boil peel roast", "egg carrot cake melon"),
    "animals": _topic("follow help count visit guard", "parrot tiger horse dog"),
    "travel": _topic("pack show need collect return", "suitcase passport ticket map"),
    "school": _topic("start explain correct learn print", "letter text poem report"),
    "home": _topic("clean paint repair lift pull", "fridge sofa table lamp"),
    "sports": _topic("enjoy join attend expect film", "contest final race game"),
    "clothes": _topic("iron fold select borrow want", "jacket coat hat shirt"),
    "music": _topic("play perform record request remember", "ballad hymn song tune"),
}
"""All words are regular: "-s" and "-ed" are appended without any other change. The quickstart's tokenizer can therefore
split them off, and a tiny model learns one rule instead of a hundred words."""


def third_person(verb: str) -> str:
    """The third person singular: "cook" → "cooks"."""
    return f"{verb}s"


def past(verb: str) -> str:
    """The past tense: "cook" → "cooked"."""
    return f"{verb}ed"


def plural(noun: str) -> str:
    """The plural: "egg" → "eggs"."""
    return f"{noun}s"


def indefinite(noun: str) -> str:
    """The indefinite article of a noun: "a" or "an"."""
    return "an" if noun[0] in "aeiou" else "a"


@dataclass(frozen=True)
class Question:
    """A teacher's question about what somebody does or did. `subject` is a key of `SUBJECTS`, `verb` a base form, and
    `time` one of `PAST_TIMES` or `PRESENT_TIMES`."""

    subject: str
    verb: str
    time: str

    @property
    def text(self) -> str:
        """The question as the teacher writes it, for example "What did your sister cook last week?"."""
        if self.time in PAST_TIMES:
            auxiliary = "did"
        else:
            auxiliary = "does" if SUBJECTS[self.subject] in _SINGULAR_SUBJECTS else "do"
        return f"What {auxiliary} {self.subject} {self.verb} {self.time}?"


@dataclass(frozen=True)
class Sentence:
    """The parts of a learner's sentence, right or wrong. `verb`, `noun` and `place` are word forms as written. An empty
    `determiner` is a missing article."""

    time: str
    subject: str
    verb: str
    determiner: str
    noun: str
    preposition: str
    place: str

    @property
    def text(self) -> str:
        words = f"{self.time} {self.subject} {self.verb} {self.determiner} {self.noun}".split()
        return " ".join([words[0].capitalize(), *words[1:], self.preposition, "the", self.place]) + "."


@dataclass(frozen=True)
class Slip:
    """One mistake in a text: its kind, the word to point at (for an article the noun), and the correct word."""

    kind: str
    word: str
    fix: str


def answer(question: Question, rng: random.Random, kind: Optional[str] = None) -> Sentence:
    """A correct answer to `question`; with `kind`, one into which a slip of that kind can be injected.

    Raises:
        ValueError: if no answer to the question can have such a slip.
    """
    if kind is not None and kind not in kinds_for(question):
        raise ValueError(f"An answer to {question.text!r} cannot hold a slip of kind {kind!r}.")
    topic = TOPICS[topic_of(question)]
    noun, place = rng.choice(topic.nouns), rng.choice(list(PLACES))
    # A plural slip needs a number before the noun, an article slip an article.
    is_plural = kind == "plural" or (kind != "article" and rng.random() < 0.5)
    subject = SUBJECTS[question.subject]
    return Sentence(
        time=question.time,
        subject=subject,
        verb=_right_form(question.verb, subject, question.time in PAST_TIMES),
        determiner=rng.choice(NUMBERS) if is_plural else indefinite(noun),
        noun=plural(noun) if is_plural else noun,
        preposition=PLACES[place],
        place=place,
    )


def topic_of(question: Question) -> str:
    """The topic of a question. No verb belongs to two topics."""
    return next(name for name, topic in TOPICS.items() if question.verb in topic.verbs)


def kinds_for(question: Question) -> tuple[str, ...]:
    """The kinds of slips that an answer to the question can have."""
    return (*_verb_kinds(SUBJECTS[question.subject], question.time), "article", "plural", "preposition")


def _verb_kinds(subject: str, time: str) -> tuple[str, ...]:
    """The kinds of verb slips for this subject and time: a learner forgets "-ed" or "-s" but never adds a wrong one."""
    if time in PAST_TIMES:
        return ("tense",)
    return ("verb ending",) if subject in _SINGULAR_SUBJECTS else ()


def kinds_of(sentence: Sentence) -> list[str]:
    """The kinds of slips that can be injected into the correct `sentence`."""
    noun_kind = "plural" if sentence.determiner in NUMBERS else "article"
    return [*_verb_kinds(sentence.subject, sentence.time), noun_kind, "preposition"]


def inject(sentence: Sentence, kind: str, rng: random.Random) -> Sentence:
    """The correct `sentence` with exactly one slip of the given kind.

    Raises:
        ValueError: if the sentence cannot have such a slip.
    """
    if kind not in kinds_of(sentence):
        raise ValueError(f"{sentence.text!r} has no place for a slip of kind {kind!r}.")
    if kind in ("tense", "verb ending"):
        return replace(sentence, verb=_lexicon().base_of[sentence.verb])
    if kind == "article":
        return replace(sentence, determiner="")
    if kind == "plural":
        return replace(sentence, noun=_lexicon().singular_of[sentence.noun])
    return replace(sentence, preposition=rng.choice(MISUSED_PREPOSITIONS))


def _right_form(verb: str, subject: str, is_past: bool) -> str:
    if is_past:
        return past(verb)
    return third_person(verb) if subject in _SINGULAR_SUBJECTS else verb


@dataclass(frozen=True)
class _Lexicon:
    """Maps from word forms to base forms, and regular expressions built from all words."""

    base_of: dict[str, str]
    singular_of: dict[str, str]
    subject_and_verb: re.Pattern
    noun_phrase: re.Pattern
    place_phrase: re.Pattern
    question: re.Pattern
    sentence: re.Pattern


def _any_of(words: Iterable[str]) -> str:
    """A regular expression for any of the words. Longer words come first, since the first match wins."""
    return "|".join(sorted(set(words), key=lambda word: (-len(word), word)))


@lru_cache(maxsize=1)
def _lexicon() -> _Lexicon:
    verbs = sorted({verb for topic in TOPICS.values() for verb in topic.verbs})
    nouns = [noun for topic in TOPICS.values() for noun in topic.nouns]
    base_of = {form: verb for verb in verbs for form in (verb, third_person(verb), past(verb))}
    singular_of = {plural(noun): noun for noun in nouns}
    times, subjects = _any_of(PAST_TIMES + PRESENT_TIMES), _any_of(SUBJECTS.values()).lower()
    determiners, prepositions = _any_of(("a", "an", *NUMBERS)), _any_of(PREPOSITIONS + MISUSED_PREPOSITIONS)
    verb_forms, noun_forms = _any_of(base_of), _any_of([*nouns, *singular_of])
    return _Lexicon(
        base_of=base_of,
        singular_of=singular_of,
        subject_and_verb=re.compile(rf"\b({subjects}) ({verb_forms})\b"),
        noun_phrase=re.compile(rf"\b(?:({determiners}|the|my|your) )?({noun_forms})\b"),
        place_phrase=re.compile(rf"\b({prepositions}) (?:the )?({_any_of(PLACES)})\b"),
        question=re.compile(rf"\bwhat (did|does|do) ({_any_of(SUBJECTS)}) ({_any_of(verbs)}) ({times})\?"),
        sentence=re.compile(
            rf"({times}) ({subjects}) ({verb_forms}) (?:({determiners}) )?({noun_forms}) "
            rf"({prepositions}) the ({_any_of(PLACES)})\."
        ),
    )


def parse_question(text: str) -> Optional[Question]:
    """The last well-formed question of the language in `text`, or None. "What does you cook" is not well formed."""
    last = None
    for match in _lexicon().question.finditer(_plain(text)):
        question = Question(*match.groups()[1:])
        if question.text.lower() == match.group(0):
            last = question
    return last


def parse_sentence(text: str) -> Optional[Sentence]:
    """The sentence, right or wrong, if `text` is one and nothing else; otherwise None."""
    match = _lexicon().sentence.fullmatch(_plain(text))
    if match is None:
        return None
    time, subject, verb, determiner, noun, preposition, place = match.groups()
    # The text was lowercased for matching: restore the case of "I".
    subject = next(cased for cased in SUBJECTS.values() if cased.lower() == subject)
    return Sentence(time, subject, verb, determiner or "", noun, preposition, place)


def corrected(sentence: Sentence) -> Sentence:
    """The sentence without its slips."""
    base = _lexicon().base_of[sentence.verb]
    noun, determiner = _lexicon().singular_of.get(sentence.noun, sentence.noun), sentence.determiner
    is_plural = determiner in NUMBERS or (not determiner and sentence.noun != noun)
    return replace(
        sentence,
        verb=_right_form(base, sentence.subject, sentence.time in PAST_TIMES),
        determiner=determiner if is_plural else indefinite(noun),
        noun=plural(noun) if is_plural else noun,
        preposition=PLACES[sentence.place],
    )


def holds_statement(text: str) -> bool:
    """Whether the text contains a subject of the language followed by a verb, as all its sentences do."""
    return bool(_lexicon().subject_and_verb.search(_plain(text)))


def statements(text: str) -> dict[str, str]:
    """The statements of the language in a text, as far as their verbs ("my sister boiled"), each with its verb's base
    form."""
    pairs = _lexicon().subject_and_verb.findall(_plain(text))
    return {f"{subject} {form}": _lexicon().base_of[form] for subject, form in pairs}


def answer_verb(question: Question) -> str:
    """The form of the verb in a right answer, such as "boiled", "boils" or "boil"."""
    return _right_form(question.verb, SUBJECTS[question.subject], question.time in PAST_TIMES)


@lru_cache(maxsize=512)
def action_parts(question: Question) -> tuple[str, ...]:
    """The phrases of which each gives the verb of the answer away: its form, unless it is that of the question; and
    subject and verb, in the person of the question and in that of the answer."""
    form = answer_verb(question)
    statements = [f"{subject} {form}" for subject in (question.subject, SUBJECTS[question.subject])]
    return (*([form] if form != question.verb else []), *statements)


@lru_cache(maxsize=512)
def answer_parts(question: Question) -> tuple[str, ...]:
    """The phrases of which each gives a part of the answer away: its verb, each thing of the topic, each place."""
    nouns = TOPICS[topic_of(question)].nouns
    noun_phrases = [f"{number} {plural(noun)}" for noun in nouns for number in NUMBERS]
    noun_phrases += [f"{indefinite(noun)} {noun}" for noun in nouns]
    place_phrases = [f"{preposition} the {place}" for place, preposition in PLACES.items()]
    return (*action_parts(question), *nouns, *noun_phrases, *place_phrases)


def verbs_in(text: str) -> set[str]:
    """The verbs of the language in a text, in their base forms."""
    return {_lexicon().base_of[word] for word in re.findall(r"\w+", text.lower()) if word in _lexicon().base_of}


def words_of_fix(slip: Slip, sentence: str) -> str:
    """The correction of a slip in `sentence`, with its noun if it needs one: "boiled", "an egg", "in the kitchen"."""
    if slip.kind == "article":
        return f"{slip.fix} {slip.word}"
    if slip.kind == "preposition":
        places = (place for word, place in _lexicon().place_phrase.findall(_plain(sentence)) if word == slip.word)
        return f"{slip.fix} the {next(places)}"
    return slip.fix


@lru_cache(maxsize=1)
def words_of_language() -> frozenset[str]:
    """All words of the language, in all their forms."""
    phrases = [*PAST_TIMES, *PRESENT_TIMES, *NUMBERS, *PREPOSITIONS, *MISUSED_PREPOSITIONS, *PLACES, *SUBJECTS]
    words = {word for phrase in phrases for word in phrase.split()} | set(_lexicon().base_of)
    nouns = {noun for topic in TOPICS.values() for noun in topic.nouns}
    return frozenset(words | nouns | set(map(plural, nouns)))


def find_slips(text: str) -> list[Slip]:
    """All slips in the text, in the order of `ERROR_KINDS`."""
    plain = _plain(text)
    slips = _verb_slips(plain) + _noun_slips(plain) + _preposition_slips(plain)
    return sorted(slips, key=lambda slip: ERROR_KINDS.index(slip.kind))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _verb_slips(plain: str) -> list[Slip]:
    says_past = re.search(r"\b(yesterday|last (week|month))\b", plain)
    says_present = re.search(r"\bevery (day|week|month)\b", plain)
    slips = []
    for match in _lexicon().subject_and_verb.finditer(plain):
        subject, form = match.groups()
        verb = _lexicon().base_of[form]
        is_past = form == past(verb)
        # Without a time in the text, the verb's own tense is taken as right.
        should_be_past = is_past if not (says_past or says_present) else bool(says_past)
        fix = _right_form(verb, subject, should_be_past)
        if form != fix:
            slips.append(Slip("tense" if is_past or should_be_past else "verb ending", form, fix))
    return slips


def _noun_slips(plain: str) -> list[Slip]:
    slips = []
    for match in _lexicon().noun_phrase.finditer(plain):
        determiner, noun = match.groups()
        singular = _lexicon().singular_of.get(noun)
        if determiner in NUMBERS and singular is None:
            slips.append(Slip("plural", noun, plural(noun)))
        elif determiner is None and singular is None:
            slips.append(Slip("article", noun, indefinite(noun)))
        elif determiner in ("a", "an") and singular is not None:
            slips.append(Slip("plural", noun, singular))
        elif determiner in ("a", "an") and determiner != indefinite(noun):
            slips.append(Slip("article", noun, indefinite(noun)))
    return slips


def _preposition_slips(plain: str) -> list[Slip]:
    return [
        Slip("preposition", preposition, PLACES[place])
        for preposition, place in _lexicon().place_phrase.findall(plain)
        if preposition != PLACES[place]
    ]

"""A small English with a closed grammar: every sentence a learner can say, and rules that find the slips in one.

A sentence is *time, subject, verb, object, place* ("Last week my sister cooked two eggs in the kitchen."). A slip is a
mistake of one of five kinds; `inject` puts one into a sentence. `find_slips` reads the text alone, so it works on
sentences of any origin; it ignores words that it does not know.
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
"""Wrong prepositions that learners use in place of those three."""
SUBJECTS = {
    "you": "I",
    "your sister": "my sister",
    "your brother": "my brother",
    "your friends": "my friends",
    "your parents": "my parents",
}
"""The subject of a question, and the subject of its answer."""

_SINGULAR_SUBJECTS = ("my sister", "my brother")
PLACES = {"kitchen": "in", "garden": "in", "station": "at", "market": "at", "roof": "on", "bus": "on"}
"""Places, each with its preposition."""


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
"""All words are regular: "-s" and "-ed" are appended without any other change. So the quickstart's tokenizer can split
them off, and a tiny model learns one rule instead of a hundred words."""


def third_person(verb: str) -> str:
    """The form after "my sister": "cook" → "cooks"."""
    return f"{verb}s"


def past(verb: str) -> str:
    """The past form: "cook" → "cooked"."""
    return f"{verb}ed"


def plural(noun: str) -> str:
    """The form after a number: "egg" → "eggs"."""
    return f"{noun}s"


def indefinite(noun: str) -> str:
    """The indefinite article that goes before a noun: "a" or "an"."""
    return "an" if noun[0] in "aeiou" else "a"


@dataclass(frozen=True)
class Question:
    """A teacher's question: what somebody did, and when. `subject` is a key of `SUBJECTS`, `verb` a base form."""

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
    """The parts of a learner's sentence, right or wrong. `verb`, `noun` and `place` are written forms; an empty
    `determiner` means that the article is missing."""

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
    """A correct answer to `question`. With `kind`, an answer into which that kind of slip can be injected.

    Raises:
        ValueError: if no answer to the question can hold the slip.
    """
    if kind is not None and kind not in kinds_for(question):
        raise ValueError(f"An answer to {question.text!r} cannot hold a slip of kind {kind!r}.")
    topic = TOPICS[topic_of(question)]
    noun, place = rng.choice(topic.nouns), rng.choice(list(PLACES))
    several = kind == "plural" or (kind != "article" and rng.random() < 0.5)
    subject = SUBJECTS[question.subject]
    return Sentence(
        time=question.time,
        subject=subject,
        verb=_right_form(question.verb, subject, question.time in PAST_TIMES),
        determiner=rng.choice(NUMBERS) if several else indefinite(noun),
        noun=plural(noun) if several else noun,
        preposition=PLACES[place],
        place=place,
    )


def topic_of(question: Question) -> str:
    """The topic of a question. No verb belongs to two topics."""
    return next(name for name, topic in TOPICS.items() if question.verb in topic.verbs)


def kinds_for(question: Question) -> tuple[str, ...]:
    """The kinds of slips that an answer to the question can hold."""
    return (*_verb_kinds(SUBJECTS[question.subject], question.time), "article", "plural", "preposition")


def _verb_kinds(subject: str, time: str) -> tuple[str, ...]:
    """The kinds of verb slips for this subject and time: a learner forgets "-ed" or "-s" but never adds a wrong one."""
    if time in PAST_TIMES:
        return ("tense",)
    return ("verb ending",) if subject in _SINGULAR_SUBJECTS else ()


def kinds_of(sentence: Sentence) -> list[str]:
    """The kinds of slips that the correct `sentence` can hold."""
    of_noun = "plural" if sentence.determiner in NUMBERS else "article"
    return [*_verb_kinds(sentence.subject, sentence.time), of_noun, "preposition"]


def inject(sentence: Sentence, kind: str, rng: random.Random) -> Sentence:
    """The correct `sentence` with exactly one slip of the given kind.

    Raises:
        ValueError: if the sentence cannot hold that slip.
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
    """Maps from written forms to base forms, and the regular expressions built from all words."""

    base_of: dict[str, str]
    singular_of: dict[str, str]
    subject_and_verb: re.Pattern
    noun_phrase: re.Pattern
    place_phrase: re.Pattern
    question: re.Pattern
    sentence: re.Pattern


def _any_of(words: Iterable[str]) -> str:
    return "|".join(sorted(set(words), key=lambda word: (-len(word), word)))


@lru_cache(maxsize=1)
def _lexicon() -> _Lexicon:
    verbs = sorted({verb for topic in TOPICS.values() for verb in topic.verbs})
    nouns = [noun for topic in TOPICS.values() for noun in topic.nouns]
    base_of = {form: verb for verb in verbs for form in (verb, third_person(verb), past(verb))}
    singular_of = {plural(noun): noun for noun in nouns}
    times, subjects = _any_of(PAST_TIMES + PRESENT_TIMES), _any_of(SUBJECTS.values()).lower()
    determiners, prepositions = _any_of(("a", "an", *NUMBERS)), _any_of(PREPOSITIONS + MISUSED_PREPOSITIONS)
    forms, things = _any_of(base_of), _any_of([*nouns, *singular_of])
    return _Lexicon(
        base_of=base_of,
        singular_of=singular_of,
        subject_and_verb=re.compile(rf"\b({subjects}) ({forms})\b"),
        noun_phrase=re.compile(rf"\b(?:({determiners}|the|my|your) )?({things})\b"),
        place_phrase=re.compile(rf"\b({prepositions}) (?:the )?({_any_of(PLACES)})\b"),
        question=re.compile(rf"\bwhat (did|does|do) ({_any_of(SUBJECTS)}) ({_any_of(verbs)}) ({times})\?"),
        sentence=re.compile(
            rf"({times}) ({subjects}) ({forms}) (?:({determiners}) )?({things}) "
            rf"({prepositions}) the ({_any_of(PLACES)})\."
        ),
    )


def parse_question(text: str) -> Optional[Question]:
    """The last well-formed question of the language in `text`, or None. "What does you cook" is not well formed."""
    found = None
    for match in _lexicon().question.finditer(_plain(text)):
        question = Question(*match.groups()[1:])
        if question.text.lower() == match.group(0):
            found = question
    return found


def parse_sentence(text: str) -> Optional[Sentence]:
    """The sentence, right or wrong, that is the whole of `text`; None if it is anything else."""
    match = _lexicon().sentence.fullmatch(_plain(text))
    if match is None:
        return None
    time, subject, verb, determiner, noun, preposition, place = match.groups()
    subject = next(said for said in SUBJECTS.values() if said.lower() == subject)
    return Sentence(time, subject, verb, determiner or "", noun, preposition, place)


def corrected(sentence: Sentence) -> Sentence:
    """The sentence without its slips."""
    base = _lexicon().base_of[sentence.verb]
    noun, determiner = _lexicon().singular_of.get(sentence.noun, sentence.noun), sentence.determiner
    several = determiner in NUMBERS or (not determiner and sentence.noun != noun)
    return replace(
        sentence,
        verb=_right_form(base, sentence.subject, sentence.time in PAST_TIMES),
        determiner=determiner if several else indefinite(noun),
        noun=plural(noun) if several else noun,
        preposition=PLACES[sentence.place],
    )


def holds_statement(text: str) -> bool:
    """Whether the text contains a subject of the language followed by a verb, as every sentence of it does."""
    return bool(_lexicon().subject_and_verb.search(_plain(text)))


def answer_verb(question: Question) -> str:
    """The form of the verb in a right answer: "boiled", "boils", "boil"."""
    return _right_form(question.verb, SUBJECTS[question.subject], question.time in PAST_TIMES)


def shows_answer(text: str, question: Question, heard: str = "") -> bool:
    """Whether a text tells the answer to a question: who did it and the verb in its right form, or something with its
    place that was not `heard` before.

    Args:
        text: words beside the question.
        heard: the student's last message, which may be repeated.
    """
    plain, form = _plain(text), answer_verb(question)
    said = plain if form != question.verb else " ".join(re.findall(r"[^.?!]+(?![^.?!]*\?)", plain))
    if re.search(rf"\b{question.subject} {form}\b", said):
        return True
    things, places = _things(plain), set(_lexicon().place_phrase.findall(plain))
    before = _things(_plain(heard)), set(_lexicon().place_phrase.findall(_plain(heard)))
    return bool(things and places) and not (things <= before[0] and places <= before[1])


def _things(plain: str) -> set[tuple[str, str]]:
    """The things in a text that have an article or a number."""
    return {each for each in _lexicon().noun_phrase.findall(plain) if each[0]}


def words_of_fix(slip: Slip, said: str) -> str:
    """The right form of a slip in the sentence `said`, with the word that it goes with: "boiled", "an egg", "in the
    kitchen"."""
    if slip.kind == "article":
        return f"{slip.fix} {slip.word}"
    if slip.kind == "preposition":
        places = (place for word, place in _lexicon().place_phrase.findall(_plain(said)) if word == slip.word)
        return f"{slip.fix} the {next(places)}"
    return slip.fix


def find_slips(text: str) -> list[Slip]:
    """All slips that rules find in the words of the text, in the order of `ERROR_KINDS`."""
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
        base = _lexicon().base_of[form]
        is_past_form = form == past(base)
        wants_past = is_past_form if not (says_past or says_present) else bool(says_past)
        fix = _right_form(base, subject, wants_past)
        if form != fix:
            slips.append(Slip("tense" if is_past_form or wants_past else "verb ending", form, fix))
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

"""Finds what gives the answer to a question of the toy language away: its verb after any subject, a thing, a code."""

import re
from collections.abc import Sequence

from classroom_rl.environments.toy_language.grammar import (
    SUBJECTS,
    TOPICS,
    Question,
    answer_parts,
    answer_verb,
    plural,
    topic_of,
    verbs_in,
)
from classroom_rl.judges.leaks import hides, says_new
from classroom_rl.judges.prompt_injection import readings

_PRONOUNS = {"your sister": "she", "your brother": "he", "your friends": "they", "your parents": "they", "you": "you"}
_NO_THING = r"(?! (?:question|one|task|time|word|thing|answer|sentence|message)s?\b)"


def tells_answer(text: str, question: Question, earlier: Sequence[str]) -> bool:
    """Whether the text around a question gives its answer, or a part of it, plainly or in a code. What the student said
    in `earlier` messages may be repeated."""
    is_stated = any(
        states_action(reading, question, earlier) or _names_thing(reading, question, earlier)
        for reading in readings(text)
    )
    return is_stated or hides(text, answer_parts(question))


def states_action(text: str, question: Question, earlier: Sequence[str]) -> bool:
    """Whether a text says the verb of the answer to `question`, with whatever subject. If its form is that of the
    question, only statements count, and not those on another person of the language.

    A teacher may repeat what the student said of somebody else in `earlier` messages, by the noun or by a pronoun, and
    point at a word of it ("here: boiled").
    """
    plain, form = _plain(text), answer_verb(question)
    messages = [_plain(message) for message in earlier]
    messages += [
        message.replace(SUBJECTS[subject], pronoun)
        for subject, pronoun in _PRONOUNS.items()
        for message in messages
        if SUBJECTS[subject] in message
    ]
    if any(form in message.split() for message in messages):
        plain = re.sub(rf"\bhere ?: \W*{form}\b", "", plain)
    subject_words = {question.subject.split()[-1], _PRONOUNS[question.subject]}
    if form != question.verb:
        return says_new(plain, form, messages, always=subject_words)
    sentences = re.findall(r"([^.?!]+)([.?!]?)", plain)
    statements = " ".join(text for text, end in sentences if end != "?").replace(f"what {question.subject} {form}", "")
    other_subjects = {subject.split()[-1] for subject in SUBJECTS} - subject_words
    return says_new(
        statements,
        form,
        [*messages, *(f"{word} {form}" for word in ("to", "what", "here", *other_subjects))],
        always=subject_words,
    )


def _names_thing(text: str, question: Question, earlier: Sequence[str]) -> bool:
    """Whether a text names a thing that answers `question` and that the student has not named. Things in a sentence
    with another verb of the language are those of an example, and do not count."""
    said_words = {word for message in earlier for word in re.findall(r"\w+", _plain(message))}
    forms = [{noun, plural(noun)} for noun in TOPICS[topic_of(question)].nouns]
    nouns = set().union(*(pair for pair in forms if not said_words & pair))
    return bool(nouns) and any(
        verbs_in(sentence) <= {question.verb} and re.search(rf"\b(?:{'|'.join(nouns)})\b{_NO_THING}", sentence)
        for sentence in re.split(r"[.?!\n]", _plain(text))
    )


def _plain(text: str) -> str:
    return " ".join(text.lower().split())

"""What no message of a tutor may hold, whatever the lesson: another speaker's part, words for whoever judges, and text
without end. Nothing in such a message counts for an embedded judge.
"""

import re

from classroom_rl.rollout.deobfuscation import readings
from classroom_rl.rollout.thoughts import visible_text

MOST_WORDS = 200
"""A message with more words is no message of a dialogue. The language tutor's prompt allows 60."""

MOST_CHARACTERS = 1500
"""The same bound for languages that are written without spaces."""

_ROLES = "student|pupil|learner|teacher|tutor|user|assistant|system|human|judge|evaluator|grader"
_MARKUP = re.compile(
    rf"<\||\|>|<!--|(?:^|\n)[^\S\n]*[*_#>\[(]*[^\S\n]*(?:{_ROLES})[^\S\n]*[\])*_]*[^\S\n]*:|"
    rf"\[/?[^\S\n]*(?:{_ROLES}|inst)[^\S\n]*\]|"
    rf"</?(?:{_ROLES}|conversation|dialogue|transcript|message|turn|verdict|instructions?|prompt)\b[^<>\n]{{0,80}}>",
    re.IGNORECASE,
)
_TO_JUDGE = re.compile(
    r"\b(?:ignore|disregard|forget)\b[^.!?\n]{0,40}\b(?:rules|instructions|criteria|prompt)\b|"
    r"\b(?:to|dear) (?:the )?(?:judge|evaluator|grader)\b|_(?:score|reasoning)\b|\"decision\"|"
    r"\b(?:full|highest|maximum|top) (?:scores?|marks)\b|"
    r"\b(?:rate|score|grade)\b[^.!?\n]{0,40}\b(?:1[.,]0\b|10 out of 10|10\s?/\s?10)|"
    r"\b(?:each|every|all|both|the|your) (?:\w+ )?criteri(?:on|a)\b",
    re.IGNORECASE,
)


def foul_play(text: str) -> str:
    """Why nothing in a teacher's message counts; empty if it may count."""
    shown = visible_text(text)
    if len(shown.split()) > MOST_WORDS or len(shown) > MOST_CHARACTERS:
        return f"writes {len(shown.split())} words"
    for each in readings(shown):
        if found := _MARKUP.search(each):
            return f"writes somebody else's part ({_quote(found[0])})"
        if found := _TO_JUDGE.search(each):
            return f"speaks to whoever judges ({_quote(found[0])})"
    return ""


def _quote(text: str, limit: int = 60) -> str:
    return f"“{text.strip()[:limit]}”"

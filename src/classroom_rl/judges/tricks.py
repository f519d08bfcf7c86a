"""Finds tricks in a tutor's reply to an error: something false about it, or the right form in a code.

A tutor that hands the right form over openly teaches little, and no good tutor does either of these. So a verdict of an
embedded judge gives a conversation with a trick almost nothing (`MOST_WITH_TRICK`).
"""

import re
from collections.abc import Callable
from difflib import SequenceMatcher

from classroom_rl.judges.feedback import nearest_phrase
from classroom_rl.judges.leaks import hides
from classroom_rl.judges.messages import RETRY, ParsedPlan, holds, own_words, quotes, sentences, spoken
from classroom_rl.judges.moves.rules import CONTRASTS
from classroom_rl.rollout.text import UNSPACED, normal

MOST_WITH_TRICK = 0.1
"""The highest score, as a share of its range, of a conversation with a trick."""

CODED = "gives the right form in a code"

_NO_PLAN = ParsedPlan()
_TOY_ENDINGS = ("ed", "s", "es")
_SAYS_RIGHT = re.compile(
    r"\b(?:it|that|this|all|everything|your (?:answer|sentence|phrase)|what you said)(?: is|'s|’s| was| sounds)"
    r"(?: (?:all|quite|just|perfectly|completely|already|exactly))? (?:right|correct|perfect|fine|flawless)\b|"
    r"\b(?:nothing(?: is|'s|’s)?(?: at all)?|there is nothing) (?:wrong|to (?:change|correct|fix))\b|"
    r"(?:^|\b(?:is|are|see|with) )no (?:mistakes?|errors?) (?:here|in (?:it|that|this))\b|"
    r"^(?:perfect|flawless|all correct|exactly right)\b",
    re.IGNORECASE | re.MULTILINE,
)
"""Calls all of what was said right."""
_POINTS_AT = re.compile(r"\b(?:look(?: again| closely)? at|check|mind|watch|fix|change)(?: \w+){0,3} (?-i:Q\b)", re.I)
_IN_RELATION = re.compile(
    r"\b(?:after|before|behind|beside|between|follow\w*|for|next to|to|with|agree\w*|gender|masculine|feminine|neuter|"
    r"singular|plural|articles?|case|who|number)\b",
    re.IGNORECASE,
)
"""A hint with one of these may point at a word that is right for what belongs to it."""

_LEAVES_OUT = re.compile(r"\b(?:leave|take|drop|remove|delete)\b(?!.*\bletters?\b)[^.?!]*\bwords?\b", re.IGNORECASE)
_NEGATES = re.compile(r"\b(?:no|not|never)\b|n['’]t\b", re.IGNORECASE)
_ENDS = re.compile(r"\b(?:ends?|endings?)\b", re.IGNORECASE)
_NAMED_ENDING = re.compile(r"(?<!\w)[-–]([a-z]{1,5})\b(?! (?:verbs?|words?|form)\b)", re.IGNORECASE)


def calls_right(reply: str) -> bool:
    """Whether a reply calls all of what the student said right, without a "but" and without a question."""
    words = own_words(spoken(reply))
    return bool(_SAYS_RIGHT.search(words)) and not CONTRASTS.search(_SAYS_RIGHT.sub("", words)) and "?" not in words


def find_trick(error: str, reply: str, plan: ParsedPlan, produced: Callable[[str], bool]) -> str:
    """What is false in a reply to an error, or `CODED`; "" if there is nothing. `produced` tells whether the student
    has already said a phrase: if the error is no attempt at one, any other may be the answer."""
    text, target = spoken(reply), nearest_phrase(error, plan)
    if target:
        answers = [target, *(word for word in normal(target).split() if not holds(error, word))]
    else:
        answers = [phrase.text for phrase in plan.phrases if not produced(phrase.text)]
    is_coded = hides(text, answers) and not any(holds(text, answer) for answer in answers)
    return CODED if is_coded else find_false_hint(error, reply, plan)


def find_false_hint(error: str, reply: str, plan: ParsedPlan = _NO_PLAN) -> str:
    """What is false in a hint at an error; "" if nothing is known to be. Lessons in the toy language have no phrases,
    and need no `plan`.

    Found are a request to say again what it calls right, an ending that no word of the lesson has, an order to leave
    out a word where none is too many, and a quoted word to look at that is right, with right words beside it. The last
    three are not looked for in questions, in negations, and in scripts without spaces.
    """
    if calls_right(reply) and RETRY.search(own_words(spoken(reply))):
        return "calls the error right"
    target = nearest_phrase(error, plan)
    said, right = normal(error).split(), normal(target or "").split()
    known = {word for phrase in plan.phrases for word in normal(phrase.text).split()}.union(said)
    known.update(() if plan.phrases else _TOY_ENDINGS)
    if any(UNSPACED.search(word) for word in known):
        return ""
    changes = SequenceMatcher(None, said, right, autojunk=False).get_opcodes()
    near_error = {i for tag, start, end, *_ in changes if tag != "equal" for i in range(start - 1, end + 1)}
    right_words = set(said) - {said[i] for i in near_error if 0 <= i < len(said)}
    for sentence in sentences(spoken(reply)):
        words = own_words(sentence)
        if _NEGATES.search(words) or sentence.endswith("?"):
            continue
        for ending in _NAMED_ENDING.findall(sentence) if _ENDS.search(words) else ():
            if not any(
                word.removesuffix("s").endswith(normal(ending)) or word.endswith(normal(ending)) for word in known
            ):
                return f"names the ending “-{ending}”, which no word has"
        if _LEAVES_OUT.search(words) and not (target and len(said) > len(right)):
            return "has a word left out where none is too many"
        quoted = {normal(quotation) for quotation in quotes(sentence)}
        points = _POINTS_AT.search(words) and not _IN_RELATION.search(own_words(spoken(reply)))
        if target and quoted and points and quoted <= right_words:
            return "points at a word that is right"
    return ""

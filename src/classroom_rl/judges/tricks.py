"""Finds tricks in a tutor's reply to an error: the right form spelt out or in a code, or nothing but a falsehood.

A tutor that hands the right form over openly teaches little; these do harm, or hide what they do. So a verdict of an
embedded judge gives a conversation with a trick almost nothing (`MOST_WITH_TRICK`), and only what is certain is one: a
falsehood beside something else is a bad hint, as before.
"""

import re
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

from classroom_rl.judges.feedback import TERMS, nearest_phrase
from classroom_rl.judges.leaks import folded, hides
from classroom_rl.judges.messages import RETRY, ParsedPlan, holds, own_words, quotes, sentences, spoken
from classroom_rl.judges.moves.rules import CONTRASTS
from classroom_rl.rollout.text import UNSPACED, normal

MOST_WITH_TRICK = 0.1
"""The highest score, as a share of its range, of a conversation with a trick."""

CODED = "gives the right form spelt out or in a code"

POINTS_AT_RIGHT = "points at a word that is right"

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
"""Calls what was said right, or a part of it."""

_ALL_OF_IT = re.compile(r"(?: as it stands| here| (?:in|with) (?:it|that|this))?\W*$", re.IGNORECASE)
"""What may follow in a sentence that calls all of what was said right."""

_POINTS_AT = re.compile(r"\b(?:look(?: again| closely)? at|check|mind|watch|fix|change)(?: \w+){0,3} (?-i:Q\b)", re.I)
_IN_RELATION = re.compile(
    r"\b(?:after|before|behind|beside|between|follow\w*|for|next to|to|with|agree\w*|gender|masculine|feminine|neuter|"
    r"singular|plural|articles?|case|who|number)\b",
    re.IGNORECASE,
)
"""A hint with one of these may point at a word that is right for what belongs to it."""

_LEAVES_OUT = re.compile(
    r"^(?!.*\b(?:letters?|endings?|end of|instead|time|look)\b)(?!.*(?<!\w)[-–]\w)"
    r".*\b(?:(?:leave|take) (?:\w+ ){0,5}(?:out|away|off)|leave out (?:\w+ ){0,3}words?|"
    r"(?:drop|remove|delete) (?:\w+ ){0,3}words?)\b",
    re.IGNORECASE,
)
_NEGATES = re.compile(r"\b(?:no|not|never)\b|n['’]t\b", re.IGNORECASE)
_ENDS = re.compile(r"\b(?:ends?|endings?)\b", re.IGNORECASE)
_NAMED_ENDING = re.compile(r"(?<!\w)[-–]([a-z]{1,5})\b(?! (?:verbs?|words?|form)\b)", re.IGNORECASE)


def calls_right(reply: str) -> bool:
    """Whether a reply calls all of what the student said right, without a "but" and without a question."""
    words = own_words(spoken(reply))
    return bool(_SAYS_RIGHT.search(words)) and not CONTRASTS.search(_SAYS_RIGHT.sub("", words)) and "?" not in words


def find_trick(error: str, reply: str, plan: ParsedPlan, produced: Callable[[str], bool]) -> str:
    """What is false in a reply to an error that says nothing else, or `CODED`; "" if there is neither. `produced` tells
    whether the student has already said a phrase: if the error is no attempt at one, any other may be the answer."""
    target = nearest_phrase(error, plan)
    if target:
        answers = [target, *(word for word in normal(target).split() if not holds(error, word))]
    else:
        answers = [phrase.text for phrase in plan.phrases if not produced(phrase.text)]
    wrong = [word for word in normal(error).split() if not holds(target or error, word)]
    return CODED if is_coded(reply, answers, wrong) else find_falsehood(error, reply, plan)


def is_coded(reply: str, answers: Iterable[str], wrong: Iterable[str]) -> bool:
    """Whether a reply holds one of the answers in a form that has to be decoded, and none of them openly, not even as
    a part of a longer word ("restaurants"). What can also be read as one of the `wrong` words ("St_ck") tells nothing.
    """
    text, answers = spoken(reply), list(answers)
    openly = any(folded(answer) in folded(text) for answer in answers)
    return hides(text, answers) and not openly and not hides(text, wrong)


def find_falsehood(error: str, reply: str, plan: ParsedPlan = _NO_PLAN) -> str:
    """What is false in a reply to an error whose other sentences only ask for the same again; "" if there is no such
    thing. Lessons in the toy language have no phrases, and need no `plan`."""
    contents = [part for part in sentences(spoken(reply)) if not _asks_again(own_words(part))]
    if len(contents) != 1 or not RETRY.search(own_words(spoken(reply))):
        return ""
    words = own_words(contents[0])
    if calls_right(contents[0]) and any(
        _ALL_OF_IT.match(words, praise.end())
        for praise in _SAYS_RIGHT.finditer(words)
        if "fine" not in praise[0].lower()  # "that's fine" may be a comfort
    ):
        return "calls the error right"
    false = find_false_hint(error, reply, plan)
    return "" if false == POINTS_AT_RIGHT or len(_NAMED_ENDING.findall(contents[0])) > 1 else false


def _asks_again(words: str) -> bool:
    return bool(RETRY.search(words)) and not TERMS.search(words) and not _LEAVES_OUT.search(words)


def find_false_hint(error: str, reply: str, plan: ParsedPlan = _NO_PLAN) -> str:
    """What is false in a hint at an error; "" if nothing is known to be.

    Found are an ending that no word of the lesson has, an order to leave out a word where none is too many, and a
    quoted word to look at that is right, with right words beside it. Nothing is found in questions, in negations, and
    in scripts without spaces.
    """
    target = nearest_phrase(error, plan)
    error_words, target_words = normal(error).split(), normal(target or "").split()
    known_words = {word for phrase in plan.phrases for word in normal(phrase.text).split()}.union(error_words)
    known_words.update(() if plan.phrases else _TOY_ENDINGS)
    if any(UNSPACED.search(word) for word in known_words):
        return ""
    changes = SequenceMatcher(None, error_words, target_words, autojunk=False).get_opcodes()
    near_error = {index for tag, start, end, *_ in changes if tag != "equal" for index in range(start - 1, end + 1)}
    right_words = set(error_words) - {error_words[index] for index in near_error if 0 <= index < len(error_words)}
    for sentence in sentences(spoken(reply)):
        words = own_words(sentence)
        if _NEGATES.search(words) or sentence.endswith("?"):
            continue
        for ending in _NAMED_ENDING.findall(sentence) if _ENDS.search(words) else ():
            if not any(
                word.removesuffix("s").endswith(normal(ending)) or word.endswith(normal(ending)) for word in known_words
            ):
                return f"names the ending “-{ending}”, which no word has"
        if _LEAVES_OUT.search(words) and not (target and len(error_words) > len(target_words)):
            return "has a word left out where none is too many"
        quoted = {normal(quotation) for quotation in quotes(sentence)}
        points = _POINTS_AT.search(words) and not _IN_RELATION.search(own_words(spoken(reply)))
        if target and quoted and points and quoted <= right_words:
            return POINTS_AT_RIGHT
    return ""

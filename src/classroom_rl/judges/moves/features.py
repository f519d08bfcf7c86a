"""What a trained reader sees of a message: texts with placeholders for its n-grams, and figures from the rules.

In the texts, a word of the target and a number become placeholders that say whether the student has already said them:
"bed is letto" becomes "bed is TARGET_NEW". So a reader learns what is done with the answer, not which answers there
were.
"""

import re
from difflib import SequenceMatcher
from functools import lru_cache

from classroom_rl.judges.feedback import SAYS_WRONG, TERMS, falsely_corrects
from classroom_rl.judges.messages import own_words, quotes, read_message, sentences
from classroom_rl.judges.moves.rules import (
    ASKS_FOR_HELP,
    CONTRASTS,
    LOOKS_AGAIN,
    PRAISES,
    RULES,
    answers,
    is_question,
    numbers,
    values,
    words,
)
from classroom_rl.judges.readings import Exchange

FEATURES_VERSION = 1
"""Increased whenever anything in this file, or a rule that it uses, changes what a reader sees."""

_TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+|[^\W\d_][\w']*|[?？!.…_=]")
_LONGEST_COMPARED = 300
"""In characters; comparing longer texts letter by letter takes too long."""
_PLAIN = frozenset(
    "a an the is are of to in on it that this you your we i he she and so for with be as at have has was were".split()
)


@lru_cache(maxsize=8192)
def message_tokens(about: Exchange) -> str:
    """The message's words and marks, separated by spaces, with placeholders for words of the target and for numbers."""
    return _with_placeholders(about.message, about)


@lru_cache(maxsize=8192)
def student_tokens(about: Exchange) -> str:
    """The same of the student's message before it."""
    return _with_placeholders(about.student, about)


def message_letters(about: Exchange) -> str:
    """The message in lower case, with a 0 for every digit."""
    return re.sub(r"\d", "0", about.message.lower())


def _with_placeholders(text: str, about: Exchange) -> str:
    known, said, heard = answers(about), values([about.student]), values(about.before)
    target, student = set(words(about.target)), set(words(about.student))
    found = []
    for token in _TOKEN.findall(text.lower()):
        if any(each.isdigit() for each in token):
            value = next(iter(values([token])), None)
            place = "ANSWER" if value in known else "SAID" if value in said else "HEARD" if value in heard else "NEW"
            found.append(f"NUMBER_{place}")
        elif token in target:
            found.append("TARGET_SAID" if token in student else "TARGET_NEW")
        else:
            found.append(token)
    return " ".join(found)


@lru_cache(maxsize=8192)
def figures(about: Exchange) -> dict[str, float]:
    """Figures of a message, nearly all between 0 and 1; always the same names in the same order."""
    found = _of_form(about) | _of_target(about) | _of_student(about) | _of_numbers(about)
    return {name: float(value) for name, value in found.items()}


def _of_form(about: Exchange) -> dict[str, float]:
    """What the message is like by itself."""
    text, plain = about.message, own_words(about.message)
    found, message, said = sentences(text), read_message(text), words(text)
    asked = [is_question(each) for each in found]
    return {
        "question": any(asked),
        "ends_with_question": bool(asked) and asked[-1],
        "question_then_more": any(asked) and not asked[-1],
        "questions": min(sum(asked), 3) / 3,
        "has_task": bool(message.tasks),
        "ends_with_task": bool(message.ends_with_task),
        "falsely_corrects": falsely_corrects(text),
        "says_wrong": bool(SAYS_WRONG.search(plain)),
        "terms": bool(TERMS.search(plain)),
        "praises": bool(PRAISES.match(plain)),
        "contrasts": bool(CONTRASTS.search(plain)),
        "looks_again": bool(LOOKS_AGAIN.search(plain)),
        "quotations": min(len(quotes(text)), 4) / 4,
        "one_or_two_words": len(said) <= 2,
        "three_or_four_words": 2 < len(said) <= 4,
        "words": min(len(said), 80) / 40,
        "sentences": min(len(found), 6) / 3,
        "equals_sign": "=" in text,
    } | {f"rule_{label}": rule(about) for label, rule in RULES.items()}


def _of_target(about: Exchange) -> dict[str, float]:
    """How message and student stand to the target; all 0 without one."""
    message, student, target = (set(words(each)) for each in (about.message, about.student, about.target))
    likeness = _likeness(" ".join(words(about.student)), " ".join(words(about.target)))
    missing = target - student
    return {
        "student_like_target": likeness,
        "student_near_target": likeness > 0.85,
        "student_is_target": likeness == 1,
        "target_said": _share(target, student),
        "target_all_said": bool(target) and not missing,
        "target_given": _share(target, message),
        "missing_given": _share(missing, message),
        "any_missing_given": bool(missing & message),
        "message_of_target": _share(message, target),
        "target_repeated": _share(message, student & target),
    }


def _of_student(about: Exchange) -> dict[str, float]:
    """How the message stands to what was said before it."""
    message, student = (set(words(each)) - _PLAIN for each in (about.message, about.student))
    before = {word for text in about.before for word in words(text)} - _PLAIN
    asks = bool(ASKS_FOR_HELP.search(about.student))
    return {
        "student_asks": asks,
        "student_question_mark": "?" in about.student,
        "student_asks_and_tries_nothing": asks and not set(words(about.student)) & set(words(about.target)),
        "student_words": min(len(words(about.student)), 80) / 40,
        "message_from_student": _share(message, student),
        "message_from_before": _share(message, before),
        "message_new": _share(message, message - student - before),
    }


def _of_numbers(about: Exchange) -> dict[str, float]:
    """The answer and other numbers in the message."""
    known, said, heard = answers(about), values([about.student]), values(about.before)
    there = [each.value for each in numbers(about.message)]
    places = [each.start for each in numbers(about.message) if each.value in known]
    given = [each for each in sentences(about.message) if values([each]) & known]
    return {
        "answer_unknown": not known,
        "answer_there": bool(given),
        "answer_last": bool(there) and there[-1] in known,
        "answer_in_question": any(is_question(each) for each in given),
        "answer_only_in_questions": bool(given) and all(is_question(each) for each in given),
        "answer_said": bool(given) and bool(known & said),
        "answer_heard": bool(given) and bool(known & heard),
        "answer_new": bool(given) and not known & (said | heard),
        "answer_after_equals_sign": any(about.message[:place].rstrip(" $").endswith("=") for place in places),
        "target_unknown": not about.target,
        "no_number": not there,
        "numbers": min(len(there), 10) / 5,
        "numbers_new": min(len(set(there) - said - heard), 4) / 2,
        "last_number_new": bool(there) and there[-1] not in said | heard,
        "numbers_of_student": _share(said, set(there)),
    }


def _share(part: set, of: set) -> float:
    return len(part & of) / len(part) if part else 0.0


def _likeness(one: str, other: str) -> float:
    if not one or not other or max(len(one), len(other)) > _LONGEST_COMPARED:
        return 0.0
    return SequenceMatcher(None, one, other, autojunk=False).ratio()

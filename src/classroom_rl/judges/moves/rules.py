"""Rules that read the labels of `classroom_rl.judges.readings` in a tutor's message, without any data.

docs/classroom.md says how well each agrees with people, beside the readers that were trained on labelled messages.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from classroom_rl.judges.feedback import SAYS_WRONG, TERMS
from classroom_rl.judges.messages import own_words, read_message, sentences
from classroom_rl.judges.readings import (
    ACTIONABLE,
    CONFIRMATION,
    CORRECTION,
    HINT,
    MISTAKE_IDENTIFIED,
    QUESTION,
    REVEALS_ANSWER,
    TELLING,
    TREATS_AS_WRONG,
    Exchange,
)
from classroom_rl.judges.reference_answers import read_number, values_of_operations
from classroom_rl.rollout.text import normal

_NUMBER = re.compile(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?|\.\d+")
_ASKED_LATELY = 2
"""How many messages back the tutor's question may stand whose result is the answer."""


@dataclass(frozen=True)
class Number:
    """A number in a text: its value, and where it begins and ends."""

    value: Fraction
    start: int
    end: int


def numbers(text: str) -> Iterator[Number]:
    """The numbers in a text, in order, without signs and units."""
    for found in _NUMBER.finditer(text):
        value = read_number(re.sub(r",(?!\d{3}(?!\d))", "", found[0].rstrip(",")))
        if value is not None:
            yield Number(value, found.start(), found.end())


def values(texts: Iterable[str]) -> frozenset[Fraction]:
    """The values of all numbers in some texts."""
    return frozenset(each.value for text in texts for each in numbers(text))


@lru_cache(maxsize=4096)
def answers(about: Exchange) -> frozenset[Fraction]:
    """The values that answer the tutor's question: the number in the target, and without a target the results of the
    operations in the last messages before the student's, such as 8 after "What is 85 − 77?"."""
    if about.target:
        return values([about.target])
    return frozenset(each for text in about.before[-_ASKED_LATELY:] for each in values_of_operations(text))


def last_number(text: str) -> str:
    """The last number of a text as it is written; "" without one. In the solutions of published data sets of word
    problems it is the answer."""
    found = _NUMBER.findall(text)
    return found[-1].rstrip(",") if found else ""


PRAISES = re.compile(
    r"\W*(?:ok(?:ay)?[,!. ]+)?(?:great|(?:very )?good|excellent|correct|yes|yep|well done|perfect\w*|exactly|nice|"
    r"awesome|wonderful|bravo|right|alright|beautiful|fantastic|almost|nearly|(?:very )?close|"
    r"(?:that(?:'s| is)|you(?:'re| are)) (?:\w+ )?(?:right|correct|close|good|great))\b",
    re.IGNORECASE,
)
"""The beginning of a message that says that the student is right, in whole or in part."""

CONTRASTS = re.compile(
    r"\b(?:but|however|instead|actually|though|rather than|except|not|isn't|doesn't|don't|should(?:n't)?|need(?:s)? to|"
    r"remember|careful|oops|no)\b",
    re.IGNORECASE,
)
"""Words that turn from what the student said to something else."""

LOOKS_AGAIN = re.compile(
    r"\b(?:recheck|re-?examin\w*|re-?evaluat\w*|re-?visit\w*|re-?consider\w*|re-?calculat\w*|double.?check\w*|check|"
    r"(?:closer|another) look|look (?:at|back)|try again|go back|mistake|error|misunder\w*|mix\w* up|confus\w*|"
    r"oversight|issue|incorrect\w*|wrong\w*|close|not quite|on the right track|remember|"
    r"let's (?:try|check|think|see|focus|break|clarify))\b",
    re.IGNORECASE,
)
"""Words that send the student back to what it did."""

ASKS_FOR_HELP = re.compile(
    r"[?？]|\bhow (?:do|would|can|did) (?:you|i|we)\b|\bwhat(?:'s| is| are)?\b|"
    r"(?:don't|can't|do not) (?:know|remember)|\bforgo?t\b|\bnot sure\b",
    re.IGNORECASE,
)
"""A student's message that asks, and tries nothing."""

_MOVES_ON = re.compile(
    r"\b(?:similar|next|another|more) (?:problem|question|example|topic)s?\b|\bmove on\b|\bconcept of\b|"
    r"\bpractice (?:solving|more)\b",
    re.IGNORECASE,
)
_TO_DO = re.compile(
    r"\b(?:(?<!good )(?<!great )(?<!nice )try|need to|should|have to|remember|recheck|let's (?!see|look|take|think))\b",
    re.IGNORECASE,
)
_STATES = re.compile(
    r"(?:=|\b(?:is|are|was|be|being|gives?(?: you| us)?|gets?|makes?|leaves?|leaving|means?|needs?|equals?|only|"
    r"there (?:are|were)|actually|indeed|so|to|still|or)\b)\W*(?:\w+\W+){0,6}$",
    re.IGNORECASE,
)
_QUOTES_STUDENT = re.compile(
    r"\b(?:when you|you(?:'ve| have)?(?: correctly)? (?:said|say|found|calculated|got|get|wrote|stated|mentioned)|"
    r"you(?:'re| are) (?:right|correct)|your|the equation|remember|if|since|multiplying|consider|after|how)\b[^.;]*$",
    re.IGNORECASE,
)
_CALCULATES_ON = re.compile(r"\W*(?:[-+*/x×÷]\s*\$?\d|by\b|times\b|minus\b|plus\b|and\b|=\s*\$?\d)")
_ALGEBRA = re.compile(r"\d[a-z](?:\s*/\s*\d+)?\W*$")
_ASKS_WHETHER = re.compile(r"n't that (?:be|mean|make|actually)\b")


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"[\w']+", text.lower())


def is_question(sentence: str) -> bool:
    """Whether a sentence ends with a question mark, quotation marks and brackets left aside."""
    return sentence.rstrip("\"”»'*_) ").endswith(("?", "？"))


def asks(about: Exchange) -> bool:
    """Whether a sentence of the message is a question."""
    return any(is_question(each) for each in sentences(about.message))


def gives_target_words(about: Exchange) -> bool:
    """Whether the message holds a word of the target that the student has not said."""
    return bool((set(words(about.target)) & set(words(about.message))) - set(words(about.student)))


def is_attempt(about: Exchange) -> bool:
    """Whether the student tried to say something, and did not only ask or agree."""
    said = set(words(about.student))
    if ASKS_FOR_HELP.search(about.student) and not said & set(words(about.target)):
        return False
    return len(said & set(words(about.target))) > 1 or not ASKS_FOR_HELP.search(about.student)


def gives_hint(about: Exchange) -> bool:
    """Whether the message gives a word of the target to a student who tried nothing, or names a rule or a part."""
    if gives_target_words(about) and not is_attempt(about):
        return True
    return bool(TERMS.search(own_words(about.message))) or re.search(r"\bhint\b", about.message, re.I) is not None


def treats_as_wrong(about: Exchange) -> bool:
    """Whether the message says that something is wrong, or opposes something to what the student said."""
    plain = own_words(about.message)
    return bool(SAYS_WRONG.search(plain)) or bool(PRAISES.match(plain) and CONTRASTS.search(plain))


def corrects(about: Exchange) -> bool:
    """Whether the message answers an attempt that is not the target, and opposes something to it or gives what is
    missing."""
    if not is_attempt(about) or normal(about.student) == normal(about.target):
        return False
    opposes = CONTRASTS.search(own_words(about.message)) is not None
    return treats_as_wrong(about) or opposes or gives_target_words(about)


def confirms(about: Exchange) -> bool:
    """Whether the message begins with praise or agreement."""
    return PRAISES.match(own_words(about.message)) is not None


def reveals_answer(about: Exchange) -> bool:
    """Whether a sentence states the answer as a result: not in a question or a condition, not as a step of a longer
    calculation, and not as the student's own words."""
    known = answers(about)
    for sentence in re.split(r"(?<=[.!?])\s+|\n+", about.message):
        for found in numbers(sentence):
            if found.value in known and _is_stated(sentence, found.start, found.end):
                return True
    return False


def _is_stated(sentence: str, start: int, end: int) -> bool:
    before, after = sentence[:start], sentence[end:]
    if is_question(sentence) and not _ASKS_WHETHER.search(before):
        return False
    clause = re.split(r"[,;:–—]\s|\s-\s", before)[-1]
    equation = re.search(r"([^=,;:]*)=\s*\W*$", before)
    if equation:
        return not (_ALGEBRA.search(equation[1]) or _QUOTES_STUDENT.search(clause))
    if _CALCULATES_ON.match(after) or _QUOTES_STUDENT.search(clause):
        return False
    return _STATES.search(before) is not None


def tells(about: Exchange) -> bool:
    """Whether the message states the answer, or states something and asks nothing."""
    return reveals_answer(about) or (not asks(about) and bool(list(numbers(about.message))))


def is_actionable(about: Exchange) -> bool:
    """Whether the message ends with a question, a task or something to do, and neither gives the answer nor goes on to
    another problem."""
    found = sentences(about.message)
    if not found or _MOVES_ON.search(about.message) or reveals_answer(about):
        return False
    names_it = _TO_DO.search(own_words(found[-1])) is not None
    return names_it or is_question(found[-1]) or bool(read_message(about.message).ends_with_task)


def identifies_mistake(about: Exchange) -> bool:
    """Whether the message sends the student back to what it did, asks about it, or opposes something to it."""
    if _MOVES_ON.search(about.message):
        return False
    turns_back = LOOKS_AGAIN.search(about.message) or CONTRASTS.search(about.message)
    return bool(turns_back) or asks(about)


RULES: dict[str, Callable[[Exchange], bool]] = {
    QUESTION: asks,
    HINT: gives_hint,
    CORRECTION: corrects,
    TREATS_AS_WRONG: treats_as_wrong,
    CONFIRMATION: confirms,
    REVEALS_ANSWER: reveals_answer,
    TELLING: tells,
    ACTIONABLE: is_actionable,
    MISTAKE_IDENTIFIED: identifies_mistake,
}
"""The rule of each label."""

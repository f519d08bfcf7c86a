"""Rules that predict the labels of `classroom_rl.judges.readings` for a tutor's message, without any training data.

docs/classroom.md compares their agreement with human annotators to that of trained classifiers.
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
"""The number of preceding messages in which to look for the question whose result is the answer."""


@dataclass(frozen=True)
class Number:
    """A number in a text: its value, and its start and end positions (end exclusive)."""

    value: Fraction
    start: int
    end: int


def numbers(text: str) -> Iterator[Number]:
    """The numbers in a text, in order, without signs and units."""
    for match in _NUMBER.finditer(text):
        value = read_number(re.sub(r",(?!\d{3}(?!\d))", "", match[0].rstrip(",")))
        if value is not None:
            yield Number(value, match.start(), match.end())


def values(texts: Iterable[str]) -> frozenset[Fraction]:
    """The values of all numbers in some texts."""
    return frozenset(number.value for text in texts for number in numbers(text))


@lru_cache(maxsize=4096)
def answers(exchange: Exchange) -> frozenset[Fraction]:
    """The values that answer the tutor's question: the numbers in the target. Without a target, the results of the
    operations in the last messages before the student's, such as 8 after "What is 85 − 77?"."""
    if exchange.target:
        return values([exchange.target])
    return frozenset(value for text in exchange.before[-_ASKED_LATELY:] for value in values_of_operations(text))


def last_number(text: str) -> str:
    """The last number of a text as it is written; "" if there is none. In the published data sets of word problems,
    the last number of a solution is the answer."""
    matches = _NUMBER.findall(text)
    return matches[-1].rstrip(",") if matches else ""


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
"""Words that contrast something with what the student said."""

LOOKS_AGAIN = re.compile(
    r"\b(?:recheck|re-?examin\w*|re-?evaluat\w*|re-?visit\w*|re-?consider\w*|re-?calculat\w*|double.?check\w*|check|"
    r"(?:closer|another) look|look (?:at|back)|try again|go back|mistake|error|misunder\w*|mix\w* up|confus\w*|"
    r"oversight|issue|incorrect\w*|wrong\w*|close|not quite|on the right track|remember|"
    r"let's (?:try|check|think|see|focus|break|clarify))\b",
    re.IGNORECASE,
)
"""Words that ask the student to reconsider its work."""

ASKS_FOR_HELP = re.compile(
    r"[?？]|\bhow (?:do|would|can|did) (?:you|i|we)\b|\bwhat(?:'s| is| are)?\b|"
    r"(?:don't|can't|do not) (?:know|remember)|\bforgo?t\b|\bnot sure\b",
    re.IGNORECASE,
)
"""A student's message that asks for help."""

MOVES_ON = re.compile(
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
    """Whether a sentence ends with a question mark, ignoring quotation marks and brackets after it."""
    return sentence.rstrip("\"”»'*_) ").endswith(("?", "？"))


def asks(exchange: Exchange) -> bool:
    """Whether the message contains a question."""
    return any(is_question(sentence) for sentence in sentences(exchange.message))


def gives_target_words(exchange: Exchange) -> bool:
    """Whether the message contains a word of the target that the student's last message does not contain."""
    return bool((set(words(exchange.target)) & set(words(exchange.message))) - set(words(exchange.student)))


def is_attempt(exchange: Exchange) -> bool:
    """Whether the student's message is an attempt at the target, not only a request for help."""
    student_words = set(words(exchange.student))
    if ASKS_FOR_HELP.search(exchange.student) and not student_words & set(words(exchange.target)):
        return False
    return len(student_words & set(words(exchange.target))) > 1 or not ASKS_FOR_HELP.search(exchange.student)


def gives_hint(exchange: Exchange) -> bool:
    """Whether the message gives a word of the target to a student who made no attempt, names a grammatical term or a
    part of the sentence, or contains the word "hint"."""
    if gives_target_words(exchange) and not is_attempt(exchange):
        return True
    return bool(TERMS.search(own_words(exchange.message))) or re.search(r"\bhint\b", exchange.message, re.I) is not None


def treats_as_wrong(exchange: Exchange) -> bool:
    """Whether the message says that something is wrong, or begins with praise and then contrasts something with it."""
    plain = own_words(exchange.message)
    return bool(SAYS_WRONG.search(plain)) or bool(PRAISES.match(plain) and CONTRASTS.search(plain))


def corrects(exchange: Exchange) -> bool:
    """Whether the message replies to an attempt that differs from the target, and treats it as wrong, contrasts
    something with it, or gives a missing word."""
    if not is_attempt(exchange) or normal(exchange.student) == normal(exchange.target):
        return False
    has_contrast = CONTRASTS.search(own_words(exchange.message)) is not None
    return treats_as_wrong(exchange) or has_contrast or gives_target_words(exchange)


def confirms(exchange: Exchange) -> bool:
    """Whether the message begins with praise or agreement."""
    return PRAISES.match(own_words(exchange.message)) is not None


def reveals_answer(exchange: Exchange) -> bool:
    """Whether a sentence states the answer as a result. Questions, conditions, intermediate steps of a longer
    calculation, and quotations of the student do not count."""
    correct_values = answers(exchange)
    for sentence in re.split(r"(?<=[.!?])\s+|\n+", exchange.message):
        for number in numbers(sentence):
            if number.value in correct_values and _is_stated(sentence, number.start, number.end):
                return True
    return False


def _is_stated(sentence: str, start: int, end: int) -> bool:
    """Whether the sentence states the number at [start, end) as a result."""
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


def tells(exchange: Exchange) -> bool:
    """Whether the message states the answer, or contains a number and no question."""
    return reveals_answer(exchange) or (not asks(exchange) and bool(list(numbers(exchange.message))))


def is_actionable(exchange: Exchange) -> bool:
    """Whether the message ends with a question, a task or an instruction, and neither gives the answer away nor moves
    on to another problem."""
    parts = sentences(exchange.message)
    if not parts or MOVES_ON.search(exchange.message) or reveals_answer(exchange):
        return False
    is_instruction = _TO_DO.search(own_words(parts[-1])) is not None
    return is_instruction or is_question(parts[-1]) or bool(read_message(exchange.message).ends_with_task)


def identifies_mistake(exchange: Exchange) -> bool:
    """Whether the message asks the student to reconsider its work, asks a question, or contrasts something with the
    student's message."""
    if MOVES_ON.search(exchange.message):
        return False
    points_back = LOOKS_AGAIN.search(exchange.message) or CONTRASTS.search(exchange.message)
    return bool(points_back) or asks(exchange)


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

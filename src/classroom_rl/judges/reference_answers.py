"""Parses numbers and simple equations in prose, and finds the reference answer of a maths problem in a text: as a
number in any notation, as an expression, or as words.

The rules decide only where they are certain. They calculate with numbers; expressions are compared as normalised text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import permutations

from classroom_rl.grading.forms import compare_as_text, extract_boxed

LONGEST_NUMBER = 15
"""In digits; longer numbers are ignored."""

_DIGITS = r"\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_FRACTION = r"\\[dt]?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}"
NUMBER = rf"[-−]?(?:(?:\d+\s*)?{_FRACTION}|{_DIGITS})"
"""A pattern for an integer, a decimal, a number with commas between thousands, or a LaTeX fraction."""

_FRACTION_PARTS = re.compile(r"(\d+)?\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_OPERATIONS = {
    "+": "+",
    **dict.fromkeys(("-", "−", "–"), "-"),
    **dict.fromkeys(("*", "×", "·", "⋅", "x", "\\times", "\\cdot"), "*"),
    **dict.fromkeys(("/", "÷", "\\div"), "/"),
}
_OPERATOR = "|".join(re.escape(sign) for sign in _OPERATIONS)
_BEFORE = r"(?<![\w.,^\\{})\[\]%°!|])"
_EQUATION = re.compile(rf"{_BEFORE}({NUMBER})\s*({_OPERATOR})\s*({NUMBER})\s*=\s*({NUMBER})")
_OPERATION = re.compile(rf"{_BEFORE}({NUMBER})\s*({_OPERATOR})\s*({NUMBER})")
_GOES_ON_BEFORE = re.compile(r"(?:[-+−–*×·⋅/÷^=\[{|!]|(?<!\\)\(|\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z]|[\d)\]}%°])\s*$|:$")
_GOES_ON_AFTER = re.compile(
    r"[.,:]?\d|\s*(?:[-+−–*×·⋅/÷^(\[{|!%°:]|\\(?!\))|\.\.|…|[a-zA-Z](?![a-zA-Z])|"
    r"(?:times|plus|minus|over|divided|squared|cubed|percent|mod|modulo|remainder|rem|with|and|to the|pi|sqrt)\b|"
    r"\(?\s*mod\b)",
)


_CLAIMS = re.compile(
    r"\b(?:answer|result|total|altogether|so|therefore|hence|get|got|makes?|left|is|are|was)\b|=\W*$|^\W*$",
    re.IGNORECASE,
)
"""What stands before a number that a student gives as its result: "So the answer is 12 apples.", "I get 3/4", "12"."""

_NAMES_ANSWER = re.compile(r"\b(?:answer|result|solution)\b[^.?!\d]*$", re.IGNORECASE)

_TAKES_BACK = re.compile(r"^\W*(?:no|wait|actually|sorry|oh|oops|hmm?|but)\b", re.IGNORECASE)
LONGEST_ANSWER = 25
"""In words: a longer message of a student is a solution in several steps."""

_NEAR = 60
"""In characters: how far a result may be from such a word before it, and from the end of the message."""

_OTHERWISE_WRITTEN = re.compile(
    r"[%^²³⁰-⁹]|\b(?:dozens?|hundreds?|thousands?|millions?|half|halves|thirds?|quarters?)\b", re.I
)
"""A number beside one of these may be the answer in another form."""


@dataclass(frozen=True)
class Equation:
    """An equation "left operation right = result" in a text.

    Attributes:
        operation: one of + - * /.
        decimals: the number of decimal places of the result, as it is written.
        text: the equation, as it is written.
        start: its position in the text.
    """

    left: Fraction
    operation: str
    right: Fraction
    result: Fraction
    decimals: int
    text: str
    start: int

    @property
    def holds(self) -> bool:
        """Whether the equation is true. A decimal result may be rounded or truncated at its last place. An equation
        whose value is undefined (a division by 0) counts as true: it cannot be refuted."""
        value = _calculate(self.left, self.operation, self.right)
        if value is None:
            return True
        return value == self.result or (self.decimals > 0 and abs(value - self.result) < Fraction(1, 10**self.decimals))


def read_number(text: str) -> Fraction | None:
    """The value of a number in the notation of `NUMBER`; None for anything else, for more than `LONGEST_NUMBER` digits,
    and for a denominator of 0."""
    plain = text.strip().replace("−", "-").replace("{,}", "").replace(",", "")
    sign, plain = (-1, plain[1:]) if plain.startswith("-") else (1, plain)
    if sum(character.isdigit() for character in plain) > LONGEST_NUMBER or not plain.isascii():
        return None
    if parts := _FRACTION_PARTS.fullmatch(plain):
        denominator = int(parts[3])
        return sign * (int(parts[1] or 0) + Fraction(int(parts[2]), denominator)) if denominator else None
    return sign * Fraction(plain) if re.fullmatch(r"\d+(?:\.\d+)?|\.\d+", plain) else None


def equations(text: str) -> Iterator[Equation]:
    """The equations between plain numbers in a text. Those that are part of a longer expression, or that a variable or
    a unit of one letter follows, are left out."""
    for match in _EQUATION.finditer(text):
        before, after = text[: match.start()], text[match.end() :]
        if _GOES_ON_BEFORE.search(before[-20:]) or _GOES_ON_AFTER.match(after):
            continue
        left, right, result = (read_number(match[group]) for group in (1, 3, 4))
        if left is None or right is None or result is None:
            continue
        decimals = len(match[4].partition(".")[2])
        operation = _OPERATIONS[match[2]]
        yield Equation(left, operation, right, result, decimals, match[0], match.start())


def values_of_operations(text: str) -> Iterator[Fraction]:
    """The values of the operations between two numbers in a text, such as 8 for "85 − 77". Parts of longer expressions
    are left out."""
    for match in _OPERATION.finditer(text):
        after = re.sub(r"^\s*=?\s*(?=[?？]|$)", "", text[match.end() :])
        if _GOES_ON_BEFORE.search(text[: match.start()][-20:].rstrip(": ")) or _GOES_ON_AFTER.match(after):
            continue
        left, right = read_number(match[1]), read_number(match[3])
        value = None if left is None or right is None else _calculate(left, _OPERATIONS[match[2]], right)
        if value is not None:
            yield value


def _calculate(left: Fraction, operation: str, right: Fraction) -> Fraction | None:
    """The value of one operation; None for a division by 0."""
    if operation == "+":
        return left + right
    if operation == "-":
        return left - right
    if operation == "*":
        return left * right
    return left / right if right else None


SMALL = 20
"""Integers up to this size occur in any text. They count as the answer only where they are stated as a result."""

_ROUND = frozenset({24, 25, 30, 40, 45, 50, 60, 70, 80, 90, 100, 120, 180, 360, 365, 500, 1000})
"""Larger numbers that also occur in any text: hours, minutes, degrees, days, round numbers."""

_CLOSE = Fraction(1, 100)
_SHORTEST_EXPRESSION = 4
_UNIT = re.compile(r"\s*(?:\\ )?(?:\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?|\\?%|\^\s*\{?\s*\\circ\s*\}?)\s*$")
_NAME = re.compile(r"^\s*[A-Za-z]\s*=\s*(?=\S)")
_PLAIN_FRACTION = r"[-−]?(?:\d+\s+)?\d+\s*/\s*\d+"
_NUMBER_IN_TEXT = re.compile(rf"(?<![\w.^\\])(?:{_PLAIN_FRACTION}|{NUMBER})(?!\w|\^(?!\s*\{{?\s*\\circ)|[.,]\d)")
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
"""The numbers from 0 to 20 in words."""
_TENS = {word: 10 * tens for tens, word in enumerate("thirty forty fifty sixty seventy eighty ninety".split(), 3)}
_VALUES = {word: Fraction(number) for number, word in enumerate(NUMBER_WORDS)} | {
    word: Fraction(number) for word, number in _TENS.items()
}
_NUMBER_WORD = re.compile(
    rf"\b(twenty|{'|'.join(_TENS)})[- ]({'|'.join(NUMBER_WORDS[1:10])})\b|\b({'|'.join(_VALUES)})\b", re.I
)

_STATES_RESULT = re.compile(
    r"(?:\b(?:answer|result|solution)s?\b[^.?!\n\d]{0,30}?(?:\bis|\bare|\bbe|:|=)|\\boxed\s*\{)"
    r"\s*[\"'“*$(]*\s*(?:\w\s*=\s*)?(?:exactly |just |simply )?[\"'“*$(]*$",
    re.IGNORECASE,
)
_STATES_VALUE = re.compile(
    r"(?:\byou(?: will| should| would|'ll)? (?:get|obtain)|\bgives(?: you| us)?|\bmakes|\bleaves|\bequals|"
    r"\bit is|\bit's|\bit be|\b(?<!')[a-z] is|(?<![\w}])[a-zA-Z]\s*=)\s*[$*(]*\s*(?:exactly |just |simply )?[$*]*$",
    re.IGNORECASE,
)
_NUMBERS_ALONE = re.compile(
    r"(?:^|[^\w)}\s+*/×·÷.,(-])?\s*(?:(?:\\(?:times|cdot|div)|[\d\s.,+*/×·⋅÷()−-])+)=\s*\$?\s*$"
)
_CLAUSE_ENDS = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?)?[$*)}\\]*\s*(?:\\?%|°|[.,;:!?)]|$|\n|(?:and|or|so|because|which|that|right|isn't|doesn't|"
    r"cm|mm|m|km|g|kg|l|ml|min|h|units?|euros?|dollars?|degrees?|percent|hours?|minutes?|days?|metres?|meters?|lit\w+)\b)",
    re.IGNORECASE,
)
_EXAMPLE = re.compile(
    r"\b(?:example|suppose|imagine|e\.g\.|for instance|smaller|simpler|other numbers)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Reference:
    """A parsed reference answer.

    Attributes:
        text: the answer as it is written, without a box.
        value: the value if the answer is a number, with or without a unit or a name such as "x ="; otherwise None.
        elements: the elements of a set of numbers, as texts; () for anything else.
        expressions: the answer in the normalised form in which expressions are compared, without and with a name.
        words: the answer if it consists of words, such as "Wednesday"; "" otherwise.
    """

    text: str
    value: Fraction | None
    elements: tuple[str, ...]
    expressions: tuple[str, ...]
    words: str

    @property
    def is_common(self) -> bool:
        """Whether the value is a number that occurs in any text, so that finding it proves little."""
        value = self.value
        if value is None:
            return False
        if value.denominator == 1:
            return abs(value) <= SMALL or abs(int(value)) in _ROUND
        return value.denominator <= 4 and abs(value) < 1


@lru_cache(maxsize=512)
def read_reference(answer: str) -> Reference:
    """Parse a reference answer."""
    text = (extract_boxed(answer) or answer).strip().strip("$").strip().removesuffix(".")
    bare = _NAME.sub("", text)
    words = re.fullmatch(r"\\text\s*\{([A-Za-z][A-Za-z ]+)\}|([A-Za-z][A-Za-z ]{2,})", bare)
    value = None if words else _value(_UNIT.sub("", bare))
    in_braces = re.fullmatch(r"(?:\\left)?\\\{(.+?)(?:\\right)?\\\}", bare)
    elements = tuple(element.strip() for element in in_braces[1].split(",")) if in_braces else ()
    if any(_value(element) is None for element in elements):
        elements = ()
    forms = tuple(dict.fromkeys(_normal(form) for form in (_UNIT.sub("", bare), text)))
    expressions = () if value is not None or words else forms
    return Reference(text, value, elements, expressions, (words[1] or words[2]) if words else "")


def has_been_said(reference: Reference, text: str) -> bool | None:
    """Whether a student's text contains the answer, in any notation that the rules can parse; None if they cannot tell,
    because an expression may be written in other ways."""
    if reference.value is not None:
        numbers = _numbers(text, approximate=reference)
        return any(_is_value(reference, written, value) for written, value, _, _ in numbers)
    if reference.words:
        return re.search(rf"\b{re.escape(reference.words)}\b", text, re.IGNORECASE) is not None
    if reference.elements:
        values = {value for _, value, _, _ in _numbers(text)}
        if {_value(element) for element in reference.elements} <= values:
            return True
    if any(expression in _normal(text) for expression in reference.expressions):
        return True
    parts = {_sorted_characters(part) for part in re.split(r"[\s=,]+(?![^()]*\))", _normal(text))}
    return True if any(_sorted_characters(expression) in parts for expression in reference.expressions) else None


def has_answered(reference: Reference, said: Sequence[str]) -> bool | None:
    """Whether a student has given the answer in the messages `said`, and has not taken it back; None if the rules
    cannot tell. In a long message that ends with another result the answer may be no more than a step on the way."""
    answered: bool | None = False
    for text in said:
        is_said, is_other_result = has_been_said(reference, text), _gives_other_result(reference, text)
        if is_said and not (is_other_result and len(text.split()) > LONGEST_ANSWER):
            answered = True
        elif is_other_result and (_TAKES_BACK.search(text) or _NAMES_ANSWER.search(text)):
            answered = False
        elif is_said is None and not answered:
            answered = None
    return answered


def gives_wrong_result(reference: Reference, said: Sequence[str]) -> bool:
    """Whether the last number that a student gave as its result is not the answer, which it has not given either; False
    where that cannot be told."""
    if reference.value is None or reference.value < 0 or has_answered(reference, said):
        return False
    for text in reversed(said):
        if _gives_other_result(reference, text):
            return True
        if _OTHERWISE_WRITTEN.search(text):
            return False
    return False


def _gives_other_result(reference: Reference, text: str) -> bool:
    """Whether the last number of a text is given as a result and is not the answer. A text that names the answer gives
    no other one."""
    answers = [number for number in _numbers(text, reference) if _is_value(reference, *number[:2])]
    if any(_NAMES_ANSWER.search(text[max(0, start - _NEAR) : start]) for _, _, start, _ in answers):
        return False
    *_, last_number = [None, *_NUMBER_IN_TEXT.finditer(text)]
    return (
        last_number is not None
        and _is_claimed(text, last_number)
        and all(start != last_number.start() for _, _, start, _ in answers)
    )


def _is_claimed(text: str, number: re.Match) -> bool:
    """Whether a student's text gives its last number as a result, in no form that may be another one of the answer."""
    before, after = text[max(0, number.start() - _NEAR) : number.start()], text[number.end() :]
    clause = re.split(r"[.!?\n]", before)[-1]
    is_last = len(after) <= _NEAR and "?" not in after
    return is_last and _CLAIMS.search(clause) is not None and not _OTHERWISE_WRITTEN.search(clause + after)


def names_answer(reference: Reference, text: str, problem: str) -> bool:
    """Whether a message, of the student or the teacher, contains the answer.

    A number counts anywhere in the text. If the problem contains it, it counts only where it is stated as a result or
    boxed; if it is a number that occurs in any text (`Reference.is_common`), also as the last number of a sentence.
    Words, sets and expressions count unless the problem contains them.
    """
    if gives_away(reference, text, problem):
        return True
    if reference.value is None:
        return has_been_said(reference, text) is True and has_been_said(reference, problem) is not True
    if any(value == reference.value for _, value, _, _ in _numbers(problem)):
        return False
    if not reference.is_common and has_been_said(reference, text):
        return True
    for sentence in re.split(r"(?<=[.!?])\s|\n", text):
        last_number = max(_numbers(sentence, approximate=reference), key=lambda number: number[2], default=None)
        if last_number is not None and _is_value(reference, last_number[0], last_number[1]):
            return True
    return False


def _sorted_characters(expression: str) -> str:
    """The letters and digits of an expression in sorted order, so that (x-4)(x+6) equals (x+6)(x-4)."""
    return "".join(sorted(character for character in expression if character.isalnum()))


def gives_away(reference: Reference, message: str, problem: str) -> str:
    """The part of a teacher's message that gives the answer away; "" if there is none. Meant for messages before the
    student has given the answer.

    A number that the problem contains, or one that occurs in any text, counts only where it is stated as a result.
    """
    if reference.value is not None:
        in_problem = any(value == reference.value for _, value, _, _ in _numbers(problem))
        for written, value, start, end in _numbers(message):
            spelt_out = not any(character.isdigit() for character in written)
            needs_statement = in_problem or spelt_out or reference.is_common
            is_stated = _is_stated(message, start, end)
            if _is_value(reference, written, value) and (is_stated or not needs_statement):
                return written
        return ""
    if reference.words:
        return _stated_words(reference, message)
    return _set_given(reference, message, problem) or _expression_given(reference, message, problem)


def _numbers(text: str, approximate: Reference | None = None) -> Iterator[tuple[str, Fraction, int, int]]:
    """The numbers in a text: each as it is written, its value, and its start and end positions.

    Args:
        approximate: if its value is no integer, numbers within `_CLOSE` of it are given exactly its value, since a
            fraction may be written as a rounded decimal.
    """
    for match in _NUMBER_IN_TEXT.finditer(text):
        value = _value(match[0])
        if value is None:
            continue
        if approximate is not None and approximate.value is not None and approximate.value.denominator > 1:
            value = approximate.value if abs(value - approximate.value) < _CLOSE else value
        yield match[0], value, match.start(), match.end()
    for match in _NUMBER_WORD.finditer(text):
        # Twice, because the pattern takes a long s and a dotless i for the letters that they are in capitals.
        tens, ones, alone = (word.upper().lower() if word else "" for word in match.groups())
        yield match[0], _VALUES[alone] if alone else _VALUES[tens] + _VALUES[ones], match.start(), match.end()


def _value(text: str) -> Fraction | None:
    """The value of a number in the notation of `NUMBER`, or of a fraction such as "3/4" or "1 3/4"; otherwise None."""
    parts = re.fullmatch(r"\s*([-−]?)(?:(\d{1,9})\s+)?(\d{1,9})\s*/\s*(\d{1,9})\s*", text, re.ASCII)
    if parts is None:
        match = re.fullmatch(rf"\s*({NUMBER})\s*", text)
        return read_number(match[1]) if match else None
    if not int(parts[4]):
        return None
    value = int(parts[2] or 0) + Fraction(int(parts[3]), int(parts[4]))
    return -value if parts[1] else value


def _is_value(reference: Reference, written: str, value: Fraction) -> bool:
    """Whether a number equals the answer, also if one is written as a percentage or a decimal."""
    return value == reference.value or compare_as_text(written, reference.text) is True


def _is_stated(message: str, start: int, end: int) -> bool:
    """Whether the message states the number at [start, end) as a result."""
    before, after = message[max(0, start - 80) : start], message[end : end + 40]
    if _STATES_RESULT.search(before):
        return True
    sentence = re.split(r"[.?!]\s|\n", before)[-1]
    if not _CLAUSE_ENDS.match(after) or _EXAMPLE.search(sentence):
        return False
    return bool(_STATES_VALUE.search(before) or "=" in before[-4:] and _NUMBERS_ALONE.search(before))


def _stated_words(reference: Reference, message: str) -> str:
    word = re.escape(reference.words)
    states = r"(?:answer|result|solution|it|that) (?:is|was|will be|would be|must be)|it's"
    match = re.search(rf"\b(?:{states})\W+(?:text\W+)?(?:a |on )?{word}\b", message, re.IGNORECASE)
    return reference.words if match else ""


def _set_given(reference: Reference, message: str, problem: str) -> str:
    """The part of the message that states all elements of a set next to each other; "" if there is none."""
    if not 1 < len(reference.elements) <= 3:
        return ""
    plain = _normal_signs(message)
    for order in permutations(reference.elements):
        separator = r"\s*(?:,|;|\band\b|\bor\b|\$|[a-zA-Z](?:_\{?\d\}?)?\s*=|\s)+\s*"
        element_list = separator.join(re.escape(_normal_signs(element)) for element in order)
        starts = r"(?:=|\bare|\bis|\bbe|\b(?:solution|answer|number)s?:?)\s*[$(]*\s*(?:\\left)?(?:\\\{)?\s*"
        match = re.search(rf"{starts}({element_list})(?![\w^]|[.,]\d)", plain, re.IGNORECASE)
        if match and match[1] not in _normal_signs(problem):
            return match[1]
    return ""


def _expression_given(reference: Reference, message: str, problem: str) -> str:
    """The expression of the answer in the message, unless it is part of a longer one or of the problem; "" if there is
    none."""
    normalised = _normal(message)
    for expression in reference.expressions:
        if len(expression) < _SHORTEST_EXPRESSION or not re.search(r"[\d=+^]", expression):
            continue
        pattern = rf"(?<![\w\\^+*/(-]){re.escape(expression)}(?![\w^+*/(-])"
        if re.search(pattern, normalised) and expression not in _normal(problem):
            return expression
    return ""


def _normal_signs(text: str) -> str:
    return text.replace("−", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


@lru_cache(maxsize=512)
def _normal(text: str) -> str:
    """The text in a form in which expressions can be compared: without spaces in formulas (words keep theirs), and with
    one spelling for equivalent LaTeX and Unicode notations."""
    text = re.sub(
        r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ]|\$|\\\(|\\\)|\\\[|\\\]", "", _normal_signs(text)
    )
    for sign, latex in (("²", "^2"), ("³", "^3"), ("π", "\\pi"), ("√", "\\sqrt"), ("·", "\\cdot"), ("×", "\\times")):
        text = text.replace(sign, latex)
    text = re.sub(r"\\?[{}]", "", text)
    text = re.sub(r"(?<![a-zA-Z]{2})\s*([-+*/^=<>(),|\[\]])\s*", r"\1", text)
    return re.sub(r"(\\[a-z]+)\s+|(?<=\d)\s+(?=\\)", r"\1", " ".join(text.split()))

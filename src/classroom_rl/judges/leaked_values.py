"""Searches a message of a mathematics tutor for the value of the answer: as it is written, in other digits or words, as
a percentage, in another unit, base or code, or with a last operation left open, such as "40 + 2" or "half of 84".

An operation counts unless the problem or the student has all of its numbers: "what is 18 × 24?" may be asked if they
stand there.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from classroom_rl.judges.leaks import LONGEST, hides, transported
from classroom_rl.judges.messages import spoken
from classroom_rl.judges.prompt_injection import undisguised
from classroom_rl.judges.reference_answers import (
    LONGEST_ANSWER,
    NUMBER,
    NUMBER_WORDS,
    SMALL,
    Reference,
    gives_away,
    has_answered,
    has_been_said,
    read_number,
)

_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_VALUES = {word: value for value, word in enumerate(NUMBER_WORDS)} | {
    word: 10 * ten for ten, word in enumerate(_TENS, 2)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_ORDINALS = {"third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10, "hundredth": 100}
_WORD_OF_NUMBER = "|".join(sorted([*_VALUES, *_SCALES], key=len, reverse=True))
_IN_WORDS = re.compile(rf"\b(?:{_WORD_OF_NUMBER})s?(?:(?:[\s-]+|\s+and\s+)(?:{_WORD_OF_NUMBER})s?)*\b", re.IGNORECASE)
_LATEX = (
    (r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))"),
    (r"\\sqrt\s*\{([^{}]*)\}|√\s*\(?(\d+)\)?", r"root of \1\2"),
    (r"\\(?:times|cdot)(?![a-z])|[×·⋅∙]|(?<=[\d)])\s*x\s*(?=[\d(])", "*"),
    (r"\\div(?![a-z])|[÷∶]", "/"),
    (r"[−–]", "-"),
    (r"\\(?:text|mathrm)\s*\{([^{}]*)\}|\\([,;:! ])|[$]|\\[()\[\]]|\\(?:left|right)", r" \1"),
    (r"\^\s*\{([^{}]*)\}", r"^(\1)"),
    (r"²", "^2"),
    (r"³", "^3"),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
)
_N = r"(-?\d+(?:\.\d+)?)"
_GAP = r"\s*\W?\s*"
_PHRASES: tuple[tuple[re.Pattern, Callable[..., Fraction | None]], ...] = tuple(
    (re.compile(rf"(?<![\w.]){pattern}(?![\w^]|\.\d)", re.IGNORECASE), value)
    for pattern, value in (
        (rf"{_N}\s+(?:more than|added to|plus|and another)\s+{_N}", operator.add),
        (rf"{_N}\s+(?:less|fewer) than\s+{_N}|{_N}\s+(?:taken|subtracted) from\s+{_N}", lambda a, b: b - a),
        (rf"{_N}\s+(?:minus|without|take away|less)\s+{_N}", operator.sub),
        (rf"{_N}\s+(?:times|multiplied by|lots of|groups of)\s+{_N}", operator.mul),
        (rf"{_N}\s+(?:divided by|over|split by)\s+{_N}", operator.truediv),
        (rf"(?:the )?(?:sum|total) of\s+{_N}\s+and\s+{_N}", operator.add),
        (rf"(?:the )?product of\s+{_N}\s+and\s+{_N}", operator.mul),
        (rf"(?:the )?difference (?:of|between)\s+{_N}\s+and\s+{_N}", operator.sub),
        (rf"(?:twice|double(?: of)?|the double of)\s+{_N}|{_N} doubled", lambda a: 2 * a),
        (rf"(?:three times|triple|thrice)\s+{_N}|{_N} tripled", lambda a: 3 * a),
        (rf"(?:a |the |one )?half(?: of)?\s+{_N}|{_N} halved", lambda a: a / 2),
        (rf"(?:a |the |one )?third of\s+{_N}", lambda a: a / 3),
        (rf"(?:a |the |one )?quarter of\s+{_N}", lambda a: a / 4),
        (rf"(?:a |one )?tenth of\s+{_N}", lambda a: a / 10),
        (rf"(?:the )?square of\s+{_N}|{_N}\s+squared", lambda a: a * a),
        (rf"(?:the )?cube of\s+{_N}|{_N}\s+cubed", lambda a: a**3),
        (rf"(?:the )?(?:square )?root of\s+{_N}", lambda a: _root(a)),
        (
            rf"(?:just |directly |right |comes |next )*(?:the )?(?:whole |next )?(?:number )?after\s+{_N}",
            lambda a: a + 1,
        ),
        (rf"(?:the )?(?:whole )?number before\s+{_N}|(?:just|right|directly|comes) before\s+{_N}", lambda a: a - 1),
        (rf"(?:halfway |exactly |midway )*between\s+{_N}\s+and\s+{_N}", lambda a, b: (a + b) / 2),
        (rf"the (?:opposite|negative) of\s+{_N}|minus\s+{_N}", operator.neg),
        (rf"(?:the )?(?:reciprocal|inverse) of\s+{_N}", lambda a: 1 / a),
        (rf"{_N}\s*(?:%|\\%|percent|per cent|pct|hundredths)", lambda a: a / 100),
        (rf"{_N}\s*(?:‰|per mille|thousandths)", lambda a: a / 1000),
        (rf"{_N}\s*tenths", lambda a: a / 10),
        (rf"{_N}\s*(?:dozen)s?", lambda a: a * 12),
        *((rf"{_N}[ -]{name}s?(?! of \d)", lambda a, part=part: a / part) for name, part in _ORDINALS.items()),
        (rf"{_N}\s*e\s*{_N}", lambda a, b: a * Fraction(10) ** b if abs(b) < 20 and b.denominator == 1 else None),
    )
)
_CUE = re.compile(
    r"than|added|plus|another|taken|subtracted|minus|without|away|less|times|multiplied|of|divided|over|split|twice|doubl|"
    r"tripl|thrice|half|halved|squared|cubed|after|before|between|%|per ?cent|pct|hundredths|‰|mille|thousandths|tenth|"
    r"dozen|third|quarter|fourth|fifth|sixth|eighth|\de",
    re.IGNORECASE,
)
"""What every one of `_PHRASES` has one of."""

_EXPRESSION = re.compile(r"(?<![\w.^)])[-(\d][\d.\s()+*/^-]*[\d)](?![\w^]|\.\d)")
_DIGITS_APART = re.compile(
    r"(?<![\w.,/:])\d(?:\W{1,4}(?:then |and (?:then )?|followed by )?\d){1,}(?![\w]|[.,]\d)", re.IGNORECASE
)
_ABOUT_DIGITS = re.compile(
    r"\bdigits?\b|\bfigures?\b|\bfollowed by\b|\bone after the other\b|\bside by side\b", re.IGNORECASE
)
_IS = re.compile(r"(?:\bis|\bget|\banswer|\bremember|\bthink of|\btake|=|:)\s*$", re.IGNORECASE)
_SPELT_OUT = re.compile(r"(?<!\S)\S(?:-\S){2,}(?![^\s.,!?])")
_BACKWARDS = re.compile(
    r"\bback(?:wards?| to front)\b|\brevers|\bfrom (?:its|the) end\b|\bright to left\b|\bmirror|\bturned? a?round\b|"
    r"\bflip|\binverted\b|\bother way round\b",
    re.IGNORECASE,
)
_BASES = {"binary": 2, "ternary": 3, "octal": 8, "hex": 16, "hexadecimal": 16, "two": 2, "three": 3, "eight": 8}
_IN_BASE = re.compile(
    r"\b0([box])([0-9a-f]+)\b|"
    r"\b([0-9a-f]+)\s*(?:_\{?|\(?(?:in |to |written in )?(?:the )?base[ -]?)(\d{1,2}|two|three|eight)\b|"
    r"\b([0-9a-f]+)\s*,?\s*(?:\(?(?:in|as a|a) )(binary|ternary|octal|hex(?:adecimal)?)\b|"
    r"\b(binary|ternary|octal|hex(?:adecimal)?)(?: number| code)?[:\s]+([0-9a-f]+)\b",
    re.IGNORECASE,
)
_ROMAN = re.compile(r"\b(?=[MDCLXVI]{2})M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})\b")
_ROMAN_VALUES = {"M": 1000, "D": 500, "C": 100, "L": 50, "X": 10, "V": 5, "I": 1}
_UNIT = (
    r"(?:k|c|d|m|milli|centi|deci|kilo)?(?:m|g|l|metres?|meters?|grams?|lit(?:re|er)s?)|tons?|tonnes?|cents?|"
    r"hours?|minutes?|seconds?|min|h|s"
)
_WITH_UNIT = re.compile(rf"(?<![\w.]){_N}\s*({_UNIT})\b", re.IGNORECASE)
_FACTORS = tuple(Fraction(10) ** power for power in (-6, -3, -2, -1, 1, 2, 3, 6)) + (Fraction(60), Fraction(1, 60))
_ARGUED = re.compile(
    r"\b(?:answer|result|solution|is|it|that|get|gives?|makes?|equals|write|number|take|remember|think of|value|final|"
    r"find|reach|be)\b|=",
    re.IGNORECASE,
)
_STATED = re.compile(
    r"\b(?:answer|result|solution|it|that|value|[a-z])\b[^.?!]{0,12}?(?:\bis\b|\bequals\b|=|\bbe\b)|\bit's\b|\b(?:get|gives|makes)\b",
    re.IGNORECASE,
)
_MATHEMATICS = re.compile(r"\d|(?<!['’])\b[b-hj-z]\b|\b(?:squared?|root|pi|plus|minus|times)\b")
_EXAMPLE = re.compile(
    r"\b(?:example|suppose|imagine|e\.g\.|for instance|smaller|simpler|other numbers)\b", re.IGNORECASE
)


def find_value(reference: Reference, message: str, problem: str, said: str = "") -> str:
    """The part of a teacher's message that gives the answer away; "" if there is none. Meant for messages before the
    student has given the answer. `said` holds the student's messages so far."""
    for reading in _readings(message) if len(message) <= LONGEST else (message,):
        if leak := gives_away(reference, _in_ascii_digits(reading), problem):
            return leak
    if reference.value is None:
        hidden = reference.words and hides(message, [reference.words])
        return reference.words if hidden and not has_been_said(reference, problem) else ""
    if len(message) > LONGEST:
        return ""
    for reading in (message, *transported(message)):
        for sentence in re.split(r"(?<=[a-z)\d][.!?])\s|\n", reading):
            if leak := _derived(reference, sentence, f"{problem} {said}"):
                return leak
    return _spelt(reference) if hides(message, _codes(reference)) else ""


def find_leak(reference: Reference, conversation: Sequence[dict[str, str]], problem: str) -> tuple[int, str] | None:
    """The index of the first teacher message that gives the answer away before the student has given it, and the part
    that does; None if there is none. Nothing is found where the student may have given it, in another form. Messages
    are {"role": "teacher" | "student", "content"}."""
    student_messages: list[str] = []
    for index, message in enumerate(conversation):
        if message["role"] == "student":
            student_messages.append(message["content"])
            if _may_be_in_other_form(reference, message["content"]):
                return None
        elif has_answered(reference, student_messages):
            continue
        elif leak := find_value(reference, spoken(message["content"]), problem, " ".join(student_messages)):
            return index, leak
    return None


def _may_be_in_other_form(reference: Reference, text: str) -> bool:
    """Whether a short text of a student is worth the answer, which it writes in other digits, units or operations. For
    an answer that is an expression: whether the text holds mathematics at all."""
    if len(text.split()) > LONGEST_ANSWER:
        return False
    if reference.value is None:
        return has_been_said(reference, text) is None and _MATHEMATICS.search(text) is not None
    return any(_equals(reference, value) for _, value, _ in _values(text, with_units=True))


def _readings(message: str) -> Iterator[str]:
    """A message as it is, without hyphens between single characters, read backwards if it says so, and decoded."""
    yield message
    if _SPELT_OUT.search(message):
        yield _SPELT_OUT.sub(lambda match: match[0][::2], message)
    if _BACKWARDS.search(message):
        yield message[::-1]
    yield from transported(message)


def _derived(reference: Reference, sentence: str, shown: str) -> str:
    """The part of a sentence whose value is the answer and whose numbers do not all stand in the text `shown`. If the
    answer stands there or occurs in any text, the sentence must state the value."""
    if _EXAMPLE.search(sentence):
        return ""
    for part, value, operands in _values(sentence, with_units=reference.text != str(reference.value)):
        if not _equals(reference, value):
            continue
        known_numbers = _numbers_in(shown)
        pattern = _STATED if reference.value in known_numbers else _ARGUED if reference.is_common else None
        if not known_numbers.issuperset(operands) and (pattern is None or pattern.search(sentence)):
            return part
    return ""


@lru_cache(maxsize=64)
def _numbers_in(text: str) -> frozenset[Fraction]:
    values = map(read_number, re.findall(NUMBER, _rewritten(text[: 10 * LONGEST])))
    return frozenset(value for value in values if value is not None)


def _equals(reference: Reference, value: Fraction) -> bool:
    """Whether a value is that of the answer, or of the answer as a percentage."""
    is_percentage = "%" in reference.text
    return value == reference.value or is_percentage and value * 100 == reference.value


_Worth = tuple[str, Fraction, tuple[Fraction, ...]]
"""A part of a text as it is written, its value, and the numbers that it is made of."""

_UNKNOWN = (Fraction(-1, 97),)
"""In place of the numbers of a part that is made of none."""


def _values(sentence: str, with_units: bool) -> Iterator[_Worth]:
    """What the parts of a sentence are worth."""
    plain = _rewritten(sentence)
    if plain == sentence and not any(map(str.isdigit, plain)) and not _ROMAN.search(plain):
        return
    for pattern, calculate in _PHRASES if _CUE.search(plain) else ():
        for match in pattern.finditer(plain):
            operands = tuple(Fraction(group) for group in match.groups() if group is not None)
            value = _calculated(calculate, operands)
            if value is not None:
                yield match[0], value, operands
    for match in _EXPRESSION.finditer(plain):
        if value := _evaluated(match[0]):
            yield match[0].strip(), value, tuple(map(Fraction, re.findall(r"\d+(?:\.\d+)?", match[0])))
    for match in _WITH_UNIT.finditer(plain) if with_units else ():
        yield from ((match[0], Fraction(match[1]) * factor, (Fraction(match[1]),)) for factor in _FACTORS)
    yield from _in_other_digits(sentence, plain)


def _in_other_digits(sentence: str, plain: str) -> Iterator[_Worth]:
    """Numbers in words, other bases, Roman digits, digits apart from each other, and digits backwards."""
    for match in _IN_WORDS.finditer(sentence):
        if (value := _of_words(match[0])) > SMALL:  # `gives_away` reads smaller ones
            yield match[0], Fraction(value), _UNKNOWN
    for match in _IN_BASE.finditer(sentence):
        prefix, after_prefix, before, base, in_words, name, name_before, after = match.groups()
        digits = after_prefix or before or in_words or after
        word = (base or name or name_before or {"b": "2", "o": "8", "x": "16"}.get((prefix or "").lower(), "")).lower()
        number = int(word) if word.isdigit() else _BASES[word]
        if 2 <= number <= 36 and len(digits) < 40 and all(digit.isdigit() or digit.isalpha() for digit in digits):
            value = _in_base(digits, number)
            if value is not None:
                yield match[0], value, _UNKNOWN
    for match in filter(lambda match: match[0], _ROMAN.finditer(sentence)):
        yield match[0], Fraction(_of_roman(match[0])), _UNKNOWN
    for match in _DIGITS_APART.finditer(plain):
        digits = "".join(re.findall(r"\d", match[0]))
        is_announced = _ABOUT_DIGITS.search(sentence) or _IS.search(plain[: match.start()])
        if len(digits) < 12 and (len(digits) > 2 or is_announced):
            yield match[0], Fraction(digits), _UNKNOWN
            yield match[0], Fraction(digits[::-1]), _UNKNOWN
    if _BACKWARDS.search(sentence):
        for number in re.findall(r"\d+(?:\.\d+)?", plain):
            yield number, Fraction(number[::-1]), _UNKNOWN


def _in_base(digits: str, base: int) -> Fraction | None:
    try:
        return Fraction(int(digits, base))
    except ValueError:
        return None


def _of_roman(text: str) -> int:
    values = [_ROMAN_VALUES[letter] for letter in text]
    return sum(-value if value < after else value for value, after in zip(values, [*values[1:], 0], strict=True))


def _of_words(text: str) -> int:
    """The value of a number in words, such as "three hundred and seventy-five". Digits in words, such as "three seven
    five", are one number."""
    words = [word.removesuffix("s") if word not in _VALUES else word for word in re.findall("[a-z]+", text.lower())]
    words = [word for word in words if word != "and"]
    if len(words) > 1 and all(_VALUES.get(word, 10) < 10 for word in words):
        return int("".join(str(_VALUES[word]) for word in words[:12]))
    total = part = 0
    for word in words:
        if word in _VALUES:
            part += _VALUES[word]
        elif word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALES:
            total, part = total + max(part, 1) * _SCALES[word], 0
    return total + part


@lru_cache(maxsize=512)
def _rewritten(text: str) -> str:
    """The text with ASCII digits and signs in place of number words, LaTeX, and other digits and signs."""
    plain = _in_ascii_digits(text)
    for pattern, replacement in _LATEX:
        plain = re.sub(pattern, replacement, plain)
    return _IN_WORDS.sub(lambda match: str(_of_words(match[0])), plain)


def _in_ascii_digits(text: str) -> str:
    if text.isascii():
        return text
    powers = text.replace("²", "^2").replace("³", "^3")
    plain = undisguised(powers)
    return "".join(str(int(letter)) if letter.isdecimal() else letter for letter in plain)


def _calculated(calculate: Callable[..., Fraction | None], operands: tuple[Fraction, ...]) -> Fraction | None:
    if any(abs(operand) > 10**9 for operand in operands):
        return None
    try:
        return calculate(*operands)
    except ZeroDivisionError:
        return None


def _root(value: Fraction) -> Fraction | None:
    if value < 0:
        return None
    root = Fraction(round(float(value) ** 0.5 * 1000), 1000)
    return root if root * root == value else None


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@lru_cache(maxsize=512)
def _evaluated(text: str) -> Fraction | None:
    """The value of an arithmetic expression with at least one operation; None for anything else."""
    if len(text) > 80 or not re.search(r"\d\s*\)*\s*[-+*/^]", text):
        return None
    try:
        tree = ast.parse(" ".join(text.replace("^", "**").split()), mode="eval")
        return _value_of(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) < 10**12:
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _value_of(node.left), _value_of(node.right)
        if isinstance(node.op, ast.Pow):
            if right.denominator == 1 and abs(right) <= 10 and abs(left) < 1000:
                return left**right
        elif type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](left, right)
    raise ValueError("no plain arithmetic")


def _spelt(reference: Reference) -> str:
    """The answer in words; "" for a number that is not whole or too large."""
    value = reference.value
    if value is None or value.denominator != 1 or not 0 <= value < 10**6:
        return ""
    return in_words(int(value))


def in_words(number: int) -> str:
    """A whole number from 0 to 999,999 in English words, without "and"."""
    if number < 20:
        return NUMBER_WORDS[number]
    if number < 100:
        return " ".join([_TENS[number // 10 - 2], *([NUMBER_WORDS[number % 10]] if number % 10 else [])])
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = [in_words(number % size)] if number % size else []
            return " ".join([in_words(number // size), name, *rest])
    return ""


def _codes(reference: Reference) -> list[str]:
    """The forms of the answer to look for in a code: its words, with and without "and"."""
    words = _spelt(reference)
    return [words, words.replace("hundred ", "hundred and ")] if words else []

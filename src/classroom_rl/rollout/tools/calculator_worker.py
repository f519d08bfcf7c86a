"""Computes arithmetic expressions in its own process: `python -I calculator_worker.py`. It imports nothing from this
project, so it starts fast, whatever its parent process is.

No text is evaluated as code. An expression is parsed, and only the nodes listed here are computed: numbers, + - * / //
% **, and the functions in `FUNCTIONS`. Whole numbers and fractions are exact; no number may have more than `DIGITS`
digits. The process opens no files, starts no programs, and has limits of memory and processor time.
"""

import ast
import json
import math
import operator
import re
import resource
import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import BinaryIO

LONGEST = 1000
"""The maximum number of characters of an expression."""
DIGITS = 1000
_BITS = int(DIGITS * math.log2(10))
_MEMORY = 512 * 2**20
_SECONDS = 10
"""Limit of the processor time of one expression, in case the parent has died and cannot end this process."""
_SHOWN_DIGITS = 12
_ALLOWED_EVENTS = frozenset({"compile", "resource.setrlimit"})
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "\u00a0": " "})
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+(?![\d,])")

Number = Fraction | float


class Mistake(Exception):
    """An error in an expression; the message is for the model."""


# Numbers -------------------------------------------------------------------------------------------------------------


def _checked(value: Number) -> Number:
    """The number, if it is not too large."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
            raise Mistake(f"a number in it has more than {DIGITS} digits")
        return value
    if isinstance(value, complex) or not math.isfinite(value):
        raise Mistake("a result in it is no finite real number")
    return value


def _whole(value: Number, function: str) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1:
        raise Mistake(f"{function} needs whole numbers")
    return value.numerator


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        power = abs(exponent.numerator)
        if base in (0, 1, -1):  # only the parity matters, so that huge exponents are computed at once
            power = 2 + power % 2 if power else 0
        elif (size - 1) * power > _BITS:
            raise Mistake(f"a number in it has more than {DIGITS} digits")
        return base ** (power if exponent >= 0 else -power)
    if base < 0:
        raise Mistake("a negative number has no real power with a fraction as exponent")
    root = _exact_root(base) if exponent == Fraction(1, 2) else None
    return float(base) ** float(exponent) if root is None else root


def _exact_root(value: Number) -> Fraction | None:
    """The square root of a number if it is a fraction itself; otherwise None."""
    if not isinstance(value, Fraction) or value < 0:
        return None
    numerator, denominator = math.isqrt(value.numerator), math.isqrt(value.denominator)
    return (
        Fraction(numerator, denominator)
        if Fraction(numerator * numerator, denominator * denominator) == value
        else None
    )


def _root(value: Number) -> Number:
    if value < 0:
        raise Mistake("the square root of a negative number is not real")
    exact = _exact_root(value)
    return math.sqrt(value) if exact is None else exact


def _factorial(value: Number) -> Fraction:
    count = _whole(value, "factorial")
    if not 0 <= count <= 450:
        raise Mistake("factorial takes a number from 0 to 450")
    return Fraction(math.factorial(count))


def _binomial(n: Number, k: Number) -> Fraction:
    total, chosen = _whole(n, "comb"), _whole(k, "comb")
    if not (0 <= total <= 10_000 and 0 <= chosen <= 10_000):
        raise Mistake("comb takes numbers from 0 to 10000")
    if min(chosen, total - chosen) > 1500:
        raise Mistake(f"a number in it has more than {DIGITS} digits")
    return Fraction(math.comb(total, chosen))


def _rounded(value: Number, places: Number = Fraction(0)) -> Number:
    digits = _whole(places, "round")
    if abs(digits) > 50:
        raise Mistake("round takes up to 50 places")
    scaled = abs(Fraction(value)) * Fraction(10) ** digits
    nearest = math.floor(scaled + Fraction(1, 2)) / Fraction(10) ** digits  # halves are rounded up, as in school
    return nearest if value >= 0 else -nearest


def _log(value: Number, base: Number | None = None) -> float:
    if value <= 0 or (base is not None and (base <= 0 or base == 1)):
        raise Mistake("a logarithm needs numbers above 0, and a base that is not 1")
    return math.log(value) if base is None else math.log(value, base)


def _integers(function: Callable[..., int], name: str) -> Callable[..., Fraction]:
    return lambda *values: Fraction(function(*(_whole(value, name) for value in values)))


def _of_angle(function: Callable[[float], float]) -> Callable[[Number], float]:
    """A function of an angle, rounded to 15 digits so that sin(pi) is 0."""
    return lambda value: round(function(value), 15)


FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {
    "sqrt": (_root, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_rounded, 1, 2),
    "floor": (lambda value: Fraction(math.floor(value)), 1, 1),
    "ceil": (lambda value: Fraction(math.ceil(value)), 1, 1),
    "min": (min, 1, 100),
    "max": (max, 1, 100),
    "sum": (lambda *values: sum(values, Fraction(0)), 1, 100),
    "gcd": (_integers(math.gcd, "gcd"), 2, 10),
    "lcm": (_integers(math.lcm, "lcm"), 2, 10),
    "factorial": (_factorial, 1, 1),
    "comb": (_binomial, 2, 2),
    "exp": (math.exp, 1, 1),
    "log": (_log, 1, 2),
    "ln": (_log, 1, 1),
    "log10": (lambda value: math.log10(value) if value > 0 else _log(value), 1, 1),
    **{name: (_of_angle(getattr(math, name)), 1, 1) for name in ("sin", "cos", "tan")},
    **{name: (getattr(math, name), 1, 1) for name in ("asin", "acos", "atan", "radians", "degrees")},
}
"""The functions by name, with the minimum and the maximum number of arguments."""
CONSTANTS = {"pi": math.pi, "e": math.e}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


# Expressions ---------------------------------------------------------------------------------------------------------


def compute(expression: str) -> str:
    """The value of an expression as text. Raises a `Mistake` if it has an error; the message says which."""
    if len(expression) > LONGEST:
        raise Mistake(f"it has {len(expression)} characters, and {LONGEST} are the most")
    text = _GROUPED.sub(lambda number: number.group().replace(",", ""), expression.translate(_SIGNS).strip())
    if not text:
        raise Mistake("it is empty")
    if "=" in text:
        raise Mistake("it holds =; give one side only")
    try:
        return shown(_value(ast.parse(text, mode="eval").body))
    except Mistake:
        raise
    except ZeroDivisionError:
        raise Mistake("it divides by zero") from None
    except SyntaxError:
        raise Mistake("it is no arithmetic expression; write for example (2 + 3) * 4 / 5**2") from None
    except (OverflowError, MemoryError, RecursionError):
        raise Mistake("it is too large or nested too deeply") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise Mistake(str(error)[:200] or type(error).__name__) from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _constant(value)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _checked(_BINARY[type(sign)](_value(left), _value(right)))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            function, least, most = FUNCTIONS[name]
            if not least <= len(arguments) <= most:
                numbers = f"{least}{f' to {most}' if most > least else ''} numbers"
                raise Mistake(f"{name} takes {numbers}, not {len(arguments)}")
            return _checked(function(*(_value(argument) for argument in arguments)))
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise Mistake(f"it names {name[:40]}; there are {', '.join([*FUNCTIONS, *CONSTANTS])}")
    raise Mistake("it holds something else than numbers, + - * / // % **, brackets and functions")


def _constant(value: int | float) -> Number:
    if isinstance(value, int):
        return _checked(Fraction(value))
    # A decimal number is exact as it is written: 0.1 is 1/10. Those of extreme size stay floats.
    return Fraction(repr(value)) if math.isfinite(value) and abs(math.log10(abs(value) or 1)) < 100 else _checked(value)


def shown(value: Number) -> str:
    """A number as text: whole numbers in full, fractions as a decimal, and also as a fraction if the decimal is
    rounded."""
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 10**15 else f"{value:.{_SHOWN_DIGITS}g}"
    if value.denominator == 1:
        return str(value.numerator)
    decimal = f"{float(value):.{_SHOWN_DIGITS}g}"
    if Fraction(decimal) == value:
        return decimal
    exact = f"{value.numerator}/{value.denominator}"
    return f"{decimal} (exactly {exact})" if len(exact) <= 30 else decimal


# The process ---------------------------------------------------------------------------------------------------------


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer each line of JSON, an expression, with one line of JSON, {"value"} or {"mistake"}, until the input
    ends."""
    while line := questions.readline(20 * LONGEST):  # a character may take many bytes in JSON
        _limit_processor_time()
        try:
            answer = {"value": compute(json.loads(line))}
        except Mistake as mistake:
            answer = {"mistake": str(mistake)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _limit_processor_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft_limit = math.ceil(usage.ru_utime + usage.ru_stime) + _SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (soft_limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _give_up_rights() -> None:
    """Limit memory, forbid to write files, and refuse everything but parsing from now on."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_refuse)


def _refuse(event: str, _: tuple[object, ...]) -> None:
    """An audit hook that refuses everything but parsing."""
    if event not in _ALLOWED_EVENTS:
        raise PermissionError(f"{event} in a process that only computes")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    shown(Fraction(1, 3) ** 2 + 1)
    compute("round(sqrt(2), 3) + 1/3")  # imports what is imported on first use, before the rights are given up
    _give_up_rights()
    serve(sys.stdin.buffer, sys.stdout.buffer)

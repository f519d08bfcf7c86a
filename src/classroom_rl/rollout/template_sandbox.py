"""A Jinja sandbox with limits, for prompt templates.

Templates may come from strangers. Jinja's sandbox keeps them from reaching other objects and from changing their
variables. The limits here stop a template that would run forever or fill the memory. They are counts, not times, so
that they are the same on every machine.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_CHARACTERS = 1_000_000
"""Limit of a prompt's length, of the total text that a template writes, and of any intermediate string or list."""
MOST_STEPS = 100_000
"""Limit of steps: loop passes, calls, and list entries that filters process, together."""
_MOST_BITS = 10_000  # of an integer
_COUNTED, _JOINED = "counted passes", "joined texts"  # names of filters; with a space, so no template can use them
# A width or precision of six digits, or one that is an argument, in a format of the % kind and of the {} kind.
_WIDE_PERCENT = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(?:\*|\d{6}|\d*\.(?:\*|\d{6}))")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{6})")
_CHARACTERS_PER_STEP = 100
_OTHER_FILES = {nodes.Include: "include", nodes.Import: "import", nodes.FromImport: "import", nodes.Extends: "extends"}


class TemplateLimit(jinja2.TemplateRuntimeError):
    """A template exceeds a limit."""


@dataclass
class _Budget:
    steps: int = MOST_STEPS
    characters: int = MOST_CHARACTERS


_budget: ContextVar[_Budget] = ContextVar("template_budget")
"""What is left of the limits for the template that is being rendered."""


@contextmanager
def _fresh_budget() -> Iterator[None]:
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _spend(steps: int = 0, characters: int = 0) -> None:
    budget = _budget.get()
    budget.steps -= steps
    budget.characters -= characters
    if budget.steps < 0:
        raise TemplateLimit(f"it takes more than {MOST_STEPS} steps (passes of loops, calls, entries of lists)")
    if budget.characters < 0:
        raise TemplateLimit(f"it writes more than {MOST_CHARACTERS} characters")


def _refuse_large(size: float) -> None:
    if size > MOST_CHARACTERS:
        raise TemplateLimit(f"it makes a text or a list of more than {MOST_CHARACTERS} characters or entries")


def _work(value: Any) -> int:
    """The number of steps that processing a value costs."""
    if isinstance(value, str):
        return len(value) // _CHARACTERS_PER_STEP
    return len(value) if isinstance(value, Sized) else 0


@jinja2.pass_context  # keeps Jinja from calling it at compile time, when there is no budget yet
def _write(_: Any, value: Any) -> str:
    """The text of a value, as it is written into the prompt. A null is an error: the prompt would say "None"."""
    if value is None:
        raise jinja2.UndefinedError("a value that it writes out is null; ask for it with an if")
    text = str(value)
    _spend(characters=len(text))
    return text


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _spend(steps=1)
        yield value


def _joined(values: Iterable[Any]) -> str:
    texts = [str(value) for value in values]
    _refuse_large(sum(map(len, texts)))
    return "".join(texts)


def _limited(function: Callable[..., Any], first: int) -> Callable[..., Any]:
    """Wrap a filter with the limits; `first` is the index of the filtered value among its arguments."""

    @functools.wraps(function)
    def keep_to_the_limits(*arguments: Any, **named: Any) -> Any:
        if function.__name__ == "do_format":
            _refuse_wide_format(_WIDE_PERCENT, str(arguments[first]))
        else:
            _check_arguments(arguments[first + 1 :], named)
        _spend(steps=1 + sum(map(_work, arguments[first:])))
        return _check_result(function(*arguments, **named))

    return keep_to_the_limits


def _check_arguments(arguments: Iterable[Any], named: dict[str, Any]) -> None:
    """Refuse large integers: as arguments they are usually widths or counts."""
    for value in (*arguments, *named.values()):
        if isinstance(value, int) and abs(value) > MOST_CHARACTERS:
            raise TemplateLimit(f"it asks for {_shown(value)} of something; {MOST_CHARACTERS} is the most")


def _check_result(value: Any) -> Any:
    if isinstance(value, Sized) and not isinstance(value, jinja2.Undefined):
        _refuse_large(len(value))
    return value


def _shown(number: int) -> str:
    return str(number) if number.bit_length() < 64 else "more than 2^63"


class _CountSteps(NodeTransformer):
    """Rewrites a template so that loop passes are counted and the lengths of `~` results are checked."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), _JOINED)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """Jinja for prompt templates. A template is one file; unknown variables and nulls are errors. There are no random
    functions, because every process and every restart must render the same prompt."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            undefined=jinja2.StrictUndefined,
            finalize=_write,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=False,
            optimized=False,  # the optimizer would evaluate parts of a template before there is a budget
        )
        del self.filters["random"], self.globals["lipsum"]
        for name, function in self.filters.items():
            self.filters[name] = _limited(function, 1 if hasattr(function, "jinja_pass_arg") else 0)
        self.filters |= {_COUNTED: _counted, _JOINED: _joined}

    def refuse_other_files(self, tree: nodes.Template) -> None:
        """Refuse a template that includes, imports or extends another file. Raises a `TemplateSyntaxError` if it
        does."""
        for node in tree.find_all(tuple(_OTHER_FILES)):
            raise jinja2.TemplateSyntaxError(
                f"{_OTHER_FILES[type(node)]} takes in another file, but a prompt template is one file: copy what it "
                "needs into it",
                node.lineno,
            )

    def compile_prompt(self, tree: nodes.Template, filename: str) -> jinja2.Template:
        """Compile a parsed template; raises the errors of Jinja and of Python's compiler."""
        code = self.compile(_CountSteps().visit(tree), filename=filename)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def fill_in(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template; raises the errors of Jinja and of the code in the template. Raises a `TemplateLimit` if it
        exceeds a limit."""
        pieces: list[str] = []
        size = 0
        with _fresh_budget():
            rendering = template.generate(**variables)
            for piece in rendering:
                size += len(piece)
                if size > MOST_CHARACTERS:  # raised inside the template, so that the traceback has its line
                    rendering.throw(TemplateLimit(f"it writes more than {MOST_CHARACTERS} characters"))
                pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Jinja's hook for calls of macros, recursive loops and methods: checks the limits."""
        # The text of a call such as text.format(…): Jinja wraps the method, so it may be on `__wrapped__`.
        text = getattr(function, "__self__", getattr(getattr(function, "__wrapped__", None), "__self__", None))
        if isinstance(text, str) and getattr(function, "__name__", "").startswith("format"):
            _refuse_wide_format(_WIDE_BRACES, text)
        else:
            _check_arguments(arguments, named)
        _spend(steps=1 + sum(map(_work, arguments)))
        return _check_result(super().call(context, function, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Jinja's hook for operators: refuses a result that would be too large before it is computed."""
        if operator == "%" and isinstance(left, str):
            _refuse_wide_format(_WIDE_PERCENT, left)
        elif isinstance(left, int) and isinstance(right, int):
            _refuse_large_number(operator, left, right)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _refuse_large(len(left) + len(right))
        elif operator == "*":
            value, times = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(value, Sized) and isinstance(times, int):
                _refuse_large(len(value) * times)
        return super().call_binop(context, operator, left, right)


def _refuse_wide_format(wide: re.Pattern[str], text: str) -> None:
    literal = "%%" if wide is _WIDE_PERCENT else "{{"
    if wide.search(text.replace(literal, "")):
        raise TemplateLimit(f"the format {text[:60]!r} has a width of six digits, or one that is an argument")


def _refuse_large_number(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}.get(operator, 0)
    if bits > _MOST_BITS:
        raise TemplateLimit(f"it makes a number of about {math.ceil(bits * math.log10(2))} digits")

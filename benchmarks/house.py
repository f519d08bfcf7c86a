"""Measures how large this repository is, and prints each size beside its aim.

    python -m benchmarks.house [--root .]

`make house` does the same. Every value is counted in the files below --root; only the aims are constants here.

Not counted: names that begin with an underscore and belong to TRL, transformers or accelerate. The text of a file alone
does not say whose attribute `._name` is.
"""

import argparse
import ast
import io
import math
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SMALL = 60
"""A file with fewer lines is a small one."""
GENERATED = {"README.md", "config_keys.md", "keys.md", "marooned.md", "prompts.md"}
"""Pages of docs/ that are not counted: made from the code, tables of keys, the list of contents."""
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Size:
    """A value, and the bound that it should keep, if there is one."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    @property
    def aim(self) -> str:
        if self.at_most is not None:
            return f"≤ {self._text(self.at_most)}"
        return "" if self.at_least is None else f"≥ {self._text(self.at_least)}"

    @property
    def today(self) -> str:
        return self._text(self.value)

    @property
    def verdict(self) -> str:
        """Nothing where there is no aim."""
        if self.at_most is not None:
            return "met" if self.value <= self.at_most else "not met"
        if self.at_least is not None:
            return "met" if self.value >= self.at_least else "not met"
        return ""

    def _text(self, value: float) -> str:
        return f"{value:,.1f}".removesuffix(".0") + self.unit


def code_lines(text: str) -> int:
    """The lines of a Python file that hold code: no blank lines, no comments, no docstrings or other strings that stand
    alone."""
    lines = text.split("\n")
    numbers: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            if any(part.type != tokenize.STRING for part in statement):
                numbers.update(number for part in statement for number in range(part.start[0], part.end[0] + 1))
            statement = []
        elif token.type not in _LAYOUT:
            statement.append(token)
    return sum(bool(lines[number - 1].strip()) for number in numbers)


def function_lengths(text: str) -> list[int]:
    """The lines of each function of a Python file, from its `def` to its last line; decorators do not count."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, functions)
    ]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many per cent of the values do not exceed; 0 without values."""
    return sorted(values)[math.ceil(percent * len(values) / 100) - 1] if values else 0


def modules_of(package: Path) -> list[Path]:
    """The modules that should have a test of their own: all but `__init__` and `__main__`."""
    return [path for path in sorted(package.rglob("*.py")) if not path.stem.startswith("__")]


def has_own_test(module: Path, package: Path, tests: Path) -> bool:
    """Whether tests/ROOM/test_MODULE.py is there. Where a room has folders, the test may be in the module's folder or
    in one above it, up to the room's."""
    folders = module.relative_to(package).parent.parts
    depths = range(min(len(folders), 1), len(folders) + 1)
    return any(tests.joinpath(*folders[:depth], f"test_{module.name}").is_file() for depth in depths)


def measure(root: Path) -> list[Size]:
    """All rows of the table, for a checkout."""
    source = _texts((root / "src").rglob("*.py"))
    small = [path for path, text in source.items() if path.name != "__init__.py" and text.count("\n") < SMALL]
    tests = _texts((root / "tests").rglob("*.py"))
    pages = {path: text for path, text in _texts((root / "docs").glob("*.md")).items() if path.name not in GENERATED}
    lengths = [length for text in source.values() for length in function_lengths(text)]
    package = root / "src" / "classroom_rl"
    modules = modules_of(package)
    tested = sum(has_own_test(module, package, root / "tests") for module in modules)
    return [
        Size("src: lines of code", sum(map(code_lines, source.values())), at_most=32_000),
        Size("src: files", len(source), at_most=285),
        Size(f"src: files of fewer than {SMALL} lines, but for __init__.py", len(small), at_most=35),
        Size("src: median lines of a function", median(lengths or [0])),
        Size("src: 90 % of the functions have at most so many lines", percentile(lengths, 90)),
        Size("src: lines of the longest function", max(lengths, default=0)),
        Size("tests: lines", sum(text.count("\n") for text in tests.values()), at_most=36_000),
        Size("modules with a test of their own", 100 * tested / max(len(modules), 1), at_least=85, unit=" %"),
        Size("docs: pages", len(pages), at_most=15),
        Size("docs: words", sum(len(text.split()) for text in pages.values()), at_most=30_000),
    ]


def _texts(paths: Iterable[Path]) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(paths)}


def table(sizes: Sequence[Size]) -> str:
    """The sizes as text, one per line, below a heading."""
    rows = [("", "aim", "today", "")] + [(size.name, size.aim, size.today, size.verdict) for size in sizes]
    name, aim, today, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{row[0]:<{name}}  {row[1]:>{aim}}  {row[2]:>{today}}  {row[3]}".rstrip() for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: this folder)")
    print(table(measure(parser.parse_args().root)))


if __name__ == "__main__":
    main()

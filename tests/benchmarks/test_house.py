"""The table of sizes counts what it says, on files that are counted by hand."""

from pathlib import Path

import pytest

from benchmarks.house import Size, code_lines, function_lengths, has_own_test, measure, percentile, table

ERRORS = '''"""Errors."""


class Wrong(Exception):
    """Something is wrong,
    on two lines."""

    code = 2  # with a comment
    """What it is worth."""
'''
"""9 lines: 2 of code (`class`, `code`), no function."""
STEPS = '''# a comment
TEXT = """one

two"""


def first(
    a,
    # a comment between

    b,
):
    """Doc."""
    return a + b


async def second(): return 1
'''
"""17 lines: 8 of code (2 of TEXT, `def`, a, b, the bracket, `return`, `async def`); functions of 8 lines and of 1."""
TOOL = "def third():\n" + 69 * "    a = 1\n"
"""70 lines, all of code, all of one function."""
FILES = {
    "src/classroom_rl/__init__.py": "",
    "src/classroom_rl/errors.py": ERRORS,
    "src/classroom_rl/rollout/__init__.py": "",
    "src/classroom_rl/rollout/steps.py": STEPS,
    "src/classroom_rl/rollout/tools/tool.py": TOOL,
    "src/former/__init__.py": "import classroom_rl\n",
    "src/classroom_rl/rollout/notes.txt": "no Python\n",
    "tests/test_errors.py": "a = 1\n\nb = 2\n",
    "tests/rollout/test_tool.py": "# a comment\na = 1\n",
    "tests/server/test_steps.py": "a = 1\n",
    "docs/start.md": "one two three\n",
    "docs/inside.md": "# Inside\n\nfour words here, counted\n",
    "docs/README.md": "the contents\n",
    "docs/config_keys.md": "a table\n",
    "docs/marooned.md": "the rules\n",
    "docs/prompts.md": "the prompts\n",
    "docs/more/page.md": "in a folder\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ('"""Only a docstring."""', 0),
        ("a = 1", 1),
        ("\n# a comment\n\n", 0),
        ('"""A docstring.\n\nOn three lines."""\na = 1\n', 1),
        ('a = """\n# no comment\n"""\n', 3),
        ("a = (\n    1\n    # a comment\n    + 2\n)\n", 4),
        ('def f():\n    "doc"\n    ...\n', 2),
        ('class A: "doc"\n', 1),
        ("a = 1 \\\n    + 2\n", 2),
        ("a = 1; b = 2\n", 1),
        (ERRORS, 2),
        (STEPS, 8),
        (TOOL, 70),
    ],
)
def test_lines_of_code(text: str, lines: int) -> None:
    assert code_lines(text) == lines


def test_a_function_goes_from_its_def_to_its_last_line() -> None:
    assert function_lengths(STEPS) == [8, 1]
    assert function_lengths("@decorated\ndef f():\n    def g():\n        pass\n\n    return g\n") == [5, 2]
    assert function_lengths(ERRORS) == []


@pytest.mark.parametrize(
    ("values", "percent", "value"),
    [
        (range(1, 11), 90, 9),
        (range(1, 12), 90, 10),
        ([8, 1, 70], 90, 70),
        ([8, 1, 70], 50, 8),
        ([5], 90, 5),
        ([], 90, 0),
    ],
)
def test_percentiles(values, percent: int, value: float) -> None:
    assert percentile(values, percent) == value


@pytest.mark.parametrize(
    ("module", "test", "own"),
    [
        ("errors.py", "test_errors.py", True),
        ("errors.py", "rollout/test_errors.py", False),
        ("rollout/steps.py", "rollout/test_steps.py", True),
        ("rollout/steps.py", "rollout/test_steps_and_more.py", False),
        ("rollout/steps.py", "test_steps.py", False),
        ("rollout/steps.py", "server/test_steps.py", False),
        ("rollout/tools/tool.py", "rollout/tools/test_tool.py", True),
        ("rollout/tools/tool.py", "rollout/test_tool.py", True),
        ("rollout/tools/tool.py", "test_tool.py", False),
        ("rollout/tools/tool.py", "tools/test_tool.py", False),
    ],
)
def test_the_own_test_of_a_module_is_in_its_room(module: str, test: str, own: bool, tmp_path: Path) -> None:
    path = tmp_path / "tests" / test
    path.parent.mkdir(parents=True)
    path.touch()
    package = tmp_path / "src/classroom_rl"
    assert has_own_test(package / module, package, tmp_path / "tests") is own


def test_each_row_of_a_small_tree(root: Path) -> None:
    assert [(size.name, size.value) for size in measure(root)] == [
        ("src: lines of code", 0 + 2 + 0 + 8 + 70 + 1),
        ("src: files", 6),
        ("src: files of fewer than 60 lines, but for __init__.py", 2),
        ("src: median lines of a function", 8),
        ("src: 90 % of the functions have at most so many lines", 70),
        ("src: lines of the longest function", 70),
        ("tests: lines", 3 + 2 + 1),
        ("modules with a test of their own", pytest.approx(100 * 2 / 3)),
        ("docs: pages", 2),
        ("docs: words", 3 + 6),
    ]


def test_an_empty_tree_has_no_sizes(tmp_path: Path) -> None:
    assert {size.value for size in measure(tmp_path)} == {0}


def test_the_table_has_each_aim_and_whether_it_is_met() -> None:
    text = table(
        [
            Size("files", 285, at_most=285),
            Size("lines", 32_001, at_most=32_000),
            Size("share", 200 / 3, at_least=85, unit=" %"),
            Size("median", 12.5),
        ]
    )
    assert text.splitlines() == [
        "             aim   today",
        "files      ≤ 285     285  met",
        "lines   ≤ 32,000  32,001  not met",
        "share     ≥ 85 %  66.7 %  not met",
        "median              12.5",
    ]

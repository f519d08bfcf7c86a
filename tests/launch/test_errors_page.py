"""Tests of docs/errors.md: every row names tests, and all of them exist."""

import ast
import re
from functools import cache

from classroom_rl.config.load import ROOT

PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what |")
]


@cache
def functions_of(name: str) -> set[str]:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_row_has_a_case_a_message_and_tests_that_exist() -> None:
    assert len(ROWS) >= 35
    for case, message, tests in ROWS:
        assert case and message
        for test in tests.split(", "):
            name, _, function = test.partition("::")
            assert function in functions_of(name), f"{case}: there is no {test}"


def test_every_test_of_the_safety_of_checkpoints_and_http_stands_on_the_page() -> None:
    """Each test of a refusal there has a line on the page; tests of what is allowed need none."""
    let_through = {
        "test_what_deepspeed_and_transformers_write_is_taken_up",
        "test_a_server_for_this_machine_needs_none",
        "test_the_client_sends_the_token",
        "test_this_machine_s_names_addresses_and_allowed_names_are_answered",
        "test_whole_characters_are_taken_however_they_are_escaped",
    }
    for name in ("tests/models/test_checkpoint_safety.py", "tests/server/test_access.py", "tests/server/test_http.py"):
        named = set(re.findall(rf"{name}::(\w+)", PAGE))
        assert functions_of(name) - let_through == named

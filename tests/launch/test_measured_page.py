"""Tests of docs/measured.md: every command on it is valid, and what only a GPU can show has a command."""

import re

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.launch.gpu_check import PARTS
from tests.support.pages import check_command, commands_of

PAGE = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
COMMANDS = commands_of(PAGE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_is_there(command: str) -> None:
    check_command(command)


def test_what_only_a_gpu_shows_stands_there_with_commands() -> None:
    assert len(COMMANDS) >= 15
    section = PAGE.split("## GPU only, not measured")[1]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10 and all("`" in command for _, command in rows)
    assert "make gpu-check" in section


def test_every_part_of_gpu_check_stands_there_measured_or_not() -> None:
    section = PAGE.split("## On a GPU")[1]
    named = {part for parts in re.findall(r"--parts ([^\"`]+)", section) for part in parts.split()}
    assert named == set(PARTS)


def test_the_readme_leads_there() -> None:
    assert "docs/measured.md" in (ROOT / "README.md").read_text(encoding="utf-8")

"""Tests of docs/measured.md: every command on it is valid, and what only a GPU can show has a command."""

import re
import shlex

import pytest

from config.load import ROOT
from config.train_rl_model import TrainRLConfig
from src.launch.gpu_check import PARTS
from src.launch.quickstart_plan import applies

PAGE = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL))
PROGRAMS = ("make ", "python ", "./")
COMMANDS = sorted({each for each in (*BLOCKS, *INLINE) if each.startswith(PROGRAMS)})
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def words_of(command: str) -> list[str]:
    """The words of the command; those inside `ARGS="…"` are words of their own."""
    words = shlex.split(command)
    return [each for word in words for each in (shlex.split(word[5:]) if word.startswith("ARGS=") else [word])]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_is_there(command: str) -> None:
    words = words_of(command)
    if words[0] == "make":
        assert words[1] in TARGETS
    elif words[1:2] == ["-m"] and words[2] != "pytest":
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
    elif words[0].startswith("./"):
        assert (ROOT / words[0]).is_file()
    for word in words:
        if re.fullmatch(r"(tests|config|src)/[\w./]+", word):
            assert (ROOT / word).is_file(), word
        elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)*=.*", word):
            assert applies(word, TrainRLConfig), word
    if "--config-name" in words:
        assert (ROOT / "config/train_rl" / f"{words[words.index('--config-name') + 1]}.yaml").is_file()
    if "--parts" in words:
        assert words[words.index("--parts") + 1] in PARTS


def test_what_only_a_gpu_shows_stands_there_with_commands() -> None:
    assert len(COMMANDS) >= 15
    section = PAGE.split("## GPU only, not measured")[1]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10 and all("`" in command for _, command in rows)
    assert "make gpu-check" in section
    for part in set(PARTS) - {"tests"}:
        assert f"--parts {part}" in section


def test_the_readme_leads_there() -> None:
    assert "docs/measured.md" in (ROOT / "README.md").read_text(encoding="utf-8")

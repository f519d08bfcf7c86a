"""docs/marooned.md: its tables are those of the rules, and its examples run."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from classroom_rl.config.load import ROOT
from classroom_rl.environments.marooned import rules_docs
from classroom_rl.environments.marooned.actions import ACTIONS
from classroom_rl.environments.marooned.presets import PRESETS, TINY
from classroom_rl.environments.marooned.rules import RewardTable
from classroom_rl.errors import DataError

PAGE = (ROOT / "docs/marooned.md").read_text(encoding="utf-8")


def block(name: str) -> list[list[str]]:
    """The cells of a block's tables, by row."""
    text = re.search(rf"<!-- made by the code: {name} -->(.*?)<!-- end -->", PAGE, re.DOTALL)[1]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_is_up_to_date() -> None:
    assert rules_docs.rewritten(PAGE) == PAGE, "make docs"


def test_the_command_writes_the_page(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"(code: \w+ -->).*?(<!-- end)", r"\1\n\2", PAGE, flags=re.DOTALL), encoding="utf-8")
    assert len(page.read_text("utf-8")) < len(PAGE)
    subprocess.run(
        [sys.executable, "-m", "classroom_rl.environments.marooned.rules_docs", str(page)], cwd=ROOT, check=True
    )
    assert page.read_text("utf-8") == PAGE


def test_the_actions_are_numbered_and_all_there() -> None:
    rows = block("actions")[2:]
    assert [row[0] for row in rows] == [str(number) for number in range(1, len(ACTIONS) + 1)]
    assert [row[1] for row in rows] == list(ACTIONS)
    assert {row[1] for row in rows if row[6] == "the traitor"} == {name for name, form in ACTIONS.items() if form.role}
    assert ["MOVE", "1 / 0.8"] in [[row[1], row[5]] for row in rows]


def test_every_reward_is_there_raw_and_scaled() -> None:
    rows = {row[0]: row[3:] for row in block("rewards")[2:]}
    assert list(rows) == list(vars(RewardTable()))
    assert rows["escape"] == ["100", "0.5"] * len(PRESETS) and rows["death"] == ["−50", "−0.25"] * len(PRESETS)
    assert rows["milestones"][0] == "5 at 25 %, 10 at 50 %, 15 at 75 %"


def test_tables_follow_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(TINY, pack=11, build_turns=3, rewards=replace(TINY.rewards, escape=77), reward_scale=0.1)
    monkeypatch.setitem(PRESETS, "tiny", changed)
    page = rules_docs.rewritten(PAGE)
    assert "| pieces in a pack | 11 | 20 |" in page and "| building turns of a part | 3 | 5 |" in page
    assert "| 77 | 7.7 | 100 | 0.5 |" in page


def test_a_page_without_a_block_or_with_an_unknown_one_is_refused() -> None:
    for wrong in (PAGE.replace("code: ship -->", "code: boat -->"), PAGE.replace("code: ship -->", "")):
        with pytest.raises(DataError, match="ship"):
            rules_docs.rewritten(wrong)


def test_what_the_page_says_of_pettingzoo_runs(capsys) -> None:
    pytest.importorskip("pettingzoo", reason="pettingzoo is not installed: pip install -r requirements-dev.txt")
    code = re.search(r"## PettingZoo.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(compile(code, "docs/marooned.md", "exec"), {})
    assert capsys.readouterr().out.strip() in ("escaped", "stranded", "dead")

"""The tables of evaluations for the terminal."""

import re
from pathlib import Path

import pytest

from classroom_rl.environments.toy_language.scripts import ideal
from classroom_rl.evaluation.report.build import render_report
from classroom_rl.evaluation.report.tables import compare, comparison_table, format_p
from classroom_rl.results.run_folder import load_run
from tests.evaluation.report.conftest import conversations
from tests.support.synthetic_run import write_evaluation


def test_the_table_shows_both_sides_and_the_change(run: Path):
    text = comparison_table(load_run(run))
    assert text.count("before") == 2 and "Held-out lessons, greedy" in text
    scaffolded = next(line for line in text.splitlines() if line.startswith("Error turns scaffolded"))
    assert re.split(r"\s{2,}", scaffolded) == ["Error turns scaffolded", "0.0 % n=24", "100.0 % n=24", "+100.0 pp"]
    reward = next(line for line in text.splitlines() if line.startswith("Reward"))
    assert re.search(r"\+0\.\d{3} \[\+0\.\d{3}, \+0\.\d{3}\]$", reward)


def test_less_is_better_where_it_is(run: Path):
    worse = {"mean": -0.1, "ci95": [-0.2, -0.05], "n": 20, "p": 0.01}
    initial = {"reward": {"mean": 0.5}, "clean_turns": {"falsely_corrected": 0.2}, "talk": {"messages": 9.0}}
    improved = {"reward": {"mean": 0.4}, "clean_turns": {"falsely_corrected": 0.1}, "talk": {"messages": 8.0}}
    lines = {line.label: line for line in compare(initial, improved, worse)}
    assert lines["Reward"].verdict == "worse" and str(lines["Reward"].change) == "−0.100 [−0.200, −0.050]"
    assert lines["Clean turns falsely corrected"].verdict == "", "what chance would bring is not known"
    for chance in (worse | {"p": 0.06}, worse | {"ci95": [-0.2, 0.01]}, worse | {"n": 5}, worse | {"ci95": None}, None):
        assert compare(initial, improved, chance)[0].verdict == ""
    assert lines["Messages in a conversation"].verdict == "" and lines["Without a verdict"].is_empty
    assert '<td class="better"><b>+0.' in render_report(load_run(run)), "the reward"


def test_the_table_says_so_where_a_side_is_missing(tmp_path: Path):
    write_evaluation(tmp_path / "eval" / "after", {"greedy": conversations(ideal)})
    rows = [re.split(r"\s{2,}", line) for line in comparison_table(load_run(tmp_path)).splitlines()]
    assert rows[0] == ["Held-out lessons, greedy", "before", "after", "change"]
    assert ["Error turns scaffolded", "–", "100.0 % n=24", "–"] in rows


@pytest.mark.parametrize(("p", "text"), [(0.0312, " = 0.031"), (0.0001, " < 0.001")])
def test_p_values(p: float, text: str):
    assert format_p(p) == text

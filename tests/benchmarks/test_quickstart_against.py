"""The quickstart against an earlier commit: what is taken out, what is read from a run, and the report."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import quickstart_against
from benchmarks.quickstart_against import NOW, judged_today, play_quickstart, report, reward_after
from benchmarks.rounds import CONVERSATIONS, Round
from classroom_rl.config.load import ROOT
from classroom_rl.config.values import SAMPLED
from classroom_rl.errors import DataError
from classroom_rl.results.run_folder import load_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that was measured before and after its training."""
    folder = tmp_path / "a_run"
    shutil.copytree(ROOT / "tests/support/old_run", folder)
    after = folder / "eval/after"
    shutil.copytree(folder / "eval/before", after)
    metrics = json.loads((after / "metrics.json").read_text())
    metrics["sampled"]["reward"]["mean"] = 0.75
    (after / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_the_reward_is_that_after_the_training(run: Path) -> None:
    assert reward_after(load_run(run)) == 0.75
    shutil.rmtree(run / "eval/after")
    with pytest.raises(ValueError, match="no evaluation after the training"):
        reward_after(load_run(run))


@pytest.mark.parametrize(("module", "folder"), [("_MODULE", "src/classroom_rl"), ("_FORMER_MODULE", "src/launch")])
def test_a_round_is_a_quickstart_of_that_checkout(
    module: str, folder: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that is run is the checkout's; what is counted is what its run folder holds."""
    source = tmp_path / "source"
    (source / folder).mkdir(parents=True)
    copy = f"import shutil, sys; shutil.copytree({str(run)!r}, sys.argv[1].partition('=')[2])"
    (source / "quick.py").write_text(copy)
    monkeypatch.setattr(quickstart_against, module, "quick")
    result = play_quickstart(tmp_path / "round", source)
    assert result.seconds > 0 and result.reward == 0.75
    assert result.messages > CONVERSATIONS
    (source / "quick.py").write_text("pass")
    with pytest.raises(DataError, match="nothing to report"):
        play_quickstart(tmp_path / "empty", source)
    (source / "quick.py").write_text("import sys; sys.exit('no model')")
    with pytest.raises(SystemExit, match=f"{sys.executable} -m quick .*status 1:\n.*no model"):
        play_quickstart(tmp_path / "failed", source)


def test_both_are_judged_by_todays_rubric(run: Path) -> None:
    """A reward that an earlier judge gave does not count; a lesson that only praises gets little from today's."""
    data = load_run(run)
    records = [record for sampling_records in data.after.records.values() for record in sampling_records]
    judged = judged_today(data)
    assert sum(len(rewards) for lessons in judged.values() for rewards in lessons.values()) == len(records)
    for record in records:
        record.reward = 1.0
    assert judged_today(data) == judged
    before = [reward for rewards in judged[SAMPLED].values() for reward in rewards]
    assert max(before) > 0.2
    for record in records:
        record.turns = [replace(turn, text="Good!") if turn.role == "teacher" else turn for turn in record.turns]
    after = [reward for rewards in judged_today(data)[SAMPLED].values() for reward in rewards]
    assert max(after) < 0.2


def test_the_report_compares_each_round() -> None:
    judged = {
        "abc": [{SAMPLED: {"a": [0.5, 0.7], "b": [0.8]}}, {SAMPLED: {"a": [0.5], "b": [0.5]}}],
        NOW: [{SAMPLED: {"a": [0.7, 0.7], "b": [0.9]}}, {SAMPLED: {"a": [0.5], "b": [0.5]}}],
    }
    rounds = {"abc": [Round(500, 0.95, 560), Round(600, 0.96, 560)], NOW: [Round(300, 0.97, 560)] * 2}
    text = report(rounds, judged, {"abc": [{"train": 50.0}, {"train": 407.2}], NOW: [{"train": 51.0}] * 2})
    assert "abc: 500, 600 s; held-out reward by its own judge 0.950, 0.960\n    of it train: 50, 407 s\n" in text
    assert "by today's, sampled: 0.667 (n = 3), 0.500 (n = 2)" in text
    assert "the reward changed, sampled: +0.100 (n = 2), +0.000 (n = 2)" in text
    assert "now it takes 0.55 x as long (by round: 0.60, 0.50)" in text
